"""Ranks that differ, groups that go, peers that die: what every rank is told, and that nobody hangs.

Each case has a group of its own, with a time-out of ``SHORT_S`` where a rank stays away. After it that group still works,
or no rank can be expected to use it any more (``DEAD``). TPFUSE_DEBUG is set: without it, operations called with other
shapes are gloo's matter, as they are without tpfuse, and that ends the process of a rank that gets more than it expects.
"""

from __future__ import annotations

import datetime
import functools
import os
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
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow
LONG_S, SHORT_S = 60, 2
AGREE = "AgreementError"
X, MATRIX = torch.ones(4, 8), torch.ones(8, 6)
SHARDED = {"enable_sp": True, "sp_min_token_num": 5}  # a call of 4 rows runs another variant than one of 5


def _group(timeout_s: float) -> dist.ProcessGroup:
    return dist.new_group([0, 1], timeout=datetime.timedelta(seconds=timeout_s))


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
        (AGREE, ""), (("rank(s) [1]", "did not reach tpfuse.apply within the time-out of 2 s"), ())),
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
        (AGREE, ""), (("rank(s) [1]", "did not reach a first call of an applied model", "2 s"), ())),
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
        lambda g, r: _other_dtype(g, r), AGREE, ("a call of tpfuse.ops", "float32 [3, 96]", "bfloat16 [3, 96]")),
    "later call: another branch": (
        _branch, (AGREE, "RuntimeError"), (("did not reach",), ("Timed out",))),
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
        (AGREE, ""), (("rank(s) [1]", "did not reach a call of tpfuse.ops within the time-out of 2 s"), ())),
    "group: for CUDA alone": (
        lambda g, r: ops.all_reduce(X, group=dist.new_group([0, 1], backend="cuda:gloo")),
        "GroupError", ("carries tensors on cuda, got one on cpu",)),
    "group: not this rank's": (
        lambda g, r: ops.all_reduce(X, group=dist.new_group([1 - r])), "GroupError", ("this rank is not in the group",)),
}  # fmt: skip

#: A rank does not come there.
AWAY = ("not on rank 1", "the group gone on one", "another branch", "bad argument on one")
#: The group is gone on one rank, or a rank has begun another collective: no later call could pair up.
DEAD = ("the group gone on one", "another branch")


def _other_dtype(group: dist.ProcessGroup, rank: int) -> None:
    model = _model(group)
    _call(model, 3)
    if rank:
        model.bfloat16()
        model.dtype = torch.bfloat16
    _call(model, 3)


def _told(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The error's name, what it says, and the seconds it took."""
    start, kind, told = time.monotonic(), "", ""
    try:
        call()
    except Exception as error:
        kind, told = type(error).__name__, str(error)
    return kind, told, time.monotonic() - start


def _works(group: dist.ProcessGroup) -> str:
    total = torch.ones(3)
    kind, told, _ = _told(lambda: dist.all_reduce(total, group=group))
    return told or ("" if total.tolist() == [2.0] * 3 else f"{kind} {total.tolist()}")


def _all(rank: int) -> dict[str, Any]:
    """What came of each case, and whether the group works after it; at the end rank 1 ends, and rank 0 calls it."""
    found: dict[str, Any] = {}
    with interpret_graphs():
        for name, (provoke, _, _) in CASES.items():
            group = _group(SHORT_S if name.endswith(AWAY) else LONG_S)
            dist.barrier()
            outcome = _told(functools.partial(provoke, group, rank))
            dist.barrier()
            found[name] = (*outcome, "" if name.endswith(DEAD) else _works(group))
        group = _group(SHORT_S)
        model = _model(group)
        _call(model, 3)
        dist.barrier()
        if rank == 0:
            found |= {f"peer ended: {name}": (*outcome, "") for name, outcome in _alone(group, model).items()}
    return found


def _alone(group: dist.ProcessGroup, model: Any) -> dict[str, tuple[str, str, float]]:
    """After rank 1 has returned, which ends its process."""
    time.sleep(3)
    return {
        "a call": _told(lambda: _call(model, 3)),
        "an operation": _told(lambda: ops.all_reduce(X, group=group)),
        "apply": _told(lambda: tpfuse.apply(Stack(group, layers=1), {"fuse_allreduce_rms": False})),
        "a collective": _told(lambda: dist.all_reduce(torch.ones(3), group=group)),
        "explain and remove": _told(lambda: str(tpfuse.explain(model)) and tpfuse.remove(model)),
    }


@pytest.fixture(scope="module")
def outcomes():
    return spawn(_all, 2, env={"TPFUSE_DEBUG": "1"}, timeout_s=200)


@pytest.mark.parametrize("name", CASES)
def test_what_every_rank_is_told(outcomes, name):
    _, errors, words = CASES[name]
    for rank, found in enumerate(outcomes):
        kind, told, seconds, broken = found[name]
        error, expected = (errors, words) if isinstance(errors, str) else (errors[rank], words[rank])
        assert kind == error, f"rank {rank}: {kind}: {told}"
        for word in expected:
            assert word in told, f"rank {rank}: no {word!r} in: {told}"
        assert seconds < 30 and not broken, (rank, seconds, broken)


#: What rank 0 is told after rank 1 has ended; calls of gloo end in gloo's words.
ENDED = {
    "a call": (AGREE, "rank(s) [1]"),
    "an operation": (AGREE, "did not reach a call of tpfuse.ops within the time-out of 2 s"),
    "apply": (AGREE, "did not reach tpfuse.apply within the time-out of 2 s"),
    "a collective": ("RuntimeError", ""),
    "explain and remove": ("", ""),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_peer_that_ended(outcomes, name):
    kind, told, seconds, _ = outcomes[0][f"peer ended: {name}"]
    error, words = ENDED[name]
    assert kind == error and words in told and seconds < 20, (kind, told, seconds)
