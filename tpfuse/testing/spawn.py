"""Run a function on several ranks of this machine and wait for all of them, for a limited time."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.testing.devices import take_device


class RankError(RuntimeError):
    """At least one rank failed, died or did not finish in time; the message has every rank's story."""


def spawn(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 120.0,
    grace_s: float = 0.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``function(rank, *args)`` in a new process per rank, with the default process group made. Results in rank order.

    function   importable by name (a module's top level); its result must pickle
    backend    of the default group; "" makes none, "cuda" that of ``take_device``
    timeout_s  for the group's collectives, and for the whole call
    grace_s    seconds more for the whole call: for tests of what happens on a time-out
    env        environment variables of the children, besides this process's
    Raises RankError: a rank raised, died, or outlived the time-out (it is killed).
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if backend else None
    results: Any = context.Queue()
    port = store.port if store else 0
    with _environment({**(env or {}), "OMP_NUM_THREADS": "1"}):
        children = [
            context.Process(
                target=_child, args=(results, function, rank, world_size, port, backend, timeout_s, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for child in children:
            child.start()
    outcomes = _collect(results, children, time.monotonic() + timeout_s + grace_s)
    for child in children:
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()
    stories = [
        f"rank {rank}: {outcomes[rank][1] if rank in outcomes else f'no result, exit code {children[rank].exitcode}'}"
        for rank in range(world_size)
        if rank not in outcomes or not outcomes[rank][0]
    ]
    if stories:
        raise RankError("\n".join(stories))
    return [outcomes[rank][1] for rank in range(world_size)]


def under_torchrun(function: Callable[..., Any], *args: Any, backend: str = "cuda", timeout_s: float = 120.0) -> None:
    """Run ``function(rank, *args)`` on the ranks that torchrun started, and print each rank's result."""
    rank = int(os.environ["RANK"])
    backend = _with_device(backend, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    print(f"rank {rank}: {function(rank, *args)}", flush=True)
    torch._dynamo.reset()  # CUDA graphs that hold NCCL calls would keep the group from ending
    dist.destroy_process_group()


def _with_device(backend: str, rank: int, ranks: int) -> str:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    return take_device(rank, ranks) if backend == "cuda" else backend


def _collect(results: Any, children: list, deadline: float) -> dict[int, tuple[bool, Any]]:
    """Outcomes by rank: (succeeded, result or traceback). Ends early once a rank failed or died and a moment passed."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    while len(outcomes) < len(children) and time.monotonic() < deadline:
        try:
            rank, succeeded, result = results.get(timeout=0.2)
            outcomes[rank] = (succeeded, result)
            if not succeeded:
                deadline = min(deadline, time.monotonic() + 15)
        except queue.Empty:
            if any(c.exitcode is not None and r not in outcomes for r, c in enumerate(children)):
                deadline = min(deadline, time.monotonic() + 15)
    return outcomes


def _child(
    results: Any, function: Callable, rank: int, world_size: int, port: int, backend: str, timeout_s: float, args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        if backend:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
            backend = _with_device(backend, rank, world_size)
            timeout = datetime.timedelta(seconds=timeout_s)
            store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        results.put((rank, True, function(rank, *args)))
        if backend:
            torch._dynamo.reset()  # CUDA graphs that hold NCCL calls would keep the group from ending
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
