"""GEMMs with their collectives: how much of the communication each way of overlapping hides.

    torchrun --nproc-per-node 2 benchmarks/gemm_overlap.py --rows 2048 --seconds 300
    torchrun --nproc-per-node 2 benchmarks/gemm_overlap.py --models llama-8b --idle
    torchrun --nproc-per-node 2 benchmarks/gemm_overlap.py --fp8          # e4m3 with a scale per row, bf16 results

Ladder, us of a call in CUDA graphs that take turns, back to back or (``--idle``) after a rest:

    gemm               cuBLAS alone, all rows, no communication
    nccl               cuBLAS, then (or after) NCCL
    torch_symm_mem     torch's fused operation
    tpfuse             ours, cut by its own rule
    tpfuse_all_reduce  the product, then the fastest plain all-reduce
    dispatch           what tpfuse chooses
    limit              the longer of cuBLAS alone and the wire at 380 GB/s, a model that ours can pass

``--profile`` says for what dispatch's kernel, if it is ours, waits: us of a multiprocessor, the mean over this rank's.

score = (nccl - t) / (nccl - limit); at the end the same over all sizes of an operation with at least 512 rows and a gap of
at least 5 %, each size counted with at most what there was to win.
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
from tpfuse.comm import arena, workspace
from tpfuse.ops.matmul import product
from tpfuse.tuner.timing import replayed_us

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = (SCATTER, GATHER, REDUCE)
TORCH, OWN, COMPOSED, DISPATCH = "torch_symm_mem", "tpfuse", "tpfuse_all_reduce", "dispatch"
ROWS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
MOST_CALLS, GRAPH_FLOP, COLD_BYTES = 10, 3e12, 160 << 20  # calls of a graph; weights that take turns
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


def layers(model: str, world: int) -> list[tuple[str, str, int, int]]:
    """(layer, operation, N, K) on a rank."""
    hidden, qkv, attention, intermediate = MODELS[model]
    found = [
        ("gate_up", GATHER, 2 * intermediate // world, hidden),
        *(("o", op, hidden, attention // world) for op in (SCATTER, REDUCE)),
        *(("down", op, hidden, intermediate // world) for op in (SCATTER, REDUCE)),
    ]
    return found if qkv is None else [("qkv", GATHER, qkv // world, hidden), *found]


class Operands:
    """Of one size on this rank: [M, K] whole, [S, K] shard, [K, N] weights; FP8 ones with a scale per row and column.

    There are so many weights, which take turns, that they come from memory, as a model's do.
    """

    def __init__(self, ranks: Ranks, m: int, n: int, k: int, fp8: bool) -> None:
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        draw = lambda *shape: torch.randn(*shape, device=ranks.device, generator=generator)  # noqa: E731
        dtype, deviation = (torch.float8_e4m3fn, 1.0) if fp8 else (torch.bfloat16, k**-0.5)
        self.whole, count = draw(m, k).to(dtype), 1 + COLD_BYTES // (n * k * dtype.itemsize)
        self.weights = [(draw(n, k) * deviation).to(dtype).t() for _ in range(min(count, MOST_CALLS))]
        share = m // ranks.size
        self.shard = self.whole[:share].contiguous()
        self.whole_options: dict[str, Any] = {}  # of our operations
        self.shard_options: dict[str, Any] = {}
        if fp8:
            scales, columns = draw(m, 1).abs() + 0.5, (draw(1, n).abs() + 0.5) * k**-0.5
            of_weight = {"out_dtype": torch.bfloat16}
            self.whole_options = {"input_scale": scales, "weight_scale": columns, **of_weight}
            self.shard_options = {"input_scale": scales[:share].contiguous(), "weight_scales": [columns], **of_weight}

    def weight(self, turn: int) -> torch.Tensor:
        return self.weights[turn % len(self.weights)]

    def product(self, turn: int) -> torch.Tensor:
        return product(self.whole, self.weight(turn), **self.whole_options)


def bodies(ranks: Ranks, op: str, operands: Operands) -> dict[str, Callable[[int], Any]]:
    """What is captured: the same product by each candidate; a new output each time."""
    group, name = dist.group.WORLD, ranks.group_name
    whole, shard = operands.whole, operands.shard

    def ours(turn: int, kernel: str | None) -> torch.Tensor:
        weight = operands.weight(turn)
        if op == GATHER:
            return ops.all_gather_matmul(shard, weight, group=group, kernel=kernel, **operands.shard_options)[0]
        run = ops.matmul_reduce_scatter if op == SCATTER else ops.matmul_all_reduce
        return run(whole, weight, group=group, kernel=kernel, **operands.whole_options)

    def fused(turn: int) -> torch.Tensor:
        weight = operands.weight(turn)
        if op == SCATTER:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(whole, weight, "sum", 0, name)
        return torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight], 0, name, return_A=False)[1][0]

    found = {"gemm": operands.product, "nccl": lambda turn: ours(turn, "nccl")}
    if op != REDUCE and not operands.whole_options:  # torch has none
        found[TORCH] = fused
    found[OWN] = lambda turn: ours(turn, OWN)
    if op == REDUCE:
        found[COMPOSED] = lambda turn: ours(turn, COMPOSED)
    return {**found, DISPATCH: lambda turn: ours(turn, None)}


def wire_us(op: str, m: int, n: int, k: int, world: int, item: int) -> float:
    sent = {SCATTER: m * n * 2, GATHER: m * k * item, REDUCE: 2 * m * n * 2}[op]
    return sent * (world - 1) / world / WIRE_BYTES_PER_US


def one_size(
    ranks: Ranks, op: str, m: int, n: int, k: int, wanted: list[str], rounds: int, idle: bool, fp8: bool = False
) -> dict[str, float]:
    """us by candidate, the limit among them; what fails or is wrong is told and left out."""
    operands = Operands(ranks, m, n, k, fp8)
    all_bodies = bodies(ranks, op, operands)
    inner = max(2, min(MOST_CALLS, int(GRAPH_FLOP / (2 * m * n * k))))
    graphs, expected = {}, all_bodies["nccl"](0)
    for name in ("gemm", "nccl", *(name for name in wanted if name in all_bodies)):
        try:
            got = all_bodies[name](0)
            error = 0.0 if name == "gemm" else ((got - expected).float().norm() / expected.float().norm()).item()
            failure = "" if error < 1e-2 else f"WRONG: {error:.2g} from nccl"
        except (RuntimeError, ValueError, AssertionError) as raised:
            failure = f"{type(raised).__name__}: {str(raised).splitlines()[0][:160]}"
        if ranks.maximum([float(bool(failure))])[0]:
            ranks.say(f"  {name} is not timed: {failure or 'it failed on another rank'}")
            continue
        graphs[name], _ = capture(all_bodies[name], inner)
    times = replayed_us(graphs, rounds, ranks.device, idle_s=0.06 if idle else 0.0)
    found = {name: statistics.median(each) / inner for name, each in times.items()}
    return {**found, LIMIT: max(found["gemm"], wire_us(op, m, n, k, ranks.size, operands.whole.element_size()))}


#: What a kernel writes down: hopper.cuh.
WAITS = ("all", "operands", "place", "stage", "rows", "partial", "result", "pushing")


def profile(ranks: Ranks, op: str, sizes: tuple[int, int, int], fp8: bool, us: float) -> str:
    """One call, compiled to count; its clocks are told as parts of ``us``."""
    space = workspace.of(arena.of(ranks.group_name))
    if isinstance(space, str):
        return space
    body = bodies(ranks, op, Operands(ranks, *sizes, fp8))[DISPATCH]
    space.profile = torch.zeros(space.arena.multiprocessors, len(WAITS), dtype=torch.int64, device=ranks.device)
    try:
        for turn in range(3):  # the first one compiles
            space.profile.zero_()
            body(turn)
        torch.cuda.synchronize()
        busy = space.profile[space.profile[:, 0] > 0].double()
    finally:
        space.profile = None
    if not busy.numel():
        return "not our kernel"
    parts = (busy.mean(0) * us / busy[:, 0].max()).tolist()
    return ", ".join(f"{name} {part:.1f}" for name, part in zip(WAITS, parts, strict=True))


def score(times: dict[str, float], name: str) -> float:
    return (times["nccl"] - times[name]) / (times["nccl"] - times[LIMIT])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--candidates", nargs="+", default=[TORCH, OWN, COMPOSED, DISPATCH], metavar="NAME")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--fp8", action="store_true", help="e4m3 operands, scales per row and column")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="say what our kernel waits for")
    parser.add_argument("--idle", action="store_true", help="let the GPUs rest before each graph")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a size once so many are spent")
    parser.add_argument("--out", default=RESULTS / "gemm_overlap.csv")
    args = parser.parse_args()

    def run(ranks: Ranks) -> int:
        budget, measured, rows = Budget(ranks, args.seconds), [], []
        common = (
            "bf16",
            "fp8_row" if args.fp8 else "none",
            ranks.size,
            torch.cuda.get_device_name(ranks.device),
            torch.__version__,
            args.idle,
        )
        sizes = [(model, *each) for model in args.models for each in layers(model, ranks.size) if each[1] in args.ops]
        for m, (model, layer, op, n, k) in ((m, size) for m in args.rows for size in sizes):
            if budget.spent():
                ranks.say(f"stopped after {budget.elapsed()}, before {model} {layer} M={m}")
                break
            times = one_size(ranks, op, m, n, k, args.candidates, args.rounds, args.idle, args.fp8)
            measured.append((op, m, times))
            scores = " ".join(f"{name} {score(times, name):.2f}" for name in args.candidates if name in times)
            figures = " ".join(f"{name} {us:.1f}" for name, us in times.items())
            ranks.say(f"{model} {layer} {op} M={m} N={n} K={k}: {figures}; score {scores} [{budget.elapsed()}]")
            if args.profile and DISPATCH in times:
                ranks.say(f"  waits: {profile(ranks, op, (m, n, k), args.fp8, times[DISPATCH])}")
            rows += [(op, m, n, k, *common, name, f"{us:.2f}", commit()) for name, us in times.items()]
            if ranks.rank == 0:
                write_rows(args.out, FIELDS, rows)
        for op in args.ops:
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
