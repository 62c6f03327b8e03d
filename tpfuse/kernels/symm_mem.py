"""torch's own symmetric-memory all-reduces, one-shot and two-shot, as a candidate: a copy into symmetric memory first.

The buffer is made by ``prepare``: collectively, outside graph captures, never freed while the group's arena lives. torch's
kernels share one set of signals per group, so all of a group's calls must be on one stream. No multicast.

Source: torch.ops.symm_mem (torch 2.11 to 2.14); it rounds at each addition, in rank order.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from tpfuse.comm import agreement, groups
from tpfuse.comm.arena import VECTOR_BYTES, Arena
from tpfuse.errors import first_line
from tpfuse.kernels.candidates import NOT_PREPARED, Problem

_ONE_SHOT_BYTES = 16 << 10  # sent by each rank; above it two-shot is measured to be faster also between two ranks
_LEAST_BYTES = 1 << 20
_SUBJECT = "preparing torch's symmetric memory"


@dataclasses.dataclass
class _State:
    """A group's buffer, the same size on all its ranks."""

    reason: str = ""  # why it can never have one
    buffer: torch.Tensor | None = None  # bytes
    older: list[torch.Tensor] = dataclasses.field(default_factory=list)


_states: weakref.WeakKeyDictionary[Arena, _State] = weakref.WeakKeyDictionary()


def cannot(arena: Arena, problem: Problem) -> str:
    """Why torch's kernels cannot do this problem, as far as can be told without talking to the other ranks."""
    size = problem.rows * problem.row_bytes
    if problem.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {problem.dtype}"
    if size % VECTOR_BYTES:
        return f"a message of {size} bytes is not a multiple of {VECTOR_BYTES}"
    state = _states.get(arena)
    if state is not None and state.reason:
        return state.reason
    if state is None or state.buffer is None or state.buffer.numel() < size:
        return NOT_PREPARED
    return ""


def prepare(arena: Arena, problem: Problem) -> str:
    """Make sure that the buffer holds the problem; why it does not, or "". Collective, and not inside a capture."""
    if cannot(arena, problem) != NOT_PREPARED:
        return cannot(arena, problem)
    if torch.cuda.is_current_stream_capturing():
        return f"{NOT_PREPARED}, and a CUDA graph is being captured"
    from torch.distributed import _symmetric_memory as torch_symm_mem

    state = _states.setdefault(arena, _State())
    group = groups.resolve(arena.group_name)
    size = max(_LEAST_BYTES, 1 << (problem.rows * problem.row_bytes - 1).bit_length())
    made, reason = None, ""
    try:
        made = torch_symm_mem.empty(size, dtype=torch.uint8, device=arena.device)
    except RuntimeError as error:  # out of memory is one
        reason = first_line(error)[:200]
    state.reason = agreement.told(agreement.exchange(group, _SUBJECT, {"reason": reason}))
    if state.reason:
        return state.reason
    assert made is not None
    try:
        torch_symm_mem.rendezvous(made, arena.group_name)
    except RuntimeError as error:
        reason = first_line(error)[:200]
    state.reason = agreement.told(agreement.exchange(group, _SUBJECT, {"reason": reason}))
    if not state.reason:
        if state.buffer is not None:
            state.older.append(state.buffer)
        state.buffer = made
    return state.reason


def all_reduce(arena: Arena, input: torch.Tensor, *, one_shot: bool | None = None) -> torch.Tensor:
    """The sum over ranks.

    input     [...]  bf16 or fp32, whole vectors of 16 bytes
    one_shot  every rank reads all parts (True) or reduces a share and gathers (False); None: by size
    returns   [...]  a new contiguous tensor
    """
    summed = _sum(arena, input, one_shot)
    return summed.clone() if _is_buffer(arena, summed) else summed


def all_reduce_rms_norm(
    arena: Arena, input: torch.Tensor, *arguments: Any, one_shot: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.all_reduce_rms_norm``: torch's all-reduce, then one kernel of ours for the rest."""
    from tpfuse.kernels.triton import own  # a CPU may have no Triton

    return own.rms_norm(arena, _sum(arena, input, one_shot), *arguments)


def _sum(arena: Arena, input: torch.Tensor, one_shot: bool | None) -> torch.Tensor:
    """The sum; of a two-shot all-reduce it lies in the buffer, until the next call."""
    state = _states[arena]
    assert state.buffer is not None
    size = input.numel() * input.itemsize
    if one_shot is None:
        one_shot = (arena.world - 1) * size <= _ONE_SHOT_BYTES
    arena.enter()
    part = state.buffer[:size].view(input.dtype).view(input.shape)
    part.copy_(input)
    if one_shot:
        return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", arena.group_name)
    return torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", arena.group_name)


def _is_buffer(arena: Arena, tensor: torch.Tensor) -> bool:
    buffer = _states[arena].buffer
    return buffer is not None and tensor.data_ptr() == buffer.data_ptr()
