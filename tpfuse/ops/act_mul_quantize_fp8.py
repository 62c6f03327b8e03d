"""``tpfuse::act_mul_quantize_fp8``: a gated activation and its quantisation to FP8, on one GPU, as one operation.

T  tokens (all leading dimensions together)     D  intermediate size     G  group size
"""

from __future__ import annotations

import torch

from tpfuse.kernels import quantize
from tpfuse.ops import library
from tpfuse.ops.act_mul import ACTIVATIONS, activate
from tpfuse.ops.quantize_fp8 import SCHEMA, Recipe, check_fp8, empty_results, quantized

NAME = "act_mul_quantize_fp8"


def _run(gate, up, act, keep_product, dtype, scale=None, *recipe):
    how = Recipe(*recipe)
    if gate.numel() and not quantize.cannot(gate, how.arguments, scale is not None, False):
        return quantize.act_mul_quantize_fp8(gate, up, act, keep_product, dtype, scale, how.arguments)
    product = activate(gate, up, act).contiguous()
    values, scales = quantized(product, dtype, scale, how)
    return values, scales, product if keep_product else gate.new_empty(0)


def _fake(gate, up, act, keep_product, dtype, scale=None, *recipe):
    values, scales = empty_results(gate, dtype, scale, recipe)
    return values, scales, gate.new_empty(gate.shape if keep_product else 0)


OP = library.define(
    f"{NAME}(Tensor gate, Tensor up, str act, bool keep_product, ScalarType dtype, Tensor? scale=None, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    collective=False,
)


def act_mul_quantize_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    act: str = "silu",
    scale: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """act(gate) * up, quantised to FP8: what a down projection with FP8 weights reads.

    gate, up  [..., D]  bf16, fp16 or fp32, the same shape and dtype; halves of one tensor [..., 2 D] are not copied
    act       "silu" or "gelu_tanh"
    scale     [1] fp32, static; None: by ``recipe``
    recipe    how scales are computed (``tpfuse.ops.Recipe``); None: one for each token, in fp32
    dtype     torch.float8_e4m3fn or torch.float8_e5m2
    returns   values [..., D] of ``dtype``, and scales, fp32 [..., D / G] (or the given one)

    The activation and the product are rounded to gate's dtype, then quantised, as the operations one by one would. On CUDA
    (compute capability 8.9 or more; scales of tokens: D up to 16384; groups of a power of two) one Triton kernel, else
    these operations. No gradients. Raises ValueError: a shape or dtype other than the above.
    """
    check_fp8(NAME, {"gate": gate, "up": up}, {}, dtype, scale, recipe)
    if act not in ACTIVATIONS:
        raise ValueError(f"{NAME}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(f"{NAME}: up must be {gate.dtype} {list(gate.shape)}, got {up.dtype} {list(up.shape)}")
    wanted = recipe or Recipe(group=None if scale is not None else gate.shape[-1])
    wanted.check(gate.shape[-1])
    values, scales, _ = OP(gate, up, act, False, dtype, scale, *wanted.arguments)
    return values, scales if scale is None else scale
