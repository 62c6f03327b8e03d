"""After the passes every node's fake value is what the node computes: sizes, strides and dtypes."""

from __future__ import annotations

import pytest
import torch
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tests.unit import norms
from tests.unit.graphs import (
    FUSED,
    all_reduce,
    all_reduce_in_place,
    compile_with_tpfuse,
    values,
    world,
)

T, D = 6, 16


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


def _plain(x, r, w):
    y = all_reduce(x) + r
    return norms.llama(y, w, 1e-5), y


def _fp32_weights(x, r, w):
    y = r + all_reduce(x)
    return norms.llama(y, w.float(), 1e-5) * 2, y


def _views(x, r, w):
    y = r.view(2, -1, D) + all_reduce(x).view(2, -1, D)
    n = norms.gemma(y.view(-1, D), w, 1e-6)
    return n, y, n.view(2, -1, D).transpose(0, 1)


def _result_in_fp32(x, r, w):
    y = all_reduce(x) + r
    h = y.float()
    return h * torch.rsqrt(norms.mean_square(h) + 1e-5) * w, y


def _in_place(x, r, w):
    y = all_reduce_in_place(x @ r.t())
    y = all_reduce_in_place(y @ x) * 0.5
    return norms.llama(y + r, w, 1e-5), y


def _merged(x, r, w):
    y = r + (all_reduce(x) + all_reduce(r.view(2, -1, D)).view(x.shape))
    return norms.llama(y, w, 1e-5), y


def _heads(x, r, w):
    y = (all_reduce(x) + r).view(-1, 4, D // 4)
    return norms.llama(y, w[: D // 4], 1e-5).reshape(-1, D), y


def _row_residual(x, r, w):
    y = all_reduce(x) + r[:1].expand(r.shape)
    return norms.llama(y, w, 1e-5), y


def _transposed_residual(x, r, w):
    y = all_reduce(x) + torch.cat([r.t(), r.t()], 1)[:, : r.shape[0]].t()
    return norms.llama(y, w, 1e-5), y


def _transposed_input(x, r, w):
    y = r + all_reduce((r.t() * 2).t())
    return norms.llama(y, w, 1e-5), y


def _layers(x, r, w):
    n = x
    for _ in range(3):
        r = r + all_reduce(torch.relu(n))
        n = norms.llama(r, w, 1e-5)
        r = r + norms.gemma(all_reduce(n.view(2, -1, D)).view(-1, D), w, 1e-6)
        n = norms.gemma(r, w, 1e-5)
    return n, r


FUNCTIONS = {
    f.__name__.strip("_"): f
    for f in (
        _plain,
        _fp32_weights,
        _views,
        _result_in_fp32,
        _in_place,
        _merged,
        _heads,
        _row_residual,
        _transposed_residual,
        _transposed_input,
        _layers,
    )
}


def _same(a, b):
    """Two fake tensors agree for every value of their symbols; a dimension of one element may have any stride."""
    assert a.dtype is b.dtype
    assert len(a.shape) == len(b.shape)
    for size, other, stride, other_stride in zip(a.shape, b.shape, a.stride(), b.stride(), strict=True):
        assert statically_known_true(size == other), f"{a.shape}, not {b.shape}"
        one = statically_known_true(size == 1)
        assert one or statically_known_true(stride == other_stride), f"strides {a.stride()}, not {b.stride()}"


class _Watch(torch.fx.Interpreter):
    """Runs a graph and holds every node's real value against its planned one."""

    def run_node(self, node):
        result, planned = super().run_node(node), node.meta.get("val")
        pairs = zip(result, planned, strict=True) if isinstance(planned, (tuple, list)) else [(result, planned)]
        for real, fake in pairs if node.op == "call_function" else []:
            if isinstance(fake, torch.Tensor):
                try:
                    assert (real.dtype, real.shape) == (fake.dtype, fake.shape)
                    assert real.stride() == fake.stride(), f"strides {real.stride()}, planned {fake.stride()}"
                except AssertionError as error:
                    raise AssertionError(f"{node.format_node()}: {error}") from None
        return result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_planned_is_what_runs(name):
    """Static shapes: execute the rewritten graph."""
    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2)
    run = compile_with_tpfuse(FUNCTIONS[name], *inputs)
    _complete(run)
    placeholders = [n.meta["val"] for n in run.graph.graph.find_nodes(op="placeholder")]
    by_shape = {(T, D): iter(inputs[:2]), (D,): iter(inputs[2:])}
    _Watch(run.graph).run(*[next(by_shape[tuple(fake.shape)]) for fake in placeholders])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_planned_is_what_propagation_finds(name, dynamic):
    """Also with symbols; propagation must not have to learn anything about them either."""
    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2)
    if dynamic:
        for tensor in inputs[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
    run = compile_with_tpfuse(FUNCTIONS[name], *inputs)
    _complete(run)
    graph = run.graph.graph
    before = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    mode = detect_fake_mode([v for v in before.values() if isinstance(v, torch.Tensor)])
    guards = len(mode.shape_env.guards)
    FakeTensorProp(run.graph, mode).propagate_dont_convert_inputs(*[before[n] for n in graph.find_nodes(op="placeholder")])
    compared = 0
    for node, planned in before.items():
        found = node.meta["val"]
        pairs = zip(found, planned, strict=True) if isinstance(planned, (tuple, list)) else [(found, planned)]
        for a, b in pairs:
            if isinstance(b, torch.Tensor):
                try:
                    _same(a, b)
                except AssertionError as error:
                    raise AssertionError(f"{node.format_node()}: {error}") from None
                compared += 1
    assert compared >= 4
    assert len(mode.shape_env.guards) == guards
    if dynamic:
        assert any(not isinstance(size, int) for v in before.values() if isinstance(v, torch.Tensor) for size in v.shape)


def _complete(run):
    """Every call has a planned value, and knows where in the model it stands."""
    assert run.report.count("fuse_allreduce_rms") or run.skipped
    for node in run.graph.graph.nodes:
        if node.op == "call_function":
            assert node.meta.get("val") is not None, node.format_node()
    for node in run.calls(FUSED):
        assert node.meta.get("stack_trace") or node.meta.get("nn_module_stack")
