"""Fusions on one GPU against what Inductor makes of the same operations: python benchmarks/single_gpu.py

Each candidate's call is repeated in a CUDA graph over tensors that together are larger than the cache; graphs take turns in
random order, the median counts. Bytes are right first: as eager operations give them, but for the rounding of a norm's sum.
limit: the bytes of the operation at 4.3 TB/s, and an empty kernel. Only rows, not the kernel's layout, are tried here.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import pathlib
import random
import statistics
import subprocess
from collections.abc import Callable

import torch
from torch.nn import functional

from tpfuse.ops import Recipe, act_mul_quantize_fp8, rms_norm_quantize_fp8

RESULTS = pathlib.Path(__file__).parent / "results" / "single_gpu_h200.csv"
FIELDS = ("op", "rows", "size", "quant", "dtype", "gpu", "torch", "candidate", "us", "commit")
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MEMORY_BYTES_PER_US, EMPTY_KERNEL_US, CACHE_BYTES = 4.3e6, 0.7, 150e6
BF16, E4M3, EPS = torch.bfloat16, torch.float8_e4m3fn, 1e-5
QUANTS = ("static", "token", "group")


def recipe_of(quant: str, size: int) -> Recipe | None:
    """torchao's for tokens, DeepSeek's granularity for groups of 128."""
    return {"static": None, "token": Recipe(group=size, scale_dtype=BF16), "group": Recipe(group=128)}[quant]


def quantise(y: torch.Tensor, quant: str, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As a model spells it."""
    if quant == "static":
        return (y.float() / scale).clamp(-448, 448).to(E4M3), scale
    parts = y.unflatten(-1, (-1, 128)) if quant == "group" else y.unsqueeze(-2)
    most = parts.abs().amax(-1, keepdim=True)
    scales = ((most if quant == "token" else most.float()) / 448.0).float()
    return (parts.float() / scales).clamp(-448, 448).to(E4M3).view(y.shape), scales.squeeze(-1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one size: what is read, and two ways to compute it."""

    op: str
    size: int
    quant: str

    @property
    def bytes_per_element(self) -> int:
        return 7 if self.op == "rms_norm_quantize_fp8" else 5

    def inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        make = lambda width: torch.randn(rows, width, device="cuda", dtype=BF16)  # noqa: E731
        return (make(self.size), make(self.size)) if self.op == "rms_norm_quantize_fp8" else (make(2 * self.size),)

    def plain(self, weight: torch.Tensor, scale: torch.Tensor) -> Callable:
        def norm(x, residual):
            total = x + residual
            h = total.float()
            y = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(BF16)
            return *quantise(y, self.quant, scale), total

        def activation(packed):
            gate, up = packed.chunk(2, -1)
            return quantise(functional.silu(gate) * up, self.quant, scale)

        return norm if self.op == "rms_norm_quantize_fp8" else activation

    def ours(self, weight: torch.Tensor, scale: torch.Tensor) -> Callable:
        recipe = recipe_of(self.quant, self.size)
        how = {"scale": scale} if recipe is None else {"recipe": recipe}

        def norm(x, residual):
            return rms_norm_quantize_fp8(x, weight, eps=EPS, residual=residual, normed_dtype=BF16, **how)

        def activation(packed):
            gate, up = packed.chunk(2, -1)
            return act_mul_quantize_fp8(gate, up, **how)

        return norm if self.op == "rms_norm_quantize_fp8" else activation


def captured(call: Callable, inputs: list[tuple[torch.Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls over all inputs, and their number. Outputs of the last few stay allocated, as a model's do."""
    calls = max(20, len(inputs))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for pair in inputs[:2]:
            call(*pair)
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


def hold(got: tuple, expected: tuple, exact: bool) -> None:
    for a, b in zip(got, expected, strict=False):
        if a is not None and a.dtype == E4M3:
            different = (a.view(torch.uint8) != b.view(torch.uint8)).float().mean().item()
            assert different <= (0.0 if exact else 5e-3), f"{different:.1%} of the bytes differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192, 7168, 14336])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rest = {"dtype": "bf16", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    with open(arguments.output, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for op in ("rms_norm_quantize_fp8", "act_mul_quantize_fp8"):
            for size in arguments.sizes:
                for quant in QUANTS:
                    for rows in arguments.rows:
                        case = Case(op, size, quant)
                        found = measured(case, rows, arguments.rounds)
                        for name, us in found.items():
                            told = {
                                "op": op,
                                "rows": rows,
                                "size": size,
                                "quant": quant,
                                "candidate": name,
                                "us": f"{us:.2f}",
                            }
                            writer.writerow({**told, **rest})
                        share, gain = found["limit"] / found["tpfuse"], found["inductor"] / found["tpfuse"]
                        print(
                            f"{op} {quant} {rows} x {size}: {found['tpfuse']:.1f} us, {gain:.2f}x Inductor, {share:.2f}",
                            flush=True,
                        )


def measured(case: Case, rows: int, rounds: int) -> dict[str, float]:
    torch._dynamo.reset()
    weight, scale = torch.randn(case.size, device="cuda", dtype=BF16), torch.full((1,), 0.02, device="cuda")
    moved = rows * case.size * case.bytes_per_element
    inputs = [case.inputs(rows) for _ in range(max(2, min(40, math.ceil(CACHE_BYTES / moved))))]
    plain, ours = case.plain(weight, scale), case.ours(weight, scale)
    hold(ours(*inputs[0]), plain(*inputs[0]), exact=False)
    found = times_us({"inductor": torch.compile(plain, dynamic=False), "tpfuse": ours}, inputs, rounds)
    return {**found, "limit": EMPTY_KERNEL_US + moved / MEMORY_BYTES_PER_US}


if __name__ == "__main__":
    main()
