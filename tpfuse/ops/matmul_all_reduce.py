"""``tpfuse::matmul_all_reduce``: a GEMM whose partial sums are added over ranks, every rank getting all rows.

M  rows     K  inner dimension, sharded over ranks     N  columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tpfuse.comm import groups
from tpfuse.kernels import matmul
from tpfuse.ops import library
from tpfuse.ops.all_reduce import OP as all_reduce_op
from tpfuse.ops.all_reduce import reference as all_reduce_reference
from tpfuse.ops.library import needs_gradients
from tpfuse.ops.matmul import check_product, check_wire_dtype, pair, plus_products, product

NAME = "matmul_all_reduce"


def reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    group: str,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    more_inputs: Sequence[torch.Tensor] = (),
    more_weights: Sequence[torch.Tensor] = (),
    sum_over_ranks: Callable[[torch.Tensor, str], torch.Tensor] = all_reduce_reference,
) -> torch.Tensor:
    """What the operation means, as products and a functional collective, or another way to sum."""
    dtype = out_dtype or input.dtype
    partial = product(input, weight, input_scale, weight_scale, wire_dtype or dtype)
    partial = plus_products(partial, more_inputs, more_weights)
    total = sum_over_ranks(partial, group).to(dtype)
    return total if bias is None else total + bias


def _run(
    input,
    weight,
    group,
    bias=None,
    input_scale=None,
    weight_scale=None,
    out_dtype=None,
    wire_dtype=None,
    kernel_name=None,
    after=None,
    more_inputs=None,
    more_weights=None,
):
    more = (more_inputs or (), more_weights or ())
    arguments = (input, weight, group, bias, input_scale, weight_scale, out_dtype, wire_dtype, *more)
    if input.is_cuda:
        scales, composed = pair(input_scale, weight_scale), lambda: reference(*arguments, all_reduce_op)
        given = (input, weight, bias, scales, out_dtype, wire_dtype, composed, more)
        result = matmul.matmul_all_reduce(kernel_name, group, *given)
        if result is not None:
            return result
    return reference(*arguments)


def _fake(input, weight, group, bias=None, input_scale=None, weight_scale=None, out_dtype=None, *rest, **more):
    return torch.empty((input.shape[0], weight.shape[1]), dtype=out_dtype or input.dtype, device=input.device)


#: more_inputs, more_weights: as in matmul_reduce_scatter
OP = library.define(
    f"{NAME}(Tensor input, Tensor weight, str group, Tensor? bias=None, Tensor? input_scale=None, "
    "Tensor? weight_scale=None, ScalarType? out_dtype=None, ScalarType? wire_dtype=None, str? kernel_name=None, "
    "Tensor? after=None, Tensor[]? more_inputs=None, Tensor[]? more_weights=None) -> Tensor",
    _run,
    _fake,
)


class Differentiable(torch.autograd.Function):
    """The result is replicated, and so is its gradient: nothing is exchanged."""

    @staticmethod
    def forward(ctx, input, weight, bias, group, wire_dtype, kernel):
        ctx.save_for_backward(input, weight)
        return OP(input, weight, group, bias, None, None, None, wire_dtype, kernel)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight.t(), input.t() @ grad, of_bias, None, None, None


def matmul_all_reduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup | str,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """A row-parallel linear layer.

        return all_reduce(input @ weight) + bias

    input         [..., K]  bf16, fp16, fp32 or FP8; K sharded over ranks, as the weight's
    weight        [K, N]  same dtype (FP8: either kind), rows or columns contiguous, another part on each rank
    group         process group, or its name
    bias          [N], of the result's dtype, replicated: added once, after the sum
    input_scale, weight_scale
                  FP8: fp32, one number each, or [..., 1] and [1, N]; the product is multiplied by both
    out_dtype     dtype of the result: with FP8 needed, else the input's
    wire_dtype    dtype in which partial sums travel, None: the result's; torch.float32 for less rounding
    kernel        None: the one that is measured fastest for this size (``tpfuse tune``), where no table answers
                  "tpfuse_all_reduce": the product, then the all-reduce that is measured fastest; "tpfuse": on Hopper, ours
                  that overlaps (bf16, fp16 and e4m3; N a multiple of 8, K of 16 bytes);
                  "nccl"
    returns       [..., N], replicated

    Accumulates in fp32 within a rank. Collective: every rank of the group calls it with the same shapes.
    Gradients (but for FP8): the result is replicated, and so must its gradient be; nothing is exchanged for it.
    Safe in CUDA graphs: there, what was not called before outside a capture is the product and
    ``tpfuse.ops.all_reduce``, or a ConfigError where a kernel is named. Tensors lie alike (strides, alignment) on every
    rank.
    Raises ValueError: arguments other than the above; GroupError (a ValueError): the group is gone, or not for this
    device; ConfigError: ``kernel`` cannot do this; PeerTimeoutError: a rank did not answer within the process group's
    time-out.
    """
    check_product(NAME, input, weight, bias, input_scale, weight_scale, out_dtype)
    check_wire_dtype(NAME, wire_dtype, out_dtype or input.dtype)
    matmul.check_name(NAME, kernel)
    flat = input.reshape(-1, input.shape[-1])
    if input_scale is not None and input_scale.numel() > 1:
        input_scale = input_scale.reshape(-1, 1)
    name = groups.group_name(group)
    if needs_gradients(input, weight, bias):
        result = Differentiable.apply(flat, weight, bias, name, wire_dtype, kernel)
    else:
        result = OP(flat, weight, name, bias, input_scale, weight_scale, out_dtype, wire_dtype, kernel)
    return result.view(*input.shape[:-1], weight.shape[1])
