"""Bad inputs and states that one process can meet: how each is provoked, and what the error must say.

Arguments of operations are in test_operation_errors.py, several ranks in tests/gloo/test_errors.py, GPUs in
tests/multigpu/test_errors.py. ``ELSEWHERE`` lists what other files test, so that the tables together are all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import pickle
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tpfuse
from tests.gloo.layers import Stack
from tests.unit.refusals import check_told, destroyed
from tpfuse import environment, tables
from tpfuse.comm import arena, groups
from tpfuse.errors import ConfigError, GroupError, NotAppliedError, StrictError
from tpfuse.testing import fake_world, interpret_graphs


@pytest.fixture(scope="module")
def group():
    with fake_world(2) as made:
        yield made


# -- apply, remove, explain, and calls of applied models -----------------------------------------------------------------


def _applied(tp_group, *args, **kwargs):
    return tpfuse.apply(Stack(tp_group, layers=1), *args, **kwargs)


def _call(model, *inputs):
    with torch.no_grad(), interpret_graphs():
        return model(*(inputs or model.inputs(3)))


def _with_env(name, value, provoke):
    with mock.patch.dict(os.environ, {name: value}):
        provoke()


def _with_torch(version, provoke):
    with mock.patch.object(torch, "__version__", version):
        provoke()


def _import_with(**changes):
    """The first of what ``import tpfuse`` runs, with another torch."""
    spec = importlib.util.spec_from_file_location("tpfuse_environment_again", environment.__file__)
    with contextlib.ExitStack() as stack:
        for name, value in changes.items():
            place = torch.distributed if name == "is_available" else torch
            stack.enter_context(mock.patch.object(place, name, value))
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _two_nccl(group):
    with mock.patch.object(torch.version, "cuda", "13.0"), mock.patch.object(environment, "_installed", lambda name: True):
        _applied(group)


def _gone_before_a_call(compiled):
    group = dist.new_group([0, 1])
    model = _applied(group)
    with torch.no_grad(), interpret_graphs():
        if compiled:
            model(*model.inputs(3))
        inputs = model.inputs(3)
        dist.destroy_process_group(group)
        model(*inputs)


def _gone_before_apply():
    group = dist.new_group([0, 1])
    model = Stack(group, layers=1)
    dist.destroy_process_group(group)
    tpfuse.apply(model)


def _mesh_gone_before_apply():
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)]))
    with mock.patch.object(type(mesh), "get_group", side_effect=RuntimeError("Could not resolve the process group")):
        tpfuse.apply(model)


def _compiled_after_apply(group):
    model = _applied(group)
    model.compile(backend="eager")
    tpfuse.explain(model)


def _strictly_nothing(group):
    _call(tpfuse.apply(torch.nn.Linear(4, 4), strict=True), torch.ones(2, 4))


def _strictly_not_what_was_named(group):
    """Norms take all all-reduces, and no GEMM is left to join one."""
    _call(_applied(group, {"fuse_gemm_comms": True}, strict=True))


def _config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


#: id -> (provoke, given the group and a folder; the error; what it says)
APPLY: dict[str, tuple[Callable[[Any, pathlib.Path], Any], type[Exception], tuple[str, ...]]] = {
    "apply: no module": (lambda g, t: tpfuse.apply(3), ConfigError, ("model must be a torch.nn.Module", "int")),
    "apply: a class": (lambda g, t: tpfuse.apply(Stack), ConfigError, ("model must be a torch.nn.Module", "type")),
    "apply: ScriptModule": (
        lambda g, t: tpfuse.apply(torch.jit.ScriptModule()),
        ConfigError, ("no ScriptModule", "torch.compile cannot see into one")),
    "remove: no module": (lambda g, t: tpfuse.remove(None), ConfigError, ("model must be a torch.nn.Module", "NoneType")),
    "explain: no module": (lambda g, t: tpfuse.explain("x"), ConfigError, ("model must be a torch.nn.Module", "str")),
    "explain: never applied": (lambda g, t: tpfuse.explain(Stack(g)), NotAppliedError, ("was not applied to this Stack",)),
    "explain: after remove": (lambda g, t: tpfuse.explain(tpfuse.remove(_applied(g))), NotAppliedError, ("not applied",)),
    "explain: compile() took its place": (
        lambda g, t: _compiled_after_apply(g), NotAppliedError, ("compile() was called since",)),
    "group: a name": (lambda g, t: _applied(g, group="tp"), GroupError, ("a torch.distributed.ProcessGroup", "'tp'")),
    "group: not this rank's": (
        lambda g, t: _applied(g, group=dist.new_group([1])), GroupError, ("this rank is not in the group",)),
    "group: destroyed": (lambda g, t: _applied(g, group=destroyed()), GroupError, ("that was destroyed", "new one")),
    "group: the model's, destroyed": (lambda g, t: _gone_before_apply(), GroupError, ("that was destroyed", "new one")),
    "group: the mesh's, destroyed": (lambda g, t: _mesh_gone_before_apply(), GroupError, ("that was destroyed",)),
    "group: destroyed before the first call": (
        lambda g, t: _gone_before_a_call(False), GroupError, ("no process group named", "destroyed")),
    "group: destroyed between calls": (
        lambda g, t: _gone_before_a_call(True), GroupError, ("process group that was destroyed", "the new one")),
    "group: cannot be pickled": (lambda g, t: pickle.dumps(g), TypeError, ("ProcessGroup",)),
    "strict: a text": (lambda g, t: _applied(g, strict="yes"), ConfigError, ("strict must be True or False", "'yes'")),
    "strict: nothing fused": (lambda g, t: _strictly_nothing(g), StrictError, ("no site", "any fusion")),
    "strict: not what was named": (
        lambda g, t: _strictly_not_what_was_named(g), StrictError, ("no site", "fuse_gemm_comms")),
    "option: unknown": (lambda g, t: _applied(g, fulgraph=True), ConfigError, ("unknown argument 'fulgraph'", "fullgraph")),
    "option: backend": (lambda g, t: _applied(g, backend="eager"), ConfigError, ("unknown argument 'backend'",)),
    "option: mode": (lambda g, t: _applied(g, mode="fast"), ConfigError, ("mode=fast", "reduce-overhead")),
    "option: mode and options": (
        lambda g, t: _applied(g, mode="default", options={"max_autotune": True}), ConfigError, ("exclude each other",)),
    "option: Inductor's, unknown": (
        lambda g, t: _applied(g, options={"max_autotun": True}), ConfigError, ("'max_autotun'", "'max_autotune'")),
    "option: Inductor's, of another type": (
        lambda g, t: _applied(g, options={"max_autotune": "x"}), ConfigError, ("max_autotune", "str", "bool")),
    "option: options is a list": (lambda g, t: _applied(g, options=[1]), ConfigError, ("must be a dict", "list")),
    "option: dynamic": (lambda g, t: _applied(g, dynamic="x"), ConfigError, ("dynamic must be True or", "'x'")),
    "option: fullgraph": (lambda g, t: _applied(g, fullgraph=1), ConfigError, ("fullgraph must be True or False", "1")),
    "config: a number": (lambda g, t: _applied(g, 3), ConfigError, ("config must be a FusionConfig, a dict", "int")),
    "config: the class": (lambda g, t: _applied(g, tpfuse.FusionConfig), ConfigError, ("config must be", "type")),
    "config: bytes": (lambda g, t: _applied(g, b"{}"), ConfigError, ("config must be", "bytes")),
    "config: unknown field": (lambda g, t: _applied(g, {"enabel_sp": True}), ConfigError, ("'enabel_sp'", "'enable_sp'")),
    "config: bad value": (lambda g, t: _applied(g, {"workspace_mb": -1}), ConfigError, ("workspace_mb", "-1", "nearest")),
    "config: no time to wait": (
        lambda g, t: _applied(g, {"peer_timeout_s": 0}), ConfigError, ("peer_timeout_s must be a number above 0", "None")),
    "config: cannot be honoured": (
        lambda g, t: _applied(g, {"fuse_attn_quant": True}), ConfigError, ("fuse_attn_quant=True cannot be honoured",)),
    "config: unknown kernel": (
        lambda g, t: _applied(g, {"allreduce_rms_kernel": "nope"}), ConfigError, ("'nope'", "the nearest valid one")),
    "config: no device for it": (
        lambda g, t: tpfuse.apply(Stack(g).to("meta"), {"fuse_allreduce_rms": True}), ConfigError, ("no kernel for meta",)),
    "config: no such file": (lambda g, t: _applied(g, t / "no.json"), ConfigError, ("cannot read", "no.json", "No such")),
    "config: a folder": (lambda g, t: _applied(g, t), ConfigError, ("cannot read", "Is a directory")),
    "config: under a file": (
        lambda g, t: _applied(g, _config(t, "{}") + "/x"), ConfigError, ("cannot read", "Not a directory")),
    "config: cut short": (lambda g, t: _applied(g, _config(t, '{"enable')), ConfigError, ("config.json", "not valid JSON")),
    "config: empty file": (lambda g, t: _applied(g, _config(t, "")), ConfigError, ("config.json", "not valid JSON")),
    "config: no text": (lambda g, t: _applied(g, _config(t, b"\xff\xfe")), ConfigError, ("config.json", "not valid JSON")),
    "config: nested without end": (lambda g, t: _applied(g, _config(t, "[" * 100000)), ConfigError, ("not valid JSON",)),
    "config: a list": (lambda g, t: _applied(g, _config(t, "[1]")), ConfigError, ("must hold one JSON object",)),
    "config: a text": (lambda g, t: _applied(g, ["enable_sp"]), ConfigError, ("'enable_sp' is not of the form key=value",)),
    "env: TPFUSE_DISABLE": (
        lambda g, t: _with_env("TPFUSE_DISABLE", "maybe", lambda: _applied(g)),
        ConfigError, ("TPFUSE_DISABLE must be one of 1, true", "'maybe'")),
    "env: TPFUSE_DEBUG": (
        lambda g, t: _with_env("TPFUSE_DEBUG", "2", lambda: _applied(g)),
        ConfigError, ("TPFUSE_DEBUG must be one of 1, true", "'2'")),
    "torch: too old": (
        lambda g, t: _with_torch("2.10.1", lambda: _applied(g)), ConfigError, ("torch 2.10.1 is not", ">=2.11,<2.15")),
    "torch: too new": (
        lambda g, t: _with_torch("2.15.0a0+git", lambda: _applied(g)), ConfigError, ("torch 2.15.0a0+git is not",)),
    "torch: no version": (
        lambda g, t: _with_torch("nightly", lambda: _applied(g)), ConfigError, ("torch nightly is not supported",)),
    "torch: too old to import": (
        lambda g, t: _import_with(__version__="2.5.0"), ImportError, ("torch 2.5.0 is not supported", ">=2.11,<2.15")),
    "torch: without distributed": (
        lambda g, t: _import_with(is_available=lambda: False), ImportError, ("built with torch.distributed",)),
    "torch: two NCCLs": (lambda g, t: _two_nccl(g), ConfigError, ("nvidia-nccl-cu12", "Uninstall")),
    "call: rows cannot be counted": (
        lambda g, t: _applied(g, {"token_boundaries": (4,)})(), ValueError, ("cannot count", "token_count_from")),
    "call: no argument of that name": (
        lambda g, t: _call(_applied(g, {"token_boundaries": (4,), "token_count_from": "ids"})),
        ValueError, ("token_count_from='ids'", "no tensor argument of that name")),
    "arena: too small": (lambda g, t: arena.layout(100_000, 2), ValueError, ("100000 bytes is too small", "2 ranks")),
    "arena: nothing at all": (lambda g, t: arena.layout(0, 8), ValueError, ("0 bytes is too small for 8 ranks",)),
    "group: for the CPU alone": (
        lambda g, t: groups.check_device(dist.new_group([0, 1], backend="cpu:fake").group_name, torch.device("cuda", 0)),
        GroupError, ("carries tensors on cpu, got one on cuda:0",)),
}  # fmt: skip


@pytest.mark.parametrize("name", APPLY)
def test_models(group, tmp_path, name):
    provoke, error, words = APPLY[name]
    check_told(lambda: provoke(group, tmp_path), error, words)


def test_import_asks_for_the_environment_first():
    """Before anything that an older torch lacks."""
    text = pathlib.Path(tpfuse.__file__).read_text()
    assert re.search(r"^(?:from|import) .*$", text, re.MULTILINE)[0].startswith("from tpfuse import environment, ops")
    text = pathlib.Path(environment.__file__).read_text()
    assert not re.search(r"^\s*(?:from|import) torch\.", text, re.MULTILINE) and text.endswith("\ncheck_import()\n")


# -- what is no error, and must be right ---------------------------------------------------------------------------------


def test_a_bad_call_in_training_costs_no_fusion(group):
    """The model's own error is the caller's; the next call is fused."""
    model = _applied(group)
    with interpret_graphs():
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.ones(3, 5), torch.ones(3, 96))
        model(*model.inputs(3))
    report = tpfuse.explain(model)
    assert report.count("fuse_allreduce_rms") == 1 and "torch failed" not in str(report)


def test_models_that_somebody_compiled(group):
    """By ``torch.compile``, by ``compile()``, or around an applied one."""
    for make in (lambda m: torch.compile(m, backend="eager"), lambda m: m.compile(backend="eager") or m):
        model = tpfuse.apply(make(Stack(group, layers=1)))
        _call(model, *Stack(group, layers=1).inputs(3))
        assert tpfuse.explain(model).count("fuse_allreduce_rms") == 1
    inner = _applied(group)
    expected = _call(Stack(group, layers=1), *inner.inputs(3))
    got = _call(torch.compile(inner, backend="eager"), *inner.inputs(3))
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert "only inside another torch.compile" in str(tpfuse.explain(inner))


def test_applied_again_while_it_is_called(group):
    """The call that runs ends as it began; the next has the new configuration."""
    model = Stack(group, layers=1)
    expected, answers = _call(model), []
    tpfuse.apply(model)

    def hook(module, args):
        tpfuse.apply(model, {"fuse_allreduce_rms": False})

    handle = model.register_forward_pre_hook(torch.compiler.disable(hook))
    answers.append(_call(model))
    handle.remove()
    answers.append(_call(model))
    for got in answers:
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert not tpfuse.explain(model).fusions["fuse_allreduce_rms"].on


# -- files that cannot be read or written --------------------------------------------------------------------------------

MACHINE = tables.Machine("A GPU", "nvlink", 2)
TABLE = tables.Table(MACHINE, {"all_reduce": {1: ((1, tables.Choice("nccl")),)}}, {"torch": "2.13.0"})


@contextlib.contextmanager
def full_disk(most_bytes: int):
    """No file grows beyond that: a disk that is full in the middle of one."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_old_table(tmp_path):
    path = tables.save(TABLE, tmp_path / "table.json")
    before = path.read_text()
    larger = TABLE.replace({"all_reduce": {size: ((1, tables.Choice("nccl")),) for size in range(1, 500)}}, {})
    with full_disk(len(before) + 10), pytest.raises(OSError, match="File too large"):
        tables.save(larger, path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["table.json"]


def test_a_full_disk_keeps_no_half_kernel(tmp_path, monkeypatch):
    """It is compiled again in every process, and nothing else; what is there stays."""
    from tpfuse.kernels.cuda import build

    path = tmp_path / "kernels" / "kernel.cubin"
    build._keep(path, b"whole")
    with full_disk(100):
        build._keep(path, b"x" * 1000)
        build._keep(path.with_name("other.cubin"), b"x" * 1000)
    assert path.read_bytes() == b"whole" and os.listdir(path.parent) == ["kernel.cubin"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TABLE.to_json()[:40], "is not a table of tpfuse"),
        ("", "is not a table of tpfuse"),
        (json.dumps({**json.loads(TABLE.to_json()), "format": 99}), "format 99, this version of tpfuse reads"),
        (TABLE.to_json().replace("A GPU", "Another"), "was measured on 2 x Another (nvlink), this is 2 x A GPU"),
    ],
    ids=["cut short", "empty", "another format", "another machine"],
)
def test_a_bad_table_is_left_aside_and_told(tmp_path, monkeypatch, text, words):
    monkeypatch.setenv("TPFUSE_CACHE_DIR", str(tmp_path))
    (tmp_path / tables.file_name(MACHINE)).write_text(text)
    table, told = tables.find(MACHINE)
    assert table is None and words in told and "run tpfuse tune" in told


@pytest.mark.parametrize("folder", ["file/below", "/proc/nowhere"], ids=["under a file", "read-only"])
def test_a_cache_where_nothing_can_be_written(tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPFUSE_CACHE_DIR", str(tmp_path / folder))
    table, told = tables.find(MACHINE)
    assert table is None and "run tpfuse tune" in told
    with pytest.raises(OSError):
        tables.save(TABLE)
    from tpfuse.kernels.cuda import build

    build._keep(build._cache() / "kernel.cubin", b"x")  # costs a compilation in every process, and nothing else


# -- what other files test -----------------------------------------------------------------------------------------------

#: id -> (file, test)
ELSEWHERE: dict[str, tuple[str, str]] = {
    "config fields, each: wrong type or range": ("unit/test_config.py", "test_bad_value_names_field_value_and_nearest"),
    "config strings that do not convert": ("unit/test_config.py", "test_bad_string_names_the_nearest"),
    "fusions that this version does not have": ("unit/test_config.py", "test_this_version"),
    "pinned kernel that cannot": ("unit/test_dispatch.py", "test_pinned_and_unable"),
    "tables that are none": ("unit/test_tables.py", "test_what_is_no_table_is_refused"),
    "no home folder for tables": ("unit/test_tables.py", "test_no_home_folder"),
    "no home folder for kernels": ("unit/test_cuda_build.py", "test_without_a_home_folder"),
    "kernels that do not compile": ("unit/test_cuda_build.py", "test_what_does_not_compile_is_told"),
    "tune: a full disk, on every rank": ("unit/test_tuner.py", "test_a_full_disk_is_told_on_every_rank"),
    "tune: nowhere to write": ("unit/test_tuner.py", "test_where_nothing_can_be_written"),
    "tune: no arena": ("unit/test_tuner.py", "test_no_arena"),
    "tune: a kernel that is wrong": ("unit/test_tuner.py", "test_a_candidate_that_fails_on_one_rank_ends_it_all"),
    "ranks ask for different things": ("gloo/test_agreement.py", "test_what_every_rank_is_told"),
    "a rank never calls apply": ("gloo/test_agreement.py", "test_a_rank_that_never_applies_ends_in_an_error_not_a_hang"),
    "a failure reaches every group": ("gloo/test_agreement.py", "test_a_failure_reaches_the_ranks_of_every_group_at_once"),
    "a hook on one rank": ("gloo/test_agreement.py", "test_a_hook_on_one_rank_keeps_all_from_merging"),
    "calls that differ, compared": ("gloo/test_agreement.py", "test_calls_that_differ_raise_in_debug_mode"),
    "a peer is stopped or killed": ("multigpu/test_peers.py", "test_a_rank_that_does_not_answer"),
    "a peer dies between GEMMs": ("multigpu/test_peers.py", "test_a_rank_that_dies_between_gemms"),
    "other shapes on one rank": ("multigpu/test_peers.py", "test_ranks_with_other_shapes"),
    "a peer comes too late": ("multigpu/test_peers.py", "test_a_rank_that_comes_late"),
    "no memory on one rank": ("multigpu/test_arena_limits.py", "test_no_memory_on_one_rank"),
    "groups destroyed and made anew": ("multigpu/test_arena_limits.py", "test_groups_destroyed_and_made_anew"),
    "capture without warm-up, arena too small, FlashInfer on one rank": ("multigpu/test_arena.py", "_capture_first"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere(name):
    file, test = ELSEWHERE[name]
    assert f"def {test}(" in (pathlib.Path(__file__).parents[1] / file).read_text()
