"""FlashInfer's one-shot and two-shot all-reduce + residual add + RMSNorm (the kernels of TensorRT-LLM), as a candidate.

It works in symmetric memory of its own, made by ``prepare``: collectively, outside graph captures, never freed while the
group's arena lives (captured graphs hold its addresses). Nothing here runs unless asked for by name or measured to be the
fastest.

It adds up in fp32, rounds the sum before the residual is added, and rounds the norm once, after the weight: a model that
rounds the normalised value before the weight gets a result that differs by that rounding.

T  rows (tokens)     D  hidden size
Source: flashinfer.comm.allreduce_fusion, 0.6.13 and later; the limits below are from reading it.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import weakref
from typing import Any

import torch

from tpfuse.comm import agreement, groups
from tpfuse.comm.arena import VECTOR_BYTES, Arena
from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM, NOT_PREPARED, Problem

OLDEST, PDL_FROM = (0, 6, 13), (0, 7, 4)  # before the latter its kernels read the residual ahead of the grid dependency
WORLDS = (2, 4, 8)
_MOST_BYTES = (1 << 30) - (2 << 20)  # of all ranks' messages together: twice that is an offset of 32 bits, with a sign
_ONE_SHOT_BYTES = 512 << 10  # sent by each rank, with more than two ranks; its own rule was tuned on another GPU
_LEAST_ELEMENTS = 1 << 20
_SUBJECT = "preparing FlashInfer"


@dataclasses.dataclass
class _State:
    """What a group has of FlashInfer; the same on all its ranks."""

    reason: str = ""  # why it can never have any
    pdl: bool = False
    elements: int = 0  # rows x hidden that the newest workspace was made for
    workspace: Any = None
    older: list[Any] = dataclasses.field(default_factory=list)


_states: weakref.WeakKeyDictionary[Arena, _State] = weakref.WeakKeyDictionary()


def cannot(arena: Arena, problem: Problem) -> str:
    """Why FlashInfer cannot do this problem, as far as can be told without talking to the other ranks."""
    unfit = _unfit(arena, problem)
    if unfit:
        return unfit
    state = _states.get(arena)
    if state is not None and state.reason:
        return state.reason
    if state is None or state.elements < problem.rows * problem.hidden:
        return NOT_PREPARED
    return ""


def prepare(arena: Arena, problem: Problem) -> str:
    """Make sure that there is a workspace for the problem; why there is none, or "". Collective, and not inside a capture.

    Every step that may fail on one rank is followed by an exchange, so that all ranks have a workspace or none has.
    """
    if cannot(arena, problem) != NOT_PREPARED:
        return cannot(arena, problem)
    if torch.cuda.is_current_stream_capturing():
        return f"{NOT_PREPARED}, and a CUDA graph is being captured"
    state = _states.setdefault(arena, _State())
    group = groups.resolve(arena.group_name)
    elements = max(_LEAST_ELEMENTS, 1 << (problem.rows * problem.hidden - 1).bit_length())
    rows = max(1, min(elements, _MOST_BYTES // (2 * arena.world)) // problem.hidden)
    version, reason = _load()
    needed = 4 * arena.world * rows * problem.row_bytes  # a buffer, and three that take turns
    free = torch.cuda.mem_get_info(arena.device)[0]
    if not reason and free < needed:
        reason = f"{needed >> 20} MiB are needed, {free >> 20} MiB are free"
    everybody = agreement.exchange(group, _SUBJECT, {"reason": reason, "version": version})
    state.reason = agreement.told(everybody)
    if not state.reason and len({each["version"] for each in everybody}) > 1:
        state.reason = f"the ranks have FlashInfer {', '.join(each['version'] for each in everybody)}"
    if state.reason:
        return state.reason
    made, reason = None, ""
    try:
        made = importlib.import_module("flashinfer.comm").create_allreduce_fusion_workspace(
            backend="trtllm",  # "auto" may pick the multicast path
            world_size=arena.world,
            rank=arena.rank,
            max_token_num=rows,
            hidden_dim=problem.hidden,
            dtype=problem.dtype,
            group=group,
        )
    except Exception as error:  # a library of many layers: any of them may raise anything
        reason = f"FlashInfer's workspace: {type(error).__name__}: {_first_line(error)}"
    state.reason = agreement.told(agreement.exchange(group, _SUBJECT, {"reason": reason}))
    if not state.reason:
        if state.workspace is not None:
            state.older.append(state.workspace)
        state.workspace, state.elements, state.pdl = made, rows * problem.hidden, _number(version) >= PDL_FROM
    return state.reason


def all_reduce_rms_norm(
    arena: Arena,
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    scale_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    one_shot: bool | None = None,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.all_reduce_rms_norm`` (see there), for problems that ``cannot`` has nothing against.

    one_shot  every rank gets all parts (True) or a share of the rows, twice (False); None: by size
    pdl       programmatic dependent launch; None: where the installed version does it right. True is for benchmarks whose
              residual is not written by the kernel before
    """
    assert bias is None and scale is None and scale_tensor is None
    state, hidden = _states[arena], input.shape[-1]
    x = aligned(input.reshape(-1, hidden))
    rows = x.shape[0]
    assert rows * hidden <= state.elements, "FlashInfer does not check its buffers' size"
    # Its patterns with a norm all add a residual and do not check for a null pointer.
    r = torch.zeros_like(x) if residual is None else aligned(residual.reshape(-1, hidden))
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if one_shot is None:
        sent = (arena.world - 1) * x.numel() * x.itemsize
        one_shot = arena.world == 2 or rows <= arena.world or sent <= _ONE_SHOT_BYTES
    comm = importlib.import_module("flashinfer.comm")
    arena.enter()
    comm.allreduce_fusion(
        input=x,
        workspace=state.workspace,
        pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
        launch_with_pdl=state.pdl if pdl is None else pdl,
        trigger_completion_at_end=True,  # False gives NaN with one-shot
        residual_in=r,
        residual_out=total,
        norm_out=normed,
        rms_gamma=aligned(weight),
        rms_eps=eps,
        use_oneshot=one_shot,
        fp32_acc=True,
        weight_bias=weight_offset,
    )
    return normed.view(input.shape), total.view(input.shape)


def _unfit(arena: Arena, problem: Problem) -> str:
    if problem.op != ALL_REDUCE_RMS_NORM:
        return "only with a norm"
    if arena.world not in WORLDS:
        return f"{arena.world} ranks: it has kernels for {', '.join(map(str, WORLDS))}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {problem.dtype}"
    if problem.weight_dtype != problem.dtype:  # it does not check, and would read wrong numbers
        return f"the weight must be {problem.dtype}, is {problem.weight_dtype}"
    if problem.normed_dtype not in (None, torch.float32, problem.dtype):
        return f"the normalised value is rounded to {problem.normed_dtype}, the row is {problem.dtype}"
    if problem.out_dtype not in (None, problem.dtype):
        return f"output {problem.out_dtype} for rows of {problem.dtype}"
    if problem.modifiers:
        return "a bias or a scale"
    if problem.row_bytes % VECTOR_BYTES:
        return f"a row of {problem.row_bytes} bytes is not a multiple of {VECTOR_BYTES}"
    if arena.world * problem.rows * problem.row_bytes > _MOST_BYTES:
        return f"more than {_MOST_BYTES >> 20} MiB over all ranks"
    return ""


def _load() -> tuple[str, str]:
    """(version, why it cannot be used). Loads its kernels, which may mean compiling them."""
    try:
        version = str(importlib.import_module("flashinfer").__version__)
        if _number(version) < OLDEST:
            return version, f"FlashInfer {version} is older than {'.'.join(map(str, OLDEST))}"
        importlib.import_module("flashinfer.comm.trtllm_ar").get_trtllm_comm_module()
    except Exception as error:  # not installed, not loadable, no compiler
        return "", f"FlashInfer: {type(error).__name__}: {_first_line(error)}"
    return version, ""


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _first_line(error: BaseException) -> str:
    """Of a message, which may be none: the kind of error is told beside it."""
    return (str(error).strip().splitlines() or [""])[0][:200]
