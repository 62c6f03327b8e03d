"""The symmetric arena: made once per group, of any size, for several groups and models, with CUDA graphs.

Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`. Groups made anew and ranks without memory are in
test_arena_limits.py, ranks that stop, die or leave in test_peers.py.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

import gc
import inspect
import itertools
import pathlib
import random
import sys
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # torchrun puts this file's folder there

import tpfuse
from tests.gloo.layers import largest_difference
from tests.multigpu.checks import (
    FEWER,
    SHARED,
    Call,
    Case,
    CudaStack,
    differ,
    error_of,
    excess,
    here,
    judge,
    noted,
    right,
    seconds_of_100_looks,
)
from tpfuse.comm import arena
from tpfuse.kernels import dispatch
from tpfuse.testing import interpret_graphs, spawn, under_torchrun

FUSION = "fuse_allreduce_rms"
SPLIT, RING = "tpfuse_split", "tpfuse_ring"
FP32_ERROR = 1e-4


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _new_group() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))


def _swapped() -> dist.ProcessGroup:
    """A group of the same ranks in the other order."""
    ranks = list(reversed(range(dist.get_world_size())))
    unsorted = "sort_ranks" in inspect.signature(c10d._new_group_with_tag).parameters
    return c10d._new_group_with_tag(ranks, sort_ranks=False) if unsorted else dist.new_group(ranks)


def _arena_of(group: dist.ProcessGroup) -> arena.Arena:
    made = dispatch.of(group.group_name)
    assert not isinstance(made, str), made
    return made.arena


# -- one arena, several groups, graphs -----------------------------------------------------------------------------------


def _groups_of_one(told: list[str]) -> None:
    """Each rank by itself, before the first group with peers: nothing waits for the others."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for rows in (3 + dist.get_rank(), 1):
        call = Call(Case((rows, 4096)), alone)
        for got, exact in zip(call.run(), call.exact(slice(None)), strict=True):
            if not excess(got, None, exact) <= 1:
                told.append(f"{rows} rows: {excess(got, None, exact):.3g} of the allowed error")
    if "no peers" not in str(dispatch.of(alone.group_name)):
        told.append(f"the reason is {dispatch.of(alone.group_name)}")


def _made_once(told: list[str]) -> None:
    """By a straggler and one that waits for it; after that nothing is exchanged any more."""
    if dist.get_rank() == 1:
        time.sleep(3)
    first = _arena_of(_world())
    right(told, judge(Call(Case((3, 4096)))))
    seconds = seconds_of_100_looks(_world())
    if seconds > 1 or _arena_of(_world()) is not first or first.bytes != arena.DEFAULT_BYTES:
        told.append(f"100 looks at the arena took {seconds:.2f} s, {first.bytes} bytes")


def _applied(told: list[str]) -> None:
    """A model by ``apply``: fused, right at every size, and the arena is in the report."""
    with interpret_graphs():
        model = tpfuse.apply(CudaStack(_world()), {FUSION: True}, strict=True, fullgraph=True)
        errors = {shape: largest_difference(model, *shape) for shape in ((1,), (5,), (0,), (33,), (2, 9), (1000,), (1,))}
        report = tpfuse.explain(model)
        told += [f"{shape}: error {error}" for shape, error in errors.items() if not error < FP32_ERROR]
        if report.count(FUSION) != 3 or "arena of 64 MiB" not in str(report):
            told.append(str(report))
        narrow = tpfuse.apply(CudaStack(_world(), hidden=100, seed=3))  # a second model, on the same arena
        for tokens in (4, 1, 40):
            if not max(largest_difference(narrow, tokens), largest_difference(model, tokens)) < FP32_ERROR:
                told.append(f"two models: wrong at {tokens} tokens")


def _deadline(told: list[str]) -> None:
    """As the configuration says, and again where the first call of a group is in inference mode."""
    with interpret_graphs():
        model = tpfuse.apply(CudaStack(_world(), layers=1), {"peer_timeout_s": 40})
        if not largest_difference(model, 5) < FP32_ERROR or _arena_of(_world()).deadline_s != 40:
            told.append(f"the deadline is {_arena_of(_world()).deadline_s} s")
    call = Call(Case((5, 4096), kernel=RING), _new_group())
    with torch.inference_mode():
        call.run()
    _arena_of(call.group).set_deadline(40)
    right(told, judge(call))


def _other_sizes(told: list[str]) -> None:
    """A small arena is asked for no more than it holds; too small a one, or one of two sizes, is not made on any rank."""
    group, none, different = (_new_group() for _ in range(3))
    made = dispatch.of(group.group_name, 8 << 20)
    assert not isinstance(made, str), made
    rows = made.arena.split.size
    if made.arena.bytes != 8 << 20 or not 1 <= rows < 32:
        told.append(f"{made.arena.bytes} bytes have room for {rows} split rows")
    for case in (Case((rows, 4096), kernel=SPLIT), Case((300, 4096), kernel=RING), Case((2049, 8192)), Case((20, 4096))):
        right(told, judge(Call(case, group)))
    why = error_of(Call(Case((rows + 1, 4096), kernel=SPLIT), group).run)
    if f"more than {rows} rows" not in why:
        told.append(f"{rows + 1} rows: {why or 'no error'}")
    reasons = (
        (none, 100_000, "an arena of 100000 bytes is too small"),
        (different, (8 + dist.get_rank()) << 20, "the ranks ask for different arena sizes"),
    )
    for each, size, words in reasons:
        reason = dispatch.of(each.group_name, size)
        if not isinstance(reason, str) or words not in reason:
            told.append(f"{words}: {reason}")
    right(told, judge(Call(Case((3, 4096)), none)))


def _library_on_one_rank(told: list[str]) -> None:
    """FlashInfer, asked for by name, is there on the first rank only: all ranks refuse, for the same reason."""
    from tpfuse.kernels import flashinfer

    there = mock.patch.object(flashinfer, "_load", lambda: ("0.6.13", ""))
    hidden = mock.patch.dict(sys.modules, {"flashinfer": None})
    call = Call(Case((5, 4096)), _new_group())
    with there if dist.get_rank() == 0 else hidden:
        why = error_of(call.run, "flashinfer")
    if not why.startswith("ConfigError: kernel 'flashinfer' cannot run") or "rank 1: FlashInfer: Module" not in why:
        told.append(why or "no error")
    right(told, judge(call))


def _several_groups(told: list[str]) -> None:
    """Groups of the same ranks, one in another order, each with an arena of its own, alternating on two streams."""
    groups = [_world(), _new_group(), _swapped()]
    # Few rows, so that kernels of two groups are on the device together: as with NCCL, two that each fill it may block.
    cases = [Case((1, 4096), kernel=SPLIT), Case((3, 4096), kernel=RING), Case((8, 4096)), Case((16, 2880), kernel=RING)]
    calls = [[Call(case, group, seed) for seed, case in enumerate(cases)] for group in groups]
    for call in itertools.chain(*calls):
        right(told, judge(call))
    expected = [[call.run() for call in each] for each in calls]
    if len({id(_arena_of(group)) for group in groups}) != len(groups):
        told.append("two groups share an arena")
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = [torch.zeros((), dtype=torch.bool, device=here()) for _ in range(2)]
    torch.cuda.synchronize()
    shared = random.Random(3)
    for _ in range(1000 // FEWER):
        pair = shared.sample(range(len(groups)), 2)  # who is on which stream changes
        for stream, index in enumerate(pair):
            i = shared.randrange(len(cases))
            with torch.cuda.stream(streams[stream]):
                got = calls[index][i].run()
                for g, e in zip(got, expected[index][i], strict=True):
                    wrong[stream] |= differ(g, e)
    torch.cuda.synchronize()
    told += [f"wrong bits on stream {stream}" for stream in range(2) if wrong[stream].item()]


def _leaving_alone(told: list[str]) -> None:
    """A rank that ends a group before the others do hinders nobody."""
    group = _new_group()
    call, same = Call(Case((5, 4096), kernel=RING), group), Call(Case((5, 4096), kernel=RING))
    got, expected = call.run(), same.run()
    torch.cuda.synchronize()
    right(told, *("wrong bits" for g, e in zip(got, expected, strict=True) if differ(g, e).item()))
    call.group = None
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
        del group, call
        gc.collect()
    for _ in range(10):
        right(told, *("wrong bits" for g, e in zip(same.run(), expected, strict=True) if differ(g, e).item()))
    if dist.get_rank() != 0:
        dist.destroy_process_group(group)


class _Graph:
    """A call captured once; ``check`` replays it on one of several inputs and compares with the eager call's bits."""

    def __init__(self, case: Case) -> None:
        self.calls = [Call(case, seed=seed) for seed in range(3)]
        self.x, self.residual = self.calls[0].input.clone(), self.calls[0].residual.clone()
        self.weight = self.calls[0].weight
        self.expected = [call.run(weight=self.weight) for call in self.calls]
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.calls[0].run(input=self.x, residual=self.residual, weight=self.weight)

    def check(self, number: int) -> torch.Tensor:
        self.x.copy_(self.calls[number].input)
        self.residual.copy_(self.calls[number].residual)
        self.graph.replay()
        return torch.stack([differ(g, e) for g, e in zip(self.outputs, self.expected[number], strict=True)]).any()


def _graphs(told: list[str]) -> None:
    """Captured small to large and back, two widths, then a larger eager call; replayed in any order, on two streams."""
    counts = (1, 2, 4, 8, 16, 64, 256)
    kernels = {1: None, 2: RING, 4: SPLIT, 8: None, 16: SPLIT, 64: RING, 256: RING}
    sizes = [(rows, 4096) for rows in (*counts, *reversed(counts))] + [(rows, 8192) for rows in (256, 8, 1)]
    graphs = [_Graph(Case(size, kernel=kernels[size[0]])) for size in sizes]
    right(told, judge(Call(Case((8192, 4096), kernel=RING))))
    eager = Call(Case((33, 7168), kernel=RING))
    expected = eager.run()
    gc.collect()
    torch.cuda.empty_cache()
    shared, wrong = random.Random(11), torch.zeros((), dtype=torch.bool, device=here())
    order = [graph for graph in graphs for _ in range(200 // FEWER)]
    shared.shuffle(order)
    other = torch.cuda.Stream()
    for half, stream in enumerate((torch.cuda.current_stream(), other)):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for graph in order[half::2]:
                wrong |= graph.check(shared.randrange(3))
                if shared.random() < 0.1:
                    wrong |= differ(eager.run()[0], expected[0])
    torch.cuda.synchronize()
    if wrong.item():
        told.append("a replay has other bits than the eager call")


def _capture_first(told: list[str]) -> None:
    """A group whose first call is inside a capture: no arena can be made there, which is said, and NCCL does the work."""
    group = _new_group()
    call = Call(Case((5, 4096)), group)
    dist.all_reduce(torch.ones(1, device=here()), group=group)  # NCCL too must have been used before
    plain = call.plain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reason = dispatch.of(group.group_name)
        got = call.run()
    graph.replay()
    torch.cuda.synchronize()
    if not isinstance(reason, str) or "CUDA graph is being captured" not in reason:
        told.append(f"the reason is {reason}")
    if not all(torch.allclose(g.float(), p.float(), rtol=2**-7, atol=1e-3) for g, p in zip(got, plain, strict=True)):
        told.append("the captured call is wrong")
    graph.reset()  # it holds NCCL's calls, which would keep the group from ending


def _first_met_in_a_capture(told: list[str]) -> None:
    """A size that was never run before, with the arena there: captured all the same."""
    call, graph = Call(Case((6, 1480), kernel=SPLIT)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run()
    graph.replay()
    again = call.run()
    right(told, *("a replay has other bits" for g, a in zip(got, again, strict=True) if differ(g, a).item()), judge(call))


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "groups of one": _groups_of_one,
    "made once": _made_once,
    "applied": _applied,
    "deadline": _deadline,
    "other sizes": _other_sizes,
    "library on one rank": _library_on_one_rank,
    "several groups": _several_groups,
    "leaving alone": _leaving_alone,
    "graphs": _graphs,
    "capture first": _capture_first,
    "first met in a capture": _first_met_in_a_capture,  # last: a capture that fails leaves a mess
}
NEEDS_NCCL = ("capture first",)


def _lifetime(rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, check in CHECKS.items():
        if SHARED and name in NEEDS_NCCL:
            continue
        start = time.monotonic()
        with noted(found, name) as told:
            check(told)
            torch.cuda.synchronize()
            arena.check()
        if rank == 0:
            print(f"{name}: {time.monotonic() - start:.1f} s, {len(found[name])} wrong", flush=True)
    gc.collect()
    return found


@pytest.fixture(scope="module")
def lifetime():
    return spawn(_lifetime, 2, backend="cuda", timeout_s=45, grace_s=90)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nccl] * (n in NEEDS_NCCL)) for n in CHECKS])
def test_arena(lifetime, name):
    for found in lifetime:
        assert not found[name], "\n".join(found[name])


def _everything(rank: int) -> str:
    told = [f"{name}: {each}" for name, listed in _lifetime(rank).items() for each in listed]
    assert not told, "\n".join(told)
    return "all right"


if __name__ == "__main__":
    under_torchrun(_everything)
