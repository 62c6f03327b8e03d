"""The ways to compute a GEMM with a collective on CUDA, candidate by candidate, and why one cannot do what is asked.

Candidate 0 is ``nccl``: a product by cuBLAS and a collective by NCCL, one after the other. That is the operation's
reference: its ``run`` gives None, and the operation runs that. An adapter imports its library inside.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tpfuse.comm import workspace
from tpfuse.comm.arena import Arena
from tpfuse.errors import ConfigError
from tpfuse.kernels.candidates import NOT_PREPARED
from tpfuse.tables import Choice

MATMUL_REDUCE_SCATTER, ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE = (
    "matmul_reduce_scatter",
    "all_gather_matmul",
    "matmul_all_reduce",
)
NCCL, OWN, SYMM_MEM, COMPOSED = "nccl", "tpfuse", "torch_symm_mem", "tpfuse_all_reduce"


class MatmulProblem(NamedTuple):
    """A call, as far as a choice depends on it: the same on every rank.

    rows        M, of the whole
    widths      N of each weight of a rank; inner: K of a rank, of all products that are added
    inners      K of each of them; (): there is one
    share       S, rows of each rank in what is gathered or scattered; of an all-reduce: M
    dtypes      of the input and all weights; FP8 comes with scales
    out_dtype   None: the input's
    wire_dtype  of partial sums, None: the result's
    """

    op: str
    rows: int
    widths: tuple[int, ...]
    inner: int
    dtypes: tuple[torch.dtype, ...]
    share: int
    out_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    inners: tuple[int, ...] = ()

    def with_rows(self, rows: int, world: int) -> MatmulProblem:
        """The same of another size, in as few rows a rank as will do."""
        return self._replace(rows=rows, share=rows if self.op == MATMUL_ALL_REDUCE else -(-rows // world))

    @property
    def columns(self) -> int:
        """N of all weights together."""
        return sum(self.widths)

    @property
    def dtype(self) -> torch.dtype:
        """Of the input."""
        return self.dtypes[0]

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype


def table_name(op: str, dtype: torch.dtype) -> str:
    """Under which name a table has an operation: bf16 is measured, and stands for fp16."""
    return op + {2: "", 1: "_fp8"}.get(dtype.itemsize, "_fp32")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute an operation.

    cannot   (arena, problem, choice) -> why it cannot do this problem there, laid out so; "" if it can, NOT_PREPARED where
             memory is missing. Depends on nothing that differs by rank.
    run      (arena, choice, *what goes with the operation: see matmul.py) -> its results; None: the reference is to run
    prepare  (arena, problem) -> why its memory cannot be made; "" if it is there. Collective, not inside a graph capture.
    """

    name: str
    cannot: Callable[[Arena, MatmulProblem, Choice], str]
    run: Callable[..., Any]
    prepare: Callable[[Arena, MatmulProblem], str] = lambda arena, problem: ""

    def obstacle(self, arena: Arena, problem: MatmulProblem, choice: Choice) -> str:
        """Why it cannot do this, after its memory has been made. Collective."""
        why = self.cannot(arena, problem, choice)
        if why != NOT_PREPARED:
            return why
        return self.prepare(arena, problem) or self.cannot(arena, problem, choice)


def check_name(op: str, name: str | None) -> None:
    """Raises ConfigError: there is no kernel of that name."""
    if name is not None and name not in tuple(MATMULS[op]):
        raise ConfigError(f"kernel {name!r} cannot run {op}: the kernels are {', '.join(MATMULS[op])}")


def _anything(arena: Arena, problem: MatmulProblem, choice: Choice) -> str:
    return ""


def _reference(arena: Arena, choice: Choice, *arguments: Any) -> None:
    return None


# -- ours --------------------------------------------------------------------------------------------------------------


@functools.cache
def _cut(choice: Choice) -> Any:
    """The tiling of a choice, None: by the kernel's own rule. Raises TypeError: this version knows no such tiling."""
    from tpfuse.kernels.cuda.gemm import Tiling

    return Tiling(**dict(choice.options)) if choice.options else None  # type: ignore[arg-type]


def _own_cannot(arena: Arena, problem: MatmulProblem, choice: Choice) -> str:
    from tpfuse.kernels.cuda import all_gather_matmul, gemm, matmul_reduce_scatter

    if len(problem.widths) > all_gather_matmul.MOST_MATRICES:
        return f"more than {all_gather_matmul.MOST_MATRICES} weights"
    if len(problem.inners) > matmul_reduce_scatter.MOST_PRODUCTS:
        return f"a sum of more than {matmul_reduce_scatter.MOST_PRODUCTS} products"
    if len(problem.inners) > 1 and problem.dtype.itemsize == 1:
        return "a sum of products that have scales"
    for width, inner in itertools.product(problem.widths, problem.inners or (problem.inner,)):
        why = gemm.cannot(problem.rows, width, inner, problem.dtypes, problem.out_dtype)
        if why:
            return why
    try:
        cut = _cut(choice)
    except TypeError:
        return f"this version has no tiling {choice}"
    space = arena.workspace
    if space is None or isinstance(space, str):
        return space or NOT_PREPARED
    if not _most_rows(space, problem, cut):
        return f"its workspace of {arena.bytes >> 20} MiB has no room for a row of tiles (workspace_mb)"
    return ""


def _most_rows(space: workspace.Workspace, problem: MatmulProblem, cut: Any) -> int:
    from tpfuse.kernels.cuda import all_gather_matmul, matmul_reduce_scatter

    if problem.op == ALL_GATHER_MATMUL:
        return all_gather_matmul.most_rows(space, problem.inner, problem.dtype)
    all_rows = problem.op == MATMUL_ALL_REDUCE
    share = -(-problem.rows // space.arena.world) if all_rows else problem.share
    kind = (all_rows, problem.wire_dtype is not None)
    cut = cut or matmul_reduce_scatter.tiling(space.arena, share, problem.columns, problem.inner, problem.dtype, *kind)
    return matmul_reduce_scatter.most_rows(space, problem.columns, problem.result_dtype, cut, *kind)


def _own_prepare(arena: Arena, problem: MatmulProblem) -> str:
    made = workspace.of(arena)
    return made if isinstance(made, str) else ""


def _own_reduce_scatter(arena: Arena, choice: Choice, *arguments: Any) -> torch.Tensor:
    from tpfuse.kernels.cuda import matmul_reduce_scatter as own

    return own.matmul_reduce_scatter(arena.workspace, *arguments, cut=_cut(choice))


def _own_all_reduce(
    arena: Arena,
    choice: Choice,
    input: Any,
    weight: Any,
    bias: Any,
    scales: Any,
    out_dtype: Any,
    composed: Any,
    more: Any = ((), ()),
    wire_dtype: Any = None,
) -> torch.Tensor:
    from tpfuse.kernels.cuda import matmul_reduce_scatter as own

    arguments = (input, weight, bias, -(-input.shape[0] // arena.world), scales, out_dtype, more, wire_dtype)
    return own.matmul_reduce_scatter(arena.workspace, *arguments, all_rows=True, cut=_cut(choice))


def _own_all_gather(arena: Arena, choice: Choice, *arguments: Any) -> list[torch.Tensor]:
    from tpfuse.kernels.cuda import all_gather_matmul as own

    return own.all_gather_matmul(arena.workspace, *arguments, cut=_cut(choice))


# -- others' -----------------------------------------------------------------------------------------------------------


def _symm_mem_cannot(arena: Arena, problem: MatmulProblem, choice: Choice) -> str:
    from tpfuse.kernels import symm_mem

    return symm_mem.cannot_matmul(arena, problem)


def _symm_mem_prepare(arena: Arena, problem: MatmulProblem) -> str:
    from tpfuse.kernels import symm_mem

    return symm_mem.prepare_matmul(arena, problem)


def _symm_mem_reduce_scatter(
    arena: Arena, choice: Choice, input: Any, weight: Any, bias: Any, *others: Any
) -> torch.Tensor:
    from tpfuse.kernels import symm_mem

    return symm_mem.matmul_reduce_scatter(arena, input, weight, bias)


def _symm_mem_all_gather(arena: Arena, choice: Choice, *arguments: Any) -> list[torch.Tensor]:
    from tpfuse.kernels import symm_mem

    input, weights, _, biases, gathered, *_ = arguments
    return symm_mem.all_gather_matmul(arena, input, weights, biases, gathered)


def _composed(
    arena: Arena, choice: Choice, input: Any, weight: Any, bias: Any, scales: Any, out_dtype: Any, composed: Any, *more: Any
) -> torch.Tensor:
    return composed()


#: Operation -> its candidates by name. ``nccl`` can do everything.
MATMULS: Mapping[str, Mapping[str, Candidate]] = {
    op: {candidate.name: candidate for candidate in (Candidate(NCCL, _anything, _reference), *others)}
    for op, others in {
        MATMUL_REDUCE_SCATTER: (
            Candidate(SYMM_MEM, _symm_mem_cannot, _symm_mem_reduce_scatter, _symm_mem_prepare),
            Candidate(OWN, _own_cannot, _own_reduce_scatter, _own_prepare),
        ),
        ALL_GATHER_MATMUL: (
            Candidate(SYMM_MEM, _symm_mem_cannot, _symm_mem_all_gather, _symm_mem_prepare),
            Candidate(OWN, _own_cannot, _own_all_gather, _own_prepare),
        ),
        MATMUL_ALL_REDUCE: (
            Candidate(COMPOSED, _anything, _composed),  # a product, then the all-reduce of kernels/dispatch.py
            Candidate(OWN, _own_cannot, _own_all_reduce, _own_prepare),
        ),
    }.items()
}
