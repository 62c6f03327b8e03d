"""What there is to measure: sizes in an order that is useful however early it ends, and the layouts of each candidate.

T  rows (tokens)     D  hidden size     vector  16 bytes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tpfuse.comm.arena import SPLIT, VECTOR_BYTES
from tpfuse.kernels.candidates import ALL_REDUCE, CANDIDATES, Problem
from tpfuse.kernels.layout import Layout, layout, pieces
from tpfuse.tables import PLAIN_ROW_BYTES, Choice

#: The layouts that were ever the fastest on 2x H200. The rule of thumb's own comes first.
SPLIT_VECTORS_PER_THREAD, RING_VECTORS_PER_THREAD = (1, 2), (2, 1)
MOST_WARPS = 32
#: Of a ring, per multiprocessor. The rule of thumb's own comes first: where a grid is smaller anyway, it stands for both.
RING_BLOCKS = (2, 1)
REGISTERS = (None, 64)
_WARP = 32


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


def sizes(ops: Sequence[str], hidden: Sequence[int], rows: Sequence[int], dtype: torch.dtype) -> list[Size]:
    """All sizes, each once: the ends of the row counts first, then ever finer between them, for each op and hidden size."""
    listed = [Size(op, count, width, dtype) for count in coarse_to_fine(rows) for op in ops for width in hidden]
    return list({size.key: size for size in reversed(listed)}.values())[::-1]


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


def choices(arena: Any, problem: Problem) -> list[Choice]:
    """Every candidate that can do the problem, in each layout that makes a difference."""
    able = [c.name for c in CANDIDATES[problem.op].values() if not c.cannot(arena, problem)]
    layouts = {"tpfuse_split": split_layouts, "tpfuse_ring": ring_layouts}
    return [choice for name in able for choice in (layouts[name](arena, problem) if name in layouts else [Choice(name)])]


def split_layouts(arena: Any, problem: Problem) -> list[Choice]:
    part = -(-_grid(problem)[1] // SPLIT)
    return [Choice("tpfuse_split", warps) for warps in _warps(part, SPLIT_VECTORS_PER_THREAD)]


def ring_layouts(arena: Any, problem: Problem) -> list[Choice]:
    """Choices that come to the same launch are one."""
    rows, vectors = _grid(problem)
    effective: dict[Layout, Choice] = {}
    for warps in _warps(vectors, RING_VECTORS_PER_THREAD):
        for per_multiprocessor in RING_BLOCKS:
            # With a row for each block, more blocks at a time are no use.
            for registers in REGISTERS if rows > max(RING_BLOCKS) * arena.multiprocessors else (None,):
                choice = Choice("tpfuse_ring", warps, per_multiprocessor * arena.multiprocessors, registers)
                laid = layout(rows, vectors, 1, arena.ring.size, arena.multiprocessors, choice)
                effective.setdefault(laid, dataclasses.replace(choice, registers=laid.registers))
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
