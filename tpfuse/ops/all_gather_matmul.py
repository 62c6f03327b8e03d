"""``tpfuse::all_gather_matmul``: GEMMs over rows that are sharded over ranks, each rank computing its columns for all rows.

M  rows     K  inner dimension     N  columns, sharded over ranks     S  rows of one rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm import groups
from tpfuse.kernels import matmul
from tpfuse.ops import library
from tpfuse.ops.arguments import check_tensors, check_whole, told
from tpfuse.ops.library import needs_gradients
from tpfuse.ops.matmul import check_dim, check_product, gather_rows, product, scatter_sum

NAME = "all_gather_matmul"


def reference(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: str,
    rows: int,
    biases: Sequence[torch.Tensor | None],
    input_scale: torch.Tensor | None,
    weight_scales: Sequence[torch.Tensor],
    out_dtype: torch.dtype | None = None,
    gathered: bool = False,
) -> list[torch.Tensor]:
    """What the operation means, as a functional collective and products; the gathered input comes last, if wanted."""
    whole = gather_rows(input, rows, group)
    if input_scale is not None and any(scale.numel() > 1 for scale in weight_scales):  # a rank may have one row
        input_scale = gather_rows(input_scale, rows, group)
    results = []
    for number, weight in enumerate(weights):
        scale = weight_scales[number] if weight_scales else None
        result = product(whole, weight, input_scale, scale, out_dtype)
        bias = biases[number] if biases else None
        results.append(result if bias is None else result + bias)
    return [*results, whole] if gathered else results


def _run(
    input,
    weights,
    group,
    rows,
    biases,
    input_scale,
    weight_scales,
    out_dtype=None,
    gathered=False,
    kernel_name=None,
    after=None,
):
    if input.is_cuda:
        scales = (input_scale, weight_scales)
        results = matmul.all_gather_matmul(kernel_name, group, input, weights, rows, biases, *scales, out_dtype, gathered)
        if results is not None:
            return results
    return reference(input, weights, group, rows, biases, input_scale, weight_scales, out_dtype, gathered)


def _fake(input, weights, group, rows, biases, input_scale, weight_scales, out_dtype=None, gathered=False, *rest):
    dtype = out_dtype or input.dtype
    results = [torch.empty((rows, w.shape[1]), dtype=dtype, device=input.device) for w in weights]
    return [*results, input.new_empty((rows, input.shape[1]))] if gathered else results


OP = library.define(
    f"{NAME}(Tensor input, Tensor[] weights, str group, SymInt rows, Tensor?[] biases, Tensor? input_scale, "
    "Tensor[] weight_scales, ScalarType? out_dtype=None, bool gathered=False, str? kernel_name=None, "
    "Tensor? after=None) -> Tensor[]",
    _run,
    _fake,
)


class Differentiable(torch.autograd.Function):
    """The input's gradient is a reduce-scatter of products; the gathered input is not kept, but gathered again."""

    @staticmethod
    def forward(ctx, input, group, rows, gathered, kernel, count, *weights_and_biases):
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(input, *weights)
        ctx.group, ctx.rows = group, rows
        ctx.set_materialize_grads(False)
        return tuple(OP(input, weights, group, rows, biases, None, [], None, gathered, kernel))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        input, *weights = ctx.saved_tensors
        pairs = [(g.contiguous(), w) for g, w in zip(grads, weights, strict=False) if g is not None]
        of_gathered = grads[len(weights)] if len(grads) > len(weights) else None
        of_weights = [None] * len(weights)
        if any(ctx.needs_input_grad[6 : 6 + len(weights)]):
            whole = gather_rows(input, ctx.rows, ctx.group)
            of_weights = [None if g is None else whole.t() @ g for g in grads[: len(weights)]]
        wanted = ctx.needs_input_grad[6 + len(weights) :]  # of biases, where there are any
        of_biases = [g.sum(0) if want and g is not None else None for g, want in zip(grads, wanted, strict=False)]
        return _of_input(input, pairs, of_gathered, ctx.group), *[None] * 5, *of_weights, *of_biases


def _of_input(
    input: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], of_gathered: torch.Tensor | None, group: str
) -> torch.Tensor:
    share = input.shape[0]
    if len(pairs) == 1 and of_gathered is None:
        grad, weight = pairs[0]
        return torch.ops.tpfuse.matmul_reduce_scatter.default(grad, weight.t(), group, share=share)
    partial: torch.Tensor | None = of_gathered
    for grad, weight in pairs:
        product = grad @ weight.t()
        partial = product if partial is None else partial + product
    return torch.zeros_like(input) if partial is None else scatter_sum(partial, group, share)


def all_gather_matmul(
    input: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | str,
    dim: int = 0,
    size: int | None = None,
    biases: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    input_scale: torch.Tensor | None = None,
    weight_scales: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    gathered: bool = False,
    kernel: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Column-parallel linear layers over rows that are sharded: one gather for all of them.

        x = all_gather(input)[:size]
        return *(x @ weight + bias for weight, bias in zip(weights, biases)), x

    input         [S, K]  or [..., K]: bf16, fp16, fp32 or FP8, this rank's rows; as many on every rank
    weights       [K, N]  each, same dtype (FP8: either kind), rows or columns contiguous, another part on each rank; a
                  single one need not be in a list, nor need what goes with it
    group         process group, or its name
    dim           dimension of the input that is gathered, any but the last
    size          of that dimension when gathered, None: world * S; what is beyond it (padding of the last ranks) is dropped
    biases        [N] or None for each weight, of the result's dtype, this rank's part
    input_scale, weight_scales
                  FP8: fp32, one number each (the same for all ranks' rows), or [..., 1] for this rank's rows and [1, N];
                  products are multiplied by both
    out_dtype     dtype of the results: with FP8 needed, else the input's
    gathered      also return the gathered input, last
    kernel        None: the one that is measured fastest for this size (``tpfuse tune``), where no table answers "nccl";
                  "tpfuse": on Hopper, ours that overlaps (bf16, fp16 and e4m3; N a multiple of 8, K of 16 bytes, partial
                  sums of the result's dtype); "torch_symm_mem" (no FP8; rows a multiple of the ranks; it waits for a
                  peer without end)
    returns       for each weight the gathered shape with N in place of K, then the gathered input if it is wanted

    Accumulates in fp32. Collective: every rank of the group calls it with the same shapes.
    Gradients (but for FP8): what the ranks' products, and users of the gathered input, give for a row is summed over ranks.
    Safe in CUDA graphs: there, what was not called before outside a capture is NCCL's, or a ConfigError where a kernel is
    named. Tensors lie alike (strides, alignment) on every rank.
    Raises ValueError: arguments other than the above; GroupError (a ValueError): the group is gone, or not for this
    device; ConfigError: ``kernel`` cannot do this; PeerTimeoutError: a rank did not answer within the process group's
    time-out.
    Source: the decomposition is Wang et al. 2023, doi:10.1145/3567955.3567959.
    """
    listed = _listed("weights", weights)
    added = [None] * len(listed) if biases is None else _listed("biases", biases)
    scales = [None] * len(listed) if weight_scales is None else _listed("weight_scales", weight_scales)
    if not listed or not len(listed) == len(added) == len(scales):
        counts = f"{len(listed)} weights with {len(added)} biases and {len(scales)} scales"
        raise ValueError(
            f"{NAME}: at least one weight, and a bias and a scale for each or none, must be given, got {counts}"
        )
    check_tensors(NAME, {"input": input}, {"input_scale": input_scale})
    per_row = input_scale is not None and input_scale.numel() > 1
    flat_scale = input_scale.reshape(-1, 1) if per_row and input_scale is not None else input_scale
    for weight, bias, scale in zip(listed, added, scales, strict=True):
        check_product(NAME, input, weight, bias, flat_scale, scale, out_dtype)
    check_dim(NAME, input, dim)
    matmul.check_name(NAME, kernel)
    moved = input.movedim(dim, 0)
    world = groups.size(group)
    most, least = moved.shape[0] * world, max(0, moved.shape[0] - 1) * world + min(1, moved.shape[0])
    size = most if size is None else size
    check_whole(NAME, "size", size)
    if not least <= size <= most:
        raise ValueError(f"{NAME}: size must be {least} to {most}, got {size}")
    if per_row and input_scale is not None:
        flat_scale = input_scale.view(*input.shape[:-1], 1).movedim(dim, 0).reshape(-1, 1)
    flat, name, rows = moved.reshape(-1, input.shape[-1]), groups.group_name(group), size * moved.shape[1:-1].numel()
    given = [] if biases is None else added
    if needs_gradients(input, *listed, *added):
        results = Differentiable.apply(flat, name, rows, gathered, kernel, len(listed), *listed, *given)
    else:
        of_weights = [] if weight_scales is None else scales
        results = OP(flat, listed, name, rows, given, flat_scale, of_weights, out_dtype, gathered, kernel)
    return tuple(each.view(size, *moved.shape[1:-1], each.shape[1]).movedim(0, dim) for each in results)


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, torch.Tensor):
        return [given]
    if not isinstance(given, Sequence):
        raise ValueError(f"{NAME}: {name} must be a tensor or a list of tensors, got {told(given)}")
    return list(given)
