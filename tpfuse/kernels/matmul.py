"""Which kernel computes a GEMM with a collective: by name, by the measured table, else by a rule that never loses.

Every answer depends only on what all ranks of the group share, and is remembered per kind of call. None of them waits for
the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpfuse.errors import BuildError, ConfigError
from tpfuse.kernels import dispatch
from tpfuse.kernels.dispatch import REFERENCE, Dispatcher
from tpfuse.kernels.matmul_candidates import (
    ALL_GATHER_MATMUL,
    COMPOSED,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MATMULS,
    NCCL,
    Candidate,
    MatmulProblem,
    check_name,
    table_name,
)
from tpfuse.tables import Choice

Scales = tuple[torch.Tensor, torch.Tensor] | None
More = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
NO_MORE: More = ((), ())


def matmul_reduce_scatter(
    kernel: str | None,
    group: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
    out_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
    share: int,
    more: More = NO_MORE,
) -> torch.Tensor | None:
    """The operation of ``tpfuse.ops`` by the kernel that is asked for, or chosen; None: by its reference.

    scales  of input and weight, where those are FP8; share: rows of each rank
    more    inputs and weights of further products, which are added
    Raises ConfigError: the kernel that is asked for cannot do this.
    """
    if kernel == NCCL or not input.numel() or not weight.numel():
        return None
    problem = _row_parallel(MATMUL_REDUCE_SCATTER, input, weight, share, out_dtype, wire_dtype, more)
    return _run(problem, kernel, group, input, weight, bias, share, scales, out_dtype, more, problem.wire_dtype)


def all_gather_matmul(
    kernel: str | None,
    group: str,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    rows: int,
    biases: Sequence[torch.Tensor | None],
    input_scale: torch.Tensor | None,
    weight_scales: Sequence[torch.Tensor],
    out_dtype: torch.dtype | None,
    gathered: bool,
) -> list[torch.Tensor] | None:
    """As above."""
    widths = tuple(weight.shape[1] for weight in weights)
    if kernel == NCCL or not input.numel() or not all(widths):
        return None
    share, inner = input.shape
    dtypes = (input.dtype, *(weight.dtype for weight in weights))
    problem = MatmulProblem(ALL_GATHER_MATMUL, rows, widths, inner, dtypes, share, out_dtype)
    scales = input_scale, weight_scales
    return _run(problem, kernel, group, input, weights, rows, biases, gathered, *scales, out_dtype)


def matmul_all_reduce(
    kernel: str | None,
    group: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
    out_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
    composed: Callable[[], torch.Tensor],
    more: More = NO_MORE,
) -> torch.Tensor | None:
    """As above. composed: computes it by a product and ``tpfuse::all_reduce``."""
    if kernel == NCCL or not input.numel() or not weight.numel():
        return None
    problem = _row_parallel(MATMUL_ALL_REDUCE, input, weight, input.shape[0], out_dtype, wire_dtype, more)
    return _run(problem, kernel, group, input, weight, bias, scales, out_dtype, composed, more, problem.wire_dtype)


def _row_parallel(
    op: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    share: int,
    out_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
    more: More,
) -> MatmulProblem:
    inputs, weights = (input, *more[0]), (weight, *more[1])
    inners = tuple(each.shape[1] for each in inputs)
    wire = None if wire_dtype == (out_dtype or input.dtype) else wire_dtype
    dtypes = tuple(each.dtype for pair in zip(inputs, weights, strict=True) for each in pair)
    facts = (sum(inners), dtypes, share, out_dtype, wire, inners if len(inners) > 1 else ())
    return MatmulProblem(op, input.shape[0], (weight.shape[1],), *facts)


def _run(problem: MatmulProblem, kernel: str | None, group: str, *arguments: Any) -> Any:
    dispatcher = dispatch.of(group)
    if isinstance(dispatcher, str):
        if kernel is not None:
            raise ConfigError(f"kernel {kernel!r} cannot run {problem.op}: {dispatcher}")
        return None
    key = (problem, kernel)
    found = dispatcher.remembered(key)
    if found is None:
        if kernel is None and torch.cuda.is_current_stream_capturing():
            found = by_rule(problem)  # for now: memory and kernels cannot be made inside a capture
        else:
            found = dispatcher.remember(key, choose(dispatcher, problem, kernel))
    candidate, choice = found
    try:
        return candidate.run(dispatcher.arena, choice, *arguments)
    except BuildError as error:  # on every rank
        if kernel is not None:
            raise
        warnings.warn(f"{problem.op}: the table's choice {choice} is not used: {error}", RuntimeWarning, stacklevel=2)
        candidate, choice = dispatcher.remember(key, by_rule(problem))
        return candidate.run(dispatcher.arena, choice, *arguments)


def choose(dispatcher: Dispatcher, problem: MatmulProblem, kernel: str | None = None) -> tuple[Candidate, Choice]:
    """The candidate for a problem, and how it is laid out. May make its memory: collective, not inside a graph capture.

    Raises ConfigError: the kernel that is asked for cannot do it.
    """
    known, arena = MATMULS[problem.op], dispatcher.arena
    if kernel is not None:
        check_name(problem.op, kernel)
        why = known[kernel].obstacle(arena, problem, Choice(kernel))
        if why:
            raise ConfigError(f"kernel {kernel!r} cannot run {problem.op}: {why}")
        return known[kernel], Choice(kernel)
    if dispatcher.table is not None:
        name = table_name(problem.op, problem.dtype)
        choice = dispatcher.table.choose_matmul(name, problem.rows, problem.columns, problem.inner)
        if choice and problem.wire_dtype is not None:  # tilings are measured without: there may be no room for theirs
            choice = Choice(choice.candidate)
        if choice and choice.candidate in known and not known[choice.candidate].obstacle(arena, problem, choice):
            return known[choice.candidate], choice
    return by_rule(problem)


def may_run(group_name: str, device_type: str, problem: MatmulProblem, most_rows: int) -> list[str]:
    """Names of what computes a problem of ``problem.rows`` to ``most_rows`` rows, fewest rows first.

    Where it is NCCL alone, nothing is won. Makes what memory they need: collective.
    """
    if device_type == "cpu":
        return [REFERENCE]
    found = dispatch.of(group_name)
    assert isinstance(found, Dispatcher), found
    counts = {problem.rows << n for n in range(most_rows.bit_length()) if problem.rows << n < most_rows} | {most_rows}
    problems = [problem.with_rows(count, found.arena.world) for count in sorted(counts)]
    return list(dict.fromkeys(choose(found, each)[0].name for each in problems))


def by_rule(problem: MatmulProblem) -> tuple[Candidate, Choice]:
    """Where no table answers: what is never slower than doing without tpfuse. (An all-reduce has a table of its own.)"""
    name = COMPOSED if problem.op == MATMUL_ALL_REDUCE else NCCL
    return MATMULS[problem.op][name], Choice(name)
