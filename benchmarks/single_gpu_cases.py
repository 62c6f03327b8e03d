"""What benchmarks/single_gpu.py compares: one entry of CASES for each fusion on one GPU.

A case is one fusion at one size. Its two ways to compute the same take the same inputs and return the same tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.nn import functional

from tpfuse.ops import Recipe, act_mul_quantize_fp8, rms_norm_quantize_fp8

BF16, E4M3, EPS = torch.bfloat16, torch.float8_e4m3fn, 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """inputs         what is read, for a number of rows; other tensors at every call
    plain          as a model spells it: for Inductor, and what results have to be
    ours           the fused operation
    bytes_per_row  that either has to move at least
    """

    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    plain: Callable
    ours: Callable
    bytes_per_row: int


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def recipe_of(quant: str, size: int) -> Recipe | None:
    """torchao's for tokens, DeepSeek's granularity for groups of 128."""
    return {"static": None, "token": Recipe(group=size, scale_dtype=BF16), "group": Recipe(group=128)}[quant]


def quantise(y: torch.Tensor, quant: str, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As a model spells it."""
    if quant == "static":
        return (y.float() / scale).clamp(-448, 448).to(E4M3), scale
    parts = y.unflatten(-1, (-1, 128)) if quant == "group" else y.unsqueeze(-2)
    most = parts.abs().amax(-1, keepdim=True)
    scales = ((most if quant == "token" else most.float()) / 448.0).float()
    return (parts.float() / scales).clamp(-448, 448).to(E4M3).view(y.shape), scales.squeeze(-1)


def _how(quant: str, size: int) -> tuple[torch.Tensor, dict]:
    """(a given scale, what the operations are told)."""
    scale, recipe = torch.full((1,), 0.02, device="cuda"), recipe_of(quant, size)
    return scale, {"scale": scale} if recipe is None else {"recipe": recipe}


def norm_quantize(size: int, quant: str) -> Case:
    """Residual add, RMSNorm and quantisation; the stream goes on."""
    weight, (scale, how) = random(size), _how(quant, size)

    def plain(x, residual):
        total = x + residual
        h = total.float()
        y = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(BF16)
        return *quantise(y, quant, scale), total

    def ours(x, residual):
        return rms_norm_quantize_fp8(x, weight, eps=EPS, residual=residual, normed_dtype=BF16, **how)

    return Case(lambda rows: (random(rows, size), random(rows, size)), plain, ours, 7 * size)


def act_quantize(size: int, quant: str) -> Case:
    """silu(gate) * up of one packed tensor, and quantisation."""
    scale, how = _how(quant, size)

    def plain(packed):
        gate, up = packed.chunk(2, -1)
        return quantise(functional.silu(gate) * up, quant, scale)

    def ours(packed):
        gate, up = packed.chunk(2, -1)
        return act_mul_quantize_fp8(gate, up, **how)

    return Case(lambda rows: (random(rows, 2 * size),), plain, ours, 5 * size)


#: The name of an operation: (its case at a size and in a variant, sizes, variants).
CASES: dict[str, tuple[Callable[[int, str], Case], tuple[int, ...], tuple[str, ...]]] = {
    "rms_norm_quantize_fp8": (norm_quantize, (4096, 7168, 8192, 14336), ("static", "token", "group")),
    "act_mul_quantize_fp8": (act_quantize, (4096, 7168, 8192, 14336), ("static", "token", "group")),
}
