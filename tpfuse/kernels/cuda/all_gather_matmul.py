"""All-gather + GEMMs by our own kernel: tensors as it needs them, tiles and pace by size, then launched.

M  rows     K  inner dimension     N  columns     S  rows of one rank
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from tpfuse.comm.arena import Arena
from tpfuse.comm.workspace import BEGUN_OFFSET, COUNTS, COUNTS_OFFSET, DATA_OFFSET, Workspace
from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.cuda.gemm import (
    ALIGNMENT_BYTES,
    BOX,
    FP8,
    MOST_SHARED_BYTES,
    SPLIT,
    STEP_BYTES,
    THREADS,
    TILE_ROWS,
    Scale,
    Tiling,
    by_rows,
    fastest_columns,
    kernel_of,
    loaded_rows,
    most_stages,
    operand,
    parts,
    pays_to_split,
    profiling,
    right_operands,
    steps_of,
)
from tpfuse.kernels.cuda.launch import Parameters, TensorMap, tensor_map

FILES = ("hopper.cuh", "gemm.cuh", "tiles.cuh", "all_gather_matmul.cu")
MOST_MATRICES = 4
_PIECE_ROWS = 64
_BOUNCE_BYTES = 2 * _PIECE_ROWS * STEP_BYTES
_SCALES_ALIGNMENT = 128
_FP8_NAN = 0x7F  # of e4m3, as a byte
_TAG = 5  # comm/arena.py TAGS


def tiling(arena: Arena, rows: int, widths: Sequence[int], inner: int, dtype: torch.dtype) -> Tiling:
    """By rule of thumb, for ``rows`` of a rank and the columns of all weights."""
    sizes = (arena.multiprocessors, arena.world, rows, widths)
    cut = Tiling(fastest_columns(*sizes), cluster=2 if rows > TILE_ROWS else 1)
    cut = SPLIT if pays_to_split(*sizes, inner, dtype) else cut
    return dataclasses.replace(cut, stages=most_stages(cut, room), across=16, pace=0.6)


def all_gather_matmul(
    workspace: Workspace,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    rows: int,
    biases: Sequence[torch.Tensor | None],
    gathered: bool = False,
    input_scale: torch.Tensor | None = None,
    weight_scales: Sequence[torch.Tensor] = (),
    out_dtype: torch.dtype | None = None,
    *,
    cut: Tiling | None = None,
) -> list[torch.Tensor]:
    """The operation of ``tpfuse.ops.all_gather_matmul`` (see there), on what ``gemm.cannot`` has nothing against.

    Where the peers' rows do not fit into the workspace at once, it is done in parts. Raises BuildError.
    """
    arena, dtype = workspace.arena, out_dtype or input.dtype
    share, inner = input.shape
    columns = [weight.shape[1] for weight in weights]
    cut = cut or tiling(arena, share, columns, inner, input.dtype)
    a, added, (b_rows, bs) = by_rows(input), [aligned(bias) for bias in biases], right_operands(weights)
    cut = cut.suiting(b_rows, steps_of(inner, input.dtype))
    factors = [scale.contiguous() for scale in (input_scale, *weight_scales) if scale is not None]
    outs = [torch.empty((arena.world * share, n), dtype=dtype, device=input.device) for n in columns]
    everybodys = input.new_empty((arena.world, share, inner)) if gathered else None
    most, shared_bytes = most_rows(workspace, inner, input.dtype), room(cut)
    macros = options(arena.world, len(weights), input.dtype, dtype, cut, b_rows)
    macros += profiling(workspace)
    kernel = kernel_of(workspace, FILES, macros, shared_bytes)
    stream = arena.enter()
    for first, count in parts(share, most):
        tiles = sum(cut.tiles(count, n) for n in columns) * arena.world
        blocks, whole = cut.grid(arena.multiprocessors, tiles)
        made = Parameters(parameters(arena.world, len(weights)))
        _fill(
            made.fields,
            workspace,
            (a, bs, b_rows, outs, added, factors),
            (share, first, count),
            cut,
            (tiles, blocks, whole),
        )
        made.launch(kernel, blocks, THREADS, shared_bytes, stream)
        if everybodys is not None:
            arrived = workspace.data(input.dtype, (arena.world - 1, count, inner))
            everybodys[arena.rank, first : first + count] = a[first : first + count]
            aborted = arena.aborted
            for number in range(arena.world - 1):
                source = (arena.rank + 1 + number) % arena.world
                everybodys[source, first : first + count] = _unless(aborted, arrived[number])
    results = [out[:rows] for out in outs]
    return results if everybodys is None else [*results, everybodys.view(-1, inner)[:rows]]


def _unless(aborted: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
    """What has arrived, or, if the arena is dead, NaN."""
    if arrived.dtype != FP8:
        return torch.where(aborted, torch.nan, arrived)
    return torch.where(aborted, _FP8_NAN, arrived.view(torch.uint8)).view(FP8)


def most_rows(workspace: Workspace, inner: int, dtype: torch.dtype) -> int:
    """Rows of a rank in one launch, maybe none: by the room for the peers' rows, and for a count per block of rows."""
    peers = workspace.arena.world - 1
    scale_bytes = (4 if dtype == FP8 else 0) * peers
    room_for = (workspace.bytes - scale_bytes * _SCALES_ALIGNMENT) // (peers * inner * dtype.itemsize + scale_bytes)
    return min(room_for // TILE_ROWS, COUNTS // peers) * TILE_ROWS


def _fill(
    fields: Any,
    workspace: Workspace,
    tensors: tuple[Any, ...],
    part: tuple[int, int, int],
    cut: Tiling,
    work: tuple[int, int, int],
) -> None:
    a, bs, b_rows, outs, biases, factors = tensors
    inner, (share, first, count) = a.shape[1], part
    arena, peers, dtype, item = workspace.arena, workspace.arena.world - 1, a.dtype, a.element_size()
    step = STEP_BYTES // item
    fields.a, fields.piece = operand(a, first + count, loaded_rows(count)), operand(a, first + count, _PIECE_ROWS)
    planes, pitches = (inner, count, peers), (inner * item, count * inner * item)
    fields.gathered = tensor_map(workspace.base + DATA_OFFSET, dtype, planes, pitches, (step, loaded_rows(count), 1))
    for number, peer in enumerate(workspace.peers):
        fields.sent[number] = tensor_map(peer + DATA_OFFSET, dtype, planes, pitches, (step, _PIECE_ROWS, 1))
        fields.peer_counts[number], fields.peer_begun[number] = peer + COUNTS_OFFSET, peer + BEGUN_OFFSET
    by_row = any(scale.numel() > 1 for scale in factors[1:])  # one row of a rank has one factor all the same
    for number, (b, out) in enumerate(zip(bs, outs, strict=True)):
        columns, bias = out.shape[1], biases[number] if biases else None
        fields.b[number] = operand(b, b.shape[0], STEP_BYTES // 2 if b_rows else cut.box_columns)
        fields.columns[number] = columns
        sizes, row_bytes = (columns, first + count, arena.world), columns * out.element_size()
        fields.out[number] = tensor_map(
            out.data_ptr(), out.dtype, sizes, (row_bytes, share * row_bytes), (BOX, TILE_ROWS // 2, 1)
        )
        fields.bias[number] = 0 if bias is None else bias.data_ptr()
        scale = factors[1 + number] if factors else None
        fields.b_scale[number] = Scale.of(scale, scale is not None and scale.numel() > 1)
    fields.counts, fields.begun = workspace.base + COUNTS_OFFSET, workspace.base + BEGUN_OFFSET
    fields.epoch, fields.control = workspace.base, arena.control
    fields.inner, fields.share, fields.first, fields.count = inner, share, first, count
    fields.loaded = loaded_rows(count)
    fields.rank, fields.across = arena.rank, max(1, cut.across // cut.cluster)
    tiles, blocks, fields.whole = work
    pieces = -(-count // _PIECE_ROWS) * -(-inner // step) * peers
    # What is sent should have gone by the time that the last rank's rows are begun: after so many rounds of tiles.
    rounds = tiles * peers // arena.world // blocks
    fields.pause = int(cut.pace * cut.clocks(inner, dtype) * rounds * blocks / pieces)
    fields.stride, fields.tag = COUNTS // peers, _TAG
    fields.profile = 0 if workspace.profile is None else workspace.profile.data_ptr()
    # Behind the rows; no two sources' in one line of a cache.
    scales = DATA_OFFSET + -(-peers * count * inner * item // _SCALES_ALIGNMENT) * _SCALES_ALIGNMENT
    fields.a_scale, fields.scales = Scale.of(factors[0] if factors else None, by_row), workspace.base + scales
    fields.scale_stride = -(-count // _SCALES_ALIGNMENT) * _SCALES_ALIGNMENT
    for number, peer in enumerate(workspace.peers):
        fields.peer_scales[number] = peer + scales


@functools.cache
def parameters(world: int, matrices: int) -> type[ctypes.Structure]:
    """``Params`` of the kernel."""
    address, number, peers = ctypes.c_uint64, ctypes.c_int32, world - 1
    maps: list[tuple[str, Any]] = [(name, TensorMap) for name in ("a", "piece", "gathered")]
    maps += [("sent", TensorMap * peers), ("b", TensorMap * matrices), ("out", TensorMap * matrices)]
    addresses: list[tuple[str, Any]] = [(name, address * peers) for name in ("peer_counts", "peer_begun")]
    addresses += [(name, address) for name in ("counts", "begun", "epoch", "control")]
    addresses += [("bias", address * matrices)]
    addresses += [("a_scale", Scale), ("b_scale", Scale * matrices), ("scales", address), ("peer_scales", address * peers)]
    numbers: list[tuple[str, Any]] = [("columns", number * matrices)]
    names = (
        "inner",
        "share",
        "first",
        "count",
        "loaded",
        "rank",
        "whole",
        "across",
        "pause",
        "stride",
        "scale_stride",
        "tag",
    )
    fields = (*maps, *addresses, *numbers, *((name, number) for name in names), ("profile", address))
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


def room(cut: Tiling) -> int:
    """Bytes of shared memory."""
    return cut.room(_beside(cut))


def _beside(cut: Tiling) -> int:
    """Bytes of shared memory beside operands."""
    return _BOUNCE_BYTES + TILE_ROWS // cut.split * stored(cut) * 2 + cut.exchange_bytes


def stored(cut: Tiling) -> int:
    """Columns of a tile of results that leave together: as many as there is room for."""
    left = MOST_SHARED_BYTES - ALIGNMENT_BYTES - cut.wide_bytes - _BOUNCE_BYTES - cut.exchange_bytes
    most = left // (TILE_ROWS // cut.split * 2)
    return next((n for n in (cut.columns, cut.columns // 2) if not n % BOX and n <= most), BOX)


def options(
    world: int, matrices: int, dtype: torch.dtype, out_dtype: torch.dtype, cut: Tiling, b_rows: bool
) -> tuple[tuple[str, int], ...]:
    return *cut.options(world, dtype, out_dtype, b_rows, _beside(cut)), ("MATRICES", matrices), ("STORED", stored(cut))
