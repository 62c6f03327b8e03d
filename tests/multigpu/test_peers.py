"""What a rank sees of others that stop, die, are called with other shapes, or leave: never a hang, never a silent NaN.

Each of these ends its processes with a broken group, so each has processes of its own; all of them run at the same time.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.multigpu.checks import Call, Case, CudaStack, Ranks, error_of, here
from tpfuse import ops
from tpfuse.kernels import dispatch
from tpfuse.testing import interpret_graphs

SPLIT, RING = "tpfuse_split", "tpfuse_ring"
DEADLINE_S = 3
READY_S, ANSWER_S, EXIT_S = 90, 40, 30


def _set_deadline() -> None:
    """A short one, once everything is compiled: until then ranks may be late for good reasons."""
    made = dispatch.of(dist.group.WORLD.group_name)
    assert not isinstance(made, str), made
    made.arena.set_deadline(DEADLINE_S)
    torch.cuda.synchronize()


def _are_nan(outputs: Any) -> bool:
    return all(bool(tensor.isnan().all().item()) for results in outputs for tensor in results)


# -- a rank that stops or dies -------------------------------------------------------------------------------------------


def _survive(rank: int, pipe: Any) -> dict[str, Any]:
    """All ranks work, then rank 1 waits for what never comes (and is stopped or killed), and rank 0 calls again."""
    call = Call(Case((8, 4096)))
    dist.all_reduce(torch.ones(1, device=here()))  # there is something to abort
    with interpret_graphs():
        model = tpfuse.apply(CudaStack(dist.group.WORLD))
        with torch.no_grad():
            model(*model.inputs(5))
        for kernel in (SPLIT, RING):
            call.run(kernel)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = call.run(SPLIT)
        graph.replay()
        torch.cuda.synchronize()
        _set_deadline()
        before = error_of(tpfuse.check)
        pipe.send((True, "ready"))
        pipe.recv()
        return {"before": before, **_alone(call, model, graph, replayed)}


def _alone(call: Call, model: CudaStack, graph: torch.cuda.CUDAGraph, replayed: Any) -> dict[str, Any]:
    start = time.monotonic()
    outputs = [call.run(SPLIT), call.run(RING)]
    torch.cuda.synchronize()
    found: dict[str, Any] = {"seconds": time.monotonic() - start, "nan": _are_nan(outputs)}
    graph.replay()
    torch.cuda.synchronize()
    found["replay is nan"] = _are_nan([replayed])
    found["check"], found["again"] = error_of(tpfuse.check), error_of(tpfuse.check)
    found["call"] = error_of(call.run, SPLIT)
    found["plain"] = error_of(tpfuse.ops.all_reduce, call.input, group=call.group, kernel=RING)
    with torch.no_grad():
        found["model"] = error_of(model, *model.inputs(5))
    found["all seconds"] = time.monotonic() - start
    return found


def _leave_alone(number: int) -> Callable[[Ranks], Any]:
    def drive(ranks: Ranks) -> dict[str, Any]:
        for rank in range(2):
            assert ranks.hear(rank, READY_S) == "ready"
        ranks.signal(1, number)
        ranks.tell(0, "go")
        return ranks.hear(0, ANSWER_S)

    return drive


# -- ranks that are called with other shapes -----------------------------------------------------------------------------


def _disagree(rank: int, pipe: Any) -> dict[str, Any]:
    """Rank 0 has 4 rows and rank 1 has 5: what rank 1 waits for never comes, and then rank 1 does not answer any more."""
    calls = [Call(Case((rows, 4096), kernel=RING)) for rows in (4, 5)]
    for call in calls:
        call.run()
    _set_deadline()
    start, told = time.monotonic(), []
    for _ in range(2):
        told.append(error_of(calls[rank].run))
        torch.cuda.synchronize()
        told.append(error_of(tpfuse.check))
    return {"told": told, "seconds": time.monotonic() - start}


def _hear_both(ranks: Ranks) -> list[dict[str, Any]]:
    return [ranks.hear(rank, READY_S if rank == 0 else ANSWER_S) for rank in range(2)]


# -- a rank that comes when its peer has given up ------------------------------------------------------------------------


def _come_late(rank: int, pipe: Any) -> dict[str, Any]:
    """Rank 0 calls, waits in vain and gives up; then rank 1 makes the same call. More rows than the slots hold at once."""
    call = Call(Case((3000, 4096), kernel=RING))
    expected = call.run()
    _set_deadline()
    pipe.send((True, "ready"))
    pipe.recv()
    outputs = call.run()
    torch.cuda.synchronize()
    right = [(got == want).all(-1) for got, want in zip(outputs, expected, strict=True)]
    nan = [got.isnan().all(-1) for got in outputs]
    return {
        "wrong": [int((~(a | b)).sum().item()) for a, b in zip(right, nan, strict=True)],
        "nan": [int(each.sum().item()) for each in nan],
        "check": error_of(tpfuse.check),
    }


def _one_after_the_other(ranks: Ranks) -> list[dict[str, Any]]:
    for rank in range(2):
        assert ranks.hear(rank, READY_S) == "ready"
    found = []
    for rank in range(2):
        ranks.tell(rank, "go")
        found.append(ranks.hear(rank, ANSWER_S))
    return found


# -- a GEMM whose peer dies ----------------------------------------------------------------------------------------------


def _multiply(rank: int, pipe: Any) -> dict[str, Any]:
    """The GEMM kernels work, then rank 1 is killed, and rank 0 calls again: NaN and an error within the deadline."""
    generator = torch.Generator(here()).manual_seed(rank)
    x = torch.randn(512, 256, device=here(), generator=generator).bfloat16()
    weight = torch.randn(1024, 256, device=here(), generator=generator).bfloat16().t()
    world = dist.group.WORLD
    calls = [
        lambda: ops.matmul_reduce_scatter(x, weight, group=world, kernel="tpfuse"),
        lambda: ops.all_gather_matmul(x, weight, group=world, kernel="tpfuse", gathered=True),
        lambda: ops.matmul_all_reduce(x, weight, group=world, kernel="tpfuse"),
    ]
    for call in calls:
        call()
    _set_deadline()
    before = error_of(tpfuse.check)
    pipe.send((True, "ready"))
    pipe.recv()
    start, found = time.monotonic(), {"before": before}
    scattered, (product, gathered), reduced = (call() for call in calls)  # the second and third begin with a dead arena
    torch.cuda.synchronize()
    found["seconds"] = time.monotonic() - start
    poisoned = (scattered, product[512:], gathered[512:], reduced)
    found["nan"] = all(each.isnan().all().item() for each in poisoned)
    found["check"], found["again"] = error_of(tpfuse.check), error_of(calls[0])
    return found


# -- ranks that end the interpreter in the ordinary way ------------------------------------------------------------------

_LEAVE = """
import datetime, os, torch, torch.distributed as dist, tpfuse
from tests.multigpu.checks import Call, Case
from tpfuse.testing import take_device
dist.init_process_group(take_device(int(os.environ["RANK"]), 2), timeout=datetime.timedelta(seconds=60))
calls = [Call(Case((4, 4096), kernel=kernel)) for kernel in ("tpfuse_split", "tpfuse_ring", "nccl")]
kept = [call.run() for call in calls]
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    kept.append(calls[0].run())
graph.replay()
torch.cuda.synchronize()
print("used", flush=True)
"""


def _start_leaving() -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    root = pathlib.Path(__file__).resolve().parents[2]
    return [
        subprocess.Popen(
            [sys.executable, "-c", _LEAVE],
            env={**common, "RANK": str(rank)},
            cwd=root,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]


def _wait_for_leaving(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """(exit code, output) of each. Raises TimeoutExpired: one does not end."""
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=READY_S + EXIT_S if not found else EXIT_S)
        found.append((process.returncode, output))
    return found


# -- all at the same time ------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, tuple[Callable, Callable[[Ranks], Any]]] = {
    "stopped": (_survive, _leave_alone(signal.SIGSTOP)),
    "killed": (_survive, _leave_alone(signal.SIGKILL)),
    "other shapes": (_disagree, _hear_both),
    "late": (_come_late, _one_after_the_other),
    "multiplying": (_multiply, _leave_alone(signal.SIGKILL)),
}


@pytest.fixture(scope="module")
def outcomes():
    """What came of each scenario, or the error that it ended in."""
    started = {name: Ranks(function) for name, (function, _) in SCENARIOS.items()}
    leaving, found = _start_leaving(), {}
    try:
        for name, (_, drive) in SCENARIOS.items():
            try:
                found[name] = drive(started[name])
            except (AssertionError, OSError) as error:
                found[name] = error
        try:
            found["left"] = _wait_for_leaving(leaving)
        except subprocess.TimeoutExpired as error:
            found["left"] = error
    finally:
        for ranks in started.values():
            ranks.end()
        for process in leaving:
            process.kill()
            process.wait()
    return found


def _outcome(outcomes: dict[str, Any], name: str) -> Any:
    if isinstance(outcomes[name], Exception):
        raise outcomes[name]
    return outcomes[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["stopped", "killed"])
def test_a_rank_that_does_not_answer(outcomes, name):
    found = _outcome(outcomes, name)
    assert found["before"] == ""
    assert DEADLINE_S - 1 < found["seconds"] < 30 and found["all seconds"] < 40, found
    assert found["nan"] and found["replay is nan"]
    for where in ("check", "again", "call", "plain", "model"):
        assert found[where].startswith("PeerTimeoutError: all_reduce_rms_norm"), (where, found[where])
        assert "rank 0 of group" in found[where] and "for rank 1" in found[where], (where, found[where])


@pytest.mark.gpu
def test_a_rank_that_dies_between_gemms(outcomes):
    found = _outcome(outcomes, "multiplying")
    assert found["before"] == "" and found["nan"] and DEADLINE_S - 1 < found["seconds"] < 30, found
    for where in ("check", "again"):
        assert found[where].startswith("PeerTimeoutError: matmul_reduce_scatter by tpfuse"), found[where]
        assert "for rank 1" in found[where]


@pytest.mark.gpu
def test_ranks_with_other_shapes(outcomes):
    """An error on the rank that waits for more than comes, and then on the other, whose peer is silent."""
    first, second = _outcome(outcomes, "other shapes")
    assert first["told"][0] == first["told"][1] == "" and second["told"][0] == ""
    assert second["told"][1].startswith("PeerTimeoutError") and "for rank 0" in second["told"][1]
    assert second["told"][2:] == [second["told"][1]] * 2
    assert first["told"][3].startswith("PeerTimeoutError") and "for rank 1" in first["told"][3]
    assert max(first["seconds"], second["seconds"]) < 30


@pytest.mark.gpu
def test_a_rank_that_comes_late(outcomes):
    """Rows that its peer had sent before it gave up are right, all others NaN; none is made of another row's data."""
    early, late = _outcome(outcomes, "late")
    assert early["wrong"] == late["wrong"] == [0, 0]
    assert early["nan"] == [3000, 3000] and late["nan"][0] > 0
    for found, peer in ((early, 1), (late, 0)):
        assert found["check"].startswith("PeerTimeoutError") and f"for rank {peer}" in found["check"]


@pytest.mark.gpu
def test_the_interpreter_ends_without_destroying_the_group(outcomes):
    for code, output in _outcome(outcomes, "left"):
        assert code == 0 and "used" in output, output
