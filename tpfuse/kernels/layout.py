"""How our kernels are laid over blocks and threads: pure arithmetic, the same for a launch and for the tuner.

vector  16 bytes     part  of a row that several blocks share
"""

from __future__ import annotations

import dataclasses

from tpfuse.tables import Choice

_PIECE_VECTORS = 512  # a plain message has no rows: it is cut into pieces of so many vectors
_WARP, _REGISTER_FILE = 32, 65536
_MOST_WARPS = 16  # by rule of thumb


@dataclasses.dataclass(frozen=True)
class Layout:
    """One launch.

    vectors    that a block takes at a time, a power of two: a row's, or a part's
    warps      of a block
    blocks     in the grid
    registers  most of a thread; None: as many as the compiler wants
    """

    vectors: int
    warps: int
    blocks: int
    registers: int | None

    @property
    def vectors_per_thread(self) -> int:
        return self.vectors // (_WARP * self.warps)


def layout(rows: int, vectors: int, parts: int, slots: int, multiprocessors: int, choice: Choice) -> Layout:
    """The launch for ``rows`` rows of ``vectors`` vectors.

    parts   blocks that share a row; with 1, a block takes row after row, and ``slots`` blocks have room for that
    choice  its options: warps, blocks (the most of a ring) and registers (the most of a thread); without: per thread one
            vector of each part, or two of a whole row, two blocks per multiprocessor, no bound
    """
    block = max(_WARP, 1 << (-(-vectors // parts) - 1).bit_length())
    by_rule = min(_MOST_WARPS, max(1, block // (_WARP if parts > 1 else 2 * _WARP)))
    # Never more threads than vectors in a block: Triton would let two threads take, and clear, the same slot.
    warps = min(choice.get("warps") or by_rule, block // _WARP)
    blocks = rows * parts if parts > 1 else min(rows, slots, choice.get("blocks") or 2 * multiprocessors)
    bound = choice.get("registers")
    # No thread can have more than its share of the registers: to ask for that is no bound.
    return Layout(block, warps, blocks, bound if bound and bound * warps * _WARP < _REGISTER_FILE else None)


def pieces(vectors: int) -> tuple[int, int]:
    """(rows, vectors of a row) of a message without rows; the last row may be shorter."""
    per_row = min(_PIECE_VECTORS, vectors)
    return -(-vectors // per_row), per_row
