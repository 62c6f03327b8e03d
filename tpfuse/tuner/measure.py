"""One size on the GPUs: which candidates compute it rightly, and how long each takes where a model's calls run.

A timed CUDA graph is a few pairs of a GEMM and the operation on its result, each pair fed by the one before; what it adds
to the same GEMMs alone is counted (see timing.py).

T  rows (tokens)     D  hidden size     K  columns of the GEMM's left side, D / world
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm import agreement
from tpfuse.comm.arena import Arena
from tpfuse.errors import AgreementError, TpfuseError
from tpfuse.kernels.candidates import ALL_REDUCE, CANDIDATES
from tpfuse.tables import Choice
from tpfuse.tuner import timing
from tpfuse.tuner.proposals import Size

EPS = 1e-5
CHECKED_CALLS = 3  # the arena's slots are used again and again
FIRST_ROUNDS, SECOND_ROUNDS = 9, 51
LONG_MESSAGE_BYTES, SHORT_PAIRS, LONG_PAIRS = 8 << 20, 16, 4
COLD_BYTES = 160 << 20  # matrices of the GEMMs together: more than an L2 cache holds, as in a model
LEAST_US = 0.01  # of a net time: noise must not make it zero

Outputs = tuple[torch.Tensor, ...]


class Bench:
    """Inputs of one size on this rank, and what to do with them. Collective: all ranks call each method alike."""

    def __init__(self, size: Size, arena: Arena, group: dist.ProcessGroup) -> None:
        self.size, self.arena, self.group, self.device = size, arena, group, arena.device
        self.random = torch.Generator(self.device)
        shape, dtype = (size.rows, size.hidden), size.dtype
        self.random.manual_seed(100 + arena.rank)
        self.input = self._normal(shape).to(dtype)
        self.columns = max(1, size.hidden // arena.world)
        message_bytes = size.rows * size.hidden * dtype.itemsize
        self.pairs = SHORT_PAIRS if message_bytes < LONG_MESSAGE_BYTES else LONG_PAIRS
        matrix = (self.columns, size.hidden)
        count = min(self.pairs, 1 + COLD_BYTES // (math.prod(matrix) * dtype.itemsize))
        # A sum over ranks of what these make of normalised rows is about as large as a normalised row.
        deviation = (self.columns * arena.world) ** -0.5
        self.matrices = [(self._normal(matrix) * deviation).to(dtype) for _ in range(count)]
        self.random.manual_seed(99)  # what is replicated is the same on all ranks
        self.start = self._normal(shape).to(dtype)
        self.residual = self._normal(shape).to(dtype)
        self.weight = (1 + 0.1 * self._normal((size.hidden,))).to(dtype)
        self.graphs: dict[Choice | None, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # of all graphs: nobody looks at their results

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    def call(self, choice: Choice, input: torch.Tensor, residual: torch.Tensor) -> Outputs:
        """The operation by one candidate: (normed, total), or (total,) of a plain all-reduce."""
        run = CANDIDATES[self.size.op][choice.candidate].run
        if self.size.op == ALL_REDUCE:
            return (run(self.arena, choice, input),)
        dtype = self.size.dtype
        return run(self.arena, choice, input, self.weight, EPS, residual, None, None, None, 0.0, dtype, dtype)

    # -- right or wrong ------------------------------------------------------------------------------------------------

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

    def refusal(self, choice: Choice, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
        """Why a candidate is left out, the same on every rank; "" if it is right.

        Raises AgreementError: it failed on some of the ranks only, so that the others may wait in it for ever.
        """
        failed = wrong = bits = ""
        try:
            for _ in range(CHECKED_CALLS):
                outputs = self.call(choice, self.input, self.residual)
                wrong = wrong or self._wrong(outputs, expected)
            bits = " ".join(_fingerprint(output) for output in outputs)
            torch.cuda.synchronize(self.device)
            self.arena.check()
        except TpfuseError:  # a peer is gone: nothing can go on
            raise
        except Exception as error:  # what a compiler or a library raises is up to it
            failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        everybody = agreement.exchange(self.group, f"tuning {self.size.op}", {"f": failed, "w": wrong, "b": bits})
        failures = agreement.told(everybody, "f")
        if failures and not all(each["f"] for each in everybody):
            raise AgreementError(f"{choice} failed on some ranks only: {failures}")
        differ = "" if len({each["b"] for each in everybody}) == 1 else "the ranks got different bits"
        return failures or agreement.told(everybody, "w") or differ

    def _wrong(self, outputs: Outputs, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
        # Half a unit per rank, for the residual and for each step of the norm, and as much again for its mean and root.
        limit = (self.arena.world + 2) * 2 * torch.finfo(self.size.dtype).eps
        for output, (value, unit) in zip(outputs, expected, strict=True):
            if output.shape != value.shape or output.dtype != self.size.dtype:
                return f"its result is {output.dtype} {list(output.shape)}"
            error = ((output.double() - value).abs() / (unit + 1e-3)).max().item()
            if not error <= limit:  # NaN too
                return f"its result is off by {error:.2g} of the addends, more than {limit:.2g}"
        return ""

    # -- how long ------------------------------------------------------------------------------------------------------

    def capture(self, choice: Choice | None) -> None:
        """The timed graph of a candidate whose kernels are compiled by now; None: of the GEMMs alone."""
        self._chain(choice, 1)
        torch.cuda.synchronize(self.device)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._chain(choice, self.pairs)
        self.graphs[choice] = graph

    def _chain(self, choice: Choice | None, pairs: int) -> None:
        left, total = self.start, self.residual
        for number in range(pairs):
            partial = left[:, : self.columns] @ self.matrices[number % len(self.matrices)]
            if choice is None:
                left = partial
            elif self.size.op == ALL_REDUCE:
                (left,) = self.call(choice, partial, total)
            else:
                left, total = self.call(choice, partial, total)

    def time_us(self, choices: Sequence[Choice], rounds: int) -> dict[Choice, float]:
        """Microseconds of one call of each, without the GEMM before it; the same on all ranks."""
        times = timing.replayed_us(
            {choice: self.graphs[choice] for choice in (*choices, None)}, rounds, self.device, self.group
        )
        self.arena.check()
        alone = times.pop(None)
        added = timing.added_us(times, alone, self.pairs)
        return {choice: max(LEAST_US, added[choice]) for choice in choices}


def measure(
    bench: Bench,
    candidates: Sequence[Choice],
    narrow: Callable[[dict[Choice, float]], list[Choice]],
    say: Callable[[str], None],
) -> tuple[dict[Choice, float], dict[Choice, float]]:
    """Microseconds of all right candidates in a first pass, and of those that ``narrow`` leaves in a second."""
    expected = bench.expect()
    right = []
    for choice in candidates:
        why = bench.refusal(choice, expected)
        if why:
            say(f"{bench.size.op} of {bench.size.rows} x {bench.size.hidden}: left out {choice}: {why}")
        else:
            right.append(choice)
    del expected
    if not right:
        return {}, {}
    for each in (None, *right):
        bench.capture(each)
    first = bench.time_us(right, FIRST_ROUNDS)
    kept = narrow(first)
    return first, bench.time_us(kept, SECOND_ROUNDS)


def _fingerprint(tensor: torch.Tensor) -> str:
    """Equal for equal bits."""
    words = tensor.contiguous().view(-1).view(torch.int16).to(torch.int64)
    place = torch.arange(1, words.numel() + 1, device=words.device)
    return f"{int((words * (place % 65521)).sum()):x}"
