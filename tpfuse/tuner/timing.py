"""How long captured calls take where a model makes them: CUDA graphs that take turns, on all ranks together.

What is timed are graphs of several calls. What of their time is a call's own, its bench says: mostly what it adds to the
GEMM before it, by graphs of [GEMM, call] x n beside one of [GEMM] x n. All take turns in a new order each round, so that a
change of clocks meets all of them. The ranks together take as long as the slowest of them: the largest time of all ranks
for each replay, then the median over the rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

Key = TypeVar("Key")
_LEAD_CYCLES = 20_000_000  # the GPU waits so long while the host fills its queue
_SHORT_LEAD_CYCLES = 200_000  # and so long, idly, after a rest


def replayed_us(
    graphs: Mapping[Key, torch.cuda.CUDAGraph],
    rounds: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    idle_s: float = 0.0,
) -> dict[Key, list[float]]:
    """us of each replay of each graph, round by round, of the slowest rank: the same figures on all. Collective.

    idle_s  rest of the GPU before each replay, so that its clocks are not held down by the heat of the one before
    """
    token = torch.zeros(1, device=device)
    torch.cuda._sleep(_LEAD_CYCLES)
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in graphs}
    for key in turns(list(graphs), rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if idle_s:
            torch.cuda.synchronize()
            time.sleep(idle_s)
            torch.cuda._sleep(_SHORT_LEAD_CYCLES)
        dist.all_reduce(token, group=group)  # lets the ranks start together
        begin.record()
        graphs[key].replay()
        end.record()
        events[key].append((begin, end))
    torch.cuda.synchronize()
    times = {key: [1000 * a.elapsed_time(b) for a, b in pairs] for key, pairs in events.items()}
    return slowest_us(times, device, group)


def called_us(
    bodies: Mapping[Key, Callable[[], object]], rounds: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[Key, list[float]]:
    """As ``replayed_us``, of calls on the CPU, by the clock: the first of each, which is not counted, warms up."""
    token = torch.zeros(1)
    times: dict[Key, list[float]] = {key: [] for key in bodies}
    for key in (*bodies, *turns(list(bodies), rounds)):
        dist.all_reduce(token, group=group)
        start = time.perf_counter()
        bodies[key]()
        times[key].append(1e6 * (time.perf_counter() - start))
    return slowest_us({key: each[1:] for key, each in times.items()}, device, group)


def turns(keys: Sequence[Key], rounds: int) -> list[Key]:
    """Everybody once per round, in another order each time: the same on every rank."""
    shuffled = random.Random(rounds)
    return [key for _ in range(rounds) for key in shuffled.sample(keys, len(keys))]


def slowest_us(
    times: Mapping[Key, Sequence[float]], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[Key, list[float]]:
    """Of each figure the largest of all ranks'. Collective; every rank has as many of each."""
    listed = iter(largest([us for each in times.values() for us in each], device, group))
    return {key: [next(listed) for _ in each] for key, each in times.items()}


def largest(numbers: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None) -> list[float]:
    """Of each number the largest of all ranks'. Collective."""
    flat = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(flat, dist.ReduceOp.MAX, group)
    return flat.tolist()


def added_us(times: Mapping[Key, Sequence[float]], alone: Sequence[float], calls: int) -> dict[Key, float]:
    """What one of the ``calls`` calls of a graph adds to what was timed ``alone`` in the same rounds: the median."""
    return {
        key: statistics.median(us - without for us, without in zip(each, alone, strict=True)) / calls
        for key, each in times.items()
    }
