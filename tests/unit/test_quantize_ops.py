"""tpfuse.ops.quantize_*: what they mean, at the edges too; and that kernels are chosen where figures say so."""

from __future__ import annotations

import collections
import csv
import pathlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.unit.graphs import values
from tpfuse.ops import Recipe, quantize_fp8_per_group, quantize_fp8_per_token, quantize_fp8_static, quantize_nvfp4

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
FIGURES = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "single_gpu_h200.csv"
X = values(6, 256)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_static():
    scale = torch.tensor([0.02])
    assert same(quantize_fp8_static(X, scale), (X.float() / scale).clamp(-448, 448).to(E4M3))
    assert same(quantize_fp8_static(X, scale, dtype=E5M2), (X.float() / scale).to(E5M2))
    assert quantize_fp8_static(X[:0], scale).shape == (0, 256)
    assert (quantize_fp8_static(X.t(), scale * 1e-6).float().abs() == 448).all()  # not contiguous; saturates


def test_per_token():
    scale = X.abs().amax(-1, keepdim=True).float() / 448
    found = quantize_fp8_per_token(X)
    assert same(found[1], scale) and same(found[0], (X.float() / scale).to(E4M3))
    row = X.clone()
    row[1], row[2, 3] = 0, torch.nan
    assert quantize_fp8_per_token(row)[0].float().isnan().all(-1).tolist() == [False, True, True] + 3 * [False]
    assert not quantize_fp8_per_token(row, recipe=Recipe(zero_to_one=True))[0][1].float().any()


@pytest.mark.parametrize("group", [64, 128])
def test_per_group(group):
    found, scales = quantize_fp8_per_group(X.view(2, 3, 256), group=group)
    parts = X.view(2, 3, -1, group).float()
    expected = parts.abs().amax(-1) / 448
    assert same(scales, expected) and same(found, (parts / expected[..., None]).to(E4M3).view(2, 3, 256))
    powers = quantize_fp8_per_group(X, group=group, recipe=Recipe(power_of_two=True))[1].view(2, 3, -1)
    assert (
        torch.equal(powers.log2(), powers.log2().round()) and (powers >= expected).all() and (powers < 2 * expected).all()
    )


def test_scales_side_by_side():
    """As ``torch._scaled_mm`` takes those of blocks: columns, that begin at multiples of 16 bytes."""
    column = Recipe(scale_layout="column")
    for shape, strides in (((6, 256), (1, 8)), ((8, 256), (1, 8)), ((2, 3, 256), (3, 1, 8)), ((0, 256), (1, 0))):
        x = values(*shape)
        (found, scales), (plain, rows) = quantize_fp8_per_group(x, recipe=column), quantize_fp8_per_group(x)
        assert same(found, plain) and torch.equal(scales, rows)
        with FakeTensorMode() as mode:
            fake = quantize_fp8_per_group(mode.from_tensor(x), recipe=column)[1]
        assert scales.stride() == fake.stride() and (scales.stride() == strides or not x.numel())


def test_nvfp4():
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat(
        [torch.linspace(-6, 6, 4096), torch.randn(4080, generator=torch.Generator().manual_seed(0)), torch.zeros(16)]
    )
    x = x.view(4, -1)
    packed, scales = quantize_nvfp4(x, torch.ones(1))
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    got = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
    ideal = torch.where(scales.float().repeat_interleave(16, -1) > 0, x / scales.float().repeat_interleave(16, -1), 0.0)
    nearest = (ideal.abs().clamp(max=6)[..., None] - magnitudes).abs().amin(-1)
    assert torch.equal((ideal.abs().clamp(max=6) - got.abs()).abs(), nearest)  # no other value is nearer
    assert (got[got != 0] * ideal[got != 0] > 0).all()
    assert same(scales, (x.unflatten(-1, (-1, 16)).abs().amax(-1) / 6).to(E4M3))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2).view(1, 16)
    assert quantize_nvfp4(ties)[0].tolist() == [[0x20, 0x42, 0x64, 0x76] * 2]  # to even codes
    assert quantize_nvfp4(x[:0])[1].shape == (0, x.shape[1] // 16)
    nan = torch.full((1, 16), torch.nan)
    assert quantize_nvfp4(nan)[1].float().isnan().all()


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: quantize_fp8_static(X, None), "scale must be a tensor"),
        (lambda: quantize_fp8_static(X, torch.ones(2)), "scale must be fp32 [1]"),
        (lambda: quantize_fp8_per_token(X.long()), "bf16, fp16 or fp32"),
        (lambda: quantize_fp8_per_token(X, dtype=BF16), "float8_e4m3fn or float8_e5m2"),
        (lambda: quantize_fp8_per_group(X, group=96), "divide the row of 256 elements, got 96"),
        (lambda: quantize_fp8_per_group(X, recipe=Recipe(scale_layout="diagonal")), "row or column"),
        (lambda: quantize_nvfp4(X[:, :24]), "a multiple of 16"),
        (lambda: quantize_nvfp4(X, torch.ones(1, dtype=BF16)), "scale must be fp32 [1]"),
        (lambda: quantize_nvfp4(X.float().requires_grad_()), "no gradients"),
    ],
)
def test_bad_arguments(call, told):
    with pytest.raises(ValueError) as error:
        call()
    assert told in str(error.value)


def test_no_kernel_was_measured_to_be_slower_than_inductors():
    """Else there would have to be a rule that leaves those sizes to Inductor."""
    times: dict[tuple, dict[str, float]] = collections.defaultdict(dict)
    with open(FIGURES, newline="") as file:
        for row in csv.DictReader(file):
            key = row["op"], row["quant"], int(row["size"]), int(row["rows"])
            times[key][row["candidate"]] = float(row["us"])
    assert len(times) > 300
    assert not [(key, us) for key, us in times.items() if us["inductor"] < 0.99 * us["tpfuse"]]
