"""Every spelling of RMSNorm after an all-reduce becomes one fused operation, and computes the same bits as before."""

from __future__ import annotations

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import all_reduce, check, compile_with_tpfuse, values, world

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T, D = 6, 16


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


# -- spellings ---------------------------------------------------------------------------------------------------------


DTYPES = {"bf16": (BF16, BF16), "bf16, fp32 weights": (BF16, FP32), "fp16": (FP16, FP16), "fp32": (FP32, FP32)}


#: Every spelling in two dtypes; the other two where casts and weights differ.
CASES = [
    *((spelling, dtypes) for spelling in norms.SPELLINGS for dtypes in ("bf16", "fp32")),
    *(
        (spelling, dtypes)
        for spelling in ("llama", "weight in fp32", "gemma", "F.rms_norm", "1 / sqrt")
        for dtypes in ("bf16, fp32 weights", "fp16")
    ),
]


@pytest.mark.parametrize(("spelling", "dtypes"), CASES)
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
    found = run.fused_arguments
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
    assert run.fused_arguments["weight"] is None


def test_norm_with_bias_after_it():
    """RMSNorm(y) * w + b: the bias of the norm is not the fused operation's (which comes before the norm)."""

    def function(x, r, w, b):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5) + b, y

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3))
    assert run.fused_arguments["bias"] is None


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
    """torch 2.14 drops + 0.0 from the graph: the mean itself is then under the root."""

    def function(x, r, w):
        return norms.llama(all_reduce(x) + r, w, 0.0)

    check(function, values(T, D), values(T, D, seed=1), values(D, seed=2))


# -- Gemma's values (cases.md 5) ---------------------------------------------------------------------------------------


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
        return norms.gemma(all_reduce(x), w, 1e-30)  # nothing, beside 1

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
