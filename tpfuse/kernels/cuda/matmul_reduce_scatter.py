"""GEMM + reduce-scatter by our own kernel: tensors as it needs them, tiles and pace by size, then launched.

M  rows     K  inner dimension     N  columns     S  rows of one rank
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import torch

from tpfuse.comm.workspace import BEGUN_OFFSET, DATA_OFFSET, FLAGS, FLAGS_OFFSET, Workspace
from tpfuse.kernels.cuda import build
from tpfuse.kernels.cuda.launch import Parameters, TensorMap, tensor_map

_FILES = ("hopper.cuh", "gemm.cuh", "matmul_reduce_scatter.cu")
_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
_TILE_ROWS, _STEP, _BOX = 128, 64, 64  # BM, BK and the columns of a box in gemm.cuh
_PIECE_ROWS, _THREADS, _ALIGNMENT = 32, 384, 8
_FLOP_PER_CLOCK = 4096  # of one multiprocessor, 16-bit
_TAG = 4  # comm/arena.py TAGS


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    columns  of a tile, 128 or 256; stages: of its operands in shared memory
    across   rows of tiles that are computed together, for the L2 cache
    lead     tiles of the peers, per multiprocessor, before own ones are mixed in; None: all of them
    pace     pause between pieces, as a share of what would spread a tile's pieces over the time of a tile
    """

    columns: int = 256
    stages: int = 3
    across: int = 8
    lead: int | None = None
    pace: float = 0.8


def tiling(rows: int, columns: int, inner: int) -> Tiling:
    """By rule of thumb, for ``rows`` of a rank: small tiles where there are few, own ones mixed in where they are short."""
    small = rows * columns <= 512 * 4096
    lead = 2 if inner <= 4096 else None
    return Tiling(128, 6, lead=lead) if small else Tiling(lead=lead)


def cannot(rows: int, columns: int, inner: int, dtype: torch.dtype) -> str:
    """Why the kernel cannot do this, wherever; "" if it can."""
    if dtype not in _ELEMENTS:
        return f"dtype {dtype}"
    if columns % _ALIGNMENT or inner % _ALIGNMENT:
        return f"K = {inner} and N = {columns} must be multiples of {_ALIGNMENT}"
    if not inner or not rows or not columns:
        return "nothing to compute"
    return ""


def matmul_reduce_scatter(
    workspace: Workspace,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    unit: int = 1,
    *,
    cut: Tiling | None = None,
) -> torch.Tensor:
    """The operation of ``tpfuse.ops.matmul_reduce_scatter`` (see there), on what ``cannot`` has nothing against.

    Partial sums travel in the input's dtype. Where they do not fit into half of the workspace at once, it is done in parts.
    """
    arena, dtype = workspace.arena, input.dtype
    rows, inner = input.shape
    columns = weight.shape[1]
    share = -(-rows // (unit * arena.world)) * unit
    cut = cut or tiling(share, columns, inner)
    a, b = _by_rows(input), _by_rows(weight.t())
    out = torch.empty((share, columns), dtype=dtype, device=input.device)
    row_bytes = columns * dtype.itemsize
    most = workspace.half // ((arena.world - 1) * row_bytes)
    most = min(most, FLAGS // (arena.world - 1) // -(-columns // cut.columns) * _TILE_ROWS) // _TILE_ROWS * _TILE_ROWS
    assert most, "a row of tiles does not fit into the workspace"
    kernel, shared_bytes = _kernel(arena.world, dtype, cut.columns, cut.stages, arena.device.index)
    stream = arena.enter()
    for first in range(0, share, most):
        count = min(most, share - first)
        made = Parameters(_parameters(arena.world))
        tiles = -(-count // _TILE_ROWS) * -(-columns // cut.columns)
        blocks = min(torch.cuda.get_device_properties(arena.device).multi_processor_count, tiles * arena.world)
        _fill(made.fields, workspace, a, b, out, bias, (share, first, count), cut, tiles, blocks)
        made.launch(kernel, blocks, _THREADS, shared_bytes, stream)
    return out


def _fill(
    fields: Any,
    workspace: Workspace,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    part: tuple[int, int, int],
    cut: Tiling,
    tiles: int,
    blocks: int,
) -> None:
    arena, peers = workspace.arena, workspace.arena.world - 1
    (rows, inner), (columns, _), (share, first, count) = a.shape, b.shape, part
    item = a.element_size()
    row_bytes, dtype = columns * item, a.dtype
    fields.a = tensor_map(a.data_ptr(), dtype, (inner, rows), (a.stride(0) * item,), (_STEP, _TILE_ROWS))
    fields.b = tensor_map(b.data_ptr(), dtype, (inner, columns), (b.stride(0) * item,), (_STEP, cut.columns))
    fields.out = tensor_map(out.data_ptr(), dtype, (columns, first + count), (row_bytes,), (_BOX, _TILE_ROWS))
    planes, pitches = (columns, count, 2 * peers), (row_bytes, count * row_bytes)
    fields.received = tensor_map(workspace.base + DATA_OFFSET, dtype, planes, pitches, (_BOX, _TILE_ROWS, 1))
    for number, peer in enumerate(workspace.peers):
        fields.sent[number] = tensor_map(peer + DATA_OFFSET, dtype, planes, pitches, (_BOX, _PIECE_ROWS, 1))
        fields.peer_flags[number], fields.peer_begun[number] = peer + FLAGS_OFFSET, peer + BEGUN_OFFSET
    fields.flags, fields.begun = workspace.base + FLAGS_OFFSET, workspace.base + BEGUN_OFFSET
    fields.epoch, fields.control = workspace.base, arena.control
    fields.bias = 0 if bias is None else bias.data_ptr()
    fields.rows, fields.columns, fields.inner, fields.share = rows, columns, inner, share
    fields.first, fields.count, fields.rank, fields.across = first, count, arena.rank, cut.across
    theirs = tiles * peers
    fields.lead = theirs if cut.lead is None else min(theirs, cut.lead * blocks // peers * peers)
    clocks = 2 * _TILE_ROWS * cut.columns * inner / _FLOP_PER_CLOCK
    fields.pause = int(cut.pace * clocks / (_TILE_ROWS // _PIECE_ROWS * cut.columns // _BOX))
    fields.tag = _TAG


@functools.cache
def _parameters(world: int) -> type[ctypes.Structure]:
    """``Params`` of the kernel."""
    address, number, peers = ctypes.c_uint64, ctypes.c_int32, world - 1
    maps: list[tuple[str, Any]] = [(name, TensorMap) for name in ("a", "b", "out", "received")]
    maps += [("sent", TensorMap * peers)]
    addresses: list[tuple[str, Any]] = [(name, address * peers) for name in ("peer_flags", "peer_begun")]
    addresses += [(name, address) for name in ("flags", "begun", "epoch", "control", "bias")]
    names = ("rows", "columns", "inner", "share", "first", "count", "rank", "lead", "across", "pause", "tag")
    return type("Params", (ctypes.Structure,), {"_fields_": (*maps, *addresses, *((name, number) for name in names))})


def _kernel(world: int, dtype: torch.dtype, columns: int, stages: int, device: int) -> tuple[int, int]:
    """(the kernel, bytes of shared memory that it needs). Raises BuildError."""
    stage = (_TILE_ROWS + columns) * _STEP * 2
    shared_bytes = stages * stage + _TILE_ROWS * columns * 2 + 1024
    options = options_for(world, dtype, columns, stages)
    return build.kernel(_FILES, "matmul_reduce_scatter", options, shared_bytes, device), shared_bytes


def options_for(world: int, dtype: torch.dtype, columns: int, stages: int) -> tuple[tuple[str, int], ...]:
    return (
        ("WORLD", world),
        ("ELEMENT", _ELEMENTS[dtype]),
        ("BN", columns),
        ("STAGES", stages),
        ("PIECE_ROWS", _PIECE_ROWS),
    )


def _by_rows(matrix: torch.Tensor) -> torch.Tensor:
    """With its last dimension contiguous and rows on 16-byte boundaries: a copy where it is not."""
    fits = matrix.stride(1) == 1 and not matrix.stride(0) % _ALIGNMENT and not matrix.data_ptr() % 16
    return matrix if fits and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()
