"""Fusions on one GPU against what Inductor makes of the same operations: python benchmarks/single_gpu.py

Each candidate's call is repeated in a CUDA graph over tensors that together are larger than the cache; graphs take turns in
random order, the median counts. Results are right first: as eager operations
give them, but for the rounding of sums.
limit: the bytes of the operation at 4.3 TB/s, and an empty kernel. Only rows, not the kernel's layout, are tried here.

Several processes compile at once; whatever runs on the GPU, Inductor's own trials too, is one process's alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import multiprocessing
import os
import pathlib
import random
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from single_gpu_cases import CASES as QUANTISING
from single_gpu_cases import E4M3
from single_gpu_norm_cases import CASES as NORMALISING

CASES = {**QUANTISING, **NORMALISING}
RESULTS = pathlib.Path(__file__).parent / "results" / "single_gpu_h200.csv"
FIELDS = ("op", "rows", "size", "quant", "dtype", "gpu", "torch", "candidate", "us", "commit")
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MEMORY_BYTES_PER_US, EMPTY_KERNEL_US, CACHE_BYTES = 4.3e6, 0.7, 150e6
Task = tuple[str, int, str, int]  # operation, size, variant, rows


# -- one measurement ---------------------------------------------------------------------------------------------------


def captured(call: Callable, inputs: list[tuple[torch.Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls over all inputs, and their number. Outputs of the last few stay allocated, as a model's do."""
    calls = max(20, len(inputs))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for each in inputs[:2]:
            call(*each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept: list = [None] * min(8, len(inputs))
    with torch.cuda.graph(graph):
        for index in range(calls):
            kept[index % len(kept)] = call(*inputs[index % len(inputs)])
    return graph, calls


def times_us(candidates: dict[str, Callable], inputs: list[tuple[torch.Tensor, ...]], rounds: int) -> dict[str, float]:
    graphs = {name: captured(call, inputs) for name, call in candidates.items()}
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            graph, calls = graphs[name]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(each) for name, each in taken.items()}


def hold(got: Any, expected: Any) -> None:
    """Raise AssertionError unless results are alike: bytes of FP8 but for few, other values but for their rounding."""
    for a, b in zip(got, expected, strict=False):
        if a is None:
            continue
        if a.dtype == E4M3:
            different = (a.view(torch.uint8) != b.view(torch.uint8)).float().mean().item()
            assert different <= 5e-3, f"{different:.1%} of the bytes differ"
        else:
            torch.testing.assert_close(a, b.reshape(a.shape), rtol=0.02, atol=0.02)


def measured(task: Task, rounds: int, gpu: Any) -> dict[str, float]:
    """us of each candidate. gpu: a lock, without which nothing is run but the first call of ours, which compiles."""
    from torch._inductor.compile_fx import compile_fx

    def in_turn(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable:
        compiled = compile_fx(module, examples)

        def run(*given: torch.Tensor) -> Any:  # the first time it tries its own variants
            with gpu:
                return compiled(*given)

        return run

    torch._dynamo.reset()
    op, size, variant, rows = task
    with gpu:
        case = CASES[op][0](size, variant)
        moved = rows * case.bytes_per_row
        inputs = [case.inputs(rows) for _ in range(max(2, min(40, math.ceil(CACHE_BYTES / moved))))]
    inductor = torch.compile(case.plain, dynamic=False, backend=in_turn)
    inductor(*inputs[0])
    got = case.ours(*inputs[0])
    with gpu:
        hold(got, case.plain(*inputs[0]))
        found = times_us({"inductor": inductor, "tpfuse": case.ours}, inputs, rounds)
        del inputs, got
        torch.cuda.empty_cache()
    return {**found, "limit": EMPTY_KERNEL_US + moved / MEMORY_BYTES_PER_US}


# -- all of them -------------------------------------------------------------------------------------------------------

_gpu: Any = None


def start(gpu: Any) -> None:
    """In each process. gpu: a lock that all of them share."""
    global _gpu
    _gpu = gpu
    torch.set_grad_enabled(False)


def measure(given: tuple[Task, int]) -> tuple[Task, dict[str, float]]:
    return given[0], measured(*given, _gpu)


def tasks(arguments: argparse.Namespace) -> list[Task]:
    """Rows in the order in which they are asked for: a run that is cut short has all operations at the first ones."""
    found = []
    for rows, op in itertools.product(arguments.rows, arguments.ops):
        _, sizes, variants = CASES[op]
        wanted = [size for size in sizes if size in (arguments.sizes or sizes)]
        found += [(op, size, variant, rows) for size, variant in itertools.product(wanted, variants)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--sizes", type=int, nargs="+", help="of the sizes of each operation, only these")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are there for that
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rest = {"dtype": "bf16", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    spawn = multiprocessing.get_context("spawn")
    with (
        open(arguments.output, "w", newline="", buffering=1) as file,
        spawn.Pool(arguments.processes, start, (spawn.RLock(),)) as pool,
    ):
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for task, found in pool.imap(measure, [(task, arguments.rounds) for task in tasks(arguments)]):
            op, size, variant, rows = task
            for name, us in found.items():
                told = {"op": op, "rows": rows, "size": size, "quant": variant, "candidate": name, "us": f"{us:.2f}"}
                writer.writerow({**told, **rest})
            share, gain = found["limit"] / found["tpfuse"], found["inductor"] / found["tpfuse"]
            print(
                f"{op} {variant} {rows} x {size}: {found['tpfuse']:.1f} us, {gain:.2f}x Inductor, {share:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
