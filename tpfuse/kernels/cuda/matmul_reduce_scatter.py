"""GEMM + reduce-scatter by our own kernel: tensors as it needs them, tiles and pace by size, then launched.

M  rows     K  inner dimension     N  columns     S  rows of one rank
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from tpfuse.comm.workspace import BEGUN_OFFSET, DATA_OFFSET, FLAGS, FLAGS_OFFSET, Workspace
from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.cuda.gemm import (
    BOX,
    STEP,
    THREADS,
    TILE_ROWS,
    Tiling,
    by_rows,
    kernel_of,
    operand,
    parts,
    right_operands,
)
from tpfuse.kernels.cuda.launch import Parameters, TensorMap, tensor_map

FILES = ("hopper.cuh", "gemm.cuh", "matmul_reduce_scatter.cu")
_PIECE_ROWS = 32
_TAG = 4  # comm/arena.py TAGS


def tiling(rows: int, columns: int, inner: int) -> Tiling:
    """By rule of thumb, for ``rows`` of a rank: small tiles where there are few, own ones mixed in where they are short."""
    lead = 2 if inner <= 4096 else None
    return Tiling(128, 6, lead=lead) if rows * columns <= 512 * 4096 else Tiling(lead=lead)


def matmul_reduce_scatter(
    workspace: Workspace,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    share: int,
    *,
    cut: Tiling | None = None,
) -> torch.Tensor:
    """The operation of ``tpfuse.ops.matmul_reduce_scatter`` (see there), on what ``gemm.cannot`` has nothing against.

    share  S, of every rank
    Partial sums travel in the input's dtype. Where they do not fit into the workspace at once, it is done in parts.
    Raises BuildError.
    """
    arena, dtype = workspace.arena, input.dtype
    columns = weight.shape[1]
    cut = cut or tiling(share, columns, input.shape[1])
    a, bias, (b_rows, (b,)) = by_rows(input), aligned(bias), right_operands([weight])
    out = torch.empty((share, columns), dtype=dtype, device=input.device)
    most = most_rows(workspace, columns, dtype, cut)
    kernel = kernel_of(workspace, FILES, options(arena.world, dtype, cut, b_rows), cut.shared_bytes)
    stream = arena.enter()
    for first, count in parts(share, most):
        blocks = cut.blocks(arena.multiprocessors, cut.tiles(count, columns) * arena.world)
        made = Parameters(parameters(arena.world))
        _fill(made.fields, workspace, (a, b, b_rows, out, bias), (share, first, count), cut, blocks)
        made.launch(kernel, blocks, THREADS, cut.shared_bytes, stream)
    return out


def most_rows(workspace: Workspace, columns: int, dtype: torch.dtype, cut: Tiling) -> int:
    """Rows of a rank in one launch, maybe none: by the room for partial sums, and for a flag per tile."""
    peers = workspace.arena.world - 1
    by_bytes = workspace.bytes // (peers * columns * dtype.itemsize) // cut.unit_rows
    return min(by_bytes, FLAGS // peers // cut.tiles(1, columns)) * cut.unit_rows


def _fill(
    fields: Any, workspace: Workspace, tensors: tuple[Any, ...], part: tuple[int, int, int], cut: Tiling, blocks: int
) -> None:
    a, b, b_rows, out, bias = tensors
    (rows, inner), columns, (share, first, count) = a.shape, out.shape[1], part
    arena, peers, dtype = workspace.arena, workspace.arena.world - 1, a.dtype
    row_bytes = columns * a.element_size()
    fields.a, fields.b = operand(a, rows, TILE_ROWS), operand(b, b.shape[0], STEP if b_rows else cut.columns // cut.cluster)
    fields.out = tensor_map(out.data_ptr(), dtype, (columns, first + count), (row_bytes,), (BOX, TILE_ROWS))
    planes, pitches = (columns, count, peers), (row_bytes, count * row_bytes)
    fields.received = tensor_map(workspace.base + DATA_OFFSET, dtype, planes, pitches, (BOX, TILE_ROWS, 1))
    for number, peer in enumerate(workspace.peers):
        fields.sent[number] = tensor_map(peer + DATA_OFFSET, dtype, planes, pitches, (BOX, _PIECE_ROWS, 1))
        fields.peer_flags[number], fields.peer_begun[number] = peer + FLAGS_OFFSET, peer + BEGUN_OFFSET
    fields.flags, fields.begun = workspace.base + FLAGS_OFFSET, workspace.base + BEGUN_OFFSET
    fields.epoch, fields.control = workspace.base, arena.control
    fields.bias = 0 if bias is None else bias.data_ptr()
    fields.rows, fields.columns, fields.inner, fields.share = rows, columns, inner, share
    fields.first, fields.count, fields.rank, fields.across = first, count, arena.rank, max(1, cut.across // cut.cluster)
    theirs, at_once = cut.tiles(count, columns) // cut.cluster * peers, blocks // cut.cluster
    fields.lead = theirs if cut.lead is None else min(theirs, cut.lead * at_once // peers * peers)
    fields.pause = int(cut.pace * cut.clocks(inner) / (TILE_ROWS // _PIECE_ROWS * cut.columns // BOX))
    fields.stride, fields.tag = FLAGS // peers, _TAG


@functools.cache
def parameters(world: int) -> type[ctypes.Structure]:
    """``Params`` of the kernel."""
    address, number, peers = ctypes.c_uint64, ctypes.c_int32, world - 1
    maps: list[tuple[str, Any]] = [(name, TensorMap) for name in ("a", "b", "out", "received")]
    maps += [("sent", TensorMap * peers)]
    addresses: list[tuple[str, Any]] = [(name, address * peers) for name in ("peer_flags", "peer_begun")]
    addresses += [(name, address) for name in ("flags", "begun", "epoch", "control", "bias")]
    names = ("rows", "columns", "inner", "share", "first", "count", "rank", "lead", "across", "pause", "stride", "tag")
    return type("Params", (ctypes.Structure,), {"_fields_": (*maps, *addresses, *((name, number) for name in names))})


def options(world: int, dtype: torch.dtype, cut: Tiling, b_rows: bool) -> tuple[tuple[str, int], ...]:
    return *cut.options(world, dtype, b_rows), ("PIECE_ROWS", _PIECE_ROWS)
