"""Ranks that want different things, or fail, learn of it on every rank, and nobody hangs."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import Stack, largest_difference
from tpfuse.errors import AgreementError
from tpfuse.testing import interpret_graphs, spawn


def _told(function, *args, **kwargs) -> str:
    """Type and text of the tpfuse error that a call ends in, empty if it does not."""
    try:
        function(*args, **kwargs)
    except tpfuse.TpfuseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Nameless(Stack):
    """Its groups cannot be found on the model, only in the graph."""

    def __init__(self, group):
        super().__init__(group, layers=1)
        self.tp_group, self.layers[0].tp_group = None, None
        self.layers[0].all_reduce = _all_reduce_in_world


def _all_reduce_in_world(y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(y)
    return y


def _scenarios(rank: int) -> dict[str, object]:
    world, found = dist.group.WORLD, {}
    with interpret_graphs():
        model = Stack(world)
        found["config"] = _told(tpfuse.apply, model, {"fuse_allreduce_rms": rank == 0})
        found["failure"] = _told(tpfuse.apply, model, {"fuse_allreduce_rsm": True} if rank else None)
        found["unsupported"] = _told(tpfuse.apply, model, {"fuse_attn_quant": True})
        found["options"] = _told(tpfuse.apply, model, fullgraph=bool(rank))
        found["argument"] = _told(tpfuse.apply, model, fulgraph=True)
        os.environ["TPFUSE_DISABLE"] = str(rank)
        found["disabled on one"] = _told(tpfuse.apply, model)
        os.environ["TPFUSE_DISABLE"] = "1"
        found["disabled"] = _told(tpfuse.apply, model)
        found["disabled report"] = str(tpfuse.explain(model))
        del os.environ["TPFUSE_DISABLE"]
        found["nothing applied"] = model._compiled_call_impl is None
        found["unknown group"] = largest_difference(tpfuse.apply(model), 3)

        nameless = tpfuse.apply(_Nameless(world), {"fuse_allreduce_rms": rank == 0})
        x = torch.randn(3, 32)
        with torch.no_grad():
            found["only in the graph"] = _told(nameless, x, torch.randn(3, 96))
        strict = tpfuse.apply(torch.nn.Linear(4, 4), strict=True)
        with torch.no_grad():
            found["strict"] = _told(strict, torch.randn(2, 4))
        if rank == 1:
            time.sleep(8)  # a straggler changes nothing
        found["straggler"] = largest_difference(tpfuse.apply(Stack(world, seed=5)), 3)
    return found


def test_what_every_rank_is_told():
    first, second = spawn(_scenarios, 2, timeout_s=240)
    for found in (first, second):
        assert "AgreementError" in found["config"] and "differ in config" in found["config"]
        assert '"fuse_allreduce_rms": false' in found["config"]
        assert found["unsupported"].startswith("ConfigError: fuse_attn_quant=True cannot be honoured: not in this version")
        assert "differ in compile options" in found["options"]
        assert "unknown argument 'fulgraph'" in found["argument"]
        assert "differ in TPFUSE_DISABLE" in found["disabled on one"]
        assert found["disabled"] == "" and "TPFUSE_DISABLE is set" in found["disabled report"]
        assert found["nothing applied"]
        assert found["unknown group"] < 1e-5 and found["straggler"] < 1e-5
        assert "AgreementError" in found["only in the graph"] and "differ in config" in found["only in the graph"]
        assert found["strict"].startswith("StrictError")
    assert "AgreementError" in first["failure"] and "rank 1: ConfigError: unknown field" in first["failure"]
    assert second["failure"].startswith("ConfigError: unknown field 'fuse_allreduce_rsm'")


def _one_stays_away(rank: int) -> tuple[str, float]:
    start = time.monotonic()
    told = _told(tpfuse.apply, Stack(dist.group.WORLD)) if rank == 0 else ""
    if rank == 1:
        time.sleep(14)
    return told, time.monotonic() - start


def test_a_rank_that_never_applies_ends_in_an_error_not_a_hang():
    (told, seconds), _ = spawn(_one_stays_away, 2, timeout_s=10, grace_s=30)
    assert "AgreementError: rank(s) [1]" in told and "did not reach tpfuse.apply within the time-out of 10 s" in told
    assert seconds < 14


def _two_groups(rank: int) -> tuple[str, float]:
    """A model with two groups; only rank 0 asks for what cannot be."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Stack(pairs[rank // 2])
    model.tensor_expert_group = crossed[rank % 2]
    start = time.monotonic()
    return _told(tpfuse.apply, model, {"fuse_attn_quant": True} if rank == 0 else None), time.monotonic() - start


def test_a_failure_reaches_the_ranks_of_every_group_at_once():
    (first, _), *others = spawn(_two_groups, 4, timeout_s=60)
    assert first.startswith("ConfigError: fuse_attn_quant=True cannot be honoured")
    for told, seconds in others:
        assert "AgreementError" in told and "fuse_attn_quant=True cannot be honoured" in told
        assert seconds < 20


def _same_words(rank: int) -> str:
    """Objects in the options have another address on every rank, and mean the same."""
    return _told(tpfuse.apply, Stack(dist.group.WORLD), options={"post_grad_custom_post_pass": _one_stays_away})


def test_options_that_hold_objects():
    assert spawn(_same_words, 2, timeout_s=60) == ["", ""]


class _Parallel(torch.nn.Module):
    """Two branches that are reduced one by one and then added: one all-reduce can do."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = Stack(group, layers=1).layers[0], Stack(group, layers=1, seed=1).layers[0]
        self.norm, self.tp_group = torch.nn.RMSNorm(96), group

    def forward(self, x, residual):
        return self.norm(
            residual + self.left(x, torch.zeros_like(residual))[1] + self.right(x, torch.zeros_like(residual))[1]
        )


def _hook_on_one_rank(rank: int) -> tuple[float, str, int]:
    """A hook on one rank keeps what a merged all-reduce would not have: merging there only would leave ranks waiting."""
    model, kept = _Parallel(dist.group.WORLD), []
    x, residual = torch.randn(5, 32, generator=torch.Generator().manual_seed(rank)), torch.ones(5, 96)
    with torch.no_grad(), interpret_graphs():
        expected = model(x, residual)
        tpfuse.apply(model)
        if rank == 0:
            model.left.register_forward_hook(lambda module, args, output: kept.append(output[1]))
        error = max((model(x, residual) - expected).abs().max().item() for _ in range(2))
    return error, str(tpfuse.explain(model)), len(kept)


def test_a_hook_on_one_rank_keeps_all_from_merging():
    (error, told, kept), (other, other_told, none) = spawn(_hook_on_one_rank, 2, timeout_s=90)
    assert max(error, other) < 1e-5 and (kept, none) == (2, 0)
    for text in (told, other_told):
        assert "ranks have different graphs or forward hooks" in text and "0 merged" in text


def _hook_behind_the_backend(rank: int) -> tuple[float, set[int]]:
    """The same where nothing is known of the model but its graph."""
    model, kept = _Parallel(dist.group.WORLD), []
    x, residual = torch.randn(5, 32, generator=torch.Generator().manual_seed(rank)), torch.ones(5, 96)
    with torch.no_grad(), interpret_graphs() as graphs:
        expected = model(x, residual)
        if rank == 0:
            model.left.register_forward_hook(lambda module, args, output: kept.append(output[1]))
        compiled = torch.compile(model, backend="tpfuse")
        error = max((compiled(x, residual) - expected).abs().max().item() for _ in range(2))
    return error, {sum("all_reduce" in str(node.target) for node in graph.graph.nodes) for graph in graphs}


def test_a_hook_on_one_rank_behind_the_backend():
    for error, reduces in spawn(_hook_behind_the_backend, 2, timeout_s=90):
        assert error < 1e-5 and reduces == {2}  # in each graph: a recompilation is one more


# -- every call compared -------------------------------------------------------------------------------------------------


def _compared(rank: int) -> dict[str, str]:
    """TPFUSE_DEBUG: calls that differ raise before anything is exchanged, and the group goes on."""
    world = dist.group.WORLD
    x, weight = torch.ones(4 + rank, 8), torch.ones(8, 6)
    calls = {
        "other rows": lambda: tpfuse.ops.all_reduce(x, group=world),
        "other rows of a norm": lambda: tpfuse.ops.all_reduce_rms_norm(x, weight[:, 0], group=world, eps=1e-6),
        "other rows of a GEMM": lambda: tpfuse.ops.matmul_reduce_scatter(x, weight, group=world),
        "other operation": lambda: (
            tpfuse.ops.matmul_all_reduce(x[:4], weight, group=world)
            if rank
            else tpfuse.ops.all_gather_matmul(x[:4], weight, group=world)
        ),
        "other option": lambda: tpfuse.ops.all_gather_matmul(x[:4], [weight], group=world, gathered=bool(rank)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except AgreementError as error:
            found[name] = str(error)
        alike = tpfuse.ops.all_reduce(torch.ones(3), group=world)
        found[name] += "" if torch.equal(alike, torch.full((3,), 2.0)) else " and the next call is wrong"
    return found


def test_calls_that_differ_raise_in_debug_mode():
    for found in spawn(_compared, 2, env={"TPFUSE_DEBUG": "1"}):
        for name, told in found.items():
            assert told.startswith("a call of tpfuse.ops: ranks of group") and "differ in call" in told, (name, told)
            assert "wrong" not in told
        assert "[4, 8]" in found["other rows"] and "[5, 8]" in found["other rows"]
