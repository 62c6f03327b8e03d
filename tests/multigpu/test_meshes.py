"""Groups on GPUs that are not the world, that overlap, and that end: arenas of their own, and nothing waits for others.

Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`, but for groups made anew. More of groups and arenas
is in test_arena.py and test_arena_limits.py.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

import datetime
import gc
import pathlib
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # torchrun puts this file's folder there

import tpfuse
from tests.gloo.layers import largest_difference
from tests.multigpu.checks import FEWER, SHARED, Call, Case, CudaStack, differ, here, judge, noted, right
from tpfuse.comm import arena
from tpfuse.kernels import dispatch
from tpfuse.testing import interpret_graphs, spawn, take_device, under_torchrun

FUSION = "fuse_allreduce_rms"
SPLIT, RING = "tpfuse_split", "tpfuse_ring"
FP32_ERROR = 1e-4
CALLS = 1000 // FEWER
CYCLES = 5
FREE_WITHIN_BYTES = 64 << 20


def _one_rank_each(told: list[str]) -> None:
    """Two tensor-parallel groups of one rank, each with its model, then one of both: the first wait for nobody."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 1:
        store.wait(["meshes/first is done"])  # the first rank must come through while the second does nothing
    with interpret_graphs():
        single = tpfuse.apply(CudaStack(alone, seed=rank))
        for tokens in (3, 5, 7) if rank == 0 else (8, 8):
            if not largest_difference(single, tokens) < FP32_ERROR:
                told.append(f"one rank alone: wrong at {tokens} tokens")
        torch.cuda.synchronize()
        store.set("meshes/first is done" if rank == 0 else "meshes/second is done", "yes")
        store.wait(["meshes/second is done"])
        if "has one rank: nothing to fuse" not in str(tpfuse.explain(single)):
            told.append(str(tpfuse.explain(single)))
        start = time.monotonic()
        both = tpfuse.apply(CudaStack(dist.group.WORLD), {FUSION: True}, strict=True)
        errors = [max(largest_difference(both, t), largest_difference(single, t)) for t in (4, 9, 1)]
        if not max(errors) < FP32_ERROR or tpfuse.explain(both).count(FUSION) != 3:
            told.append(f"errors {errors}\n{tpfuse.explain(both)}")
        if time.monotonic() - start > 30:
            told.append(f"the group of both took {time.monotonic() - start:.0f} s")


def _two_groups_in_turn(told: list[str]) -> None:
    """Two groups of the same ranks: calls take turns, on one stream and then on two."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    calls = [Call(Case((3, 4096), kernel=RING), groups[0]), Call(Case((3, 4096), kernel=SPLIT), groups[1], seed=1)]
    for call in calls:
        right(told, judge(call))
    expected = [call.run() for call in calls]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for second in streams:
        wrong = [torch.zeros((), dtype=torch.bool, device=here()) for _ in groups]
        for _ in range(CALLS):
            for index, stream in enumerate((streams[0], second)):
                with torch.cuda.stream(stream):
                    for g, e in zip(calls[index].run(), expected[index], strict=True):
                        wrong[index] |= differ(g, e)
        torch.cuda.synchronize()
        told += [f"group {index}: wrong bits" for index, each in enumerate(wrong) if each.item()]


def _two_models(told: list[str]) -> None:
    """Of other width, dtype and epsilon, in turns; one is deleted on one rank, and its sibling goes on."""
    world = dist.group.WORLD
    with interpret_graphs() as graphs:
        target = tpfuse.apply(CudaStack(world, hidden=2048, eps=1e-5), strict=True)
        draft = tpfuse.apply(CudaStack(world, hidden=2560, eps=1e-6, dtype=torch.bfloat16, seed=3), strict=True)
        gone = weakref.ref(draft)
        for tokens in (4, 5, 2, 9):
            wide, narrow = largest_difference(target, tokens), largest_difference(draft, tokens)
            if not (wide < FP32_ERROR and narrow < 0.1):
                told.append(f"{tokens} tokens: errors {wide:.3g} and {narrow:.3g}")
        if dist.get_rank() == 0:
            del draft
            graphs.clear()
            gc.collect()
            if gone() is not None:
                told.append("the deleted model is still there")
        for tokens in (4, 1, 11):
            if not largest_difference(target, tokens) < FP32_ERROR:
                told.append(f"{tokens} tokens: wrong after the other model was deleted")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "one rank each": _one_rank_each,
    "two groups in turn": _two_groups_in_turn,
    "two models": _two_models,
}


def _meshes(rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, check in CHECKS.items():
        start = time.monotonic()
        with noted(found, name) as told:
            check(told)
            torch.cuda.synchronize()
            arena.check()
        if rank == 0:
            print(f"{name}: {time.monotonic() - start:.1f} s, {len(found[name])} wrong", flush=True)
    return found


@pytest.fixture(scope="module")
def meshes():
    return spawn(_meshes, 2, backend="cuda", timeout_s=60, grace_s=60)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_meshes(meshes, name):
    for found in meshes:
        assert not found[name], "\n".join(found[name])


# -- groups destroyed and made anew --------------------------------------------------------------------------------------


def _made_anew(rank: int, ports: list[int]) -> dict[str, Any]:
    """One applied model over groups of one name, in turned order each time; it is given the new group."""
    backend, model = take_device(rank, 2), None
    found: dict[str, Any] = {"errors": [], "free": [], "fused": set(), "arenas": []}
    with interpret_graphs() as graphs:
        for cycle, port in enumerate(ports):
            timeout = datetime.timedelta(seconds=30)
            store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
            order = rank if cycle % 2 == 0 else 1 - rank
            dist.init_process_group(backend, store=store, rank=order, world_size=2, timeout=timeout)
            fresh = CudaStack(dist.group.WORLD, seed=cycle)
            if model is None:
                model = tpfuse.apply(CudaStack(dist.group.WORLD, seed=cycle), {FUSION: True}, strict=True)
            model.load_state_dict(fresh.state_dict())
            for mine, other in zip(model.layers, fresh.layers, strict=True):
                mine.tp_group, mine.full_down, mine.full_up = dist.group.WORLD, other.full_down, other.full_up
            model.tp_group = dist.group.WORLD
            found["errors"] += [largest_difference(model, tokens) for tokens in (4, 9, 300)]
            found["fused"].add(tpfuse.explain(model).count(FUSION))
            torch.cuda.synchronize()
            _let_go(model)
            del fresh
            dist.destroy_process_group()
            graphs.clear()
            gc.collect()
            torch.cuda.empty_cache()
            found["free"].append(torch.cuda.mem_get_info()[0])
            found["arenas"].append((len(arena._arenas), len(dispatch._dispatchers)))
    tpfuse.remove(model)
    del model
    gc.collect()
    found["arenas"].append((len(arena._arenas), len(dispatch._dispatchers)))
    return found


def _let_go(model: CudaStack) -> None:
    """A model that keeps a destroyed group keeps its arena."""
    for each in (model, *model.layers):
        each.tp_group = None


@pytest.mark.gpu
def test_a_model_over_groups_made_anew():
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(CYCLES)]
    found = spawn(_made_anew, 2, [store.port for store in stores], backend="", timeout_s=120)
    for each in found:
        assert max(each["errors"]) < FP32_ERROR and each["fused"] == {3}
        *kept, left = each["arenas"]
        assert all(max(count) <= 1 for count in kept), (
            f"only the last group's graphs may remain until the next call: {kept}"
        )
        assert left == (0, 0), "an arena outlives its group and model"
        if not SHARED:  # else the other rank's memory comes and goes beside it
            free = each["free"]
            assert free[0] - free[-1] <= FREE_WITHIN_BYTES, [f"{f >> 20} MiB" for f in free]
    if SHARED:
        assert found[0]["free"][0] - min(each["free"][-1] for each in found) <= 4 * FREE_WITHIN_BYTES


def _everything(rank: int) -> str:
    told = [f"{name}: {each}" for name, listed in _meshes(rank).items() for each in listed]
    assert not told, "\n".join(told)
    return "all right"


if __name__ == "__main__":
    under_torchrun(_everything)
