"""``tpfuse::quantize_nvfp4``: values of 4 bits (e2m1), 16 of which share a scale of 8 bits (e4m3). Rounded by software.

Nothing that tpfuse runs on reads them (compute capability 10.0 does): for checkpoints, and to see what the format costs.

T  tokens (all leading dimensions together)     D  row length
"""

from __future__ import annotations

from typing import Any

import torch

from tpfuse.kernels import quantize_nvfp4 as kernel
from tpfuse.ops import library
from tpfuse.ops.arguments import check_tensors, told
from tpfuse.ops.library import needs_gradients

NAME = "quantize_nvfp4"
BLOCK = 16  # elements that share a scale
#: Between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6. On a boundary the one with the even code is taken.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
MOST, MOST_SCALE = 6.0, 448.0


def reference(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operation means, in eager code."""
    parts = x.float().unflatten(-1, (-1, BLOCK))
    outer = 1.0 if scale is None else scale
    most = parts.abs().amax(-1) if x.numel() else parts.new_zeros(parts.shape[:-1])
    scales = (most / MOST / outer).clamp(max=MOST_SCALE).to(torch.float8_e4m3fn)
    divisor = (scales.float() * outer).unsqueeze(-1)
    magnitudes = torch.where(divisor > 0, parts / divisor, 0.0).abs().flatten(-2)
    codes = sum((magnitudes >= edge if index % 2 else magnitudes > edge).byte() for index, edge in enumerate(_BOUNDARIES))
    codes = codes | (torch.signbit(x).byte() << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _run(x, scale=None):
    if x.numel() and not kernel.cannot(x):
        return kernel.quantize_nvfp4(x, scale)
    return reference(x, scale)


def _fake(x, scale=None):
    *leading, size = x.shape
    packed = torch.empty((*leading, size // 2), dtype=torch.uint8, device=x.device)
    return packed, torch.empty((*leading, size // BLOCK), dtype=torch.float8_e4m3fn, device=x.device)


OP = library.define(f"{NAME}(Tensor x, Tensor? scale=None) -> (Tensor, Tensor)", _run, _fake, collective=False)


def quantize_nvfp4(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x in NVFP4: blocks of 16 elements of a row, each value e2m1, each block's scale e4m3.

        scales = (amax(abs(block)) / 6 / scale).to(e4m3)
        return e2m1(block / (scales * scale)), scales

    x        [..., D]  bf16, fp16 or fp32; D a multiple of 16
    scale    [1] fp32, of the whole tensor (usually its greatest magnitude / (6 * 448)); None: 1
    returns  two values a byte, uint8 [..., D / 2] (the first in the low half; a view of it is torch.float4_e2m1fn_x2), and
             scales, torch.float8_e4m3fn [..., D / 16], row after row (not swizzled)

    Rounds to nearest, ties to even codes. A block of zeros has the scale 0 and zeros; one with a NaN has a NaN as scale. On
    CUDA (compute capability 8.9 or more) one Triton kernel, else eager operations, to the same bytes. Safe in CUDA graphs.
    No gradients. Raises ValueError: a shape or dtype other than the above.
    """
    check_tensors(NAME, {"x": x}, {"scale": scale})
    if x.dim() < 1 or x.shape[-1] % BLOCK or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{NAME}: x must be bf16, fp16 or fp32 [..., D], D a multiple of {BLOCK}, got {told(x)}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device):
        raise ValueError(f"{NAME}: scale must be fp32 [1] on {x.device}, got {told(scale)}")
    given: list[Any] = [x] if scale is None else [x, scale]
    if needs_gradients(*given):
        raise ValueError(f"{NAME} has no gradients: call it under torch.no_grad()")
    return OP(x, scale)
