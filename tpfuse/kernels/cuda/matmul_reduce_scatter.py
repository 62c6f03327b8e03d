"""GEMM + reduce-scatter, or all-reduce, by our own kernel: tensors as it needs them, tiles and pace by size, then launched.

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
from tpfuse.comm.workspace import BEGUN_OFFSET, DATA_OFFSET, FLAGS, FLAGS_OFFSET, Workspace
from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.cuda.gemm import (
    BOX,
    COLUMNS,
    FP8,
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

FILES = ("hopper.cuh", "gemm.cuh", "tiles.cuh", "matmul_reduce_scatter.cu")
_PIECE_ROWS, _COPY_ROWS = 32, 64
_COPY_BYTES = 2 * _COPY_ROWS * BOX * 2
_TAG, _TAG_ALL_ROWS = 4, 6  # comm/arena.py TAGS
MOST_PRODUCTS = 4  # that are added: q, k and v, or gate and up, of a backward
_LEAD_ROUNDS = 1.5  # of tiles: with a lead of as many, sums may take their time
_ENOUGH_STAGES = 3  # with fewer, multipliers wait for operands: beside wide tiles of fp32


def tiling(
    arena: Arena,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    all_rows: bool = False,
    fp32_wire: bool = False,
) -> Tiling:
    """By rule of thumb, for ``rows`` of a rank: own tiles are mixed in where they are short."""
    sizes = (arena.multiprocessors, arena.world, rows, [columns])
    if pays_to_split(*sizes, inner, dtype):
        return dataclasses.replace(SPLIT, stages=most_stages(SPLIT, lambda cut: room(cut, all_rows, fp32_wire)))
    stages = {wide: most_stages(Tiling(wide), lambda cut: room(cut, all_rows, fp32_wire)) for wide in COLUMNS}
    wide = fastest_columns(*sizes, among=[wide for wide in COLUMNS if stages[wide] >= _ENOUGH_STAGES])
    cluster = 2 if dtype == FP8 and rows > TILE_ROWS else 1
    return Tiling(wide, stages[wide], cluster, lead=2 if inner * dtype.itemsize <= 8192 else None)


def matmul_reduce_scatter(
    workspace: Workspace,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    share: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    more: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ()),
    wire_dtype: torch.dtype | None = None,
    *,
    all_rows: bool = False,
    cut: Tiling | None = None,
) -> torch.Tensor:
    """``tpfuse.ops.matmul_reduce_scatter`` (see there), on what ``gemm.cannot`` has nothing against.

    share     S, of every rank
    scales    of input and weight, where those are FP8
    more      inputs and weights of further products, which are added; none with scales
    wire_dtype  of partial sums: fp32, or None: the result's
    all_rows  every rank gets all rows: ``tpfuse.ops.matmul_all_reduce``
    Where partial sums do not fit into the workspace at once, it is done in parts. A tiling for which there is no room has
    fewer stages, or is the rule's: it was measured for operands that it suits, or for partial sums of 16 bits.
    Raises BuildError.
    """
    arena, dtype, columns = workspace.arena, out_dtype or input.dtype, weight.shape[1]
    a, bias, (b_rows, b) = [by_rows(each) for each in (input, *more[0])], aligned(bias), right_operands([weight, *more[1]])
    fp32_wire = wire_dtype is not None
    by_rule = (arena, share, columns, sum(each.shape[1] for each in a), input.dtype, all_rows, fp32_wire)
    cut = (cut or tiling(*by_rule)).suiting(b_rows, sum(steps_of(each.shape[1], each.dtype) for each in a))
    stages = most_stages(cut, lambda cut: room(cut, all_rows, fp32_wire))
    cut = dataclasses.replace(cut, stages=min(cut.stages, stages)) if stages else tiling(*by_rule)
    factors = [None, None] if scales is None else [scale.contiguous() for scale in scales]
    out = torch.empty((arena.world if all_rows else 1, share, columns), dtype=dtype, device=input.device)
    most = most_rows(workspace, columns, dtype, cut, all_rows, fp32_wire)
    shared_bytes = room(cut, all_rows, fp32_wire)
    macros = options(arena.world, len(a), input.dtype, dtype, cut, b_rows, all_rows, fp32_wire)
    macros += profiling(workspace)
    kernel = kernel_of(workspace, FILES, macros, shared_bytes)
    stream = arena.enter()
    for first, count in parts(share, most):
        blocks, whole = cut.grid(arena.multiprocessors, cut.tiles(count, columns) * arena.world)
        made = Parameters(parameters(arena.world, len(a)))
        tensors = (a, b, b_rows, out, bias, factors)
        _fill(made.fields, workspace, tensors, wire_dtype or dtype, (share, first, count), cut, (blocks, whole))
        made.launch(kernel, blocks, THREADS, shared_bytes, stream)
    return out.view(-1, columns)[: input.shape[0]] if all_rows else out[0]


def most_rows(
    workspace: Workspace,
    columns: int,
    dtype: torch.dtype,
    cut: Tiling,
    all_rows: bool = False,
    fp32_wire: bool = False,
) -> int:
    """Rows of a rank in one launch, maybe none: by the room for partial sums (and results), and for flags."""
    peers = workspace.arena.world - 1
    item_bytes = _sum_bytes(fp32_wire) + (dtype.itemsize if all_rows else 0)
    by_bytes = workspace.bytes // (peers * columns * item_bytes) // cut.unit_rows
    return min(by_bytes, FLAGS // peers // (cut.tiles(1, columns) * cut.slices)) * cut.unit_rows


def _fill(
    fields: Any,
    workspace: Workspace,
    tensors: tuple[Any, ...],
    wire: torch.dtype,
    part: tuple[int, int, int],
    cut: Tiling,
    grid: tuple[int, int],
) -> None:
    a, b, b_rows, out, bias, factors = tensors
    rows, columns, (share, first, count) = a[0].shape[0], out.shape[2], part
    arena, peers, dtype = workspace.arena, workspace.arena.world - 1, out.dtype
    row_bytes = columns * dtype.itemsize
    for number, (left, right) in enumerate(zip(a, b, strict=True)):
        fields.a[number] = operand(left, rows, loaded_rows(count))
        fields.b[number] = operand(right, right.shape[0], STEP_BYTES // 2 if b_rows else cut.box_columns)
        fields.inner[number] = left.shape[1]
    sizes, steps = (columns, first + count, out.shape[0]), (row_bytes, share * row_bytes)
    high = TILE_ROWS // cut.split  # rows of a tile that a multiprocessor sums up
    fields.out = tensor_map(out.data_ptr(), dtype, sizes, steps, (BOX, high, 1))
    fields.copied = tensor_map(out.data_ptr(), dtype, sizes, steps, (BOX, _COPY_ROWS, 1))
    planes, pitches = (columns, count, peers), (row_bytes, count * row_bytes)
    sum_bytes, sum_box = columns * wire.itemsize, STEP_BYTES // wire.itemsize
    all_rows, results = out.shape[0] > 1, DATA_OFFSET + peers * count * sum_bytes
    sums = (wire, planes, (sum_bytes, count * sum_bytes))
    fields.received = tensor_map(workspace.base + DATA_OFFSET, *sums, (sum_box, high, 1))
    fields.results = tensor_map(workspace.base + results, dtype, planes, pitches, (BOX, _COPY_ROWS, 1))
    for number, peer in enumerate(workspace.peers):
        fields.sent[number] = tensor_map(peer + DATA_OFFSET, *sums, (sum_box, _PIECE_ROWS, 1))
        fields.given[number] = tensor_map(peer + results, dtype, planes, pitches, (BOX, _PIECE_ROWS, 1))
        fields.peer_flags[number], fields.peer_begun[number] = peer + FLAGS_OFFSET, peer + BEGUN_OFFSET
    fields.flags, fields.begun = workspace.base + FLAGS_OFFSET, workspace.base + BEGUN_OFFSET
    fields.epoch, fields.control = workspace.base, arena.control
    fields.bias = 0 if bias is None else bias.data_ptr()
    fields.a_scale, fields.b_scale = (Scale.of(each, each is not None and each.numel() > 1) for each in factors)
    fields.rows, fields.columns, fields.share = rows, columns, share
    fields.first, fields.count, fields.loaded = first, count, loaded_rows(count)
    fields.rank, fields.across = arena.rank, max(1, cut.across // cut.cluster)
    blocks, fields.whole = grid
    theirs, at_once = cut.tiles(count, columns) // cut.cluster * peers, blocks // cut.cluster
    fields.lead = theirs if cut.lead is None else min(theirs, cut.lead * at_once // peers * peers)
    # A tile is sent while the next one is computed; sooner where a peer's own tile, the lead behind it, waits for it.
    time = cut.clocks(sum(fields.inner), a[0].dtype) * min(1, fields.lead / at_once / _LEAD_ROUNDS)
    fields.pause = int(cut.pace * time / (high // _PIECE_ROWS * cut.columns // BOX))
    fields.stride, fields.results_ahead = FLAGS // peers, FLAGS
    fields.tag = _TAG_ALL_ROWS if all_rows else _TAG
    fields.profile = 0 if workspace.profile is None else workspace.profile.data_ptr()


@functools.cache
def parameters(world: int, products: int) -> type[ctypes.Structure]:
    """``Params`` of the kernel."""
    address, number, peers = ctypes.c_uint64, ctypes.c_int32, world - 1
    maps: list[tuple[str, Any]] = [(name, TensorMap * products) for name in ("a", "b")]
    maps += [(name, TensorMap) for name in ("out", "received", "results", "copied")]
    maps += [("sent", TensorMap * peers), ("given", TensorMap * peers)]
    addresses: list[tuple[str, Any]] = [(name, address * peers) for name in ("peer_flags", "peer_begun")]
    addresses += [(name, address) for name in ("flags", "begun", "epoch", "control", "bias")]
    addresses += [(name, Scale) for name in ("a_scale", "b_scale")]
    sizes = ("rows", "columns", "share", "first", "count", "loaded", "rank", "lead", "whole", "across", "pause")
    names = (*sizes, "stride", "results_ahead", "tag")
    numbers: list[tuple[str, Any]] = [("inner", number * products), *((name, number) for name in names)]
    fields = (*maps, *addresses, *numbers, ("profile", address))
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


def room(cut: Tiling, all_rows: bool, fp32_wire: bool = False) -> int:
    """Bytes of shared memory."""
    return cut.room(_beside(cut, all_rows, fp32_wire))


def _beside(cut: Tiling, all_rows: bool, fp32_wire: bool) -> int:
    """Bytes of shared memory beside operands."""
    return cut.tile_bytes(_sum_bytes(fp32_wire)) + (_COPY_BYTES if all_rows else 0) + cut.exchange_bytes


def _sum_bytes(fp32_wire: bool) -> int:
    """Of a partial sum."""
    return 4 if fp32_wire else 2


def options(
    world: int,
    products: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    cut: Tiling,
    b_rows: bool,
    all_rows: bool = False,
    fp32_wire: bool = False,
) -> tuple[tuple[str, int], ...]:
    common = cut.options(world, dtype, out_dtype, b_rows, _beside(cut, all_rows, fp32_wire))
    return *common, ("PRODUCTS", products), ("ALL_ROWS", int(all_rows)), ("WIRE_FP32", int(fp32_wire))
