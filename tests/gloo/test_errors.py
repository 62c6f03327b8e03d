"""Ranks that differ, groups that go, peers that die: what every rank is told, and that nobody hangs.

Each case has a group of its own with a time-out of ``TIMEOUT_S``. After it that group still works, or no rank can be
expected to use it any more (``DEAD``). Without TPFUSE_DEBUG, calls of other shapes are gloo's matter, as they are without
tpfuse: it ends the process (``test_calls_that_differ_end_without_debug_too``).
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import Stack
from tpfuse import ops
from tpfuse.testing import RankError, interpret_graphs, spawn

TIMEOUT_S = 3
AGREE = "AgreementError"
X, MATRIX = torch.ones(4, 8), torch.ones(8, 6)
SHARDED = {"enable_sp": True, "sp_min_token_num": 5}  # a call of 4 rows runs another variant than one of 5


def _group() -> dist.ProcessGroup:
    return dist.new_group([0, 1], timeout=datetime.timedelta(seconds=TIMEOUT_S))


def _call(model: Any, rows: int) -> None:
    with torch.no_grad():
        model(*model.inputs(rows))


def _model(group: dist.ProcessGroup, config: Any = None) -> Any:
    return tpfuse.apply(Stack(group, layers=1), config)


def _calls(group: dist.ProcessGroup, config: Any, *rows: int) -> None:
    model = _model(group, config)
    for each in rows:
        _call(model, each)


class _Branching(Stack):
    """Which way it goes depends on data."""

    def forward(self, x, residual):
        if self.first:
            x = x * 2
            dist.all_reduce(residual, group=self.tp_group)
        return super().forward(x, residual)


def _branch(group: dist.ProcessGroup, rank: int) -> None:
    model = _Branching(group, layers=1)
    model.first = False
    tpfuse.apply(model)
    _call(model, 3)
    model.first = bool(rank)
    _call(model, 3)


def _with(target: Any, name: str, value: Any, rank: int, call: Callable[[], Any]) -> None:
    """``call``, where rank 1 has another value of something."""
    if not rank:
        return call()
    with mock.patch.object(target, name, value):
        return call()


def _with_env(name: str, value: str, rank: int, call: Callable[[], Any]) -> None:
    with mock.patch.dict(os.environ, {name: value} if rank else {}):
        return call()


def _gone_on_one(group: dist.ProcessGroup, rank: int) -> None:
    model = Stack(group, layers=1)
    if rank:
        dist.destroy_process_group(group)
    tpfuse.apply(model)


#: id -> (provoke, given a group and the rank; the error's name; what it says, on each rank or on rank 0 and on rank 1).
#: Of applied models and ``apply``: they need no TPFUSE_DEBUG.
CASES: dict[str, tuple[Callable[[Any, int], Any], Any, Any]] = {
    "apply: another config": (
        lambda g, r: _model(g, {"fuse_allreduce_rms": not r}), AGREE, ("tpfuse.apply", "differ in config")),
    "apply: another torch": (
        lambda g, r: _with(torch, "__version__", "2.12.0", r, lambda: _model(g)),
        AGREE, ("differ in torch", "rank 1: 2.12.0")),
    "apply: another tpfuse": (
        lambda g, r: _with(tpfuse.api, "__version__", "9.9", r, lambda: _model(g)),
        AGREE, ("differ in tpfuse", "rank 1: 9.9")),
    "apply: an unsupported torch on one": (
        lambda g, r: _with(torch, "__version__", "2.1.0", r, lambda: _model(g)),
        (AGREE, "ConfigError"), (("rank 1: ConfigError: torch 2.1.0",), ("torch 2.1.0 is not supported",))),
    "apply: disabled on one": (
        lambda g, r: _with_env("TPFUSE_DISABLE", "1", r, lambda: _model(g)),
        AGREE, ("differ in TPFUSE_DISABLE", "rank 0: False", "rank 1: True")),
    "apply: debugging on one": (
        lambda g, r: _with_env("TPFUSE_DEBUG", "0", r, lambda: _model(g)),
        AGREE, ("differ in TPFUSE_DEBUG", "rank 0: True", "rank 1: False")),
    "apply: an environment that is no switch on one": (
        lambda g, r: _with_env("TPFUSE_DISABLE", "maybe", r, lambda: _model(g)),
        (AGREE, "ConfigError"), (("rank 1: ConfigError: TPFUSE_DISABLE must be",), ("TPFUSE_DISABLE must be",))),
    "apply: another model": (
        lambda g, r: tpfuse.apply(Stack(g, layers=1 + r)), AGREE, ("differ in model", "rank 0: Stack", "rank 1")),
    "apply: a config file on one": (
        lambda g, r: _model(g, "/nowhere/config.json" if r else None),
        (AGREE, "ConfigError"), (("rank 1: ConfigError: cannot read",), ("cannot read", "/nowhere/config.json"))),
    "apply: not on rank 1": (
        lambda g, r: None if r else _model(g),
        (AGREE, ""), (("rank(s) [1]", "did not reach tpfuse.apply within the time-out of 3 s"), ())),
    "apply: another call on rank 1": (
        lambda g, r: ops.all_reduce(X, group=g) if r else _model(g),
        AGREE, ("are in different calls", "rank 0: tpfuse.apply", "rank 1: a call of tpfuse.ops")),
    "apply: the group gone on one": (
        _gone_on_one, (AGREE, "GroupError"), (("rank(s) [1]", "did not reach tpfuse.apply"), ("was destroyed",))),
    "first call: other rows, other variant": (
        lambda g, r: _calls(g, {"token_boundaries": (5,)}, 4 + r),
        AGREE, ("a first call of an applied model", "in rows of a call: rank 0: rows<5, rank 1: rows>=5")),
    "first call: other rows, sharded": (
        lambda g, r: _calls(g, SHARDED, 4 + r), AGREE, ("differ in rows of a call", "rank 0: rows<5")),
    "first call: not on rank 1": (
        lambda g, r: _model(g) if r else _calls(g, None, 3),
        (AGREE, ""), (("rank(s) [1]", "did not reach a first call of an applied model", "3 s"), ())),
    "first call: training on one": (
        lambda g, r: (lambda m: m(*m.inputs(3)) if r else _call(m, 3))(_model(g)),
        AGREE, ("differ in rows of a call", "rank 0: all", "rank 1: all, training")),
    "later call: other rows, other variant": (
        lambda g, r: _calls(g, SHARDED, 3, 7, 4 + r),
        AGREE, ("a call of an applied model", "differ in rows of a call", "rank 0: rows<5", "rank 1: rows>=5")),
    "later call: other rows, same variant": (
        lambda g, r: _calls(g, None, 3, 4 + r),
        AGREE, ("a call of tpfuse.ops", "differ in call", "[4, 96]", "[5, 96]")),
    "later call: another dtype": (
        lambda g, r: _other_dtype(g, r), AGREE, ("a call of tpfuse.ops", "torch.float32 [3, 96]", "torch.float64")),
    "later call: another branch": (
        _branch, (AGREE, ""), (("did not reach",), ())),
    "operation: other rows": (
        lambda g, r: ops.all_reduce(torch.ones(4 + r, 8), group=g),
        AGREE, ("differ in call: rank 0: all_reduce(torch.float32 [4, 8]", "[5, 8]")),
    "operation: no rows on one": (
        lambda g, r: ops.all_reduce(torch.ones(4 * r, 8), group=g), AGREE, ("differ in call", "[0, 8]", "[4, 8]")),
    "operation: another dtype": (
        lambda g, r: ops.all_reduce(X.bfloat16() if r else X, group=g), AGREE, ("float32", "bfloat16")),
    "operation: another one": (
        lambda g, r: ops.all_reduce(X, group=g) if r else ops.matmul_all_reduce(X, MATRIX, group=g),
        AGREE, ("rank 0: matmul_all_reduce", "rank 1: all_reduce")),
    "operation: other rows of a product": (
        lambda g, r: ops.matmul_reduce_scatter(torch.ones(4 + r, 8), MATRIX, group=g), AGREE, ("[4, 8]", "[5, 8]")),
    "operation: other rows gathered": (
        lambda g, r: ops.all_gather_matmul(torch.ones(4 + r, 8), MATRIX, group=g), AGREE, ("[4, 8]", "[5, 8]")),
    "operation: bad argument on one": (
        lambda g, r: ops.all_reduce(X.int() if r else X, group=g),
        (AGREE, "ValueError"), (("rank(s) [1]", "did not reach a call of tpfuse.ops"), ("input must be bf16",))),
    "operation: not on rank 1": (
        lambda g, r: None if r else ops.all_reduce(X, group=g),
        (AGREE, ""), (("rank(s) [1]", "did not reach a call of tpfuse.ops within the time-out of 3 s"), ())),
    "group: for CUDA alone": (
        lambda g, r: ops.all_reduce(X, group=dist.new_group([0, 1], backend="cuda:gloo")),
        "GroupError", ("carries tensors on cuda, got one on cpu",)),
    "group: not this rank's": (
        lambda g, r: ops.all_reduce(X, group=dist.new_group([1 - r])), "GroupError", ("this rank is not in the group",)),
}  # fmt: skip

#: A rank is missing there, gone, or in another collective: no later call could pair up.
DEAD = ("the group gone on one", "another branch")


def _other_dtype(group: dist.ProcessGroup, rank: int) -> None:
    model = _model(group)
    _call(model, 3)
    if rank:
        model.double()
        model.dtype = torch.float64
    _call(model, 3)


def _all(rank: int) -> dict[str, tuple[str, str, float, bool]]:
    """Per case: the error's name, what it says, the seconds it took, and whether the group works after it."""
    found = {}
    with interpret_graphs():
        for name, (provoke, _, _) in CASES.items():
            group = _group()
            dist.barrier()
            start, kind, told = time.monotonic(), "", ""
            try:
                provoke(group, rank)
            except Exception as error:
                kind, told = type(error).__name__, str(error)
            seconds, works = time.monotonic() - start, True
            dist.barrier()
            if not name.endswith(DEAD):
                total = torch.ones(3)
                dist.all_reduce(total, group=group)
                works = total.tolist() == [2.0] * 3
            found[name] = kind, told, seconds, works
    return found


@pytest.fixture(scope="module")
def outcomes():
    return spawn(_all, 2, env={"TPFUSE_DEBUG": "1"}, timeout_s=150)


@pytest.mark.parametrize("name", CASES)
def test_what_every_rank_is_told(outcomes, name):
    _, errors, words = CASES[name]
    for rank, found in enumerate(outcomes):
        kind, told, seconds, works = found[name]
        error, expected = (errors, words) if isinstance(errors, str) else (errors[rank], words[rank])
        assert kind == error, f"rank {rank}: {kind}: {told}"
        for word in expected:
            assert word in told, f"rank {rank}: no {word!r} in: {told}"
        assert seconds < 20 and works, (rank, seconds, works)


# -- without TPFUSE_DEBUG, and peers that die ----------------------------------------------------------------------------


def _told(call: Callable[[], Any]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        call()
        told = ""
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return told, time.monotonic() - start


def _leave(rank: int) -> dict[str, tuple[str, float]]:
    """Rank 1 ends before ``apply``, or between two calls, each in a world of its own."""
    found = {}
    with interpret_graphs():
        other = _group()
        model = _model(other)
        _call(model, 3)
        compiled = torch.compile(lambda x: ops.all_reduce(x, group=other), backend="eager")
        compiled(X)
        dist.barrier()
        if rank:
            sys.stdout.flush()
            os._exit(0)
        time.sleep(1)
        found["call"] = _told(lambda: _call(model, 3))
        found["operation"] = _told(lambda: ops.all_reduce(X, group=other))
        found["apply"] = _told(lambda: tpfuse.apply(Stack(other, layers=1), {"fuse_allreduce_rms": False}))
        found["explain"] = _told(lambda: str(tpfuse.explain(model)))
        found["remove"] = _told(lambda: tpfuse.remove(model))
    return found


def _survivor(rank: int, folder: str) -> None:
    import json
    import pathlib

    found = _leave(rank)
    pathlib.Path(folder, "found.json").write_text(json.dumps(found))
    os._exit(0)


def test_a_peer_that_dies(tmp_path):
    """The survivor is told by gloo in a call, by tpfuse in ``apply``; what needs no peer works."""
    import json

    with pytest.raises(RankError):  # rank 1 gives no result
        spawn(_survivor, 2, str(tmp_path), timeout_s=60)
    found = json.loads((tmp_path / "found.json").read_text())
    for where in ("call", "operation"):
        told, seconds = found[where]
        assert "RuntimeError" in told and seconds < 2 * TIMEOUT_S, (where, told, seconds)
    told, seconds = found["apply"]
    assert told.startswith("AgreementError: rank(s) [1] of group") and "did not reach tpfuse.apply" in told, told
    assert seconds < 3 * TIMEOUT_S
    assert found["explain"][0] == found["remove"][0] == ""


def _differ(rank: int) -> None:
    with interpret_graphs():
        _calls(_group(), None, 3, 4 + rank)


def test_calls_that_differ_end_without_debug_too():
    """gloo ends the rank that gets more than it expects, and the other is told: as without tpfuse."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        spawn(_differ, 2, timeout_s=40)
    assert "exit code -6" in str(caught.value) or "gloo" in str(caught.value).lower(), str(caught.value)
    assert time.monotonic() - start < 40
