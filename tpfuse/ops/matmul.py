"""What the GEMM operations share: the product, its arguments, and rows sharded over ranks.

M  rows     K  inner dimension     N  columns     S  rows of one rank: the last ranks' may be padding, which is zero

FP8: ``product`` multiplies by both scales, one number each (per tensor) or [M, 1] and [1, N] (per row and column).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tpfuse.comm import groups
from tpfuse.kernels.candidates import DTYPES
from tpfuse.ops.arguments import check_tensors, check_whole, told
from tpfuse.ops.library import needs_gradients

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def product(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """input [M, K] @ weight [K, N], times the scales, in out_dtype (None: input's). Accumulates in fp32."""
    dtype = out_dtype or input.dtype
    if input_scale is None or weight_scale is None:
        if dtype == input.dtype:
            return input @ weight
        return (input.float() @ weight.float()).to(dtype)
    if input.is_cuda and input.numel():
        column_major = weight if weight.stride(0) == 1 else weight.t().contiguous().t()
        return torch._scaled_mm(input.contiguous(), column_major, input_scale, weight_scale, out_dtype=dtype)
    return ((input.float() @ weight.float()) * (input_scale * weight_scale)).to(dtype)


def plus_products(total: torch.Tensor, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of [M, N] and of products [M, K] @ [K, N], each with a K of its own, in the first one's dtype."""
    for input, weight in zip(inputs, weights, strict=True):
        same = input.dtype == total.dtype
        total = torch.addmm(total, input, weight) if same else total + product(input, weight, out_dtype=total.dtype)
    return total


def pair(input_scale: torch.Tensor | None, weight_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both scales, or None: there are none."""
    return None if input_scale is None or weight_scale is None else (input_scale, weight_scale)


def rows_of(rows: int, group: str | dist.ProcessGroup, share: int | None = None) -> int:
    """S: the rows of each rank, as many as were asked for or as few as will do."""
    return -(-rows // groups.size(group)) if share is None else share


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows at the end, up to ``rows``; the tensor itself where there are so many."""
    missing = rows - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


def gather_rows(shard: torch.Tensor, rows: int, group: str) -> torch.Tensor:
    """[S, ...] of each rank -> [rows, ...] on all, by a functional collective. The padding is dropped."""
    world = groups.size(group)
    groups.check_device(group, shard.device)
    if not shard.numel():
        return shard.new_zeros(rows, *shard.shape[1:])
    sent = shard.contiguous()
    sent = sent.view(torch.uint8) if shard.dtype in FP8 else sent  # which not every backend knows
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(sent, world, group)
    return torch.ops._c10d_functional.wait_tensor(gathered)[:rows].view(shard.dtype)


def scatter_sum(partial: torch.Tensor, group: str, share: int | None = None) -> torch.Tensor:
    """[M, ...], partial sums -> [S, ...], this rank's rows of the sum, by a functional collective."""
    world, size = groups.size(group), rows_of(partial.shape[0], group, share)
    groups.check_device(group, partial.device)
    if not partial.numel():
        return partial.new_zeros(size, *partial.shape[1:])
    padded = pad_rows(partial, size * world).contiguous()
    reduced = torch.ops._c10d_functional.reduce_scatter_tensor(padded, "sum", world, group)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def check_product(
    op: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    """Raises ValueError: these are not the arguments of one product."""

    def require(ok: bool, what: str, given: object) -> None:
        if not ok:
            raise ValueError(
                f"{op}: {what}, got {', '.join(map(told, given)) if isinstance(given, tuple) else told(given)}"
            )

    scales = {"input_scale": input_scale, "weight_scale": weight_scale}
    check_tensors(op, {"input": input, "weight": weight}, {"bias": bias, **scales})
    require(input.dim() >= 2, "input must be [..., K] with rows", input)
    require(weight.dim() == 2, "weight must be [K, N]", weight)
    rows, inner, columns = input.shape[:-1].numel(), input.shape[-1], weight.shape[1]
    require(weight.shape[0] == inner, f"weight must be [{inner}, N]", weight)
    scaled = input.dtype in FP8
    require(scaled or input.dtype in DTYPES, "input must be bf16, fp16, fp32 or FP8", input)
    require(weight.dtype in FP8 if scaled else weight.dtype == input.dtype, f"weight must go with {input.dtype}", weight)
    given = (input_scale, weight_scale)
    if scaled:
        require(all(scale is not None and scale.dtype == torch.float32 for scale in given), "FP8 needs fp32 scales", given)
        shapes = ((rows, 1), (*input.shape[:-1], 1))
        per_row = input_scale.shape in shapes and weight_scale.shape == (1, columns)  # type: ignore[union-attr]
        one = all(scale.numel() == 1 for scale in given)  # type: ignore[union-attr]
        require(one or per_row, f"scales must be one number each, or {list(shapes[1])} and [1, {columns}]", given)
        require(out_dtype in DTYPES, "FP8 needs an out_dtype of bf16, fp16 or fp32", out_dtype)
    else:
        require(given == (None, None), "scales are for FP8", given)
        require(out_dtype in (None, input.dtype), f"out_dtype must be {input.dtype} or None", out_dtype)
    wide = out_dtype or input.dtype
    require(bias is None or (bias.shape == (columns,) and bias.dtype == wide), f"bias must be {wide} [{columns}]", bias)
    tensors = [t for t in (input, weight, bias, input_scale, weight_scale) if t is not None]
    if needs_gradients(input_scale, weight_scale) or (scaled and needs_gradients(input, weight, bias)):
        raise ValueError(f"{op} has no backward for FP8: call it under torch.no_grad()")
    devices = [str(t.device) for t in tensors]
    if len(set(devices)) > 1:
        raise ValueError(f"{op}: all tensors must be on one device, got {', '.join(devices)}")


def check_dim(op: str, input: torch.Tensor, dim: int) -> None:
    """Raises ValueError: it is not a dimension of rows."""
    check_whole(op, "dim", dim)
    if not 0 <= dim < input.dim() - 1:
        raise ValueError(f"{op}: dim must be 0 to {input.dim() - 2}, got {dim}")


def check_wire_dtype(op: str, wire_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Raises ValueError: partial sums of a result of ``dtype`` cannot travel so."""
    if wire_dtype not in (None, torch.float32, dtype):
        raise ValueError(f"{op}: wire_dtype must be torch.float32 or the result's, got {told(wire_dtype)}")
