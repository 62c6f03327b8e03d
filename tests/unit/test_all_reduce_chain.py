"""What may stand between an all-reduce and its norm, and who else may use the values: fused all the same, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import all_reduce, all_reduce_in_place, check, compile_with_tpfuse, values, world

BF16, FP32 = torch.bfloat16, torch.float32
T, D = 6, 16


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


# -- what stands between the all-reduce and the norm -------------------------------------------------------------------


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
    found = run.fused_arguments
    assert (found["bias"] is not None) == (bias is not None)
    assert (found["scale"] is not None) == (scale in ("number", "integer"))
    assert (found["scale_tensor"] is not None) == (scale in ("tensor", "tensor first"))
    assert (found["residual"] is not None) == with_residual


def test_bias_exact_toy():
    """cases.md 18: W = twos(3, 6), x = ones(4, 3) on each of two ranks, b = 1 added once: all 13."""

    def function(x, w, b, weight):
        y = all_reduce(x @ w) + b
        return norms.llama(y, weight, 1e-30), y

    normed, y = check(function, torch.ones(4, 3), torch.full((3, 6), 2.0), torch.ones(6), torch.ones(6)).outputs
    assert torch.equal(y, torch.full((4, 6), 13.0))
    torch.testing.assert_close(normed, torch.ones(4, 6))


def test_bias_on_one_rank_before_the_all_reduce():
    """addmm before the all-reduce is nobody's business: the bias there stays there."""

    def function(x, w, b, r, weight):
        y = all_reduce(torch.addmm(b, x, w)) + r
        return norms.llama(y, weight, 1e-5), y

    run = check(function, values(T, 8), values(8, D), values(D, seed=1), values(T, D, seed=2), values(D, seed=3))
    assert run.fused_arguments["bias"] is None
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


@pytest.mark.parametrize("place", ["after the all-reduce", "before the add", "before the norm", "after the norm"])
@pytest.mark.parametrize("view", [_to_3d, _to_3d_reshape, _to_3d_and_back, _one_more_dimension], ids=lambda v: v.__name__)
def test_views_2d_to_3d(view, place):
    """A view anywhere hides nothing: without residual, and with it in either order."""
    at = {place: view}

    def function(x, r, w, b):
        results = []
        for residual in RESIDUALS:
            y = at.get("after the all-reduce", _identity)(all_reduce(x)) + b
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


@pytest.mark.parametrize("dynamic", [None, True])
def test_squeezes_are_views(dynamic):
    def function(x, r, w):
        y = r + all_reduce(x).unsqueeze(0)
        return norms.llama(y, w, 1e-5).squeeze(0), y

    check(function, values(T, D), values(1, T, D, seed=1), values(D, seed=2), dynamic=dynamic)


def test_several_views_on_the_way():
    def function(x, r, w):
        y = r + all_reduce(x.view(-1)).view(2, 3, D).unsqueeze(1)
        return norms.llama(y.view(T, D), w, 1e-5).view(2, 3, D), y

    check(function, values(T, D), values(2, 1, 3, D, seed=1), values(D, seed=2))


@pytest.mark.parametrize(("divisor", "fused"), [(2.0, 1), (0.25, 1), (3.0, 0)])
def test_division_is_a_scale_where_it_is_exact(divisor, fused):
    def function(x, r, w):
        y = all_reduce(x) / divisor + r
        return norms.llama(y, w, 1e-5), y

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), fused=fused, skipped=1 - fused)


def test_unbatched():
    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    run = check(function, values(D), values(D, seed=1), values(D, seed=2))
    assert run.fused_arguments["residual"] is not None and run.fused_arguments["bias"] is None


def test_second_norm_of_a_fused_sum_says_so():
    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), norms.llama(y, w + 1, 1e-6), y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))
    assert [s.reason for s in run.report.sites if s.op == "rms_norm"] == ["its sum is fused with another norm"]


def test_two_all_reduces_meet():
    """The later one reduces by maximum; the earlier one must not wait for it."""

    def function(a, b, w):
        y = all_reduce(a) + all_reduce(b, "max")
        return norms.llama(y, w, 1e-5), y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), fused=0, skipped=2)
    assert "another collective" in run.skipped[0] and "'max'" in run.skipped[1]


def test_t5_multiplies_the_narrow_value():
    def function(x, r, w):
        y = all_reduce(x) + r
        normed = y * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * normed.to(y.dtype), y

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))


def test_epsilon_in_a_tensor_is_told():
    def function(x, r, w, eps):
        y = all_reduce(x) + r
        return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)), y

    inputs = [values(T, D, dtype=FP32), values(T, D, seed=1, dtype=FP32), values(D, seed=2, dtype=FP32), torch.tensor(1e-5)]
    run = check(function, *inputs, fused=0, skipped=1)
    assert "epsilon is not a number" in run.skipped[0]
