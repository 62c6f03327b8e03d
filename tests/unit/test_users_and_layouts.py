"""Fused sites whose values have other users, odd sizes, no rows or strange strides."""

from __future__ import annotations

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import Backend, all_reduce, assert_same, check, compile_with_tpfuse, values, world

BF16, FP32 = torch.bfloat16, torch.float32
T, D = 6, 16


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


# -- users -------------------------------------------------------------------------------------------------------------


def _identity(y):
    return y


def _to_3d(y):
    return y.view(2, T // 2, D)


def _users():
    def only_norm(n, y, r, x):
        return n

    def only_sum(n, y, r, x):
        return n.sum() * 0 + y

    def both(n, y, r, x):
        return n, y

    def norm_used_often(n, y, r, x):
        return n @ n.t(), n + 1, n, n.float()

    def sum_used_often(n, y, r, x):
        return n, y + 1, y * 2, y.view(-1), y.float()

    def residual_used(n, y, r, x):
        return n, r * 2, r + y

    def input_used(n, y, r, x):
        return n, x * 2, x + y

    return [only_norm, only_sum, both, norm_used_often, sum_used_often, residual_used, input_used]


@pytest.mark.parametrize(("spelling", "view"), [("llama", _identity), ("gemma", _to_3d)], ids=["flat", "norm of a view"])
@pytest.mark.parametrize("users", _users(), ids=lambda u: u.__name__)
def test_users(users, spelling, view):
    """A dead residual, and more users of every value."""

    def function(x, r, w):
        y = r + all_reduce(x)
        n = norms.SPELLINGS[spelling](view(y), w, 1e-5).view(y.shape)
        return users(n, y, r, x)

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))


def test_nothing_aliases():
    """The outputs are fresh: writing to them does not reach an input."""

    def function(x, r, w):
        y = r + all_reduce(x)
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D, dtype=FP32), values(T, D, dtype=FP32, seed=1), values(D, dtype=FP32, seed=2)
    kept = [t.clone() for t in inputs]
    for output in check(function, *inputs).outputs:
        output.zero_()
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


def test_two_norms_of_one_sum():
    """Falcon-like: the first norm is fused, the second one reads its sum."""

    def function(x, r, w, v):
        y = r + all_reduce(x)
        return norms.llama(y, w, 1e-5), norms.gemma(y, v, 1e-6), y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3))
    left = [s for s in run.report.sites if s.op == "rms_norm"]
    assert len(left) == 1 and left[0].outcome == "skipped" and left[0].reason


def test_unweighted_value_used_too():
    """The normalised value before its weight has another user: the weight stays outside."""

    def function(x, r, w):
        y = r + all_reduce(x)
        h = y.float()
        n = (h * torch.rsqrt(norms.mean_square(h) + 1e-5)).to(y.dtype)
        return n * w, n, y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))
    assert run.fused_arguments["weight"] is None


def test_fp32_result_before_its_cast_used_too():
    """A router reads the fp32 product, the layer its bf16 rounding."""

    def function(x, r, w):
        y = r + all_reduce(x)
        h = y.float()
        n = h * torch.rsqrt(norms.mean_square(h) + 1e-5) * w.float()
        return n.to(y.dtype), n, y

    assert check(function, values(T, D), values(T, D, seed=1), values(D, seed=2)).fused_arguments["out_dtype"] is FP32


def test_router_reads_the_norm_in_fp32():
    """A widening cast after the norm belongs to the router."""

    def function(x, r, w):
        y = r + all_reduce(x)
        return norms.llama(y, w, 1e-5).float(), y

    assert check(function, values(T, D), values(T, D, seed=1), values(D, seed=2)).fused_arguments["out_dtype"] is BF16


@pytest.mark.parametrize("spelling", ["llama", "gemma", "F.rms_norm"])
def test_post_norm(spelling):
    """Gemma and GLM4: all-reduce -> norm -> add -> norm. The first is fused, the second one stays."""
    norm = norms.SPELLINGS[spelling]

    def function(x, r, w, v):
        y = r + norm(all_reduce(x), w, 1e-6)
        return norm(y, v, 1e-6), y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3))
    assert run.fused_arguments["residual"] is None
    assert len(run.calls(torch.ops.aten.rsqrt.default)) == 1


def test_embedding_like_scale_then_norm():
    """Gemma's embedding: the reduced value is scaled, goes on as the residual stream, and is normalised."""

    def function(x, w, s):
        y = all_reduce(x) * s
        return norms.gemma(y, w, 1e-6), y

    check(function, values(T, D), values(D, seed=1), torch.tensor(8.0, dtype=BF16))


def test_a_stack_of_layers():
    """Two fused sites a layer, and every one of them in its own place."""
    layers = 4

    def function(x, ws, norms_, last):
        y = x
        n = norms.llama(y, last, 1e-5)
        for up, down, w in zip(ws[::2], ws[1::2], norms_, strict=True):
            y = y + all_reduce(n @ up)
            n = norms.llama(y, w, 1e-5)
            y = y + all_reduce(torch.relu(n @ down))
            n = norms.llama(y, last, 1e-5)
        return n, y

    ws = [values(D, D, seed=i) / 8 for i in range(2 * layers)]
    run = check(function, values(T, D), ws, [values(D, seed=50 + i) for i in range(layers)], values(D), fused=2 * layers)
    places = [s.where for s in run.report.sites if s.outcome == "fused"]
    assert len(set(places)) == 2 * layers


def test_weight_computed_before_the_sum_is_used():
    """The fused call waits for a weight that is computed between the sum and its first use."""

    def function(x, r, w):
        y = r + all_reduce(x)
        scaled = torch.exp(w)
        return norms.llama(y, scaled, 1e-5), y

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))


def test_residual_computed_after_the_all_reduce():
    def function(x, r, w):
        reduced = all_reduce(x)
        y = torch.tanh(r) + reduced
        return norms.llama(y, w, 1e-5), y

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))


# -- shapes and layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [1, 7, 100, 2880])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_odd_hidden_sizes(hidden, dtype):
    """cases.md 24."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    inputs = values(5, hidden, dtype=dtype), values(5, hidden, dtype=dtype, seed=1), values(hidden, dtype=dtype, seed=2)
    check(function, *inputs)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 129])
@pytest.mark.parametrize("batch", [None, 2])
def test_row_counts(rows, batch):
    """cases.md 15 and 23: none and one included."""
    shape = (rows, D) if batch is None else (batch, rows, D)

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    check(function, values(*shape), values(*shape, seed=1), values(D, seed=2))


def test_empty_between_others():
    """cases.md 15: T = 4, then 0, then 3 with the same callable."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    compiled = torch.compile(function, backend=Backend(), fullgraph=True)
    for rows in (4, 0, 3, 0, 1):
        inputs = values(rows, D), values(rows, D, seed=1), values(D, seed=2)
        assert_same(compiled(*inputs), function(*inputs))


def _expanded(r):
    return r[:1].expand(r.shape)


def _transposed(r):
    return r.t().contiguous().t()


def _column_slice(r):
    return torch.cat([r, r], -1)[:, : r.shape[-1]]


def _every_other_row(r):
    return torch.stack([r, r], 1)[:, 0]


LAYOUTS = [_expanded, _transposed, _column_slice, _every_other_row]


@pytest.mark.parametrize("residual_first", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_residual_layouts(layout, residual_first):
    """cases.md 14: fused or not, the values are right, and the strides are those that the rest of the graph counts on."""

    def function(x, r, w):
        y = r + all_reduce(x) if residual_first else all_reduce(x) + r
        n = norms.llama(y, w, 1e-5)
        flat = y.t() if layout is _transposed and residual_first else y
        return n, y, flat.view(-1)

    inputs = values(T, D), layout(values(T, D, seed=1)), values(D, seed=2)
    run = compile_with_tpfuse(function, *inputs)
    fused = run.report.count("fuse_allreduce_rms")
    check(function, *inputs, fused=fused, skipped=1 - fused)
    assert fused == 1 or (layout is _transposed and residual_first)
    for output, planned, eager in zip(run.outputs, run.graph.graph.output_node().args[0], function(*inputs), strict=True):
        assert output.stride() == tuple(planned.meta["val"].stride()) == eager.stride()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_input_layouts(layout):
    def function(x, r, w):
        y = r + all_reduce(x)
        return norms.llama(y, w, 1e-5), y

    check(function, layout(values(T, D)), values(T, D, seed=1), values(D, seed=2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_weight_layouts(layout):
    def function(x, r, w):
        y = r + all_reduce(x)
        return norms.llama(y, w, 1e-5), y

    check(function, values(T, D), values(T, D, seed=1), layout(values(D, 2, seed=2))[:, 0])


def test_mla_dual_norm():
    """cases.md 14: [5, 96] split into 48, 32, 16; two norms on column slices after one all-reduce, the third returned."""

    def function(x, w, v):
        a, b, c = all_reduce(x).split([48, 32, 16], -1)
        return norms.llama(a, w, 1e-5), norms.llama(b, v, 1e-5), c

    run = check(function, values(5, 96), values(48, seed=1), values(32, seed=2), fused=0, skipped=1)
    assert run.skipped[0]
