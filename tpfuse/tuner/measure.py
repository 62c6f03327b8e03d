"""One size on the GPUs: which candidates compute it rightly, and how long each takes. What all operations share.

bench_all_reduce.py and bench_matmul.py say what a call is, when it is right, and what of the time of a graph is its own.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm import agreement
from tpfuse.comm.arena import Arena
from tpfuse.errors import AgreementError, BuildError, TpfuseError, first_line
from tpfuse.tables import Choice
from tpfuse.tuner import timing

CHECKED_CALLS = 3  # symmetric memory is used again and again
FIRST_ROUNDS, SECOND_ROUNDS = 9, 51
COLD_BYTES = 160 << 20  # weights that take turns together: more than an L2 cache holds, as in a model
LEAST_US = 0.01  # of a net time: noise must not make it zero

Outputs = tuple[torch.Tensor, ...]


class Bench(abc.ABC):
    """Inputs of one size on this rank, and what to do with them. Collective: all ranks call each method alike."""

    calls = 1  # in a timed graph
    second_rounds = SECOND_ROUNDS
    rests_s: tuple[float, ...] = (0.0,)  # of the device before each timed graph: it is timed with each
    beside: tuple[None, ...] = ()  # None: what the calls stand between is timed by itself, too
    replicated = True  # the results are to have the same bits on all ranks

    def __init__(self, size: Any, arena: Arena, group: dist.ProcessGroup) -> None:
        self.size, self.arena, self.group, self.device = size, arena, group, arena.device
        self.random = torch.Generator(self.device)
        self.graphs: dict[Choice | None, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # of all graphs: nobody looks at their results

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    # -- what each operation says ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def once(self, choice: Choice) -> Outputs:
        """The results of one call, to be checked."""

    @abc.abstractmethod
    def expect(self) -> Any:
        """What ``wrong`` compares with."""

    @abc.abstractmethod
    def wrong(self, outputs: Outputs, expected: Any) -> str:
        """What is wrong with the results on this rank, or ""."""

    @abc.abstractmethod
    def chain(self, choice: Choice | None, calls: int) -> None:
        """So many calls one after the other, as they are timed; None: what they stand between alone."""

    @abc.abstractmethod
    def net_us(self, times: Mapping[Choice | None, list[float]]) -> dict[Choice, float]:
        """From us of graphs, round by round, to us of one call."""

    # -- right or wrong ------------------------------------------------------------------------------------------------

    def refusal(self, choice: Choice, expected: Any) -> str:
        """Why a candidate is left out, the same on every rank; "" if it is right.

        Raises AgreementError: it failed on some of the ranks only, so that the others may wait in it for ever.
        """
        failed = wrong = bits = ""
        try:
            for _ in range(CHECKED_CALLS):
                outputs = self.once(choice)
                wrong = wrong or self.wrong(outputs, expected)
            bits = " ".join(_fingerprint(output) for output in outputs) if self.replicated else ""
            torch.cuda.synchronize(self.device)
            self.arena.check()
        except BuildError as error:  # on every rank: a tiling that does not fit, perhaps
            failed = f"{type(error).__name__}: {first_line(error)}"
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

    # -- how long ------------------------------------------------------------------------------------------------------

    def capture(self, choice: Choice | None) -> None:
        """The timed graph of a candidate whose kernels are compiled by now; None: of what its calls stand between."""
        self.chain(choice, 1)
        torch.cuda.synchronize(self.device)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.chain(choice, self.calls)
        self.graphs[choice] = graph

    def time_us(self, choices: Sequence[Choice], rounds: int) -> dict[Choice, float]:
        """Microseconds of one call of each, the geometric mean over the rests; the same on all ranks."""
        timed = {choice: self.graphs[choice] for choice in (*choices, *self.beside)}
        nets = [
            self.net_us(timing.replayed_us(timed, rounds, self.device, self.group, idle_s=rest)) for rest in self.rests_s
        ]
        self.arena.check()
        return {c: math.prod(max(LEAST_US, net[c]) for net in nets) ** (1 / len(nets)) for c in choices}


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
            say(f"{bench.size}: left out {choice}: {why}")
        else:
            right.append(choice)
    del expected
    if not right:
        return {}, {}
    for each in (*bench.beside, *right):
        bench.capture(each)
    first = bench.time_us(right, FIRST_ROUNDS)
    kept = narrow(first)
    return first, bench.time_us(kept, bench.second_rounds)


def _fingerprint(tensor: torch.Tensor) -> str:
    """Equal for equal bits."""
    words = tensor.contiguous().view(-1).view(torch.int16).to(torch.int64)
    place = torch.arange(1, words.numel() + 1, device=words.device)
    return f"{int((words * (place % 65521)).sum()):x}"
