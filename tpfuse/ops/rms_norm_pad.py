"""``tpfuse::rms_norm_pad``: [residual add,] RMSNorm and zeros behind each row, on one GPU, as one operation.

T  tokens (all leading dimensions together)     D  hidden size     P  padded size
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tpfuse.kernels import norms
from tpfuse.ops import library
from tpfuse.ops.arguments import check_floating, check_number, check_tensors, check_whole
from tpfuse.ops.rms_norm import normalize

NAME = "rms_norm_pad"


def _run(x, residual, weight, eps, weight_offset, normed_dtype, keep_normed, size):
    if x.numel() and not norms.cannot(x, size, None if weight is None else weight.dtype, normed_dtype):
        return norms.rms_norm_pad(x, residual, weight, eps, weight_offset, normed_dtype, keep_normed, size)
    total = x.contiguous() if residual is None else (x + residual).contiguous()
    normed = normalize(total, weight, eps, weight_offset, normed_dtype)
    padded = functional.pad(normed, (0, size - x.shape[-1]))
    return padded, normed if keep_normed else x.new_empty(0), x.new_empty(0) if residual is None else total


def _fake(x, residual, weight, eps, weight_offset, normed_dtype, keep_normed, size):
    whole = lambda there: x.new_empty(x.shape if there else 0)  # noqa: E731
    return x.new_empty((*x.shape[:-1], size)), whole(keep_normed), whole(residual is not None)


OP = library.define(
    f"{NAME}(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, ScalarType? normed_dtype, "
    "bool keep_normed, int size) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    collective=False,
)


def rms_norm_pad(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RMSNorm of [the residual stream and] x, with zeros behind each row: what a GEMM with a padded inner dimension reads.

        y = x + residual
        return pad(rms_norm(y) * (weight_offset + weight), (0, size - D)), y

    x, residual   [..., D]  one floating dtype
    weight        [D] or None
    size          P, no less than D, such as 3072 for 2880
    eps, weight_offset, normed_dtype  as in ``tpfuse.ops.all_reduce_rms_norm``
    returns       [..., P]; y, None without a residual; never aliases

    Computed in fp32. On CUDA (bf16 and fp16, rows of up to 16384) one Triton kernel, else these operations. No gradients.
    Raises ValueError: a shape or dtype other than the above.
    """
    check_tensors(NAME, {"x": x}, {"weight": weight, "residual": residual})
    check_number(NAME, "eps", eps, least=0)
    check_number(NAME, "weight_offset", weight_offset)
    check_floating(NAME, "normed_dtype", normed_dtype)
    check_whole(NAME, "size", size)
    if not x.dim() or not x.is_floating_point():
        raise ValueError(f"{NAME}: x must be floating [..., D], got {x.dtype} {list(x.shape)}")
    hidden = x.shape[-1]
    if size < hidden:
        raise ValueError(f"{NAME}: size must be at least {hidden}, the row length of x, got {size}")
    if residual is not None and (residual.shape != x.shape or residual.dtype is not x.dtype):
        raise ValueError(f"{NAME}: residual must be {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}")
    if weight is not None and (weight.shape != (hidden,) or not weight.is_floating_point()):
        raise ValueError(f"{NAME}: weight must be floating [{hidden}], got {weight.dtype} {list(weight.shape)}")
    if library.needs_gradients(x, weight, residual):
        raise ValueError(f"{NAME}: it has no gradients; call it under torch.no_grad()")
    padded, _, total = OP(x, residual, weight, float(eps), weight_offset, normed_dtype, False, size)
    return padded, None if residual is None else total
