"""All-reduce + RMSNorm, and the plain all-reduce, by our own kernels: tensors laid out as the kernels need them, then
launched.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from tpfuse.comm.arena import VECTOR_BYTES, Alone, Arena
from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.fp8 import Fp8, Quantisation
from tpfuse.kernels.layout import pieces
from tpfuse.kernels.triton.launch import Options, Plan, plan
from tpfuse.tables import Choice

_TAGS = {"split": 1, "ring": 2, "plain": 3}  # comm/arena.py TAGS says what they stand for
_MOST_PLANS = 4096  # per arena; then they are forgotten: a plan costs little to make again


def all_reduce_rms_norm(
    name: str,
    arena: Arena | Alone,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    scale_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    choice: Choice | None = None,
    wait: bool = True,
    fp8: Fp8 | None = None,
) -> tuple[Any, ...]:
    """The operation of ``tpfuse.ops.all_reduce_rms_norm`` (see there) by the kernel ``name``, "split" or "ring"; with
    ``fp8`` that of ``all_reduce_rms_norm_quantize_fp8``.

    A hidden size that does not fill whole vectors is padded with zeros, which changes no sum and no greatest magnitude.
    """
    counted, dtype = input.shape[-1], input.dtype
    odd = -counted % (VECTOR_BYTES // dtype.itemsize)
    if odd:
        weight, residual, bias = (None if t is None else pad(t, (0, odd)) for t in (weight, residual, bias))
        input = pad(input, (0, odd))
    x, w = aligned(input), _fit_weight(weight, dtype)
    r, b = aligned(residual), aligned(bias)
    rounded = normed_dtype == dtype and dtype != torch.float32
    product_is_narrow = rounded and (weight is None or (weight.dtype == dtype and not weight_offset))
    wide_out = out_dtype is not None and out_dtype != dtype and dtype != torch.float32 and not product_is_narrow
    total = torch.empty(input.shape, dtype=dtype, device=input.device)
    keep = fp8 is None or fp8.keep
    normed = input.new_empty(input.shape if keep else 0, dtype=torch.float32 if wide_out else dtype)
    how, quantised, given_scale, floor = _quantised(fp8, input, counted)
    weight_kind = 0 if w is None else 1 if w.dtype == dtype else 2
    given = (weight_kind, wide_out, rounded, b is not None, scale is not None, scale_tensor is not None, r is not None)
    key = (name, x.shape, dtype, given, choice, wait, keep, how)
    found = arena.plans.get(key)
    if found is None:
        rows, vectors = x.numel() // (counted + odd), _vectors(counted + odd, dtype)
        last = () if how is None else (how.dtype, how.switches(counted, dtype))
        options = Options(dtype, True, *given, keep, *last)
        found = _remember(arena, key, plan(name, arena, rows, vectors, options, choice, wait))
    rows, vectors = found.rows, found.vectors
    factor = 1.0 if scale is None else scale
    numbers = (rows, vectors, 1 / counted, rows * vectors, _tag(name, arena), eps, factor, weight_offset, floor)
    _launch(found, arena, (x, r, b, w, scale_tensor, normed, total, *quantised, given_scale), numbers)
    values, scales = quantised
    if odd:
        normed, total = normed[..., :counted].contiguous(), total[..., :counted].contiguous()
        values = None if values is None else values[..., :counted].contiguous()
    if out_dtype is not None and normed.dtype != out_dtype:
        normed = normed.to(out_dtype)
    return (normed, total) if how is None else (values, scales, normed, total)


def _quantised(
    fp8: Fp8 | None, input: torch.Tensor, counted: int
) -> tuple[Quantisation | None, tuple[Any, Any], torch.Tensor | None, float]:
    """What is made of rows with ``counted`` elements, room for its values and scales, the given scale, the floor."""
    if fp8 is None:
        return None, (None, None), None, 0.0
    values = torch.empty(input.shape, dtype=fp8.how.dtype, device=input.device)
    scales = fp8.how.scales((*input.shape[:-1], counted), input.device)
    return fp8.how, (values, scales), fp8.scale, float(fp8.how.recipe[2])


def all_reduce(arena: Arena, input: torch.Tensor, *, choice: Choice | None = None) -> torch.Tensor:
    """The sum over ranks, in fp32 and rank order, rounded once: the ring kernel without its norm.

    input    [...]  bf16, fp16 or fp32, at least one element
    returns  [...]  a new contiguous tensor
    """
    dtype, size = input.dtype, input.numel()
    odd = -size % (VECTOR_BYTES // dtype.itemsize)
    x = aligned(pad(input.reshape(-1), (0, odd)) if odd else input)
    total = torch.empty(x.shape, dtype=dtype, device=x.device)
    vectors = _vectors(x.numel(), dtype)
    rows, per_row = pieces(vectors)
    key = ("plain", vectors, dtype, choice)
    found = arena.plans.get(key)
    if found is None:
        found = _remember(arena, key, plan("ring", arena, rows, per_row, Options(dtype=dtype, norm=False), choice))
    numbers = (rows, per_row, 1.0, vectors, _tag("plain", arena), 0.0, 1.0, 0.0, 0.0)
    _launch(found, arena, (x, *[None] * 5, total, *[None] * 3), numbers)
    return total[:size].view(input.shape) if odd else total


def rms_norm(arena: Arena, input: torch.Tensor, *arguments: Any, fp8: Fp8 | None = None) -> tuple[torch.Tensor, ...]:
    """What follows the all-reduce, alone: ``input`` is already the sum, the same on every rank. Arguments as above."""
    return all_reduce_rms_norm("ring", arena.alone, input, *arguments, fp8=fp8)


def _launch(found: Plan, arena: Arena | Alone, tensors: tuple[torch.Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    stream = arena.enter()
    found.launch(
        *addresses,
        arena.base,
        arena.next_base,
        arena.peers,
        found.region,
        found.state,
        arena.control,
        arena.rank,
        *numbers,
        *found.constants,
        stream=stream,
    )


def _tag(name: str, arena: Arena | Alone) -> int:
    """With two ranks the peer is known here; with more the kernel adds it."""
    return _TAGS[name] + (256 * (1 - arena.rank) if arena.world == 2 else 0)


def _remember(arena: Arena | Alone, key: tuple, found: Plan) -> Plan:
    if len(arena.plans) >= _MOST_PLANS:
        arena.plans.clear()
    arena.plans[key] = found
    return found


def _vectors(elements: int, dtype: torch.dtype) -> int:
    return elements * dtype.itemsize // VECTOR_BYTES


def _fit_weight(weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """In the row's dtype, or in fp32, which holds the 16-bit ones exactly."""
    if weight is None:
        return None
    return aligned(weight if weight.dtype in (dtype, torch.float32) else weight.float())
