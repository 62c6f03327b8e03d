"""torch's own symmetric-memory kernels as candidates: all-reduces, one-shot and two-shot, and GEMMs with collectives.

An all-reduce is a copy into symmetric memory first. That buffer is made by ``prepare``, and the workspace that torch keeps
for GEMMs by ``prepare_matmul``: collectively, outside graph captures, never freed while the group's arena lives. torch's
kernels share one set of signals per group, so all of a group's calls must be on one stream. No multicast, but where torch
itself prefers it (few gathered rows).

Source: torch.ops.symm_mem (torch 2.11 to 2.14); it rounds at each addition, in rank order.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpfuse.comm import agreement, groups
from tpfuse.comm.arena import VECTOR_BYTES, Arena
from tpfuse.errors import first_line
from tpfuse.kernels.candidates import NOT_PREPARED, Problem
from tpfuse.kernels.fp8 import Fp8
from tpfuse.kernels.matmul_candidates import ALL_GATHER_MATMUL, MatmulProblem

_ONE_SHOT_BYTES = 16 << 10  # sent by each rank; above it two-shot is measured to be faster also between two ranks
_LEAST_BYTES = 1 << 20
_SUBJECT = "preparing torch's symmetric memory"
_CAPTURING = f"{NOT_PREPARED}, and a CUDA graph is being captured"


@dataclasses.dataclass
class _State:
    """A group's buffer, the same size on all its ranks."""

    reason: str = ""  # why it can never have one
    buffer: torch.Tensor | None = None  # bytes
    older: list[torch.Tensor] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Workspace:
    """What torch keeps for a group's GEMMs, as far as it was made here. Graphs may hold the addresses of all of it."""

    reason: str = ""  # why there can never be more
    bytes: int = 0
    kept: list[Any] = dataclasses.field(default_factory=list)


_states: weakref.WeakKeyDictionary[Arena, _State] = weakref.WeakKeyDictionary()
_workspaces: weakref.WeakKeyDictionary[Arena, _Workspace] = weakref.WeakKeyDictionary()


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
        return _CAPTURING
    from torch.distributed import _symmetric_memory as torch_symm_mem

    def connect(held: list[Any]) -> torch.Tensor:
        torch_symm_mem.rendezvous(held[0], arena.group_name)
        return held[0]

    state = _states.setdefault(arena, _State())
    made, state.reason = _make(arena, _room(problem.rows * problem.row_bytes), connect)
    if not state.reason:
        if state.buffer is not None:
            state.older.append(state.buffer)
        state.buffer = made
    return state.reason


def _room(size: int) -> int:
    return max(_LEAST_BYTES, 1 << (size - 1).bit_length())


def _make(arena: Arena, size: int, connect: Callable[[list[Any]], Any]) -> tuple[Any, str]:
    """(what ``connect`` gives for so much memory, "") or (anything, why one of the ranks has none). Collective.

    connect  of a list that alone holds the memory
    """
    from torch.distributed import _symmetric_memory as torch_symm_mem

    group, made, result, reason = groups.resolve(arena.group_name), None, None, ""
    try:
        made = torch_symm_mem.empty(size, dtype=torch.uint8, device=arena.device)
    except RuntimeError as error:  # out of memory is one
        reason = first_line(error)[:200]
    reason = agreement.told(agreement.exchange(group, _SUBJECT, {"reason": reason}))
    if reason:
        return None, reason
    held, made = [made], None
    try:
        result = connect(held)
    except RuntimeError as error:
        reason = first_line(error)[:200]
    return result, agreement.told(agreement.exchange(group, _SUBJECT, {"reason": reason}))


def all_reduce(arena: Arena, input: torch.Tensor, *, one_shot: bool | None = None) -> torch.Tensor:
    """The sum over ranks.

    input     [...]  bf16 or fp32, whole vectors of 16 bytes
    one_shot  every rank reads all parts (True) or reduces a share and gathers (False); None: by size
    returns   [...]  a new contiguous tensor
    """
    summed = _sum(arena, input, one_shot)
    return summed.clone() if _is_buffer(arena, summed) else summed


def all_reduce_rms_norm(
    arena: Arena, input: torch.Tensor, *arguments: Any, one_shot: bool | None = None, fp8: Fp8 | None = None
) -> tuple[torch.Tensor, ...]:
    """The operation of ``tpfuse.ops.all_reduce_rms_norm``: torch's all-reduce, then one kernel of ours for the rest."""
    from tpfuse.kernels.triton import own  # a CPU may have no Triton

    return own.rms_norm(arena, _sum(arena, input, one_shot), *arguments, fp8=fp8)


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


# -- GEMMs -------------------------------------------------------------------------------------------------------------


def cannot_matmul(arena: Arena, problem: MatmulProblem) -> str:
    """Why torch's kernels cannot do this problem, as far as can be told without talking to the other ranks."""
    if problem.dtype.itemsize == 1:
        return "scales"
    if problem.out_dtype not in (None, problem.dtype):
        return f"a result in {problem.out_dtype}"
    if problem.wire_dtype is not None:
        return f"partial sums in {problem.wire_dtype}"
    if len(problem.inners) > 1:
        return "a sum of products"
    if problem.share * arena.world != problem.rows:
        return f"{problem.rows} rows are not a multiple of {arena.world} ranks"
    made = _workspaces.get(arena)
    if made is not None and made.reason:
        return made.reason
    return "" if made is not None and made.bytes >= _matmul_bytes(arena, problem) else NOT_PREPARED


def _matmul_bytes(arena: Arena, problem: MatmulProblem) -> int:
    """At least what torch's kernels ask for: all gathered rows, or two ranks' shares of the partial sums."""
    numbers = arena.world * problem.inner if problem.op == ALL_GATHER_MATMUL else 2 * problem.columns
    return problem.share * numbers * problem.dtype.itemsize


def prepare_matmul(arena: Arena, problem: MatmulProblem) -> str:
    """Make sure that torch's workspace is large enough; why it is not, or "". Collective, and not inside a capture."""
    if cannot_matmul(arena, problem) != NOT_PREPARED:
        return cannot_matmul(arena, problem)
    if torch.cuda.is_current_stream_capturing():
        return _CAPTURING
    from torch.distributed import _symmetric_memory as torch_symm_mem

    size = _room(_matmul_bytes(arena, problem))
    state = _workspaces.setdefault(arena, _Workspace())

    def connect(held: list[Any]) -> Any:
        held.clear()  # what is agreed on goes back, and torch takes its own: every rank has room for it
        return torch_symm_mem.get_symm_mem_workspace(arena.group_name, size)

    made, state.reason = _make(arena, size, connect)
    if not state.reason:
        state.bytes = size
        state.kept.append(made)  # torch itself would let go of a smaller one
    return state.reason


def matmul_reduce_scatter(
    arena: Arena, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The operation of ``tpfuse.ops.matmul_reduce_scatter``, on what ``cannot_matmul`` has nothing against."""
    import torch.distributed._symmetric_memory  # registers torch's operations

    arena.enter()
    total = torch.ops.symm_mem.fused_matmul_reduce_scatter(input, weight, "sum", 0, arena.group_name)
    return total if bias is None else total.add_(bias)


def all_gather_matmul(
    arena: Arena,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gathered: bool,
) -> list[torch.Tensor]:
    """The operation of ``tpfuse.ops.all_gather_matmul``, on what ``cannot_matmul`` has nothing against."""
    import torch.distributed._symmetric_memory  # registers torch's operations

    arena.enter()
    whole, results = torch.ops.symm_mem.fused_all_gather_matmul(
        input, list(weights), 0, arena.group_name, return_A=gathered
    )
    for number, bias in enumerate(biases):
        if bias is not None:
            results[number].add_(bias)
    return [*results, whole] if gathered else results
