"""Two RMSNorms at once, and an RMSNorm with padding, on one GPU, by our Triton kernels: what they cannot do, their launch.

T  rows (tokens, all leading dimensions together)     D  row length
"""

from __future__ import annotations

import torch

from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.launch import begins_early, launch, power_of_two
from tpfuse.kernels.quantize import DTYPES, LONGEST_ROW, norm_cannot


def cannot(x: torch.Tensor, size: int, weight: torch.dtype | None, normed_dtype: torch.dtype | None) -> str:
    """Why the kernels cannot normalise rows of x, written as ``size`` elements; "" if they can."""
    if x.device.type != "cuda":
        return f"no kernel for {x.device.type}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "compute capability 8.0 is needed"
    if x.dtype not in DTYPES:
        return f"dtype {x.dtype}"
    if max(size, x.shape[-1]) > LONGEST_ROW:
        return f"a row of {size} elements is longer than {LONGEST_ROW}"
    return norm_cannot(x.dtype, weight, normed_dtype)


def dual_rms_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_weight: torch.Tensor | None,
    b_weight: torch.Tensor | None,
    a_eps: float,
    b_eps: float,
    weight_offset: float,
    normed_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.dual_rms_norm`` (see there), where ``cannot`` finds nothing."""
    from tpfuse.kernels.triton.norms import tpfuse_dual_rms_norm as kernel

    made = (
        torch.empty_like(a, memory_format=torch.contiguous_format),
        torch.empty_like(b, memory_format=torch.contiguous_format),
    )
    left, right = _rows(a), _rows(b)
    rows, sizes = left.shape[0], (a.shape[-1], b.shape[-1])
    blocks = [power_of_two(size) for size in sizes]
    early = begins_early(a.device)
    strides, epsilons = (left.stride(0), right.stride(0)), (float(a_eps), float(b_eps))
    arguments = (left, right, aligned(a_weight), aligned(b_weight), *made, rows, *sizes, *strides, *epsilons)
    switches = (a_weight is not None, b_weight is not None, bool(weight_offset), normed_dtype == a.dtype, early)
    options = {"num_warps": _warps(max(blocks)), "launch_pdl": early}
    launch(kernel, (2 * rows, 1, 1), (*arguments, float(weight_offset)), (*blocks, *switches), **options)
    return made


def rms_norm_pad(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    normed_dtype: torch.dtype | None,
    keep_normed: bool,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.rms_norm_pad`` (see there), where ``cannot`` finds nothing."""
    from tpfuse.kernels.triton.norms import tpfuse_rms_norm_pad as kernel

    rows = _rows(x)
    padded = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    normed, total = (x.new_empty(x.shape if there else 0) for there in (keep_normed, residual is not None))
    summands = None if residual is None else _rows(residual.contiguous())
    block, early = power_of_two(size), begins_early(x.device)
    arguments = (rows, summands, aligned(weight), padded, normed, total, x.shape[-1], size, rows.stride(0))
    switches = (residual is not None, weight is not None, bool(weight_offset), normed_dtype == x.dtype, keep_normed, early)
    options = {"num_warps": _warps(block), "launch_pdl": early}
    numbers = (float(eps), float(weight_offset))
    launch(kernel, (rows.shape[0], 1, 1), (*arguments, *numbers), (block, *switches), **options)
    return padded, normed, total


def _warps(block: int) -> int:
    """Measured on an H200: as good as any at any number of rows, on which sums thus do not depend."""
    return min(32, max(1, block // 512))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, D], of which elements of a row lie side by side; x itself where it is so."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])
