"""GEMMs with collectives as they are measured: a few calls back to back, with weights that come from memory.

M  rows of the whole     N  columns     K  inner dimension of a rank     S  rows of one rank
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm.arena import Arena
from tpfuse.kernels.matmul_candidates import ALL_GATHER, ALL_REDUCE, MATMULS, NCCL, REDUCE_SCATTER
from tpfuse.ops.all_gather_matmul import reference as gathering
from tpfuse.ops.all_reduce import OP as ALL_REDUCE_OP
from tpfuse.ops.matmul import gather_rows, pad_rows
from tpfuse.ops.matmul_all_reduce import reference as reducing
from tpfuse.ops.matmul_reduce_scatter import reference as scattering
from tpfuse.tables import Choice
from tpfuse.tuner.measure import COLD_BYTES, Bench, Outputs
from tpfuse.tuner.proposals import MatmulSize

GRAPH_FLOP, LEAST_CALLS, MOST_CALLS = 1e13, 2, 10  # of a timed graph
TINY = 1e-6  # relative error that is allowed whatever NCCL's is


class MatmulBench(Bench):
    def __init__(self, size: MatmulSize, arena: Arena, group: dist.ProcessGroup) -> None:
        super().__init__(size, arena, group)
        self.name, self.replicated = group.group_name, size.op == ALL_REDUCE
        flop = 2 * size.rows * size.columns * size.inner
        self.calls = max(LEAST_CALLS, min(MOST_CALLS, int(GRAPH_FLOP / flop)))
        weight_bytes = size.columns * size.inner * size.dtype.itemsize
        self.random.manual_seed(100 + arena.rank)
        rows = size.share if size.op == ALL_GATHER else size.rows
        self.input = self.normal((rows, size.inner)).to(size.dtype)
        deviation = size.inner**-0.5
        self.weights = [
            (self.normal((size.columns, size.inner)) * deviation).to(size.dtype).t()  # as a linear layer has it
            for _ in range(min(self.calls, 1 + COLD_BYTES // weight_bytes))
        ]

    def call(self, choice: Choice, weight: torch.Tensor) -> Outputs:
        """The operation by one candidate."""
        candidate, x, size = MATMULS[self.size.op][choice.candidate], self.input, self.size
        arguments: tuple[Any, ...]
        if size.op == ALL_GATHER:
            arguments = x, [weight], size.rows, [], False, None, [], None
        elif size.op == REDUCE_SCATTER:
            arguments = x, weight, None, size.share, None, None
        else:
            arguments = x, weight, None, None, None, lambda: reducing(x, weight, self.name, sum_over_ranks=ALL_REDUCE_OP)
        result = candidate.run(self.arena, choice, *arguments)
        if result is None:
            result = self.reference(weight)
        return tuple(result) if isinstance(result, list) else (result,)

    def reference(self, weight: torch.Tensor) -> Any:
        """The operation by its reference, which is NCCL's."""
        if self.size.op == ALL_GATHER:
            return gathering(self.input, [weight], self.name, self.size.rows, [], None, [])
        return (scattering if self.size.op == REDUCE_SCATTER else reducing)(self.input, weight, self.name)

    def once(self, choice: Choice) -> Outputs:
        return self.call(choice, self.weights[0])

    def expect(self) -> tuple[torch.Tensor, float]:
        """The result in fp64, and how far from it one may be: twice as far as NCCL's."""
        size, weight = self.size, self.weights[0].double()
        if size.op == ALL_GATHER:
            value = gather_rows(self.input, size.rows, self.name).double() @ weight
        else:
            value = self.input.double() @ weight
            dist.all_reduce(value, group=self.group)
        if size.op == REDUCE_SCATTER:
            value = pad_rows(value, size.share * self.arena.world)[self.arena.rank * size.share :][: size.share].clone()
        (plain,) = self.once(Choice(NCCL))
        return value, 2 * _error(plain, value) + TINY

    def wrong(self, outputs: Outputs, expected: tuple[torch.Tensor, float]) -> str:
        (output,), (value, limit) = outputs, expected
        if output.shape != value.shape or output.dtype != self.size.dtype:
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
