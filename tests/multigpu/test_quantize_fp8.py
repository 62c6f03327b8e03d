"""Norm or activation with quantisation by our Triton kernels on one GPU: the bytes that the operations one by one give."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

import tpfuse
from tpfuse.ops import Recipe
from tpfuse.ops.act_mul_quantize_fp8 import OP as ACT_OP
from tpfuse.ops.quantize_fp8 import OP as QUANTIZE_OP
from tpfuse.ops.quantize_fp8 import quantized
from tpfuse.ops.quantize_nvfp4 import quantize_nvfp4
from tpfuse.ops.quantize_nvfp4 import reference as nvfp4
from tpfuse.ops.rms_norm import normalize
from tpfuse.ops.rms_norm_quantize_fp8 import OP as NORM_OP

pytestmark = [pytest.mark.gpu]
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = {
    "row": Recipe(group=0, scale_dtype=BF16),
    "row in fp32": Recipe(group=0, zero_to_one=True),
    "group": Recipe(group=128, scale_dtype=BF16),
    "group by reciprocal": Recipe(group=128, floor=1e-4, by_reciprocal=True),
    "group of 64, powers of two": Recipe(group=64, power_of_two=True),
    "group, side by side": Recipe(group=128, least=1e-12, scale_layout="column"),
    "static": None,
}
SIZES = [(1, 128), (3, 2880), (5, 7168), (127, 4096), (600, 14336), (520, 10240), (64, 16384), (2, 4100), (0, 256)]


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def fitted(name: str, like: torch.Tensor) -> tuple[Recipe, torch.Tensor | None]:
    """(the recipe for such rows, the given scale)."""
    recipe, size = RECIPES[name], like.shape[-1]
    if recipe is None:
        return Recipe(), torch.full((1,), 0.017, device="cuda")
    if recipe.group == 0:
        recipe = dataclasses.replace(recipe, group=size)
    if recipe.scale_dtype == BF16:
        recipe = dataclasses.replace(recipe, scale_dtype=like.dtype)
    if size % (recipe.group or 1):
        pytest.skip(f"rows of {size} have no groups of {recipe.group}")
    return recipe, None


def hold(
    values: torch.Tensor, scales: torch.Tensor, source: torch.Tensor, recipe: Recipe, given: torch.Tensor | None
) -> None:
    """Every byte of ``values`` and ``scales`` is what eager operations make of ``source``; a NaN is a NaN."""
    expected, expected_scales = quantized(source, values.dtype, given, recipe)
    assert (
        torch.equal(scales.nan_to_num(-1), expected_scales.nan_to_num(-1)) and scales.stride() == expected_scales.stride()
    )
    nans = expected.float().isnan()
    assert torch.equal(values.float().isnan(), nans)
    assert torch.equal(values.view(torch.uint8)[~nans], expected.view(torch.uint8)[~nans])


def norm_and_hold(x, residual, weight, name, offset=0.0, normed_dtype=None, fp8=E4M3):
    recipe, given = fitted(name, x)
    arguments = (x, residual, weight, 1e-5, offset, normed_dtype, True, fp8, given, *recipe.arguments)
    values, scales, normed, total = NORM_OP(*arguments)
    expected_total = x if residual is None else x + residual
    assert residual is None or torch.equal(total, expected_total)
    expected = normalize(expected_total, weight, 1e-5, offset, normed_dtype)
    torch.testing.assert_close(normed, expected, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6, equal_nan=True)
    hold(values, scales, normed, recipe, given)
    return values


def act_and_hold(gate, up, name, act="silu", fp8=E4M3):
    recipe, given = fitted(name, gate)
    values, scales, product = ACT_OP(gate, up, act, True, fp8, given, *recipe.arguments)
    activated = functional.silu(gate) if act == "silu" else functional.gelu(gate, approximate="tanh")
    eps = torch.finfo(gate.dtype).eps
    torch.testing.assert_close(product, activated * up, rtol=2 * eps, atol=1e-6, equal_nan=True)
    hold(values, scales, product, recipe, given)
    return values


def quantize_and_hold(x, name, fp8=E4M3):
    recipe, given = fitted(name, x)
    values, scales = QUANTIZE_OP(x, fp8, given, *recipe.arguments)
    hold(values, scales, x, recipe, given)
    return values


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows, size", SIZES)
def test_quantisation_alone(rows, size, name):
    quantize_and_hold(draw(rows, size), name)
    quantize_and_hold(draw(rows, 2 * size)[:, size:], name)
    quantize_and_hold(draw(rows, size, dtype=FP16), name, E5M2)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows, size", SIZES)
def test_norm(rows, size, name):
    x, residual = draw(rows, size), draw(rows, size, seed=1)
    norm_and_hold(x, residual, draw(size, seed=2), name, normed_dtype=BF16)
    norm_and_hold(x, None, draw(size, seed=2).float(), name, offset=1.0)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows, size", SIZES)
def test_activation(rows, size, name):
    packed = draw(rows, 2 * size)
    act_and_hold(packed[:, :size], packed[:, size:], name)
    act_and_hold(packed[:, size:].contiguous(), packed[:, :size], name, act="gelu_tanh")


@pytest.mark.parametrize("name", RECIPES)
def test_other_dtypes_and_shapes(name):
    x = draw(2, 3, 256, dtype=FP16)
    assert norm_and_hold(x, None, None, name, fp8=E5M2).shape == (2, 3, 256)
    assert act_and_hold(x, x.transpose(0, 1).contiguous().transpose(0, 1), name).shape == (2, 3, 256)
    flat = draw(4 * 256 + 1)
    act_and_hold(flat[1:].view(4, 256), draw(256, 4).t(), name)  # off a 16-byte boundary; column-major
    norm_and_hold(draw(1, 256).expand(4, 256), None, draw(256), name)
    quantize_and_hold(flat[1:].view(4, 256), name)
    quantize_and_hold(draw(256, 4).t(), name)


@pytest.mark.parametrize("name", RECIPES)
def test_extremes(name):
    """Zeros, NaN, infinities, subnormal and huge values, each in a row of its own."""
    x = draw(8, 256)
    x[0], x[1, 7], x[2, 5] = 0, torch.nan, torch.inf
    x[3] *= 2.0 ** (-126 if "powers" not in name else -110)  # a power of two below the normal numbers depends on exp2
    x[4] *= 2.0**120
    x[5] *= 2.0**-100
    ones = torch.full_like(x, 50.0)  # silu(50) = 50
    act_and_hold(ones, x / 64, name)
    norm_and_hold(x, None, draw(256), name)
    quantize_and_hold(x, name)
    quantize_and_hold(-x, name)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-42, 2.0**-70, 2.0**70, 3e38, torch.inf, torch.nan])
def test_a_given_scale_of_any_kind(scale):
    x = draw(8, 256)
    x[0], x[1, 7], x[2, 5], x[3, 5], x[4] = 0, torch.nan, torch.inf, -torch.inf, x[4] * 2.0**120
    x[5], x[6] = x[5] * 2.0**-126, -0.0
    given = torch.full((1,), scale, device="cuda")
    hold(*QUANTIZE_OP(x, E4M3, given), x, Recipe(), given)


@pytest.mark.parametrize("rows", [16, 128, 6])
@pytest.mark.parametrize("layout", ["row", "group", "group, weights in blocks"])
def test_scales_are_as_scaled_mm_takes_them(layout, rows):
    """The product of what was quantised is, but for FP8's rounding, that of the values."""
    size, columns = 512, 256
    x, weight = draw(rows, size), draw(columns, size, seed=1)
    if layout == "row":
        values, scales = tpfuse.ops.quantize_fp8_per_token(x)
        weights, weight_scales = tpfuse.ops.quantize_fp8_per_token(weight)
        weight_scales = weight_scales.t()
    else:
        recipe = Recipe(scale_layout="column")
        values, scales = tpfuse.ops.quantize_fp8_per_group(x, recipe=recipe)
        column = -(-rows // 4) * 4
        assert scales.stride() == (1, column)
        if column != rows:  # a caller pads values; there is room for scales
            values = torch.cat([values.view(torch.uint8), values.view(torch.uint8)[: column - rows]]).view(E4M3)
            scales = scales.as_strided((column, size // 128), (1, column))
            scales[rows:] = scales[: column - rows]
        weights, weight_scales = tpfuse.ops.quantize_fp8_per_group(weight, recipe=recipe)
        if layout != "group":
            blocks = weight.float().view(columns // 128, 128, size // 128, 128)
            weight_scales = blocks.abs().amax((1, 3)) / 448
            weights = (blocks / weight_scales[:, None, :, None]).view(columns, size).to(E4M3)
        weight_scales = weight_scales.t()
    got = torch._scaled_mm(values, weights.t(), scales, weight_scales, out_dtype=BF16)[:rows]
    expected = x.float() @ weight.float().t()
    assert (got.float() - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("given", [None, 0.01])
def test_nvfp4(dtype, given):
    scale = None if given is None else torch.full((1,), given, device="cuda")
    for shape in ((3, 2880), (300, 4096), (2, 3, 32), (0, 64)):
        x = draw(*shape, dtype=dtype)
        if x.numel():
            x.flatten()[:32] = torch.arange(32, device="cuda") / 4 - 4  # ties
            x.flatten()[64:80] = 0
            x.flatten()[96] = torch.nan
        for got, expected in zip(quantize_nvfp4(x, scale), nvfp4(x, scale), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_offsets_beyond_32_bits():
    size = 16384
    rows = (1 << 31) // size + 3
    gate = draw(1, size).expand(rows, size)
    up = torch.ones(rows, size, dtype=BF16, device="cuda")
    up[-1] = 2
    recipe = Recipe(group=128)
    values, scales, _ = ACT_OP(gate, up, "silu", False, E4M3, None, *recipe.arguments)
    hold(values[-2:], scales[-2:], functional.silu(gate[-2:]) * up[-2:], recipe, None)
    total = NORM_OP(up, None, None, 1e-5, 0.0, None, False, E4M3, None, *Recipe(group=size).arguments)[0]
    assert torch.equal(total[-1].view(torch.uint8), total[0].view(torch.uint8)) and (total[-1].float() == 448).all()
    del total, values
    alone = Recipe(group=128, scale_layout="column")
    values, scales = QUANTIZE_OP(up, E4M3, None, *alone.arguments)
    assert (values[-1].float() == 448).all() and (scales[-1] == scales[-2] * 2).all()
    assert (quantize_nvfp4(up)[0][-1] == 0x77).all()


class Mlp(torch.nn.Module):
    """Norm, quantised projections of gate and up, quantised projection down: per token, as torchao spells it."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5, dtype=BF16, device="cuda")
        for name, shape in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner))):
            weight = draw(*shape) / shape[1] ** 0.5
            scale = weight.abs().amax(1, keepdim=True).float() / 448
            self.register_buffer(name, (weight.float() / scale).to(E4M3))
            self.register_buffer(f"{name}_scale", scale)

    def linear(self, x, name):
        scale = (x.abs().amax(-1, keepdim=True) / 448).float()
        values = (x.float() / scale).clamp(-448, 448).to(E4M3)
        weight, weight_scale = getattr(self, name), getattr(self, f"{name}_scale")
        return torch._scaled_mm(values, weight.t(), scale, weight_scale.t(), out_dtype=BF16)

    def forward(self, x, residual):
        total = x + residual
        gate, up = self.linear(self.norm(total), "gate_up").chunk(2, -1)
        return total + self.linear(functional.silu(gate) * up, "down")


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_apply(mode):
    model = Mlp(1024, 2048)
    with torch.no_grad():
        inputs = [(draw(rows, 1024), draw(rows, 1024, seed=1)) for rows in (1, 7, 256, 7)]
        expected = [model(*pair) for pair in inputs]
        tpfuse.apply(model, mode=mode)
        for pair, right in zip(inputs * 3, expected * 3, strict=True):
            got = model(*pair)
            assert (got - right).float().norm() < 0.01 * right.float().norm()
    report = tpfuse.explain(model)
    assert report.count("fuse_norm_quant") and report.count("fuse_act_quant")
