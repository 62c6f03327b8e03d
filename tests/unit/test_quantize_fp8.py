"""Quantisation of activations to FP8: every spelling is found bit for bit, and joined where asked; near-misses are not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.unit.graphs import compile_plainly, compile_with_tpfuse, values, world
from tests.unit.test_lower import reads
from tpfuse.ops import Recipe, act_mul_quantize_fp8, rms_norm_quantize_fp8
from tpfuse.ops.act_mul_quantize_fp8 import OP as ACT_OP
from tpfuse.ops.quantize_fp8 import quantized
from tpfuse.ops.rms_norm_quantize_fp8 import OP as NORM_OP

T, D, G = 6, 96, 32
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
ON = {"fuse_norm_quant": True, "fuse_act_quant": True}
PER_TOKEN = Recipe(group=D, scale_dtype=BF16)


@pytest.fixture(autouse=True)
def one_process():
    with world(2):
        yield


# -- how models spell it -----------------------------------------------------------------------------------------------


def cast(scaled, most=448.0):
    return scaled.clamp(-most, most).to(E4M3)


def torchao_row(y):
    scale = (y.abs().amax(-1, keepdim=True) / 448.0).float()
    return cast(y.float() / scale), scale


def torchao_tensor(y):
    scale = (y.abs().amax([0, 1], keepdim=True) / 448.0).float()
    return cast(y.float() / scale), scale


def torchao_group(y):
    parts = y.view(*y.shape[:-1], -1, G)
    scale = (parts.abs().amax(-1, keepdim=True) / 448.0).float()
    return cast(parts.float() / scale).view(y.shape), scale.squeeze(-1)


def compressed_tensors(y):
    most = y.float().abs().amax(-1, keepdim=True)
    scale = torch.where(most > 0, most, 1.0) / 448.0
    return cast(y.float() / scale), scale


def torchao_training(y):
    """Rows, powers of two; the product takes the reciprocal of the scale, which is of another node."""
    most = torch.amax(torch.abs(y), dim=-1, keepdim=True).to(torch.float64)
    scale = torch.exp2(torch.floor(torch.log2((448.0 / torch.clamp(most, min=1e-12)).to(torch.float32))))
    return cast(y.to(torch.float32) * scale), scale


def torchao_training_tensor(y):
    scale = (448.0 / torch.clamp(torch.max(torch.abs(y)).to(torch.float64), min=1e-12)).to(torch.float32)
    return cast(y.to(torch.float32) * scale), scale


def deepgemm(y):
    parts = y.view(-1, y.shape[-1] // G, G)
    scale = parts.abs().float().amax(dim=2).view(-1, y.shape[-1] // G).clamp(1e-4) / 448.0
    return (parts * (1.0 / scale.unsqueeze(2))).to(E4M3).view(y.shape), scale


def deepgemm_powers_of_two(y):
    parts = y.view(-1, y.shape[-1] // G, G)
    most = parts.abs().float().amax(dim=2).view(-1, y.shape[-1] // G).clamp(1e-4)
    scale = torch.pow(2.0, torch.ceil(torch.log2(most / 448.0)))
    return (parts * (1.0 / scale.unsqueeze(2))).to(E4M3).view(y.shape), scale


def hugging_face(y):
    """As its Triton kernel computes it."""
    parts = y.view(*y.shape[:-1], -1, G).float()
    scale = parts.abs().amax(-1, keepdim=True) / 448.0
    return (parts / torch.clamp(scale, min=1e-12)).to(E4M3).view(y.shape), scale.squeeze(-1)


SPELLINGS = {
    "torchao row": (torchao_row, PER_TOKEN),
    "torchao tensor": (torchao_tensor, Recipe(scale_dtype=BF16)),
    "torchao group": (torchao_group, Recipe(group=G, scale_dtype=BF16)),
    "compressed-tensors": (compressed_tensors, Recipe(group=D, zero_to_one=True)),
    "torchao training": (
        torchao_training,
        Recipe(group=D, scale_dtype=torch.float64, floor=1e-12, power_of_two=True, inverse=True),
    ),
    "torchao training, tensor": (torchao_training_tensor, Recipe(scale_dtype=torch.float64, floor=1e-12, inverse=True)),
    "DeepGEMM": (deepgemm, Recipe(group=G, floor=1e-4, by_reciprocal=True)),
    "DeepGEMM, powers of two": (
        deepgemm_powers_of_two,
        Recipe(group=G, floor=1e-4, by_reciprocal=True, power_of_two=True),
    ),
    "Hugging Face": (hugging_face, Recipe(group=G, least=1e-12)),
}


def norm(x, weight):
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def bf16(*shape, seed=0):
    return values(*shape, seed=seed).to(BF16)


X, R, W = bf16(T, D), bf16(T, D, seed=1), bf16(D, seed=2)


def same_bits(a, b):
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(torch.atleast_1d(z).view(torch.uint8) for z in (a, b)))
    )


def hold_same_bits(found, expected):
    assert len(found) == len(expected) and all(map(same_bits, found, expected))


# -- meaning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_reference_is_the_spelling_bit_for_bit(spelling):
    quantise, recipe = SPELLINGS[spelling]
    for x in (X, X * 1e-3, X * 300, bf16(1, D)):
        for got, expected in zip(quantized(x, E4M3, None, recipe), quantise(x), strict=True):
            assert same_bits(got.view(expected.shape), expected)


def test_reference_at_the_edges():
    zero, nan = torch.zeros(2, D, dtype=BF16), X.clone()
    nan[1, 3] = torch.nan
    assert quantized(zero, E4M3, None, PER_TOKEN)[0].float().isnan().all()  # as torchao: no epsilon
    assert not quantized(zero, E4M3, None, Recipe(group=D, zero_to_one=True))[0].float().any()
    found = quantized(nan, E4M3, None, PER_TOKEN)[0].float().isnan().all(-1)
    assert found.tolist() == [False, True] + [False] * (T - 2)
    scales = quantized(X, E4M3, None, Recipe(group=G, power_of_two=True))[1]
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
    least = quantized(zero, E4M3, None, Recipe(group=D, floor=1e-4))[1]
    assert torch.equal(least, torch.full((2, 1), 1e-4) / 448)
    assert quantized(X[:0], E4M3, None, PER_TOKEN)[1].shape == (0, 1)
    assert quantized(X[:0], E4M3, None, Recipe())[1].shape == (1, 1)


# -- recognised, and joined ------------------------------------------------------------------------------------------


DYNAMIC = [
    (spelling, dynamic) for spelling in SPELLINGS for dynamic in ((False, True) if spelling != "DeepGEMM" else (True,))
]


@pytest.mark.parametrize("spelling, dynamic", DYNAMIC)
def test_norm_and_quantisation_are_one(spelling, dynamic):
    quantise, _ = SPELLINGS[spelling]

    def model(x, r, w):
        total = x + r
        return *quantise(norm(total, w)), total

    x, r = X.clone(), R.clone()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(r, 0)
    run = compile_with_tpfuse(model, x, r, W, config=ON)
    hold_same_bits(run.outputs, model(X, R, W))
    (node,) = run.calls(NORM_OP)
    assert node.args[1] is not None and node.args[6] is False  # takes the residual; nobody needs the norm itself
    assert run.report.count("fuse_norm_quant") == 1


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}


@pytest.mark.parametrize("packing", ["gate first", "up first", "separate"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("spelling", ["torchao row", "DeepGEMM"])
def test_activation_and_quantisation_are_one(spelling, act, packing):
    quantise, _ = SPELLINGS[spelling]

    def model(packed, other):
        parts = packed.chunk(2, -1)
        gate, up = (packed, other) if packing == "separate" else parts if packing == "gate first" else parts[::-1]
        return quantise(up * ACTIVATIONS[act](gate) if packing == "up first" else ACTIVATIONS[act](gate) * up)

    inputs = bf16(T, 2 * D), bf16(T, 2 * D, seed=1)
    run = compile_with_tpfuse(model, *inputs, config=ON)
    hold_same_bits(run.outputs, model(*inputs))
    (node,) = run.calls(ACT_OP)
    assert node.args[2] == act and run.report.count("fuse_act_quant") == 1


@pytest.mark.parametrize("act", [functional.gelu, torch.tanh, torch.sigmoid, functional.relu])
def test_other_activations_stay(act):
    model = lambda gate, up: torchao_row(act(gate) * up)  # noqa: E731
    run = compile_with_tpfuse(model, X, R, config=ON)
    hold_same_bits(run.outputs, model(X, R))
    assert not run.calls(ACT_OP)


def test_groups_of_rows_in_batches():
    """DeepGEMM's view makes one dimension of all tokens."""
    model = lambda x, w: deepgemm(norm(x, w))  # noqa: E731
    x = bf16(2, 3, D)
    run = compile_with_tpfuse(model, x, W, config=ON)
    hold_same_bits(run.outputs, model(x, W))
    assert len(run.calls(NORM_OP)) == 1


def test_a_given_scale():
    scale = torch.tensor([0.03])
    model = lambda x, r, w, s: cast(norm(x + r, w).float() / s)  # noqa: E731
    run = compile_with_tpfuse(model, X, R, W, scale, config=ON)
    assert same_bits(run.outputs, model(X, R, W, scale))
    (node,) = run.calls(NORM_OP)
    assert node.args[8] is not None


def test_repeated_quantisation_is_done_once():
    def model(x, w):
        y = norm(x, w)
        return *torchao_row(y), *torchao_row(y), y  # as the projections of q, k and v do; and y goes on

    run = compile_with_tpfuse(model, X, W, config=ON)
    hold_same_bits(run.outputs, model(X, W))
    (node,) = run.calls(NORM_OP)
    assert node.args[6] is True  # y is needed too
    assert not run.calls(torch.ops.aten.amax.default)


def test_recipes_that_differ_in_a_bit_are_not_one():
    def model(x, w):
        y = norm(x, w)
        return *torchao_row(y), *compressed_tensors(y)

    run = compile_with_tpfuse(model, X, W, config=ON)
    hold_same_bits(run.outputs, model(X, W))
    assert len(run.calls(NORM_OP)) == 1 and len(run.calls(torch.ops.aten.amax.default)) == 1


NEAR_MISSES = {
    "columns": lambda y: cast(y.float() / (y.abs().amax(0, keepdim=True) / 448.0).float()),
    "another format's range": lambda y: cast(y.float() / (y.abs().amax(-1, keepdim=True) / 240.0).float()),
    "another value's scale": lambda y: cast(y.float() / ((y + 1).abs().amax(-1, keepdim=True) / 448.0).float()),
    "clamped elsewhere": lambda y: (y.float() / (y.abs().amax(-1, keepdim=True) / 448.0).float()).clamp(-400, 400).to(E4M3),
    "rounded on the way": lambda y: cast((y / (y.abs().amax(-1, keepdim=True) / 448.0)).float()),
    "greatest, not magnitude": lambda y: cast(y.float() / (y.amax(-1, keepdim=True) / 448.0).float()),
    "inverse of another's range": lambda y: cast(y.float() * (240.0 / y.abs().amax(-1, keepdim=True).double()).float()),
    "multiplied by what divides": lambda y: cast(y.float() * (y.abs().amax(-1, keepdim=True) / 448.0).float()),
    "rounded to nearest power": lambda y: cast(
        y.float() / torch.exp2(torch.round(torch.log2(y.abs().amax(-1, keepdim=True).float() / 448.0)))
    ),
    "given, not clamped": lambda y: (y.float() / torch.full((1,), 0.5)).clamp(-447, 447).to(E4M3),
    "clamped above": lambda y: cast(y.float() / (y.abs().amax(-1, keepdim=True).clamp(max=5.0) / 448.0).float()),
    "epsilon": lambda y: cast(y.float() / (y.abs().amax(-1, keepdim=True) / 448.0 + 1e-6).float()),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name):
    model = lambda x, w: NEAR_MISSES[name](norm(x, w))  # noqa: E731
    run = compile_with_tpfuse(model, X, W, config=ON)
    assert same_bits(run.outputs, model(X, W))
    assert not run.calls(NORM_OP)


def test_what_is_not_joined_is_compiled_as_before():
    def model(x, w):
        return *torchao_row(x), torchao_group(x * 2)[0]

    run = compile_with_tpfuse(model, X, W, config=ON)
    outputs, plain = compile_plainly(model, X, W)
    assert reads(run) == reads(plain)
    hold_same_bits(run.outputs, outputs)


def test_left_to_inductor_on_a_cpu_unless_named():
    model = lambda x, w: torchao_row(norm(x, w))  # noqa: E731
    run = compile_with_tpfuse(model, X, W)
    assert not run.calls(NORM_OP) and run.report.count("fuse_norm_quant") == 0
    assert any("by name" in site.reason for site in run.report.sites if site.fusion == "fuse_norm_quant")


# -- eager -------------------------------------------------------------------------------------------------------------


def test_eager_operations():
    got = rms_norm_quantize_fp8(X, W, eps=1e-5, residual=R, recipe=PER_TOKEN, normed_dtype=BF16)
    hold_same_bits(got, (*torchao_row(norm(X + R, W)), X + R))
    got = act_mul_quantize_fp8(X, R, recipe=Recipe(group=G, scale_dtype=BF16))
    hold_same_bits(got, torchao_group(functional.silu(X) * R))
    assert act_mul_quantize_fp8(X, R, act="gelu_tanh", dtype=E5M2)[0].dtype == E5M2
    columns = X.t().contiguous().t()
    hold_same_bits(act_mul_quantize_fp8(columns, R), act_mul_quantize_fp8(X, R))
    values, _, total = rms_norm_quantize_fp8(columns, W, eps=1e-5, residual=columns)
    assert values.is_contiguous() and total is not None and total.is_contiguous()


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: rms_norm_quantize_fp8(X, W, eps=1e-5, dtype=torch.int8), "float8_e4m3fn or float8_e5m2, got torch.int8"),
        (lambda: rms_norm_quantize_fp8(X.long(), W, eps=1e-5), "bf16, fp16 or fp32"),
        (lambda: rms_norm_quantize_fp8(X, W[1:], eps=1e-5), "weight must be [96], got [95]"),
        (lambda: rms_norm_quantize_fp8(X, W, eps=1e-5, residual=R[1:]), "residual must be torch.bfloat16 [6, 96]"),
        (lambda: rms_norm_quantize_fp8(X, W, eps=1e-5, recipe=Recipe(group=7)), "divide the row of 96 elements, got 7"),
        (lambda: act_mul_quantize_fp8(X, R, act="relu"), "silu, gelu_tanh, got 'relu'"),
        (lambda: act_mul_quantize_fp8(X, R[:1]), "up must be torch.bfloat16 [6, 96]"),
        (lambda: act_mul_quantize_fp8(X, R, scale=torch.ones(2)), "scale must be fp32 [1]"),
        (lambda: act_mul_quantize_fp8(X, R, scale=torch.ones(1, device="meta")), "all tensors must be on cpu"),
        (lambda: act_mul_quantize_fp8(X, None), "up must be a tensor"),
        (lambda: rms_norm_quantize_fp8([1.0], W, eps=1e-5), "x must be a tensor"),
        (lambda: rms_norm_quantize_fp8(X, W, eps="a"), "eps must be a finite number"),
        (lambda: rms_norm_quantize_fp8(X, W, eps=1e-5, normed_dtype=3), "normed_dtype must be a floating torch.dtype"),
        (lambda: rms_norm_quantize_fp8(X, W.long(), eps=1e-5), "weight must be floating"),
        (lambda: rms_norm_quantize_fp8(X, W, eps=1e-5, recipe="row"), "recipe must be a tpfuse.ops.Recipe"),
        (lambda: rms_norm_quantize_fp8(X, W, eps=1e-5, recipe=Recipe(group=1.5)), "divide the row"),
    ],
)
def test_bad_arguments(call, told):
    with pytest.raises(ValueError) as error:
        call()
    assert told in str(error.value)
