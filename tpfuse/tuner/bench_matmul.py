"""GEMMs with collectives as they are measured: a few calls back to back, with weights that come from memory.

They are timed on a device that is busy all the time, whose clocks its power holds down, and on one that has rested: what is
the fastest differs, and a model is somewhere between.

M  rows of the whole     N  columns     K  inner dimension of a rank     S  rows of one rank
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm.arena import Arena
from tpfuse.kernels.matmul_candidates import ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, MATMULS, NCCL
from tpfuse.ops.all_gather_matmul import reference as gathering
from tpfuse.ops.all_reduce import OP as ALL_REDUCE_OP
from tpfuse.ops.matmul import gather_rows, pad_rows
from tpfuse.ops.matmul_all_reduce import reference as reducing
from tpfuse.ops.matmul_reduce_scatter import reference as scattering
from tpfuse.tables import Choice
from tpfuse.tuner.measure import COLD_BYTES, Bench, Outputs
from tpfuse.tuner.proposals import MatmulSize

GRAPH_FLOP, LEAST_CALLS, MOST_CALLS = 3e12, 2, 10  # of a timed graph
TINY = 1e-6  # relative error that is allowed whatever NCCL's is


class MatmulBench(Bench):
    second_rounds = 15
    rests_s = (0.0, 0.015)

    def __init__(self, size: MatmulSize, arena: Arena, group: dist.ProcessGroup) -> None:
        super().__init__(size, arena, group)
        self.name, self.replicated = group.group_name, size.op == MATMUL_ALL_REDUCE
        flop = 2 * size.rows * size.columns * size.inner
        self.calls = max(LEAST_CALLS, min(MOST_CALLS, int(GRAPH_FLOP / flop)))
        weight_bytes = size.columns * size.inner * size.dtype.itemsize
        self.random.manual_seed(100 + arena.rank)
        rows = size.share if size.op == ALL_GATHER_MATMUL else size.rows
        self.input = self.normal((rows, size.inner)).to(size.dtype)
        deviation = size.inner**-0.5
        scaled = size.dtype.itemsize == 1  # FP8: a scale for each row and column
        self.weights = [
            (self.normal((size.columns, size.inner)) * (1 if scaled else deviation)).to(size.dtype).t()  # as a layer has it
            for _ in range(min(self.calls, 1 + COLD_BYTES // weight_bytes))
        ]
        self.scales = None
        if scaled:
            factors = self.normal((rows, 1)).abs() + 0.5, self.normal((1, size.columns)).abs() + 0.5
            self.scales = factors[0], factors[1] * deviation

    def call(self, choice: Choice, weight: torch.Tensor) -> Outputs:
        """The operation by one candidate."""
        candidate, x, size = MATMULS[self.size.op][choice.candidate], self.input, self.size
        scales, out_dtype = self.scales, size.problem.out_dtype
        arguments: tuple[Any, ...]
        if size.op == ALL_GATHER_MATMUL:
            factors = (None, []) if scales is None else (scales[0], [scales[1]])
            arguments = x, [weight], size.rows, [], False, *factors, out_dtype
        elif size.op == MATMUL_REDUCE_SCATTER:
            arguments = x, weight, None, size.share, scales, out_dtype
        else:
            arguments = x, weight, None, scales, out_dtype, lambda: self.reference(weight, sum_over_ranks=ALL_REDUCE_OP)
        result = candidate.run(self.arena, choice, *arguments)
        if result is None:
            result = self.reference(weight)
        return tuple(result) if isinstance(result, list) else (result,)

    def reference(self, weight: torch.Tensor, **how: Any) -> Any:
        """The operation by its reference, which is NCCL's."""
        size, (of_input, of_weight) = self.size, self.scales or (None, None)
        out_dtype = size.problem.out_dtype
        if size.op == ALL_GATHER_MATMUL:
            of_weights = [] if of_weight is None else [of_weight]
            return gathering(self.input, [weight], self.name, size.rows, [], of_input, of_weights, out_dtype)
        run = scattering if size.op == MATMUL_REDUCE_SCATTER else reducing
        return run(self.input, weight, self.name, None, of_input, of_weight, out_dtype, **how)

    def once(self, choice: Choice) -> Outputs:
        return self.call(choice, self.weights[0])

    def expect(self) -> tuple[torch.Tensor, float]:
        """The result in fp64, and how far from it one may be: twice as far as NCCL's."""
        size, weight, rows = self.size, self.weights[0].double(), self.input.double()
        if self.scales is not None:
            rows, weight = rows * self.scales[0].double(), weight * self.scales[1].double()
        if size.op == ALL_GATHER_MATMUL:
            value = gather_rows(rows, size.rows, self.name) @ weight
        else:
            value = rows @ weight
            dist.all_reduce(value, group=self.group)
        if size.op == MATMUL_REDUCE_SCATTER:
            value = pad_rows(value, size.share * self.arena.world)[self.arena.rank * size.share :][: size.share].clone()
        (plain,) = self.once(Choice(NCCL))
        return value, 2 * _error(plain, value) + TINY

    def wrong(self, outputs: Outputs, expected: tuple[torch.Tensor, float]) -> str:
        (output,), (value, limit) = outputs, expected
        if output.shape != value.shape or output.dtype != self.size.problem.result_dtype:
            return f"its result is {output.dtype} {list(output.shape)}"
        error = _error(output, value)
        return "" if error <= limit else f"its result is off by {error:.2g}, more than {limit:.2g}"  # NaN too

    def chain(self, choice: Choice | None, calls: int) -> None:
        assert choice is not None  # nothing stands between the calls
        for number in range(calls):
            self.call(choice, self.weights[number % len(self.weights)])

    def net_us(self, times: Mapping[Choice | None, list[float]]) -> dict[Choice, float]:
        return {choice: statistics.median(each) / self.calls for choice, each in times.items() if choice is not None}


def _error(output: torch.Tensor, value: torch.Tensor) -> float:
    """Relative, of all together."""
    return ((output.double() - value).norm() / value.norm().clamp(min=1e-30)).item()
