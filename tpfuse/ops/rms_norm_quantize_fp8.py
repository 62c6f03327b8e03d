"""``tpfuse::rms_norm_quantize_fp8``: [residual add,] RMSNorm and quantisation to FP8, on one GPU, as one operation.

T  tokens (all leading dimensions together)     D  hidden size     G  group size
"""

from __future__ import annotations

import torch

from tpfuse.kernels import quantize
from tpfuse.ops import library
from tpfuse.ops.arguments import check_floating, check_number
from tpfuse.ops.quantize_fp8 import SCHEMA, Recipe, check_fp8, empty_results, quantized
from tpfuse.ops.rms_norm import normalize

NAME = "rms_norm_quantize_fp8"


def _run(x, residual, weight, eps, weight_offset, normed_dtype, keep_normed, dtype, scale=None, *recipe):
    how, weight_dtype = Recipe(*recipe), None if weight is None else weight.dtype
    cannot = quantize.cannot(x, how.arguments, scale is not None, True)
    if x.numel() and not (cannot or quantize.norm_cannot(x.dtype, weight_dtype, normed_dtype)):
        norm = (residual, weight, eps, weight_offset, normed_dtype, keep_normed)
        return quantize.rms_norm_quantize_fp8(x, *norm, dtype, scale, how.arguments)
    total = x.contiguous() if residual is None else (x + residual).contiguous()
    normed = normalize(total, weight, eps, weight_offset, normed_dtype)
    values, scales = quantized(normed, dtype, scale, how)
    return values, scales, normed if keep_normed else x.new_empty(0), x.new_empty(0) if residual is None else total


def _fake(x, residual, weight, eps, weight_offset, normed_dtype, keep_normed, dtype, scale=None, *recipe):
    whole = lambda there: x.new_empty(x.shape if there else 0)  # noqa: E731
    values, scales = empty_results(x, dtype, scale, recipe)
    return values, scales, whole(keep_normed), whole(residual is not None)


OP = library.define(
    f"{NAME}(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, ScalarType? normed_dtype, "
    f"bool keep_normed, ScalarType dtype, Tensor? scale=None, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    collective=False,
)


def rms_norm_quantize_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """RMSNorm of [the residual stream and] x, quantised to FP8: what a Linear with FP8 weights reads.

        y = x + residual
        return *quantize_fp8(rms_norm(y) * (weight_offset + weight)), y

    x, residual   [..., D]  bf16, fp16 or fp32, the same shape and dtype
    weight        [D] or None, any floating dtype
    eps, weight_offset, normed_dtype  as in ``tpfuse.ops.all_reduce_rms_norm``
    scale         [1] fp32, static; None: by ``recipe``
    recipe        how scales are computed (``tpfuse.ops.Recipe``); None: one for each token, in fp32
    dtype         torch.float8_e4m3fn or torch.float8_e5m2
    returns       values [..., D] of ``dtype``; scales, fp32 [..., D / G] (or the given one); y, None without a residual

    The norm is computed in fp32 and rounded to x's dtype, then quantised, as the operations one by one would. On CUDA
    (compute capability 8.9 or more, D up to 16384, groups of a power of two) one Triton kernel, else these operations.
    No gradients. Raises ValueError: a shape or dtype other than the above.
    """
    check_fp8(NAME, {"x": x}, {"weight": weight, "residual": residual}, dtype, scale, recipe)
    check_number(NAME, "eps", eps, least=0)
    check_number(NAME, "weight_offset", weight_offset)
    check_floating(NAME, "normed_dtype", normed_dtype)
    hidden = x.shape[-1]
    if weight is not None and not weight.is_floating_point():
        raise ValueError(f"{NAME}: weight must be floating, got {weight.dtype}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"{NAME}: residual must be {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}")
    if weight is not None and weight.shape != (hidden,):
        raise ValueError(f"{NAME}: weight must be [{hidden}], got {list(weight.shape)}")
    wanted = recipe or Recipe(group=None if scale is not None else hidden)
    wanted.check(hidden)
    norm = (residual, weight, eps, weight_offset, normed_dtype, False)
    values, scales, _, total = OP(x, *norm, dtype, scale, *wanted.arguments)
    return values, scales if scale is None else scale, None if residual is None else total
