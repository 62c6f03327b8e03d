"""The symmetric arena where it ends: groups destroyed and made anew, and ranks without memory.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

import contextlib
import datetime
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import largest_difference
from tests.multigpu.checks import Call, Case, CudaStack, error_of, here, judge, right, seconds_of_100_looks
from tpfuse.comm import arena
from tpfuse.kernels import dispatch
from tpfuse.testing import interpret_graphs, spawn

FUSION = "fuse_allreduce_rms"
SPLIT, RING = "tpfuse_split", "tpfuse_ring"
FP32_ERROR = 1e-4
FREE_WITHIN_BYTES = 64 << 20

# -- groups destroyed and made anew --------------------------------------------------------------------------------------

CYCLES = 20


def _cycles(rank: int, ports: list[int]) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    found: dict[str, Any] = {"wrong": [], "free": [], "arenas": []}
    for cycle, port in enumerate(ports):
        order = rank if cycle % 2 == 0 else 1 - rank
        timeout = datetime.timedelta(seconds=30)
        store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
        dist.init_process_group("nccl", store=store, rank=order, world_size=2, timeout=timeout)
        for case in (Case((4, 4096), kernel=SPLIT), Case((9, 4096), kernel=RING), Case((300, 4096))):
            right(found["wrong"], judge(Call(case, seed=cycle)))
        torch.cuda.synchronize()
        dist.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()
        found["free"].append(torch.cuda.mem_get_info()[0])
        found["arenas"].append(len(arena._arenas))
    return found


@pytest.mark.gpu
@pytest.mark.nccl
def test_groups_destroyed_and_made_anew():
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(CYCLES)]
    ports = [store.port for store in stores]
    for found in spawn(_cycles, 2, ports, backend="", timeout_s=150):
        assert not found["wrong"], "\n".join(found["wrong"])
        assert found["arenas"] == [0] * CYCLES, "an arena outlives its group"
        free = found["free"]
        assert len(free) == CYCLES and free[1] - free[-1] <= FREE_WITHIN_BYTES, [f"{f >> 20} MiB" for f in free]


# -- no memory on one rank ----------------------------------------------------------------------------------------------


def _no_memory(rank: int) -> dict[str, Any]:
    """One rank cannot make its part: all are told the same, nothing is tried again, and the operation works."""
    refuse = mock.patch.object(arena.Arena, "__init__", side_effect=RuntimeError("out of memory\nand more"))
    found: dict[str, Any] = {"wrong": []}
    with refuse if rank == 1 else contextlib.nullcontext():
        found["refused"] = dispatch.of(dist.group.WORLD.group_name)
    found["seconds"] = seconds_of_100_looks(dist.group.WORLD)
    right(found["wrong"], *(judge(Call(Case(shape))) for shape in ((1, 4096), (40, 100), (3, 7))))
    with interpret_graphs():
        model = tpfuse.apply(CudaStack(dist.group.WORLD), {FUSION: True})
        found["explicit"] = error_of(_call, model)
        tpfuse.apply(model)
        found["error"], report = largest_difference(model, 5), tpfuse.explain(model)
        found["left"] = [site.reason for site in report.sites if site.op == "all_reduce"]
    found["really"], found["later"] = _really_no_memory(found["wrong"], rank)
    return found


def _call(model: CudaStack) -> None:
    with torch.no_grad():
        model(*model.inputs(5))


def _really_no_memory(wrong: list[str], rank: int) -> tuple[Any, str]:
    """(what is said of a group whose second rank has no memory left, and of the next, when it has again)."""
    group, later = (dist.new_group([0, 1]) for _ in range(2))
    call = Call(Case((5, 4096)), group)
    for each in (group, later):
        dist.all_reduce(call.input.clone(), group=each)  # NCCL takes its memory before there is none
    call.plain()
    torch.cuda.synchronize()
    kept = _take_memory(leave=48 << 20) if rank == 1 else []
    reason = dispatch.of(group.group_name)
    got = call.run()
    torch.cuda.synchronize()
    kept.clear()
    torch.cuda.empty_cache()
    plain = call.plain()
    if not all(torch.equal(g, p) for g, p in zip(got, plain, strict=True)):
        wrong.append("without memory for an arena, results are not the plain ones")
    made = dispatch.of(later.group_name)
    right(wrong, judge(Call(Case((5, 4096)), later)))
    return reason, made if isinstance(made, str) else ""


def _take_memory(leave: int) -> list[torch.Tensor]:
    """Nearly all of the device's memory, in pieces; ``leave`` bytes are less than an arena needs."""
    kept, piece = [], 1 << 36
    torch.cuda.empty_cache()
    while piece >= 2 << 20:
        if torch.cuda.mem_get_info()[0] - leave < piece:
            piece //= 2
            continue
        try:
            kept.append(torch.empty(piece, dtype=torch.uint8, device=here()))
        except torch.cuda.OutOfMemoryError:
            piece //= 2
    return kept


@pytest.mark.gpu
@pytest.mark.nccl
def test_no_memory_on_one_rank():
    first, second = spawn(_no_memory, 2, backend="cuda", timeout_s=45, grace_s=60)
    for found in (first, second):
        assert found["refused"] == "rank 1: no memory for the arena: out of memory"
        assert found["seconds"] < 1, "it is tried again at every call"
        assert found["explicit"].startswith(f"ConfigError: {FUSION}=True cannot be honoured: rank 1: no memory")
        assert len(found["left"]) == 3 and all("rank 1: no memory" in reason for reason in found["left"])
        assert found["error"] < FP32_ERROR
        assert not found["wrong"], "\n".join(found["wrong"])
        assert found["later"] == ""
        assert isinstance(found["really"], str) and found["really"].startswith("rank 1: no memory for the arena: ")
    assert first["really"] == second["really"] and first["explicit"] == second["explicit"]
