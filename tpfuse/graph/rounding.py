"""How far two computations of one value may lie apart: by rounding alone."""

from __future__ import annotations

import math

import torch

_ADDED_UP = 64  # roundings of an accumulation that a single element may show, and a row on the whole a quarter of them


def eps(dtype: torch.dtype) -> float:
    """Of a floating dtype; zero for others, which are compared exactly, and for FP8: nothing is computed in it."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return 0.0
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-10  # TF32
    return torch.finfo(dtype).eps


def excess(found: torch.Tensor, expected: torch.Tensor, coarsest: float, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the largest difference, as a multiple of what is allowed; the largest difference), each a number on the device.

    coarsest  eps of the coarsest dtype that the operation reads or makes
    ranks     that are summed over

    With e the coarsest eps and a that of accumulation (fp32, or fp64), no element may be further off than
    (4 + ranks) * e + 64 * a times the largest element of its row (last dimension), and no row, in root mean square, than
    (1 + ranks / 4) * e + 16 * a times its own: a sum over ranks may round at each rank, bias, scale, residual and norm once
    each. A result in FP8 may lie a rounding to FP8 further off (its eps s; s / 4 for rows): what is quantised may lie at an
    edge. NaN equals NaN and an infinity itself; integers have to be the same.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        wrong = torch.full((), math.inf, device=expected.device)
        return wrong, wrong
    if not expected.numel():
        none = torch.zeros((), device=expected.device)
        return none, none
    if not expected.is_floating_point():
        differs = (found != expected).any().to(torch.float32)
        return torch.where(differs > 0, math.inf, 0.0), differs
    wide = torch.float64 if expected.dtype is torch.float64 else torch.float32
    step = torch.finfo(expected.dtype).eps if expected.dtype.itemsize == 1 else 0.0
    found, expected = found.to(wide), expected.to(wide)
    equal = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(equal, 0.0, (found - expected).abs()).nan_to_num(nan=math.inf)
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs()
    if not expected.dim():
        difference, size = difference[None], size[None]
    coarsest, tiny = max(coarsest, torch.finfo(wide).eps), torch.finfo(wide).tiny
    single = (4 + ranks) * coarsest + _ADDED_UP * torch.finfo(wide).eps + step
    whole = (1 + ranks / 4) * coarsest + _ADDED_UP / 4 * torch.finfo(wide).eps + step / 4
    of_single = difference.amax(-1) / (single * size.amax(-1) + tiny)
    of_whole = _rms(difference) / (whole * _rms(size) + tiny)
    return torch.maximum(of_single, of_whole).amax().to(torch.float32), difference.amax().to(torch.float32)


def _rms(rows: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, computed so that no square overflows or vanishes."""
    largest = rows.amax(-1, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return (rows / scale).square().mean(-1).sqrt() * scale[..., 0]
