"""``tpfuse::matmul_reduce_scatter``: a GEMM whose partial sums are added over ranks, each rank keeping its share of rows.

M  rows     K  inner dimension, sharded over ranks     N  columns     S  rows of one rank
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tpfuse.comm import groups
from tpfuse.kernels import matmul
from tpfuse.ops import library
from tpfuse.ops.library import needs_gradients
from tpfuse.ops.matmul import check_dim, check_product, check_wire_dtype, pair, plus_products, product, rows_of, scatter_sum

NAME = "matmul_reduce_scatter"


def reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    group: str,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    share: int | None = None,
    more_inputs: Sequence[torch.Tensor] = (),
    more_weights: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """What the operation means, as products and a functional collective."""
    dtype = out_dtype or input.dtype
    partial = product(input, weight, input_scale, weight_scale, wire_dtype or dtype)
    partial = plus_products(partial, more_inputs, more_weights)
    total = scatter_sum(partial, group, share).to(dtype)
    return total if bias is None else _mask_padding(total + bias, input.shape[0], group)


def _mask_padding(total: torch.Tensor, rows: int, group: str) -> torch.Tensor:
    """The bias is for rows that there are."""
    size = total.shape[0]
    if size * groups.size(group) == rows:
        return total
    first = groups.resolve(group).rank() * size
    there = torch.arange(first, first + size, device=total.device) < rows
    return total * there[:, None]


def _run(
    input,
    weight,
    group,
    bias=None,
    input_scale=None,
    weight_scale=None,
    out_dtype=None,
    wire_dtype=None,
    share=None,
    kernel_name=None,
    after=None,
    more_inputs=None,
    more_weights=None,
):
    more = (more_inputs or (), more_weights or ())
    if input.is_cuda:
        size, scales = rows_of(input.shape[0], group, share), pair(input_scale, weight_scale)
        arguments = (input, weight, bias, scales, out_dtype, wire_dtype, size, more)
        result = matmul.matmul_reduce_scatter(kernel_name, group, *arguments)
        if result is not None:
            return result
    given = (bias, input_scale, weight_scale, out_dtype, wire_dtype, share, *more)
    return reference(input, weight, group, *given)


def _fake(input, weight, group, bias=None, input_scale=None, weight_scale=None, out_dtype=None, *rest, **more):
    share = rest[1] if len(rest) > 1 else more.get("share")
    rows = rows_of(input.shape[0], group, share)
    return torch.empty((rows, weight.shape[1]), dtype=out_dtype or input.dtype, device=input.device)


#: more_inputs, more_weights: further products, without scales, that are added to the first before ranks are summed.
OP = library.define(
    f"{NAME}(Tensor input, Tensor weight, str group, Tensor? bias=None, Tensor? input_scale=None, "
    "Tensor? weight_scale=None, ScalarType? out_dtype=None, ScalarType? wire_dtype=None, SymInt? share=None, "
    "str? kernel_name=None, Tensor? after=None, Tensor[]? more_inputs=None, Tensor[]? more_weights=None) -> Tensor",
    _run,
    _fake,
)


class Differentiable(torch.autograd.Function):
    """The gradients of the rows are gathered, once for both products: the input's is an ``all_gather_matmul``."""

    @staticmethod
    def forward(ctx, input, weight, bias, group, wire_dtype, share, kernel):
        ctx.save_for_backward(input, weight)
        ctx.group = group
        return OP(input, weight, group, bias, None, None, None, wire_dtype, share, kernel)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        gather, rows = torch.ops.tpfuse.all_gather_matmul.default, input.shape[0]
        of_input, whole = gather(grad.contiguous(), [weight.t()], ctx.group, rows, [], None, [], gathered=True)
        of_weight = input.t() @ whole if ctx.needs_input_grad[1] else None
        of_bias = whole.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None, None


def matmul_reduce_scatter(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup | str,
    dim: int = 0,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """This rank's rows of a row-parallel linear layer.

        y = all_reduce(input @ weight) + bias
        return y.split(ceil(M / world))[rank]             # of as many rows on every rank: zero where there is none

    input         [M, K]  or [..., K]: bf16, fp16, fp32 or FP8; K sharded over ranks, as the weight's
    weight        [K, N]  same dtype (FP8: either kind), rows or columns contiguous, another part on each rank
    group         process group, or its name
    dim           dimension of the input that is scattered: 0, or another but the last, whose rows then come first
    bias          [N], of the result's dtype, replicated: added once, after the sum
    input_scale, weight_scale
                  FP8: fp32, one number each, or [..., 1] and [1, N]; the product is multiplied by both
    out_dtype     dtype of the result: with FP8 needed, else the input's
    wire_dtype    dtype in which partial sums travel, None: the result's; torch.float32 for less rounding
    kernel        None: the one that is measured fastest for this size (``tpfuse tune``), where no table answers "nccl";
                  "tpfuse": on Hopper, ours that overlaps (bf16, fp16 and e4m3; N a multiple of 8, K of 16
                  bytes); "torch_symm_mem" (no FP8; rows a multiple of the ranks; it waits for a
                  peer without end)
    returns       the input's shape with S = ceil(size of dim / world) in place of that and N in place of K; row i of rank r
                  is row r * S + i of the whole, and zero where there is none

    Accumulates in fp32 within a rank. Collective: every rank of the group calls it with the same shapes.
    Gradients (but for FP8): those of all ranks' rows are gathered; the bias's is of all rows, the same on every rank.
    Safe in CUDA graphs: there, what was not called before outside a capture is NCCL's, or a ConfigError where a kernel is
    named. Tensors lie alike (strides, alignment) on every rank.
    Raises ValueError: arguments other than the above; GroupError (a ValueError): the group is gone, or not for this
    device; ConfigError: ``kernel`` cannot do this; PeerTimeoutError: a rank did not answer within the process group's
    time-out.
    Source: the decomposition is Wang et al. 2023, doi:10.1145/3567955.3567959.
    """
    check_product(NAME, input, weight, bias, input_scale, weight_scale, out_dtype)
    check_dim(NAME, input, dim)
    check_wire_dtype(NAME, wire_dtype, out_dtype or input.dtype)
    matmul.check_name(NAME, kernel)
    moved = input.movedim(dim, 0)
    share = rows_of(moved.shape[0], group) * moved.shape[1:-1].numel()
    if input_scale is not None and input_scale.numel() > 1:
        input_scale = input_scale.view(*input.shape[:-1], 1).movedim(dim, 0).reshape(-1, 1)
    flat, name = moved.reshape(-1, input.shape[-1]), groups.group_name(group)
    if needs_gradients(input, weight, bias):
        result = Differentiable.apply(flat, weight, bias, name, wire_dtype, share, kernel)
    else:
        result = OP(flat, weight, name, bias, input_scale, weight_scale, out_dtype, wire_dtype, share, kernel)
    return result.view(-1, *moved.shape[1:-1], weight.shape[1]).movedim(0, dim)
