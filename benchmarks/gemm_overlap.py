"""GEMMs with their collectives: how much of the communication each way of overlapping hides.

    torchrun --nproc-per-node 2 benchmarks/gemm_overlap.py --rows 2048 --seconds 300
    torchrun --nproc-per-node 2 benchmarks/gemm_overlap.py --models llama-8b --idle

Ladder, us of a call in CUDA graphs that take turns, back to back or (``--idle``) after a rest:

    gemm            cuBLAS alone, all rows, no communication
    nccl            cuBLAS, then (or after) NCCL
    torch_symm_mem  torch's fused operation
    tpfuse          ours
    limit           the longer of gemm and the wire at 380 GB/s

score = (nccl - t) / (nccl - limit); at the end the same over all sizes of an operation with at least 512 rows, each size
counted with at most what there was to win.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers its operations
from timing import LIMIT, RESULTS, WIRE_BYTES_PER_US, Budget, Ranks, capture, commit, launch, write_rows

from tpfuse import ops
from tpfuse.tuner.timing import replayed_us

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
ROWS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
LEAST_SCORED_ROWS, LEAST_SCORED_GAP = 512, 0.05
FIELDS = ("op", "m", "n", "k", "dtype", "quant", "world", "gpu", "torch", "idle", "candidate", "us", "commit")
#: hidden, attention's columns (queries, keys and values), those of its output, intermediate: before they are sharded
MODELS = {
    "llama-8b": (4096, 6144, 4096, 14336),
    "llama-70b": (8192, 10240, 8192, 28672),
    "qwen3-32b": (5120, 10240, 8192, 25600),
    "mistral-large": (12288, 14336, 12288, 28672),
    "deepseek-v3": (7168, None, 16384, 18432),
}


def layers(model: str, world: int) -> dict[str, tuple[str, int, int]]:
    """Layer -> (operation, N, K) on a rank."""
    hidden, qkv, attention, intermediate = MODELS[model]
    found = {
        "o": (SCATTER, hidden, attention // world),
        "gate_up": (GATHER, 2 * intermediate // world, hidden),
        "down": (SCATTER, hidden, intermediate // world),
    }
    return found if qkv is None else {"qkv": (GATHER, qkv // world, hidden), **found}


def bodies(ranks: Ranks, op: str, m: int, n: int, k: int) -> dict[str, Callable[[int], Any]]:
    """What is captured: the same product by each candidate; a new output each time, inputs that take turns."""
    group, name, world = dist.group.WORLD, ranks.group_name, ranks.size
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    draw = lambda *shape: torch.randn(*shape, device=ranks.device, generator=generator).to(torch.bfloat16)  # noqa: E731
    whole, weight = draw(m, k), (draw(n, k) * k**-0.5).t()
    shard = whole[: m // world].contiguous()
    symm_mem = torch.ops.symm_mem

    def nccl(turn: int) -> torch.Tensor:
        if op == SCATTER:
            partial = whole @ weight
            out = partial.new_empty(m // world, n)
            dist.reduce_scatter_tensor(out, partial)
            return out
        gathered = shard.new_empty(m, k)
        dist.all_gather_into_tensor(gathered, shard)
        return gathered @ weight

    def fused(turn: int) -> torch.Tensor:
        if op == SCATTER:
            return symm_mem.fused_matmul_reduce_scatter(whole, weight, "sum", 0, name)
        return symm_mem.fused_all_gather_matmul(shard, [weight], 0, name, return_A=False)[1][0]

    def ours(turn: int) -> torch.Tensor:
        if op == SCATTER:
            return ops.matmul_reduce_scatter(whole, weight, group=group, kernel="tpfuse")
        return ops.all_gather_matmul(shard, weight, group=group, kernel="tpfuse")[0]

    return {"gemm": lambda turn: whole @ weight, "nccl": nccl, "torch_symm_mem": fused, "tpfuse": ours}


def one_size(ranks: Ranks, op: str, m: int, n: int, k: int, wanted: list[str], rounds: int, idle: bool) -> dict[str, float]:
    """us by candidate, the limit among them; what fails or is wrong is told and left out."""
    all_bodies = bodies(ranks, op, m, n, k)
    inner = max(2, min(10, int(3e14 / (2 * m * n * k))))
    graphs, expected = {}, all_bodies["nccl"](0)
    for name in ("gemm", "nccl", *wanted):
        try:
            got = all_bodies[name](0)
            error = 0.0 if name == "gemm" else ((got - expected).float().norm() / expected.float().norm()).item()
            failure = "" if error < 1e-2 else f"WRONG: {error:.2g} from nccl"
        except (RuntimeError, ValueError, AssertionError) as raised:
            error, failure = 1.0, f"{type(raised).__name__}: {str(raised).splitlines()[0][:160]}"
        if ranks.maximum([float(bool(failure))])[0]:
            ranks.say(f"  {name} is not timed: {failure or 'it failed on another rank'}")
            continue
        graphs[name], _ = capture(all_bodies[name], inner)
    times = replayed_us(graphs, rounds, ranks.device, idle_s=0.06 if idle else 0.0)
    found = {name: statistics.median(each) / inner for name, each in times.items()}
    sent = (m * n if op == SCATTER else m * k) * 2 * (ranks.size - 1) / ranks.size
    return {**found, LIMIT: max(found["gemm"], sent / WIRE_BYTES_PER_US)}


def score(times: dict[str, float], name: str) -> float:
    return (times["nccl"] - times[name]) / (times["nccl"] - times[LIMIT])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--candidates", nargs="+", default=["torch_symm_mem", "tpfuse"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--idle", action="store_true", help="let the GPUs rest before each graph")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a size once so many are spent")
    parser.add_argument("--out", default=RESULTS / "gemm_overlap.csv")
    args = parser.parse_args()

    def run(ranks: Ranks) -> int:
        budget, measured, rows = Budget(ranks, args.seconds), [], []
        common = ("bf16", "none", ranks.size, torch.cuda.get_device_name(ranks.device), torch.__version__, args.idle)
        sizes = [(model, layer, *what) for model in args.models for layer, what in layers(model, ranks.size).items()]
        for m, (model, layer, op, n, k) in ((m, size) for m in args.rows for size in sizes):
            if budget.spent():
                ranks.say(f"stopped after {budget.elapsed()}, before {model} {layer} M={m}")
                break
            times = one_size(ranks, op, m, n, k, args.candidates, args.rounds, args.idle)
            measured.append((op, m, times))
            scores = " ".join(f"{name} {score(times, name):.2f}" for name in args.candidates if name in times)
            figures = " ".join(f"{name} {us:.1f}" for name, us in times.items())
            ranks.say(f"{model} {layer} M={m} N={n} K={k}: {figures}; score {scores} [{budget.elapsed()}]")
            rows += [(op, m, n, k, *common, name, f"{us:.2f}", commit()) for name, us in times.items()]
            if ranks.rank == 0:
                write_rows(args.out, FIELDS, rows)
        for op in (SCATTER, GATHER):
            for name in args.candidates:
                ranks.say(_summary(op, name, [times for o, m, times in measured if o == op and m >= LEAST_SCORED_ROWS]))
        return 0

    launch(run)


def _summary(op: str, name: str, sizes: list[dict[str, float]]) -> str:
    scored = [t for t in sizes if name in t and t["nccl"] - t[LIMIT] >= LEAST_SCORED_GAP * t["nccl"]]
    if not scored:
        return f"{op}, {name}: nothing to score"
    there = sum(t["nccl"] - t[LIMIT] for t in scored)
    won = sum(min(t["nccl"] - t[name], t["nccl"] - t[LIMIT]) for t in scored)
    worst = min(t["nccl"] / t[name] for t in sizes if name in t)
    return f"{op}, {name}: {won / there:.3f} of what there was to win over {len(scored)} sizes; at worst {worst:.3f}x nccl"


if __name__ == "__main__":
    main()
