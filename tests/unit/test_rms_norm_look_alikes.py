"""What looks like an RMSNorm and is none stays untouched, computes what it did, and says why."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from tests.unit import norms
from tests.unit.graphs import all_reduce, check, compile_plainly, compile_with_tpfuse, values, world

T, D = 6, 16


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


def _layer_norm(x, w, eps):
    return F.layer_norm(x, (D,), w, None, eps)


def _layer_norm_by_hand(x, w, eps):
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    return w * (h * torch.rsqrt(norms.mean_square(h) + eps)).to(x.dtype)


def _layer_norm_by_var(x, w, eps):
    h = x.float()
    return w * ((h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + eps)).to(x.dtype)


def _uncentred_by_variance(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + eps)).to(x.dtype)


def _epsilon_outside(x, w, eps):
    h = x.float()
    return w * (h * (torch.rsqrt(norms.mean_square(h)) + eps)).to(x.dtype)


def _epsilon_beside_the_root(x, w, eps):
    h = x.float()
    return w * (h / (torch.sqrt(norms.mean_square(h)) + eps)).to(x.dtype)


def _epsilon_as_maximum(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(norms.mean_square(h).clamp(min=eps))).to(x.dtype)


def _epsilon_is_a_vector(x, w, eps):
    h = x.float()
    return (h * torch.rsqrt(norms.mean_square(h) + w.float().abs())).to(x.dtype)


def _epsilon_is_subtracted(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(norms.mean_square(h) + 1.0 - eps)).to(x.dtype)


def _sum(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def _maximum(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).amax(-1, keepdim=True) + eps)).to(x.dtype)


def _mean_over_rows(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + eps)).to(x.dtype)


def _mean_over_everything(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean() + eps)).to(x.dtype)


def _mean_over_both_dimensions(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean((-2, -1), keepdim=True) + eps)).to(x.dtype)


def _mean_without_the_dimension(x, w, eps):
    h = x[:D].float()
    return w * (h.t() * torch.rsqrt(h.pow(2).mean(-1) + eps)).t().to(x.dtype)


def _mean_of_fourth_powers(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(4).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _mean_of_absolutes(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.abs().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _root_not_inverted(x, w, eps):
    h = x.float()
    return w * (h * torch.sqrt(norms.mean_square(h) + eps)).to(x.dtype)


def _in_the_model_dtype(x, w, eps):
    return w * (x * torch.rsqrt(norms.mean_square(x) + eps))


def _mean_in_the_model_dtype(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt((x * x).mean(-1, keepdim=True).float() + eps)).to(x.dtype)


def _norm_of_another_value(x, w, eps):
    h = x.float()
    return w * (torch.tanh(h) * torch.rsqrt(norms.mean_square(h) + eps)).to(x.dtype)


def _root_goes_elsewhere_too(x, w, eps):
    h = x.float()
    root = torch.rsqrt(norms.mean_square(h) + eps)
    return w * (h * root).to(x.dtype) + root.to(x.dtype)


def _rounded_before_the_product(x, w, eps):
    h = x.float()
    return w * (x * torch.rsqrt(norms.mean_square(h) + eps).to(x.dtype))


def _in_fp64(x, w, eps):
    h = x.double()
    return w * (h * torch.rsqrt(norms.mean_square(h) + eps)).to(x.dtype)


#: Name -> (norm, what its reason must say). None: no root of a mean of squares, so no norm to name at all.
LOOK_ALIKES = {
    "LayerNorm": (_layer_norm, "LayerNorm"),
    "LayerNorm by hand": (_layer_norm_by_hand, "LayerNorm"),
    "LayerNorm by var": (_layer_norm_by_var, "LayerNorm"),
    "variance, not centred": (_uncentred_by_variance, "LayerNorm|variance"),
    "eps added to the inverse root": (_epsilon_outside, "epsilon|does not multiply"),
    "eps added to the root": (_epsilon_beside_the_root, None),
    "clamped, no eps": (_epsilon_as_maximum, None),
    "eps is a vector": (_epsilon_is_a_vector, None),
    "sum": (_sum, "sum"),
    "max": (_maximum, None),
    "mean over rows": (_mean_over_rows, "dimension"),
    "mean over everything": (_mean_over_everything, None),
    "mean over the last two": (_mean_over_both_dimensions, "dimension"),
    "mean drops the dimension": (_mean_without_the_dimension, "drops|dimension"),
    "fourth powers": (_mean_of_fourth_powers, None),
    "absolutes": (_mean_of_absolutes, None),
    "root, not inverse": (_root_not_inverted, None),
    "computed in bf16": (_in_the_model_dtype, "bfloat16"),
    "mean in bf16": (_mean_in_the_model_dtype, None),
    "another value is scaled": (_norm_of_another_value, "does not multiply"),
    "inverse root used twice": (_root_goes_elsewhere_too, "several users"),
    "inverse root rounded": (_rounded_before_the_product, None),
    "computed in fp64": (_in_fp64, "float64"),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike(name):
    norm, reason = LOOK_ALIKES[name]

    def function(x, r, w):
        y = all_reduce(x) + r
        return norm(y, w, 1e-5), y

    inputs = values(D, D), values(D, D, seed=1), values(D, seed=2)
    run = check(function, *inputs, fused=0, skipped=1, exact=name != "LayerNorm")
    _, plain = compile_plainly(function, *inputs)
    assert run.graph.code == plain.graphs[0].code
    (told,) = run.skipped
    assert told
    if reason is not None:
        assert re.search(reason, told), told
        (norm_site,) = [s for s in run.report.sites if s.op != "all_reduce"]
        assert norm_site.outcome == "skipped" and re.search(reason, norm_site.reason)


def test_epsilon_of_two_numbers_is_not_lost():
    """mean + 1 - eps: whatever is fused, both numbers count."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return _epsilon_is_subtracted(y, w, 0.25), y

    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2)
    fused = compile_with_tpfuse(function, *inputs).report.count("fuse_allreduce_rms")
    check(function, *inputs, fused=fused, skipped=1 - fused)


def test_look_alike_with_one_more_element_in_the_mean():
    """A norm over [T, D] padded to D + 1: another size under the mean than in the product."""

    def function(x, r, w):
        y = all_reduce(x) + r
        h = y.float()
        return w * (h * torch.rsqrt(norms.mean_square(F.pad(h, (0, 1))) + 1e-5)).to(y.dtype), y

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), fused=0, skipped=1)
