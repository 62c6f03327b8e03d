"""What there is to measure: sizes in an order that is useful however early it ends, and the layouts of each candidate.

T  rows (tokens)     D  hidden size     vector  16 bytes
M  rows of the whole     N  columns     K  inner dimension of a rank
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tpfuse.comm.arena import SPLIT, VECTOR_BYTES
from tpfuse.kernels.candidates import ALL_REDUCE, CANDIDATES, Problem
from tpfuse.kernels.layout import Layout, layout, pieces
from tpfuse.kernels.matmul_candidates import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MATMULS,
    OWN,
    MatmulProblem,
    table_name,
)
from tpfuse.tables import PLAIN_ROW_BYTES, Choice

#: The layouts that were ever the fastest on 2x H200. The rule of thumb's own comes first.
SPLIT_VECTORS_PER_THREAD, RING_VECTORS_PER_THREAD = (1, 2), (2, 1)
MOST_WARPS = 32
#: Of a ring, per multiprocessor. The rule of thumb's own comes first: where a grid is smaller anyway, it stands for both.
RING_BLOCKS = (2, 1)
REGISTERS = (None, 64)
_WARP = 32
#: Of our GEMM kernels: what is tried besides the columns of a tile, which go by the rows.
TILINGS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    MATMUL_REDUCE_SCATTER: {"cluster": (1, 2), "lead": (None, 1)},
    ALL_GATHER_MATMUL: {"cluster": (1, 2), "across": (16,), "pace": (0.6,)},
    MATMUL_ALL_REDUCE: {"cluster": (1, 2), "lead": (None, 1)},
}
ONLY_NARROW_ROWS, ONLY_WIDE_ROWS = 256, 4096  # up to so many rows only narrow tiles, from so many on only wide ones
#: Operation -> its candidates by name.
KNOWN: Mapping[str, Mapping[str, Any]] = {**CANDIDATES, **MATMULS}


@dataclasses.dataclass(frozen=True)
class Size:
    """One operation on [T, D]."""

    op: str
    rows: int
    hidden: int
    dtype: torch.dtype

    @property
    def problem(self) -> Problem:
        """As a model's call looks to the dispatcher: Llama's norm, or all elements in one row."""
        if self.op == ALL_REDUCE:
            return Problem(self.op, self.rows * self.hidden, 1, self.dtype)
        return Problem(self.op, self.rows, self.hidden, self.dtype, self.dtype, self.dtype, self.dtype)

    @property
    def key(self) -> tuple[str, int, int]:
        """Where it belongs in a table: operation, bytes per row, rows."""
        row_bytes = self.hidden * self.dtype.itemsize
        if self.op == ALL_REDUCE:
            return self.op, PLAIN_ROW_BYTES, self.rows * row_bytes
        return self.op, row_bytes, self.rows

    @property
    def bytes(self) -> int:
        return self.rows * self.hidden * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.op} of {self.rows} x {self.hidden}"


@dataclasses.dataclass(frozen=True)
class MatmulSize:
    """One GEMM with a collective: M rows of the whole, N columns and K on each of the ranks."""

    op: str
    rows: int
    columns: int
    inner: int
    world: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def share(self) -> int:
        """Rows of each rank in what is gathered or scattered."""
        return self.rows if self.op == MATMUL_ALL_REDUCE else -(-self.rows // self.world)

    @property
    def problem(self) -> MatmulProblem:
        out_dtype = torch.bfloat16 if self.dtype.itemsize == 1 else None
        dtypes = (self.dtype, self.dtype)
        return MatmulProblem(self.op, self.rows, (self.columns,), self.inner, dtypes, self.share, out_dtype)

    @property
    def key(self) -> tuple[str, tuple[int, int], int]:
        """Where it belongs in a table."""
        return table_name(self.op, self.dtype), (self.columns, self.inner), self.rows

    @property
    def bytes(self) -> int:
        return self.rows * (self.columns + self.inner) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.op} of {self.rows} x {self.columns} x {self.inner}"


def sizes(ops: Sequence[str], hidden: Sequence[int], rows: Sequence[int], dtype: torch.dtype) -> list[Size]:
    """All sizes, each once: the ends of the row counts first, then ever finer between them, for each op and hidden size."""
    listed = [Size(op, count, width, dtype) for count in coarse_to_fine(rows) for op in ops for width in hidden]
    return list({size.key: size for size in reversed(listed)}.values())[::-1]


def matmul_sizes(
    ops: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    world: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[MatmulSize]:
    """As above, for each op and (N, K)."""
    return [MatmulSize(op, n, *shape, world, dtype) for n in coarse_to_fine(rows) for op in ops for shape in shapes]


def coarse_to_fine(values: Sequence[int]) -> Iterator[int]:
    """Smallest, largest, the one in the middle, those in the middle of the halves, ..."""
    values = sorted(set(values))
    yield from dict.fromkeys((values[0], values[-1]))
    spans = [(0, len(values) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            yield values[middle]
            spans += [(low, middle), (middle, high)]


def choices(arena: Any, problem: Problem | MatmulProblem) -> list[Choice]:
    """Every candidate that can do the problem, in each layout that makes a difference."""
    if isinstance(problem, MatmulProblem):
        return _matmul_choices(arena, problem)
    able = [c.name for c in CANDIDATES[problem.op].values() if not c.cannot(arena, problem)]
    layouts = {"tpfuse_split": split_layouts, "tpfuse_ring": ring_layouts}
    return [choice for name in able for choice in (layouts[name](arena, problem) if name in layouts else [Choice(name)])]


def split_layouts(arena: Any, problem: Problem) -> list[Choice]:
    part = -(-_grid(problem)[1] // SPLIT)
    return [Choice("tpfuse_split", warps=warps) for warps in _warps(part, SPLIT_VECTORS_PER_THREAD)]


def ring_layouts(arena: Any, problem: Problem) -> list[Choice]:
    """Choices that come to the same launch are one."""
    rows, vectors = _grid(problem)
    effective: dict[Layout, Choice] = {}
    for warps in _warps(vectors, RING_VECTORS_PER_THREAD):
        for per_multiprocessor in RING_BLOCKS:
            # With a row for each block, more blocks at a time are no use.
            for registers in REGISTERS if rows > max(RING_BLOCKS) * arena.multiprocessors else (None,):
                options = {"warps": warps, "blocks": per_multiprocessor * arena.multiprocessors}
                bound = {} if registers is None else {"registers": registers}
                choice = Choice("tpfuse_ring", **options, **bound)
                laid = layout(rows, vectors, 1, arena.ring.size, arena.multiprocessors, choice)
                effective.setdefault(laid, choice if laid.registers else Choice("tpfuse_ring", **options))
    return list(effective.values())


def _grid(problem: Problem) -> tuple[int, int]:
    """(rows, vectors of a row) as the kernels see a problem."""
    vectors = -(-problem.row_bytes // VECTOR_BYTES)
    if problem.op != ALL_REDUCE:
        return problem.rows, vectors
    return pieces(-(-problem.rows * problem.row_bytes // VECTOR_BYTES))


def _warps(vectors: int, per_thread: Sequence[int]) -> list[int]:
    """Warps of a block for so many vectors (rounded up to a power of two) of each thread; never a thread without any."""
    most = max(_WARP, 1 << (vectors - 1).bit_length()) // _WARP
    return list(dict.fromkeys(min(MOST_WARPS, max(1, most // each)) for each in per_thread))


def _matmul_choices(arena: Any, problem: MatmulProblem) -> list[Choice]:
    listed = []
    for candidate in MATMULS[problem.op].values():
        ours = [Choice(OWN, **dataclasses.asdict(tiling)) for tiling in tilings(problem)]
        laid = ours if candidate.name == OWN else [Choice(candidate.name)]
        listed += [choice for choice in laid if not candidate.cannot(arena, problem, choice)]
    return listed


def tilings(problem: MatmulProblem) -> list[Any]:
    """Of our kernel: each of ``TILINGS`` with tiles that suit so many rows, and as many stages as there is room for."""
    from tpfuse.kernels.cuda import all_gather_matmul, matmul_reduce_scatter
    from tpfuse.kernels.cuda.gemm import SPLIT, Tiling, most_stages

    def room(tiling: Tiling) -> int:
        if problem.op == ALL_GATHER_MATMUL:
            return all_gather_matmul.room(tiling)
        return matmul_reduce_scatter.room(tiling, problem.op == MATMUL_ALL_REDUCE)

    tried = TILINGS.get(problem.op, {})
    found = []
    for columns in _tile_columns(problem.rows):
        for values in itertools.product(*tried.values()):
            cut = Tiling(columns=columns, **dict(zip(tried, values, strict=True)))
            most = most_stages(cut, room)
            # With a stage less, a whole wide tile of gathered rows' results has room, and is stored at once.
            for stages in (most, most - 1) if problem.op == ALL_GATHER_MATMUL and columns == 256 else (most,):
                found.append(dataclasses.replace(cut, stages=stages))
    if problem.rows <= ONLY_NARROW_ROWS:  # else there are tiles enough
        cut = dataclasses.replace(found[0], columns=SPLIT.columns, cluster=SPLIT.cluster, split=SPLIT.split)
        found.append(dataclasses.replace(cut, stages=most_stages(cut, room)))
    return found


def _tile_columns(rows: int) -> tuple[int, ...]:
    if rows <= ONLY_NARROW_ROWS:
        return (128,)
    return (128, 192, 256) if rows < ONLY_WIDE_ROWS else (256,)
