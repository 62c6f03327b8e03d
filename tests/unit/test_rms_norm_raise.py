"""Every spelling of RMSNorm after an all-reduce becomes one fused operation, and computes the same bits as before."""

from __future__ import annotations

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import (
    FUSED,
    Backend,
    all_reduce,
    all_reduce_in_place,
    assert_same,
    check,
    compile_with_tpfuse,
    values,
    world,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T, D = 6, 16


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


# -- spellings ------------------------------------------------------------------------------------------------------------


DTYPES = {"bf16": (BF16, BF16), "bf16, fp32 weights": (BF16, FP32), "fp16": (FP16, FP16), "fp32": (FP32, FP32)}


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("spelling", norms.SPELLINGS)
def test_spelling(spelling, dtypes):
    """In both residual orders, with the sum used again."""
    norm, (dtype, weight_dtype) = norms.SPELLINGS[spelling], DTYPES[dtypes]

    def function(x, r, w):
        y = all_reduce(x) + r
        n = norm(y, w, 1e-5).to(x.dtype)
        z = y * 2 + all_reduce(n)
        return norm(z, w, 1e-5), z

    inputs = values(T, D, dtype=dtype), values(T, D, dtype=dtype, seed=1), values(D, dtype=weight_dtype, seed=2)
    run = check(function, *inputs, fused=2, exact=spelling in norms.EXACT)
    assert not run.calls(torch.ops.aten.rsqrt.default)
    assert not run.calls(torch.ops.tpfuse.rms_norm.default)


def _arguments(run):
    """Arguments of the one fused call, by the operation's own names."""
    (node,) = run.calls(FUSED)
    return dict(zip([a.name for a in FUSED._schema.arguments], node.args, strict=False))


@pytest.mark.parametrize(
    ("spelling", "offset", "normed_dtype", "has_weight"),
    [
        ("llama", 0.0, BF16, True),
        ("F.rms_norm", 0.0, None, True),
        ("weight in fp32", 0.0, None, True),
        ("gemma", 1.0, None, True),
        ("gemma, offset 0.5", 0.5, None, True),
        ("without weight", 0.0, None, False),
    ],
)
def test_canonical_arguments(spelling, offset, normed_dtype, has_weight, two_ranks):
    """The weight reaches the kernel as it is stored, and the roundings as the model has them."""

    def function(x, r, w):
        return norms.SPELLINGS[spelling](all_reduce(x) + r, w, 1e-5)

    run = compile_with_tpfuse(function, values(T, D), values(T, D), values(D))
    found = _arguments(run)
    assert (found["weight_offset"], found["normed_dtype"], found["out_dtype"]) == (offset, normed_dtype, BF16)
    assert found["group"] == two_ranks.group_name
    assert found["eps"] == pytest.approx(1e-5)
    weight = found["weight"]
    assert (weight is not None and weight.op == "placeholder") if has_weight else weight is None


def test_weight_rounded_by_the_model_stays_rounded():
    """1 + w in bf16 is not Gemma's 1 + w in fp32: w = 2**-8 is lost, and must stay lost."""

    def function(x, r, w):
        return norms.llama(all_reduce(x) + r, 1 + w, 1e-5)

    x, r = values(T, D), values(T, D, seed=1)
    small = check(function, x, r, torch.full((D,), 2.0**-8, dtype=BF16)).outputs
    zero = check(function, x, r, torch.zeros(D, dtype=BF16)).outputs
    assert torch.equal(small, zero)


def test_weight_cast_after_the_norm_is_not_widened():
    """normed.to(bf16) * w.float() has an fp32 result: the cast of the weight counts there."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.without_weight(y, w, 1e-5) * w.float(), y

    assert check(function, values(T, D), values(T, D, seed=1), values(D, seed=2)).outputs[0].dtype is FP32


def test_weight_of_more_dimensions_stays_outside():
    """[1, D] is no [D]: the product is left to the compiler, the norm is fused without it."""

    def function(x, r, w):
        return norms.llama(all_reduce(x) + r, w[None], 1e-5)

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))
    assert _arguments(run)["weight"] is None


def test_norm_with_bias_after_it():
    """RMSNorm(y) * w + b: the bias of the norm is not the fused operation's (which comes before the norm)."""

    def function(x, r, w, b):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5) + b, y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3))
    assert _arguments(run)["bias"] is None


def test_several_eps_in_one_graph():
    """cases.md 21: 1e-3 after the reduction gives these three with eps 1e-5, 1e-6, 1e-12."""

    def function(x, w):
        return tuple(norms.llama(all_reduce(x), w, eps) for eps in (1e-5, 1e-6, 1e-12))

    x, w = torch.full((T, D), 0.5e-3), torch.ones(D)
    outputs = check(function, x, w, fused=3).outputs
    for found, expected in zip(outputs, (0.30151, 0.70711, 1.0), strict=True):
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=0, atol=1e-5)


def test_several_models_with_other_eps():
    """cases.md 21: one model after the other in one process."""
    x, w = torch.full((T, D), 0.5e-3), torch.ones(D)
    for eps, expected in ((1e-5, 0.30151), (1e-6, 0.70711), (3e-6, 0.5), (1e-5, 0.30151)):

        def function(x, w, eps=eps):
            return norms.llama(all_reduce(x), w, eps)

        found = check(function, x, w).outputs
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=0, atol=1e-5)


def test_eps_zero():
    def function(x, r, w):
        return norms.llama(all_reduce(x) + r, w, 0.0)

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))


# -- Gemma's values (cases.md 5) --------------------------------------------------------------------------------------------


def _exact(y, scale, eps=1e-6):
    """In fp64, rounded where a bf16 model rounds: at the end."""
    h = y.double()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * scale).to(BF16)


@pytest.mark.parametrize("with_residual", [True, False])
def test_gemma_small_weight(with_residual):
    """w = 2**-8: 1 + w in bf16 would be 1, and only 28 % of the values right."""

    def function(x, r, w):
        reduced = all_reduce(x)
        y = reduced + r if with_residual else reduced
        return norms.gemma(y, w, 1e-6), y

    x, r, w = values(16, 512), values(16, 512, seed=1), torch.full((512,), 2.0**-8, dtype=BF16)
    found, y = check(function, x, r, w).outputs
    expected = _exact(y, 1 + 2.0**-8)
    assert (found == expected).float().mean() >= 0.95
    assert (_exact(y, 1.0) == expected).float().mean() < 0.5  # so the line above means something


def test_gemma_weight_that_bf16_rounds():
    """w = 15.8125: the scale is 16.8125, which bf16 would make 16.75."""

    def function(x, w):
        return norms.gemma(all_reduce(x), w, 0.0)

    signs = torch.ones(4, 64, dtype=BF16)
    signs[:, ::2] = -1  # mean square 1
    found = check(function, signs / 2, torch.full((64,), 15.8125, dtype=BF16)).outputs
    assert torch.equal(found, (signs.float() * 16.8125).to(BF16))
    wide = check(function, signs.float() / 2, torch.full((64,), 15.8125, dtype=BF16)).outputs
    assert torch.equal(wide, signs.float() * 16.8125)


def test_gemma_fp32_weight_with_bf16_activations():
    def function(x, r, w):
        return norms.gemma(all_reduce(x) + r, w, 1e-6)

    w = torch.full((512,), 2.0**-9 + 2.0**-16)
    check(function, values(16, 512), values(16, 512, seed=1), w)


# -- what stands between the all-reduce and the norm ------------------------------------------------------------------------


def _bias(y, b):
    return y + b


def _bias_first(y, b):
    return b + y


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("bias", [None, _bias, _bias_first], ids=["no bias", "y + b", "b + y"])
@pytest.mark.parametrize("scale", [None, "number", "integer", "tensor", "tensor first"])
def test_bias_and_scale(with_residual, bias, scale):
    """The bias is added once, after the sum (cases.md 18), then the scale, then the residual."""

    def function(x, r, w, b, s):
        y = all_reduce(x)
        y = bias(y, b) if bias else y
        y = {None: y, "number": y * 0.22, "integer": 3 * y, "tensor": y * s, "tensor first": s * y}[scale]
        y = r + y if with_residual else y
        return norms.llama(y, w, 1e-5), y

    s = torch.tensor(0.3, dtype=BF16)
    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3), s)
    found = _arguments(run)
    assert (found["bias"] is not None) == (bias is not None)
    assert (found["scale"] is not None) == (scale in ("number", "integer"))
    assert (found["scale_tensor"] is not None) == (scale in ("tensor", "tensor first"))
    assert (found["residual"] is not None) == with_residual


def test_bias_exact_toy():
    """cases.md 18: W = twos(3, 6), x = ones(4, 3) on each of two ranks, b = 1 added once: all 13."""

    def function(x, w, b, weight):
        y = all_reduce(x @ w) + b
        return norms.llama(y, weight, 0.0), y

    normed, y = check(function, torch.ones(4, 3), torch.full((3, 6), 2.0), torch.ones(6), torch.ones(6)).outputs
    assert torch.equal(y, torch.full((4, 6), 13.0))
    torch.testing.assert_close(normed, torch.ones(4, 6))


def test_bias_on_one_rank_before_the_all_reduce():
    """addmm before the all-reduce is nobody's business: the bias there stays there."""

    def function(x, w, b, r, weight):
        y = all_reduce(torch.addmm(b, x, w)) + r
        return norms.llama(y, weight, 1e-5), y

    run = check(function, values(T, 8), values(8, D), values(D, seed=1), values(T, D, seed=2), values(D, seed=3))
    assert _arguments(run)["bias"] is None
    assert len(run.calls(torch.ops.aten.addmm.default)) == 1


def _identity(y):
    return y


def _to_3d(y):
    return y.view(2, T // 2, D)


def _to_3d_reshape(y):
    return y.reshape(2, -1, D)


def _to_3d_and_back(y):
    return y.view(2, T // 2, D).view(T, D)


def _one_more_dimension(y):
    return y.view(1, *y.shape)


def _combine(kind, y, r):
    return {"none": y, "first": r + y, "last": y + r}[kind]


RESIDUALS = ("none", "first", "last")


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("place", ["after the all-reduce", "before the add", "before the norm", "after the norm"])
@pytest.mark.parametrize("view", [_to_3d, _to_3d_reshape, _to_3d_and_back, _one_more_dimension], ids=lambda v: v.__name__)
def test_views_2d_to_3d(view, place, with_bias):
    """A view anywhere hides nothing: without residual, and with it in either order."""
    at = {place: view}

    def function(x, r, w, b):
        results = []
        for residual in RESIDUALS:
            y = at.get("after the all-reduce", _identity)(all_reduce(x))
            y = y + b if with_bias else y
            y = at.get("before the add", _identity)(y)
            y = _combine(residual, y, r.view(y.shape))
            n = norms.llama(at.get("before the norm", _identity)(y), w, 1e-5)
            results += [at.get("after the norm", _identity)(n), y]
        return results

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3), fused=3)


@pytest.mark.parametrize("place", ["before the all-reduce", "after the all-reduce", "before the norm"])
def test_views_3d_to_2d(place):
    """Mixtral and DeepSeek reduce flattened tokens; the residual stream is 3-D, or the other way round."""

    def flat(y):
        return y.view(-1, D)

    at = {place: flat}

    def function(x, r, w):
        results = []
        for residual in RESIDUALS:
            y = at.get("after the all-reduce", _identity)(all_reduce(at.get("before the all-reduce", _identity)(x)))
            y = _combine(residual, y, r.view(y.shape))
            results += [norms.llama(at.get("before the norm", _identity)(y), w, 1e-5), y]
        return results

    check(function, values(2, 3, D), values(2, 3, D, seed=1), values(D, seed=2), fused=3)


def test_flattened_reduction_back_to_3d():
    def function(x, r, w):
        y = r + all_reduce(x.view(-1, D)).view(2, 3, D)
        return norms.llama(y, w, 1e-5), y

    check(function, values(2, 3, D), values(2, 3, D, seed=1), values(D, seed=2))


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_norm_over_heads(residual, bias):
    """A view that splits the last dimension: the norm is over D / 4, the bias over D."""

    def function(x, r, w, b):
        y = all_reduce(x)
        y = y + b if bias else y
        y = y.view(T, 4, D // 4)
        r = r.view(T, 4, D // 4)
        y = _combine(residual, y, r)
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), values(T, D, seed=1), values(D // 4, seed=2), values(D, seed=3)
    check(function, *inputs, **({"fused": 0, "skipped": 1} if bias else {"fused": 1}))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_bias_per_head(residual):
    """A bias of [D / 4] on heads, then the norm over D: it is no bias of [D]."""

    def function(x, r, w, b):
        y = (all_reduce(x).view(T, 4, D // 4) + b).view(T, D)
        y = _combine(residual, y, r)
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2), values(D // 4, seed=3)
    check(function, *inputs, fused=0, skipped=1)


def test_bias_of_the_rows():
    """[T] on a transposed value is a bias of no hidden dimension; with T == D only the view tells them apart."""

    def function(x, r, w, b):
        y = (all_reduce(x).t() + b).t() + r
        return norms.llama(y, w, 1e-5), y

    inputs = values(D, D), values(D, D, seed=1), values(D, seed=2), values(D, seed=3)
    check(function, *inputs, fused=0, skipped=1)


def test_in_place_all_reduce():
    """Hugging Face's way; the copies it leaves in the graph are no obstacle."""

    def function(x, w1, r, w, b):
        y = all_reduce_in_place(x @ w1)
        y = y + b
        y = r + y.view(2, 3, D)
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, 8), values(8, D, seed=1), values(2, 3, D, seed=2), values(D, seed=3), values(D, seed=4)
    check(function, *inputs)


def test_in_place_all_reduce_of_a_view():
    def function(x, w1, r, w):
        y = x @ w1
        torch.distributed.all_reduce(y.view(-1))
        y = y + r
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, 8), values(8, D, seed=1), values(T, D, seed=2), values(D, seed=3)
    expected = function(*inputs)
    run = compile_with_tpfuse(function, *inputs)
    assert torch.equal(run.outputs[0], expected[0]) and torch.equal(run.outputs[1], expected[1])


# -- users ------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("view", [_identity, _to_3d], ids=["flat", "norm of a view"])
@pytest.mark.parametrize("users", _users(), ids=lambda u: u.__name__)
@pytest.mark.parametrize("spelling", ["llama", "gemma"])
def test_users(spelling, users, view):
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
    assert _arguments(run)["weight"] is None


def test_fp32_result_before_its_cast_used_too():
    """A router reads the fp32 product, the layer its bf16 rounding."""

    def function(x, r, w):
        y = r + all_reduce(x)
        h = y.float()
        n = h * torch.rsqrt(norms.mean_square(h) + 1e-5) * w.float()
        return n.to(y.dtype), n, y

    assert _arguments(check(function, values(T, D), values(T, D, seed=1), values(D, seed=2)))["out_dtype"] is FP32


def test_router_reads_the_norm_in_fp32():
    """A widening cast after the norm belongs to the router."""

    def function(x, r, w):
        y = r + all_reduce(x)
        return norms.llama(y, w, 1e-5).float(), y

    assert _arguments(check(function, values(T, D), values(T, D, seed=1), values(D, seed=2)))["out_dtype"] is BF16


@pytest.mark.parametrize("spelling", ["llama", "gemma", "F.rms_norm"])
def test_post_norm(spelling):
    """Gemma and GLM4: all-reduce -> norm -> add -> norm. The first is fused, the second one stays."""
    norm = norms.SPELLINGS[spelling]

    def function(x, r, w, v):
        y = r + norm(all_reduce(x), w, 1e-6)
        return norm(y, v, 1e-6), y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3))
    assert _arguments(run)["residual"] is None
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


# -- shapes and layouts -------------------------------------------------------------------------------------------------------


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
    """cases.md 14: fused or not, the values are right and the strides are those the graph was promised."""

    def function(x, r, w):
        y = r + all_reduce(x) if residual_first else all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), layout(values(T, D, seed=1)), values(D, seed=2)
    run = compile_with_tpfuse(function, *inputs)
    fused = run.report.count("fuse_allreduce_rms")
    check(function, *inputs, fused=fused, skipped=1 - fused)
    assert fused == 1 or (layout is _transposed and residual_first)
    for output, planned in zip(run.outputs, run.graph.graph.output_node().args[0], strict=True):
        assert output.stride() == tuple(planned.meta["val"].stride())


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
