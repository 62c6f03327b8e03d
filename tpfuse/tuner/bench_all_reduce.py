"""All-reduces as they are measured: where a model's calls run, between GEMMs.

A timed CUDA graph is a few pairs of a GEMM and the operation on its result, each pair fed by the one before; what it adds
to the same GEMMs alone is counted (see timing.py).

T  rows (tokens)     D  hidden size     K  columns of the GEMM's left side, D / world
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from tpfuse.comm.arena import Arena
from tpfuse.kernels.candidates import ALL_REDUCE, CANDIDATES
from tpfuse.tables import Choice
from tpfuse.tuner import timing
from tpfuse.tuner.measure import COLD_BYTES, Bench, Outputs
from tpfuse.tuner.proposals import Size

EPS = 1e-5
LONG_MESSAGE_BYTES, SHORT_PAIRS, LONG_PAIRS = 8 << 20, 16, 4


class AllReduceBench(Bench):
    beside = (None,)

    def __init__(self, size: Size, arena: Arena, group: dist.ProcessGroup) -> None:
        super().__init__(size, arena, group)
        shape, dtype = (size.rows, size.hidden), size.dtype
        self.random.manual_seed(100 + arena.rank)
        self.input = self.normal(shape).to(dtype)
        self.columns = max(1, size.hidden // arena.world)
        self.calls = SHORT_PAIRS if size.bytes < LONG_MESSAGE_BYTES else LONG_PAIRS
        matrix = (self.columns, size.hidden)
        count = min(self.calls, 1 + COLD_BYTES // (math.prod(matrix) * dtype.itemsize))
        # A sum over ranks of what these make of normalised rows is about as large as a normalised row.
        deviation = (self.columns * arena.world) ** -0.5
        self.matrices = [(self.normal(matrix) * deviation).to(dtype) for _ in range(count)]
        self.random.manual_seed(99)  # what is replicated is the same on all ranks
        self.start = self.normal(shape).to(dtype)
        self.residual = self.normal(shape).to(dtype)
        self.weight = (1 + 0.1 * self.normal((size.hidden,))).to(dtype)

    def call(self, choice: Choice, input: torch.Tensor, residual: torch.Tensor) -> Outputs:
        """The operation by one candidate: (normed, total), or (total,) of a plain all-reduce."""
        run = CANDIDATES[self.size.op][choice.candidate].run
        if self.size.op == ALL_REDUCE:
            return (run(self.arena, choice, input),)
        dtype = self.size.dtype
        return run(self.arena, choice, input, self.weight, EPS, residual, None, None, None, 0.0, dtype, dtype)

    def once(self, choice: Choice) -> Outputs:
        return self.call(choice, self.input, self.residual)

    def expect(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per output: its value in fp64, and how large an error would be an error of one whole rounding unit."""
        total, magnitude = self.input.double(), self.input.double().abs()
        for each in (total, magnitude):
            dist.all_reduce(each, group=self.group)
        if self.size.op == ALL_REDUCE:
            return [(total, magnitude)]
        total += self.residual.double()
        magnitude += self.residual.double().abs()
        factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * self.weight.double()
        return [(total * factor, magnitude * factor.abs()), (total, magnitude)]

    def wrong(self, outputs: Outputs, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
        # Half a unit per rank, for the residual and for each step of the norm, and as much again for its mean and root.
        limit = (self.arena.world + 2) * 2 * torch.finfo(self.size.dtype).eps
        for output, (value, unit) in zip(outputs, expected, strict=True):
            if output.shape != value.shape or output.dtype != self.size.dtype:
                return f"its result is {output.dtype} {list(output.shape)}"
            error = ((output.double() - value).abs() / (unit + 1e-3)).max().item()
            if not error <= limit:  # NaN too
                return f"its result is off by {error:.2g} of the addends, more than {limit:.2g}"
        return ""

    def chain(self, choice: Choice | None, calls: int) -> None:
        left, total = self.start, self.residual
        for number in range(calls):
            partial = left[:, : self.columns] @ self.matrices[number % len(self.matrices)]
            if choice is None:
                left = partial
            elif self.size.op == ALL_REDUCE:
                (left,) = self.call(choice, partial, total)
            else:
                left, total = self.call(choice, partial, total)

    def net_us(self, times: Mapping[Choice | None, list[float]]) -> dict[Choice, float]:
        """Without the GEMM before it."""
        calls = {choice: each for choice, each in times.items() if choice is not None}
        return timing.added_us(calls, times[None], self.calls)
