"""``tpfuse::all_reduce_rms_norm_quantize_fp8``: all-reduce, bias, scale, residual add, RMSNorm and FP8 as one operation.

T  tokens (all leading dimensions together)     D  hidden size     G  group size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm.groups import group_name
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM_QUANTIZE_FP8, Wish, check_name
from tpfuse.kernels.fp8 import Fp8, Quantisation
from tpfuse.ops import library
from tpfuse.ops.all_reduce import reference as all_reduce_reference
from tpfuse.ops.all_reduce import sum_for
from tpfuse.ops.all_reduce_rms_norm import check_arguments
from tpfuse.ops.all_reduce_rms_norm import reference as norm_reference
from tpfuse.ops.quantize_fp8 import SCHEMA, Recipe, check_fp8, empty_results, quantized

NAME = ALL_REDUCE_RMS_NORM_QUANTIZE_FP8
_RECIPE, _FIELDS = SCHEMA.replace("group", "group_size"), len(Recipe().arguments)  # ``group`` is the ranks


def reference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    group: str,
    eps: float,
    modifiers: Sequence[Any],
    keep_normed: bool,
    dtype: torch.dtype,
    fp8_scale: torch.Tensor | None,
    recipe: Recipe,
    sum_over_ranks: Callable[[torch.Tensor, str], torch.Tensor] = all_reduce_reference,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operation means: ``all_reduce_rms_norm``, whose normed output is quantised as a model would.

    modifiers  residual, bias, scale, scale_tensor, weight_offset, normed_dtype, as there
    """
    arguments = (*modifiers, None, sum_over_ranks)
    normed, total = norm_reference(input, weight, group, eps, *arguments)
    values, scales = quantized(normed, dtype, fp8_scale, recipe)
    return values, scales, normed if keep_normed else input.new_empty(0), total


def _run(input, weight, group, eps, *rest):
    modifiers, keep_normed, dtype = rest[:6], *rest[6:8]
    fp8_scale, *more = rest[8:] or (None,)
    recipe, (kernel_name, flashinfer_bytes, *_) = Recipe(*more[:_FIELDS]), (*more[_FIELDS:], None, None)
    if input.is_cuda and input.numel():
        found = dispatch.of(group)
        if not isinstance(found, str):
            fp8 = Fp8(Quantisation(dtype, fp8_scale is not None, recipe.arguments), fp8_scale, keep_normed)
            wish = Wish(kernel_name, flashinfer_bytes)
            results = found.all_reduce_rms_norm(wish, input, weight, eps, *modifiers, None, fp8=fp8)
            if results is not None:
                return results
        else:
            dispatch.refuse(NAME, kernel_name, group, found)
    quantisation = keep_normed, dtype, fp8_scale, recipe
    return reference(input, weight, group, eps, modifiers, *quantisation, sum_for(kernel_name))


def _fake(input, weight, group, eps, *rest):
    keep_normed, dtype, *more = rest[6:]
    fp8_scale, *recipe = more or (None,)
    values, scales = empty_results(input, dtype, fp8_scale, tuple(recipe[:_FIELDS]))
    total = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return values, scales, torch.empty_like(total) if keep_normed else input.new_empty(0), total


OP = library.define(
    f"{NAME}(Tensor input, Tensor? weight, str group, float eps, Tensor? residual, Tensor? bias, float? scale, "
    "Tensor? scale_tensor, float weight_offset, ScalarType? normed_dtype, bool keep_normed, ScalarType dtype, "
    f"Tensor? fp8_scale=None, {_RECIPE}, str? kernel_name=None, int? flashinfer_bytes=None, Tensor? after=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)


def all_reduce_rms_norm_quantize_fp8(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    group: dist.ProcessGroup | str,
    eps: float,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    fp8_scale: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of the summed residual stream, quantised to FP8: what a Linear with FP8 weights reads.

        y = (all_reduce(input) + bias) * scale + residual
        return *quantize_fp8(rms_norm(y) * (weight_offset + weight)), y

    input, weight, group, eps, residual, bias, scale, weight_offset, normed_dtype, kernel
                  as in ``tpfuse.ops.all_reduce_rms_norm``
    fp8_scale     [1] fp32, static, replicated; None: by ``recipe``
    recipe        how scales are computed (``tpfuse.ops.Recipe``); None: one for each token, in fp32
    dtype         torch.float8_e4m3fn or torch.float8_e5m2
    returns       values [..., D] of ``dtype``; scales, fp32 [..., D / G] (or the given one); y [..., D] of input's dtype;
                  all replicated

    Values and scales are, bit for bit, what quantising the normed output of ``all_reduce_rms_norm`` by the same kernel
    gives. On CUDA one kernel does it all for rows of bf16 and fp16 up to 16384 elements, scales of a power of two of at
    least 8 elements, or of a row; others are quantised behind the sum. Collective, and safe in CUDA graphs, as that
    operation is. No gradients.
    Raises ValueError: a shape or dtype other than the above; else as ``tpfuse.ops.all_reduce_rms_norm``.
    """
    factor = scale if isinstance(scale, torch.Tensor) else None
    optional = {"weight": weight, "residual": residual, "bias": bias, "scale": factor}
    check_arguments(NAME, input, optional, scale, eps, weight_offset, normed_dtype)
    check_fp8(NAME, {"input": input}, optional, dtype, fp8_scale, recipe)
    check_name(NAME, kernel)
    hidden = input.shape[-1]
    wanted = recipe or Recipe(group=None if fp8_scale is not None else hidden)
    wanted.check(hidden)
    number, element = (scale, None) if factor is None else (None, factor.reshape(()))
    modifiers = (residual, bias, number, element, weight_offset, normed_dtype)
    quantisation = (False, dtype, fp8_scale, *wanted.arguments)
    values, scales, _, total = OP(input, weight, group_name(group), eps, *modifiers, *quantisation, kernel)
    return values, scales if fp8_scale is None else fp8_scale, total
