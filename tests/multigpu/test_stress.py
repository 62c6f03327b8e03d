"""The kernels back to back: many launches that nothing waits for, under delays; and the control, which must go wrong.

Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

import pathlib
import random
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # torchrun puts this file's folder there

from tests.multigpu.checks import (
    BF16,
    EPS,
    FEWER,
    FP16,
    FP32,
    Call,
    Case,
    Outputs,
    delay,
    differ,
    here,
    judge,
    noted,
    right,
)
from tpfuse.kernels import dispatch
from tpfuse.testing import spawn, under_torchrun

SPLIT, RING, NCCL = "tpfuse_split", "tpfuse_ring", "nccl"
LAUNCHES = 20_000 // FEWER
CHECK_EVERY = 60 // FEWER  # turns; a turn is a launch, or a graph or chain of several
CHAIN = 8
WIDTHS = {BF16: (64, 100, 2880, 4096, 4098, 7168, 8192), FP16: (100, 4096, 7168), FP32: (64, 4098, 8192)}
ROWS = (1, 1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 64, 100, 256, 264, 265, 300, 1024)


class _Item:
    """Something to launch, and the bits that it must give: those of its first run, which were judged."""

    def __init__(self, run: Callable[[], list[torch.Tensor]], launches: int, expected: list[torch.Tensor] | None = None):
        self.run, self.launches = run, launches
        self.expected = [tensor.clone() for tensor in run()] if expected is None else expected

    def is_wrong(self, got: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([differ(g, e) for g, e in zip(got, self.expected, strict=True)]).any()


def _item(call: Call) -> _Item:
    return _Item(lambda: list(call.run()), 1)


def _chain(call: Call) -> _Item:
    """Layer after layer: each takes the norm and the sum of the one before."""

    def run() -> list[torch.Tensor]:
        normed, total = call.run()
        for _ in range(CHAIN - 1):
            normed, total = call.run(input=normed, residual=total)
        return [normed, total]

    return _Item(run, CHAIN)


def _graph(items: list[_Item]) -> _Item:
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for item in items:
            outputs += item.run()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return outputs

    return _Item(replay, sum(item.launches for item in items), [tensor for item in items for tensor in item.expected])


def _items(told: list[str], shared: random.Random) -> tuple[list[_Item], list[_Item]]:
    """Eager calls of random sizes and CUDA graphs of several of them. A graph must not hold NCCL's calls (it would keep the
    group from ending), so only calls that name a kernel of ours go into one."""
    cases = [Case((t, d), kernel=NCCL) for t, d in ((3, 4096), (64, 7168))]
    for _ in range(40):
        dtype, rows = shared.choice((BF16, BF16, FP16, FP32)), shared.choice(ROWS)
        kernel = shared.choice((None, RING, SPLIT if rows <= 32 else RING))
        cases.append(Case((rows, shared.choice(WIDTHS[dtype])), dtype, kernel))
    calls = [Call(case, seed=seed) for seed, case in enumerate(cases)]
    for call in calls:
        right(told, judge(call))
    sizes = ((t, d, k) for d in (4096, 7168) for t, k in ((1, SPLIT), (3, RING), (8, SPLIT), (1024, RING)))
    chains = [_chain(Call(Case((t, d), kernel=kernel))) for t, d, kernel in sizes]
    eager = [*map(_item, calls), *chains]
    ours = [item for call, item in zip(calls, eager, strict=False) if call.case.kernel in (SPLIT, RING)] + chains
    torch.cuda.synchronize()
    return eager, [_graph([shared.choice(ours) for _ in range(CHAIN)]) for _ in range(8)]


class _Storm:
    """Turns on two streams, in one order on all ranks, with delays of each rank's own.

    Eager calls follow one another by themselves; a replay on the other stream than the turn before or after it is ordered
    here, as a user has to.
    """

    def __init__(self, shared: random.Random, mine: random.Random) -> None:
        self.shared, self.mine = shared, mine
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.last, self.replayed = 0, False

    def run(self, told: list[str], eager: list[_Item], graphs: list[_Item]) -> None:
        wrong = [torch.zeros((), dtype=torch.bool, device=here()) for _ in range(2)]
        torch.cuda.synchronize()
        launches = turn = checked = 0
        while launches < LAUNCHES:
            replay = self.shared.random() < 0.12
            item = self.shared.choice(graphs if replay else eager)
            on = self._stream(replay)
            with torch.cuda.stream(self.streams[on]):
                self._dawdle()
                got = item.run()
                if turn % CHECK_EVERY < 2:
                    wrong[on] |= item.is_wrong(got)
                    checked += 1
            launches, turn = launches + item.launches, turn + 1
        torch.cuda.synchronize()
        told += [f"wrong bits among {checked} checked results on stream {i}" for i in range(2) if wrong[i].item()]
        if checked < 50:
            told.append(f"only {checked} results were checked")

    def _stream(self, replay: bool) -> int:
        on = self.last if self.shared.random() < 0.7 else 1 - self.last
        if on != self.last and (replay or self.replayed):
            self.streams[on].wait_stream(self.streams[self.last])
        self.last, self.replayed = on, replay
        return on

    def _dawdle(self) -> None:
        """Be late at times, on the device or before the launch."""
        chance = self.mine.random()
        if chance < 0.02:
            delay(self.mine.uniform(0, 10e-3))
        elif chance < 0.025:
            time.sleep(self.mine.uniform(0, 10e-3))


def _stress(rank: int) -> list[str]:
    found: dict[str, list[str]] = {}
    shared, mine = random.Random(7), random.Random(1000 + rank)
    with noted(found, "stress") as told:
        made = dispatch.of(dist.group.WORLD.group_name)
        assert not isinstance(made, str), made
        eager, graphs = _items(told, shared)
        start = time.monotonic()
        _Storm(shared, mine).run(told, eager, graphs)
        if rank == 0:
            print(f"stress: {time.monotonic() - start:.1f} s for {LAUNCHES} launches", flush=True)
        made.arena.check()
    return found["stress"]


@pytest.mark.gpu
def test_stress():
    for told in spawn(_stress, 2, backend="cuda", timeout_s=60, grace_s=90):
        assert not told, "\n".join(told)


# -- the control: without waiting for peers it must go wrong ------------------------------------------------------------


def _without_waiting(rank: int) -> dict[str, int]:
    """How many of 40 results are wrong, by kernel and whether it waits; ranks take turns at being late."""
    from tpfuse.kernels.triton import own

    arena = dispatch.of(dist.group.WORLD.group_name).arena
    calls = [Call(Case((8, 4096)), seed=seed) for seed in range(5)]  # as many as slots, and one: what is stale shows
    exact = [call.exact(slice(None)) for call in calls]

    def run(name: str, i: int, wait: bool) -> Outputs:
        call = calls[i % len(calls)]
        return own.all_reduce_rms_norm(name, arena, call.input, call.weight, EPS, call.residual, wait=wait)

    found = {}
    for wait in (True, False):  # without waiting, slots are left in disorder: last
        for name in ("split", "ring"):
            run(name, 0, wait)  # compiles
            torch.cuda.synchronize()
            wrong = torch.zeros((), dtype=torch.int64, device=here())
            for i in range(40):
                if i % 4 == 2 * rank:
                    delay(5e-3)
                wrong += _is_far(run(name, i, wait), exact[i % len(calls)])
            found[f"{name} {'waits' if wait else 'does not wait'}"] = wrong.item()
    return found


def _is_far(got: Outputs, exact: Outputs) -> torch.Tensor:
    far = [((g.double() - e).abs() > 0.1 * e.abs().max()).any() for g, e in zip(got, exact, strict=True)]
    return torch.stack(far).any()


@pytest.mark.gpu
def test_without_waiting_for_peers_results_are_wrong():
    for found in spawn(_without_waiting, 2, backend="cuda", timeout_s=60, grace_s=30):
        assert found.pop("split waits") == 0 and found.pop("ring waits") == 0
        assert all(wrong > 0 for wrong in found.values()), f"nothing went wrong, so no test could see it: {found}"


def _everything(rank: int) -> str:
    told = _stress(rank)
    assert not told, "\n".join(told)
    return "all right"


if __name__ == "__main__":
    under_torchrun(_everything)
