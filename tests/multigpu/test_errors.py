"""Bad inputs and states that only GPUs can meet: what every rank is told, and that the ranks go on together.

Peers that die, stop or are late are in test_peers.py; ranks without memory in test_arena_limits.py.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import largest_difference
from tests.multigpu.checks import CudaStack, here
from tpfuse import ops
from tpfuse.kernels import dispatch
from tpfuse.testing import interpret_graphs, spawn

HUGE_MB = 1 << 24  # 16 TiB


def _group(backend: str | None = None) -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())), backend=backend)


def _x(rows: int = 5, hidden: int = 4096, **how: Any) -> torch.Tensor:
    return torch.ones(rows, hidden, **{"device": here(), "dtype": torch.bfloat16, **how})


def _first_call(group: dist.ProcessGroup, config: dict[str, Any]) -> None:
    model = tpfuse.apply(CudaStack(group, layers=1), config)
    with torch.no_grad(), interpret_graphs():
        model(*model.inputs(5))


def _in_a_capture(call: Callable[[dist.ProcessGroup], Any]) -> None:
    """The error of a new group's first call inside a capture, which itself ends well."""
    group = _group()
    dist.barrier()
    torch.cuda.synchronize()
    graph, error = torch.cuda.CUDAGraph(), None
    filled = torch.zeros(1, device=here())
    with torch.cuda.graph(graph):
        filled += 1
        try:
            call(group)
        except Exception as caught:
            error = caught
    graph.replay()
    torch.cuda.synchronize()
    graph.reset()
    if error is not None:
        raise error


def _without_memory(call: Callable[[dist.ProcessGroup], Any]) -> None:
    group = _group()
    assert "no memory" in str(dispatch.of(group.group_name, HUGE_MB << 20))
    call(group)


#: id -> (provoke, the error's name, what it says), the same on every rank.
CASES: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "capture: the first call of a group, by name": (
        lambda: _in_a_capture(lambda group: ops.all_reduce(_x(), group=group, kernel="tpfuse_ring")),
        "ConfigError", ("kernel 'tpfuse_ring' cannot run all_reduce", "CUDA graph is being captured: call once before")),
    "capture: the first GEMM of a group, by name": (
        lambda: _in_a_capture(
            lambda group: ops.matmul_all_reduce(_x(), _x(4096, 512), group=group, kernel="tpfuse")),
        "ConfigError", ("kernel 'tpfuse' cannot run matmul_all_reduce", "CUDA graph is being captured")),
    "arena: too small": (
        lambda: _first_call(_group(), {"workspace_mb": 0.1}),
        "ConfigError", ("workspace_mb=0.1 cannot be honoured", "too small for")),
    "arena: no memory for it": (
        lambda: _first_call(_group(), {"workspace_mb": HUGE_MB}),
        "ConfigError", (f"workspace_mb={HUGE_MB} cannot be honoured", "rank 0: no memory for the arena", "rank 1: no")),
    "arena: no memory, fusion by name": (
        lambda: _without_memory(lambda group: _first_call(group, {"fuse_allreduce_rms": True})),
        "ConfigError", ("fuse_allreduce_rms=True cannot be honoured", "no memory for the arena")),
    "arena: no memory, kernel by name": (
        lambda: _without_memory(lambda group: ops.all_reduce(_x(), group=group, kernel="tpfuse_ring")),
        "ConfigError", ("kernel 'tpfuse_ring' cannot run all_reduce", "no memory for the arena")),
    "arena: no memory, kernel of the model by name": (
        lambda: _without_memory(lambda group: _first_call(group, {"allreduce_rms_kernel": "tpfuse_ring"})),
        "ConfigError", ("allreduce_rms_kernel=tpfuse_ring cannot be honoured", "no memory for the arena")),
    "group: CPU tensors over CUDA alone": (
        lambda: ops.all_reduce(_x(device="cpu"), group=_group(f"cuda:{_backend()}")),
        "GroupError", ("carries tensors on cuda, got one on cpu",)),
    "group: CUDA tensors over the CPU alone": (
        lambda: ops.all_reduce(_x(), group=_group("cpu:gloo")), "GroupError", ("carries tensors on cpu, got one on cuda",)),
    "group: CUDA rows gathered over the CPU alone": (
        lambda: ops.all_gather_matmul(_x(), _x(4096, 512), group=_group("cpu:gloo")),
        "GroupError", ("carries tensors on cpu, got one on cuda",)),
    "operation: weight on the CPU": (
        lambda: ops.all_reduce_rms_norm(_x(), torch.ones(4096), group=dist.group.WORLD, eps=1e-6),
        "ValueError", ("weight must be on cuda", "got one on cpu")),
    "operation: product with a weight on the CPU": (
        lambda: ops.matmul_all_reduce(_x(), _x(4096, 512, device="cpu"), group=dist.group.WORLD),
        "ValueError", ("all tensors must be on one device", "cpu")),
    "kernel: more rows than fit": (
        lambda: ops.all_reduce_rms_norm(_x(33), None, group=dist.group.WORLD, eps=1e-6, kernel="tpfuse_split"),
        "ConfigError", ("kernel 'tpfuse_split' cannot run all_reduce_rms_norm", "more than 32 rows")),
    "kernel: a row that is too long": (
        lambda: ops.all_reduce_rms_norm(_x(2, 40000), None, group=dist.group.WORLD, eps=1e-6, kernel="tpfuse_ring"),
        "ConfigError", ("kernel 'tpfuse_ring' cannot run all_reduce_rms_norm", "longer than")),
    "kernel: columns that do not fit": (
        lambda: ops.matmul_all_reduce(_x(), _x(4096, 511), group=dist.group.WORLD, kernel="tpfuse"),
        "ConfigError", ("kernel 'tpfuse' cannot run matmul_all_reduce",)),
}  # fmt: skip


def _backend() -> str:
    return dist.get_backend().split(":")[-1]


def _all(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (provoke, _, _) in CASES.items():
        try:
            provoke()
            found[name] = "", ""
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    with interpret_graphs():
        found["after"] = largest_difference(tpfuse.apply(CudaStack(dist.group.WORLD)), 5)
    return found


@pytest.fixture(scope="module")
def outcomes():
    return spawn(_all, 2, backend="cuda", timeout_s=120)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_what_every_rank_is_told(outcomes, name):
    _, error, words = CASES[name]
    for rank, found in enumerate(outcomes):
        kind, told = found[name]
        assert kind == error, f"rank {rank}: {kind}: {told}"
        for word in words:
            assert word in told, f"rank {rank}: no {word!r} in: {told}"


@pytest.mark.gpu
def test_the_ranks_go_on_together(outcomes):
    assert all(found["after"] < 1e-4 for found in outcomes)


def _broken_cache(rank: int) -> list[float]:
    """Kernels that were kept and do not load any more are built anew, and kept again."""
    from tpfuse.kernels.cuda import build

    folder, found = pathlib.Path(os.environ["TPFUSE_CACHE_DIR"], "kernels"), []
    x, weight = _x(512, 256), _x(256, 1024)
    for content in (None, b"", b"no cubin"):
        dist.barrier()
        if content is not None and rank == 0:
            for path in folder.iterdir():
                path.write_bytes(content)
        dist.barrier()
        build.kernel.cache_clear()
        got = ops.matmul_all_reduce(x, weight, group=_group(), kernel="tpfuse")
        torch.cuda.synchronize()
        found.append(float(got[0, 0]))
        found.append(min(path.stat().st_size for path in folder.iterdir()))
    return found


@pytest.mark.gpu
def test_kernels_that_were_kept_and_are_broken(tmp_path):
    for found in spawn(_broken_cache, 2, backend="cuda", timeout_s=120, env={"TPFUSE_CACHE_DIR": str(tmp_path)}):
        assert found[::2] == [512.0] * 3 and min(found[1::2]) > 1000, found
