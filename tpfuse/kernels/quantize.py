"""Norm or activation with quantisation to FP8 on one GPU, by our Triton kernels: what they cannot do, and their launch.

T  rows (tokens, all leading dimensions together)     D  row length     G  group size
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.launch import begins_early, launch, power_of_two

DTYPES = (torch.bfloat16, torch.float16)
LONGEST_ROW = 16384  # elements that one program keeps in registers
_MANY_ROWS = 512  # from which warps of more elements each were seen to be faster
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

Recipe = tuple[int | None, torch.dtype, float, bool, bool, bool, bool, float, str]  # fields of tpfuse.ops.Recipe


def cannot(x: torch.Tensor, recipe: Recipe, static: bool, whole_rows: bool) -> str:
    """Why the kernels cannot take x [..., D]; "" if they can.

    static      the scale is given, not computed by the recipe
    whole_rows  the kernel needs a row at once, whatever its scales
    """
    size, group, scale_dtype = x.shape[-1], *recipe[:2]
    if x.device.type != "cuda":
        return f"no kernel for {x.device.type}"
    if torch.cuda.get_device_capability(x.device) < (8, 9):
        return "compute capability 8.9 is needed for FP8"
    if x.dtype not in DTYPES:
        return f"dtype {x.dtype}"
    if not static and recipe[6]:
        return "values are multiplied by inverse scales"
    if not static and scale_dtype not in (torch.float32, x.dtype):
        return f"scales of {x.dtype} values are computed in {scale_dtype}"
    if not static and group is None:
        return "one scale for the whole tensor is known only after a pass over it"
    if not static and group != size and (group & (group - 1) or size % group):  # type: ignore[operator]
        return f"groups of {group} in rows of {size}"
    if (whole_rows or (not static and group == size)) and size > LONGEST_ROW:
        return f"a row of {size} elements is longer than {LONGEST_ROW}"
    return ""


def norm_cannot(dtype: torch.dtype, weight_dtype: torch.dtype | None, normed_dtype: torch.dtype | None) -> str:
    """What of a norm of values of ``dtype`` the kernel cannot do; "" if it can all."""
    if normed_dtype not in (None, torch.float32, dtype):
        return f"the normalised value is rounded to {normed_dtype}"
    return "a float64 weight" if weight_dtype == torch.float64 else ""


def why_not_faster(in_groups: bool, stored: bool) -> str:
    """Why Inductor's kernel is taken where both can run; "" where ours was measured to be faster (H200).

    in_groups  scales are of groups, rather than of tokens, or given
    stored     what the kernel reads lies in memory anyway, rather than being computed for it
    """
    return "" if stored or in_groups else "Inductor computes what it reads in the same kernel"


def quantize_fp8(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.quantize_fp8`` (see there), where ``cannot`` finds nothing."""
    from tpfuse.kernels.triton.quantize import tpfuse_quantize_fp8 as kernel

    size, rows = x.shape[-1], _rows(x)
    values, scales, (given, *steps), floor, constants = _scales(x, dtype, scale, recipe)
    layout = _piece_layout(size, rows.shape[0], 1 if scale is not None else recipe[0], begins_early(x.device))
    arguments = (rows, values, scales, given, size, rows.stride(0), *steps, floor)
    grid = (rows.shape[0], -(-size // layout.block), 1)
    launch(kernel, grid, arguments, (layout.block, layout.early, *constants), **layout.options)
    return values, scales


def rms_norm_quantize_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    normed_dtype: torch.dtype | None,
    keep_normed: bool,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    recipe: Recipe,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.rms_norm_quantize_fp8`` (see there), where ``cannot`` finds nothing."""
    from tpfuse.kernels.triton.quantize import tpfuse_rms_norm_quantize_fp8 as kernel

    size, rows = x.shape[-1], _rows(x)
    summands = None if residual is None else _rows(residual.contiguous())
    values, scales, (given, *steps), floor, constants = _scales(x, dtype, scale, recipe)
    normed, total = (x.new_empty(x.shape if there else 0) for there in (keep_normed, residual is not None))
    count = rows.shape[0]
    layout = _norm_layout(size, count, begins_early(x.device))
    looped = count if layout.stages else 0  # of another number no other kernel is compiled
    arguments = (
        rows,
        summands,
        aligned(weight),
        normed,
        total,
        values,
        scales,
        given,
        looped,
        size,
        rows.stride(0),
        *steps,
    )
    switches = (residual is not None, weight is not None, bool(weight_offset), normed_dtype == x.dtype, keep_normed)
    numbers = (float(eps), float(weight_offset), floor)
    constants = (layout.block, layout.stages, layout.early, *switches, *constants)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(count, processors) if layout.stages else count
    launch(kernel, (programs, 1, 1), (*arguments, *numbers), constants, **layout.options)
    return values, scales, normed, total


def act_mul_quantize_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    act: str,
    keep_product: bool,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    recipe: Recipe,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.act_mul_quantize_fp8`` (see there), where ``cannot`` finds nothing."""
    from tpfuse.kernels.triton.quantize import tpfuse_act_mul_quantize_fp8 as kernel

    size, gates, ups = gate.shape[-1], _rows(gate), _rows(up)
    values, scales, (given, *steps), floor, constants = _scales(gate, dtype, scale, recipe)
    product = gate.new_empty(gate.shape if keep_product else 0)
    layout = _piece_layout(size, gates.shape[0], 1 if scale is not None else recipe[0], begins_early(gate.device))
    arguments = (gates, ups, product, values, scales, given, size, gates.stride(0), ups.stride(0), *steps, floor)
    grid = (gates.shape[0], -(-size // layout.block), 1)
    constants = (layout.block, layout.early, _ACTIVATIONS[act], keep_product, *constants)
    launch(kernel, grid, arguments, constants, **layout.options)
    return values, scales, product


@dataclasses.dataclass(frozen=True)
class _Layout:
    """block    elements of a program
    warps
    stages   0: a program for each piece; else one for each multiprocessor, with so many rows, but one, in its shared memory
    most     registers of a thread, 0: as many as the compiler likes
    early    whether it may be launched while the kernel before still runs
    """

    block: int
    warps: int
    stages: int = 0
    most: int = 0
    early: bool = True

    @property
    def options(self) -> dict[str, int]:
        """Of Triton's compiler."""
        return {"num_warps": self.warps, "launch_pdl": self.early, **({"maxnreg": self.most} if self.most else {})}


# Measured on an H200: few rows want many threads for each, many rows want more work for each thread. A row of more than
# 8192 elements fills a multiprocessor's registers: a norm then loads the next two rows meanwhile, an activation, of which
# less has to be kept, is told to use fewer.


@functools.lru_cache(4096)
def _norm_layout(size: int, rows: int, hopper: bool) -> _Layout:
    block = power_of_two(size)
    if rows < _MANY_ROWS:
        return _Layout(block, min(16 if block > 8192 else 32, max(1, block // 256)), early=hopper)
    if block > 8192:
        return _Layout(block, 16, stages=3 if hopper else 0, early=hopper)
    enough = block * rows >= 1 << 22  # programs that begin early share the multiprocessors unevenly where all of them fit
    return _Layout(block, max(4, block // 1024), early=hopper and enough)


@functools.lru_cache(4096)
def _piece_layout(size: int, rows: int, group: int | None, hopper: bool) -> _Layout:
    """A row where that has one scale, else a piece of it. group: 1 where a scale is given."""
    block, elements = power_of_two(size), size * rows
    if group == size:
        if block * rows > 1 << 23 and rows >= _MANY_ROWS:
            return _Layout(block, max(1, block // 1024), most=64 if block > 8192 else 0, early=hopper)
        return _Layout(block, min(32, max(1, block // (256 if rows < _MANY_ROWS else 512))), early=hopper)
    few, many = elements < 1 << 20, elements >= 1 << 24
    piece = max(min(512 if few else 1024, block), group or 1)
    per_warp = 128 if few else 256 if group == 1 and not many else 512
    return _Layout(piece, max(1, piece // per_warp), early=hopper)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, D], of which elements of a row lie side by side, from 16 bytes on; x itself where it is so."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.data_ptr() % 16 == 0 else rows.clone(memory_format=torch.contiguous_format)


def empty_scales(x: torch.Tensor, shape: Sequence[Any], layout: str) -> torch.Tensor:
    """fp32, not written yet. "column": the scales of a group, of all rows, side by side, as ``torch._scaled_mm`` takes
    those of blocks; each such column starts at a multiple of 16 bytes."""
    if layout == "row":
        return x.new_empty(shape, dtype=torch.float32)
    *leading, groups = shape
    column = -(-math.prod(leading) // 4) * 4
    steps = [math.prod(leading[place + 1 :]) for place in range(len(leading))]
    return x.new_empty((groups, column), dtype=torch.float32).as_strided((*leading, groups), (*steps, column))


def _scales(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, int, int], float, tuple[Any, ...]]:
    """(values, scales, (the given scale or a stand-in, from a row's scales to the next row's, from a group's to the next
    one's), floor, constants of the kernel from GROUP on)."""
    group, scale_dtype, floor, zero_to_one, by_reciprocal, power_of_two, _, least, layout = recipe
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    steps: tuple[Any, int, int]
    if scale is not None:
        scales, kind, steps = scale.new_empty(0), 0, (scale, 0, 1)
    else:
        assert group is not None
        groups = x.shape[-1] // group
        scales = empty_scales(x, (*x.shape[:-1], groups), layout)
        kind = -1 if group == x.shape[-1] else group
        steps = (scales, groups, 1) if layout == "row" else (scales, 1, scales.stride(-1))
    narrow = scale_dtype == x.dtype
    switches = (
        kind,
        float(torch.finfo(dtype).max),
        narrow,
        floor > 0,
        zero_to_one,
        by_reciprocal,
        power_of_two,
        float(least),
    )
    return values, scales, steps, float(floor), switches
