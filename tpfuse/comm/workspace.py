"""Symmetric memory for GEMMs that exchange tiles: flags, and partial sums or gathered rows on their way. One per group.

    header  {int32 epoch of the last call that has ended, int32 CTAs that have ended this one}, then for each source the
            epoch of the call that it has begun
    flags   int32 each, some for each source: the epoch that has arrived; once for partial sums, once for results
    counts  int32 each, some for each source: pieces that have arrived
    data    as many bytes as the arena has. A rank writes to another once that has begun the same call, so all calls use it

It stands beside the group's arena, whose control block and order of calls it shares, and like that it never grows or moves.
"""

from __future__ import annotations

import math
import uuid

import torch

from tpfuse.comm import agreement, groups
from tpfuse.comm.arena import Arena, plain_tensors
from tpfuse.comm.symmetric import SymmetricMemory
from tpfuse.errors import first_line

FLAGS, COUNTS = 1 << 16, 1 << 13  # of all sources; FLAGS twice
BEGUN_OFFSET, FLAGS_OFFSET = 256, 4096
COUNTS_OFFSET = FLAGS_OFFSET + 2 * 4 * FLAGS
DATA_OFFSET = COUNTS_OFFSET + 4 * COUNTS
_SUBJECT = "making the workspace of GEMMs"


class Workspace:
    """A group's. Made by ``of``; every rank of the group has one, or none has.

    base   address of this rank's block
    peers  of those of rank + 1, rank + 2, ...
    bytes  of the data
    profile  int64 [multiprocessors, 8]: where the next calls write how long they waited (see hopper.cuh), None: nowhere
    """

    def __init__(self, arena: Arena, size: int) -> None:
        """Only the part that cannot hang."""
        self.arena = arena
        self._symmetric = SymmetricMemory(arena.device, DATA_OFFSET + size)
        self.kernels: dict[tuple, int] = {}  # that all ranks have built
        self.bytes = size
        self.profile: torch.Tensor | None = None

    def connect(self, name: str) -> None:
        """The collective part."""
        self._symmetric.connect(groups.resolve(self.arena.group_name), name)
        self._symmetric.tensor[: DATA_OFFSET // 4].zero_()
        bases, rank = self._symmetric.bases, self.arena.rank
        self.base, self.peers = bases[rank], [*bases[rank + 1 :], *bases[:rank]]
        torch.cuda.synchronize(self.arena.device)

    def data(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The beginning of the data."""
        return self._symmetric.tensor[DATA_OFFSET // 4 :].view(dtype)[: math.prod(shape)].view(shape)


def of(arena: Arena) -> Workspace | str:
    """The workspace of a group, as large as its arena, or why it has none. The first call is collective."""
    found = arena.workspace
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured: call once before"
        with plain_tensors():
            found = arena.workspace = _make(arena)
    return found


def _make(arena: Arena) -> Workspace | str:
    group, made, reason = groups.resolve(arena.group_name), None, ""
    try:
        made = Workspace(arena, arena.bytes)
    except RuntimeError as error:  # out of memory
        reason = f"no memory for GEMMs: {first_line(error)}"
    everybody = agreement.exchange(group, _SUBJECT, {"reason": reason, "name": uuid.uuid4().hex})
    reason = agreement.told(everybody)
    if reason:
        return reason
    assert made is not None
    try:
        made.connect(f"tpfuse/workspace/{everybody[0]['name']}")
    except RuntimeError as error:
        reason = f"the ranks cannot reach each other's memory: {first_line(error)}"
    return agreement.told(agreement.exchange(group, _SUBJECT, {"reason": reason})) or made
