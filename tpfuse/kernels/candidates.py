"""The ways to compute each operation on CUDA, candidate by candidate, and why one cannot do what is asked.

Candidate 0, the unfused graph, is not here: it is chosen at compile time by not fusing. What stands closest to it is
``nccl``: NCCL's all-reduce and then one kernel for the rest. A candidate's ``run`` takes the operation's arguments, so
that a benchmark or the tuner can call any of them; an adapter imports its library inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tpfuse.comm.arena import MAX_SPLIT_ROWS, SLOT_BYTES, SPLIT, Arena
from tpfuse.errors import ConfigError
from tpfuse.kernels.fp8 import Fp8, Quantisation
from tpfuse.tables import Choice

ALL_REDUCE_RMS_NORM, ALL_REDUCE = "all_reduce_rms_norm", "all_reduce"
ALL_REDUCE_RMS_NORM_QUANTIZE_FP8 = "all_reduce_rms_norm_quantize_fp8"
#: The kernel that computes a row alike whatever rows are beside it: its layout goes by the hidden size alone.
BATCH_INVARIANT = "tpfuse_ring"
FLASHINFER, NOT_PREPARED = "flashinfer", "not prepared"
_LONGEST_ROW_BYTES = 64 << 10
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call, as far as a choice depends on it: the same on every rank.

    rows, hidden  T, all leading dimensions together, at least 1, and D (a plain all-reduce: its elements, and 1)
    weight_dtype, normed_dtype, out_dtype, modifiers
                  of the norm; modifiers: a bias or a scale is there
    fp8           what the norm is quantised to, if it is
    """

    op: str
    rows: int
    hidden: int
    dtype: torch.dtype
    weight_dtype: torch.dtype | None = None
    normed_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    modifiers: bool = False
    fp8: Quantisation | None = None

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize


class Wish(NamedTuple):
    """What a user asked of the choice.

    kernel            the candidate to take, None: the fastest
    flashinfer_bytes  of the largest message that FlashInfer gets, None: any
    """

    kernel: str | None = None
    flashinfer_bytes: int | None = None

    def forbids(self, name: str, problem: Problem) -> bool:
        most = self.flashinfer_bytes
        return name == FLASHINFER and most is not None and problem.rows * problem.row_bytes > most


ANY = Wish()


def _anything(arena: Arena, problem: Problem) -> str:
    return ""


def check_name(op: str, name: str | None) -> None:
    """Raises ConfigError: there is no candidate of that name. Everywhere, also where there is nothing to choose."""
    if name is not None and name not in tuple(CANDIDATES[op]):
        raise ConfigError(f"kernel {name!r} cannot run {op}: the kernels are {', '.join(CANDIDATES[op])}")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute an operation.

    cannot  (arena, problem) -> why it cannot do this problem there; "" if it can. Depends on nothing that differs by rank.
    run     (arena, choice, *the operation's arguments) -> its results
    prepare (arena, problem) -> why it cannot be made ready for problems up to this one; "" if it is. Collective, not inside
            a graph capture: for what a table chooses or a user names, when a graph is compiled or it is first called.
            Without it ``cannot`` says NOT_PREPARED where a library needs memory of its own.
    """

    name: str
    cannot: Callable[[Arena, Problem], str]
    run: Callable[..., Any]
    prepare: Callable[[Arena, Problem], str] = _anything


def _norm_cannot(arena: Arena, problem: Problem) -> str:
    """What our kernels' norm cannot do, behind whatever all-reduce."""
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype}"
    if problem.row_bytes > _LONGEST_ROW_BYTES:
        return f"a row of {problem.row_bytes} bytes is longer than {_LONGEST_ROW_BYTES}"
    if problem.normed_dtype not in (None, torch.float32, problem.dtype):
        return f"the normalised value is rounded to {problem.normed_dtype}, the row is {problem.dtype}"
    if problem.weight_dtype == torch.float64:
        return "a float64 weight"
    return _fp8_cannot(problem)


def _fp8_cannot(problem: Problem, parts: int = 1) -> str:
    """What our kernels cannot make of a norm's rows, which they compute in so many parts."""
    if problem.fp8 is None:
        return ""
    if problem.out_dtype not in (None, problem.dtype):
        return f"the norm gives {problem.out_dtype} of {problem.dtype}"
    return problem.fp8.cannot(problem.hidden, problem.dtype, parts)


def _own_cannot(arena: Arena, problem: Problem) -> str:
    if problem.op == ALL_REDUCE:
        return "" if problem.dtype in DTYPES else f"dtype {problem.dtype}"
    if problem.row_bytes > SLOT_BYTES:
        return f"a row of {problem.row_bytes} bytes is longer than a slot of {SLOT_BYTES}"
    return _norm_cannot(arena, problem)


def _split_cannot(arena: Arena, problem: Problem) -> str:
    most = min(MAX_SPLIT_ROWS, arena.split.size)
    if problem.rows > most:
        return f"more than {most} rows"
    return _own_cannot(arena, problem) or _fp8_cannot(problem, SPLIT)


def _split(arena: Arena, choice: Choice, *arguments: Any, fp8: Fp8 | None = None) -> Any:
    from tpfuse.kernels.triton import own

    return own.all_reduce_rms_norm("split", arena, *arguments, choice=choice, fp8=fp8)


def _ring(arena: Arena, choice: Choice, *arguments: Any, fp8: Fp8 | None = None) -> Any:
    from tpfuse.kernels.triton import own

    return own.all_reduce_rms_norm("ring", arena, *arguments, choice=choice, fp8=fp8)


def _ring_plain(arena: Arena, choice: Choice, input: torch.Tensor) -> torch.Tensor:
    from tpfuse.kernels.triton import own

    return own.all_reduce(arena, input, choice=choice)


def _nccl(arena: Arena, choice: Choice, input: torch.Tensor, *arguments: Any, fp8: Fp8 | None = None) -> Any:
    from tpfuse.kernels.triton import own

    return own.rms_norm(arena, _nccl_plain(arena, choice, input), *arguments, fp8=fp8)


def _nccl_plain(arena: Arena, choice: Choice, input: torch.Tensor) -> torch.Tensor:
    arena.check()
    reduced = torch.ops._c10d_functional.all_reduce(input.contiguous(), "sum", arena.group_name)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def _flashinfer_cannot(arena: Arena, problem: Problem) -> str:
    from tpfuse.kernels import flashinfer

    return flashinfer.cannot(arena, problem)


def _flashinfer_prepare(arena: Arena, problem: Problem) -> str:
    from tpfuse.kernels import flashinfer

    return flashinfer.prepare(arena, problem)


def _flashinfer(arena: Arena, choice: Choice, *arguments: Any) -> Any:
    from tpfuse.kernels import flashinfer

    return flashinfer.all_reduce_rms_norm(arena, *arguments)


def _symm_mem_cannot(arena: Arena, problem: Problem) -> str:
    from tpfuse.kernels import symm_mem

    unfit = _norm_cannot(arena, problem) if problem.op != ALL_REDUCE else ""
    return unfit or symm_mem.cannot(arena, problem)


def _symm_mem_prepare(arena: Arena, problem: Problem) -> str:
    from tpfuse.kernels import symm_mem

    return symm_mem.prepare(arena, problem)


def _symm_mem(arena: Arena, choice: Choice, *arguments: Any, fp8: Fp8 | None = None) -> Any:
    from tpfuse.kernels import symm_mem

    return symm_mem.all_reduce_rms_norm(arena, *arguments, fp8=fp8)


def _symm_mem_plain(arena: Arena, choice: Choice, input: torch.Tensor) -> torch.Tensor:
    from tpfuse.kernels import symm_mem

    return symm_mem.all_reduce(arena, input)


#: Operation -> its candidates by name. ``nccl`` can do everything our kernels' norm can.
CANDIDATES: Mapping[str, Mapping[str, Candidate]] = {
    ALL_REDUCE_RMS_NORM: {
        c.name: c
        for c in (
            Candidate("tpfuse_split", _split_cannot, _split),
            Candidate("tpfuse_ring", _own_cannot, _ring),
            Candidate(FLASHINFER, _flashinfer_cannot, _flashinfer, _flashinfer_prepare),
            Candidate("torch_symm_mem", _symm_mem_cannot, _symm_mem, _symm_mem_prepare),
            Candidate("nccl", _norm_cannot, _nccl),
        )
    },
    ALL_REDUCE_RMS_NORM_QUANTIZE_FP8: {
        c.name: c
        for c in (
            Candidate("tpfuse_split", _split_cannot, _split),
            Candidate("tpfuse_ring", _own_cannot, _ring),
            Candidate("torch_symm_mem", _symm_mem_cannot, _symm_mem, _symm_mem_prepare),
            Candidate("nccl", _norm_cannot, _nccl),
        )
    },
    ALL_REDUCE: {
        c.name: c
        for c in (
            Candidate("tpfuse_ring", _own_cannot, _ring_plain),
            Candidate("torch_symm_mem", _symm_mem_cannot, _symm_mem_plain, _symm_mem_prepare),
            Candidate("nccl", _anything, _nccl_plain),
        )
    },
}
