"""Hand-written tensor-parallel models on CPU ranks: the numbers of the unsharded model, on every rank alike.

Graphs are run by an interpreter here: what the passes do is the same, and Inductor's compile time is saved. One spawn runs
many scenarios, because starting ranks is what costs.
"""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import Stack, largest_difference, same_on_all_ranks
from tpfuse.testing import interpret_graphs, spawn

TOKENS = [(1,), (2,), (3,), (5,), (7,), (8,), (64,), (129,), (1000,), (2, 9), (4, 3)]
FUSION = "fuse_allreduce_rms"
FP32 = 1e-5


def _fused(model) -> int:
    return tpfuse.explain(model).count(FUSION)


# -- two ranks -----------------------------------------------------------------------------------------------------------


def _two_ranks(rank: int) -> dict[str, object]:
    world, found = dist.group.WORLD, {}
    with interpret_graphs() as graphs:
        for style in ("inplace", "functional", "view"):
            model = tpfuse.apply(Stack(world, style=style), fullgraph=True)
            found[f"{style} error"] = max(largest_difference(model, *shape) for shape in TOKENS)
            found[f"{style} fused"] = _fused(model)
            found[f"{style} graphs"] = tpfuse.explain(model).graphs
        with torch.no_grad():
            found["bits agree"] = all(same_on_all_ranks(o, world) for o in model(*model.inputs(7)))
            x, residual = model.inputs(6)
            found["expanded residual"] = _plain_difference(model, x, residual[:1].expand(6, -1))
            found["transposed input"] = _plain_difference(model, x.t().contiguous().t(), residual)
        found["empty"] = [largest_difference(model, t) for t in (4, 0, 3)]
        found["bits of one sum"] = _exact_bias(world)
        broken = tpfuse.apply(Stack(world, break_after=1))
        found["graph break"] = max(largest_difference(broken, t) for t in (8, 7, 1))
        found["graph break fused"] = _fused(broken) > 0 and tpfuse.explain(broken).count(FUSION, "skipped") == 0
        found["two models"] = _two_models(world)
        found["lifecycle"] = _lifecycle(world)
        found["odd widths"] = _odd_widths(world)
        found["epsilons"] = _epsilons(world)
        found["graphs seen"] = len(graphs) > 0
    return found


def _plain_difference(model: Stack, x: torch.Tensor, residual: torch.Tensor) -> float:
    got = model(x, residual)
    expected = model._call_impl(x, residual)
    return max((g - e).abs().max().item() for g, e in zip(got, expected, strict=True))


class _BiasBefore(torch.nn.Module):
    """x @ W with W = ones * 2 over [3, 6], and a bias of one on rank 0 only, before the all-reduce: all 13."""

    def __init__(self, group, before: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 6), 2.0))
        self.bias = torch.nn.Parameter(torch.full((6,), 1.0 if not before or group.rank() == 0 else 0.0))
        self.norm, self.tp_group, self.before = torch.nn.RMSNorm(6, eps=1e-6), group, before

    def forward(self, x):
        y = torch.addmm(self.bias, x, self.weight) if self.before else x @ self.weight
        dist.all_reduce(y, group=self.tp_group)
        y = y if self.before else y + self.bias
        return y, self.norm(y)


def _exact_bias(group) -> bool:
    ok = True
    for before in (True, False):
        model = tpfuse.apply(_BiasBefore(group, before), fullgraph=True)
        with torch.no_grad():
            total, normed = model(torch.ones(4, 3))
        ok = ok and torch.equal(total, torch.full((4, 6), 13.0)) and torch.allclose(normed, torch.ones(4, 6))
        ok = ok and _fused(model) == 1
    return ok


def _two_models(group) -> bool:
    """Different width, dtype and epsilon, interleaved; then one is deleted and the other goes on."""
    a = tpfuse.apply(Stack(group, hidden=96, eps=1e-5))
    b = tpfuse.apply(Stack(group, hidden=160, eps=1e-6, dtype=torch.bfloat16, seed=3))
    errors_a = [largest_difference(a, t) for t in (4, 5)]
    ok = largest_difference(b, 4) < 0.06
    errors_a += [largest_difference(a, t) for t in (2, 9)]
    del a
    gc.collect()
    return ok and max(errors_a) < FP32 and largest_difference(b, 9) < 0.06 and _fused(b) == 3


def _lifecycle(group) -> dict[str, bool]:
    """Apply twice, remove, copies, pickles, gradients: what changes and what does not."""
    model = Stack(group)
    keys, cls, parameters = list(model.state_dict()), type(model), [id(p) for p in model.parameters()]
    same = tpfuse.apply(model) is model
    first = model._compiled_call_impl
    tpfuse.apply(model)
    again = model._compiled_call_impl is first
    largest_difference(model, 4)
    tpfuse.apply(model, {"fuse_allreduce_rms": False})
    largest_difference(model, 4)
    off = _fused(model) == 0 and all("fuse_allreduce_rms=False" in s.reason for s in tpfuse.explain(model).sites)
    untouched = (
        list(model.state_dict()) == keys and type(model) is cls and [id(p) for p in model.parameters()] == parameters
    )
    x, residual = model.inputs(4)
    tpfuse.apply(model, fullgraph=True)
    loss = model(x, residual)[0].sum()
    loss.backward()
    gradients = model.layers[0].down.grad is not None and "all, training" in str(tpfuse.explain(model))
    for layer in model.layers:
        layer.tp_group = None  # process groups do not copy
    tp_group, model.tp_group = model.tp_group, None
    twin = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    removed = tpfuse.remove(tpfuse.remove(model))
    with pytest.raises(tpfuse.NotAppliedError):
        tpfuse.explain(removed)
    model.tp_group = tp_group
    return {
        "same object": same,
        "apply twice": again,
        "off means off": off,
        "untouched": untouched,
        "gradients": gradients,
        "copy is not applied": twin._compiled_call_impl is None,
        "removed": removed._compiled_call_impl is None,
    }


def _odd_widths(group) -> dict[int, float]:
    return {h: largest_difference(tpfuse.apply(Stack(group, layers=1, hidden=h)), 5) for h in (1, 7, 100, 2880)}


class _Epsilons(torch.nn.Module):
    def __init__(self, group, values):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(8, eps=v, elementwise_affine=False) for v in values)
        self.tp_group = group

    def forward(self, x):
        outs = []
        for norm in self.norms:
            y = x.clone()
            dist.all_reduce(y, group=self.tp_group)
            outs.append(norm(y))
        return outs


def _epsilons(group) -> list[float]:
    """Constant 1e-3 after the sum: 0.30151, 0.70711 and 1.0 for three epsilons in one graph."""
    model = tpfuse.apply(_Epsilons(group, (1e-5, 1e-6, 1e-12)), fullgraph=True)
    with torch.no_grad():
        outs = model(torch.full((2, 8), 1e-3 / group.size()))
    return [o.flatten()[0].item() for o in outs] + [float(_fused(model))]


@pytest.fixture(scope="module")
def two_ranks():
    return spawn(_two_ranks, 2, timeout_s=240)


@pytest.mark.parametrize("style", ["inplace", "functional", "view"])
def test_every_shape_equals_the_unsharded_model(two_ranks, style):
    for found in two_ranks:
        assert found[f"{style} error"] < FP32
        assert found[f"{style} fused"] == 3
        assert found[f"{style} graphs"] <= 5  # one row, dynamic rows, and the same for a batch dimension


def test_ranks_agree_in_bits(two_ranks):
    assert all(found["bits agree"] for found in two_ranks)


def test_strides_other_than_row_major(two_ranks):
    for found in two_ranks:
        assert found["expanded residual"] < FP32 and found["transposed input"] < FP32


def test_no_tokens_then_some(two_ranks):
    assert all(max(found["empty"]) < FP32 for found in two_ranks)


def test_bias_before_and_after_the_all_reduce(two_ranks):
    assert all(found["bits of one sum"] for found in two_ranks)


def test_graph_break_between_layers(two_ranks):
    assert all(found["graph break"] < FP32 and found["graph break fused"] for found in two_ranks)


def test_two_models_interleaved(two_ranks):
    assert all(found["two models"] for found in two_ranks)


def test_lifecycle(two_ranks):
    for found in two_ranks:
        assert found["lifecycle"] == dict.fromkeys(found["lifecycle"], True)


def test_odd_hidden_sizes(two_ranks):
    assert all(error < FP32 for found in two_ranks for error in found["odd widths"].values())


def test_epsilon_is_the_models_own(two_ranks):
    for found in two_ranks:
        assert found["epsilons"] == pytest.approx([0.30151, 0.70711, 1.0, 3.0], abs=1e-5)


# -- other sizes ---------------------------------------------------------------------------------------------------------


def _few_tokens(rank: int) -> dict[int, float]:
    groups = {size: dist.new_group(range(size)) for size in (3, 5, 6)}  # every rank makes every group, in one order
    found = {}
    with interpret_graphs():
        for size in (size for size in groups if rank < size):
            model = tpfuse.apply(Stack(groups[size]), strict=True)
            found[size] = max(largest_difference(model, t) for t in (1, 2, 5))
    return found


@pytest.mark.slow
def test_group_sizes_that_are_no_power_of_two():
    found = spawn(_few_tokens, 6, timeout_s=240)
    assert [sorted(each) for each in found] == [[3, 5, 6]] * 3 + [[5, 6]] * 2 + [[6]]
    assert max(error for each in found for error in each.values()) < FP32
