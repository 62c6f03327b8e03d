"""How much slower is what dispatch chooses than the best it could have chosen? Over random sizes, most of them in no table.

    torchrun --nproc-per-node 2 benchmarks/dispatch_regret.py --seconds 400

Every candidate is timed in two passes of their own, with new graphs. The choice is dispatch's (``dispatch``); without a
table for this machine it goes by a rule of thumb, so the fastest of the first pass is told as well (``first pass``). Both
are judged by the second pass alone: time of the choice over the best time there. What a choice by the first pass loses is
noise, and so the floor of what any table can reach.
"""

from __future__ import annotations

import argparse
import math
import random

import torch
from ladder import Ladder, norm_problem, reference_norm
from timing import (
    DTYPES,
    RESULTS,
    Budget,
    Gemm,
    Ranks,
    Writer,
    gemm_us,
    launch,
    limit_us,
    measure,
    repeats,
    right_ones,
)

from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM

CANDIDATES = ("nccl", "nccl_norm", "torch_symm_mem", "flashinfer", "tpfuse_split", "tpfuse_ring", "dispatch")
HIDDEN = (1024, 2048, 2880, 3584, 4096, 5120, 6144, 7168, 8192)
MOST_ROWS = 4096


def shapes(count: int, seed: int) -> list[tuple[int, int]]:
    """(rows, hidden), rows evenly spread on a log scale; by hidden size, for each needs a compilation."""
    numbers = random.Random(seed)
    drawn = [(round(math.exp(numbers.uniform(0, math.log(MOST_ROWS)))), numbers.choice(HIDDEN)) for _ in range(count)]
    return sorted(drawn, key=lambda shape: (shape[1], shape[0]))


def two_passes(
    ladder: Ladder, rows: int, hidden: int, k: int, dtype: torch.dtype, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """us by candidate, twice."""
    ranks, problem = ladder.ranks, norm_problem(rows, hidden, dtype)
    message = rows * problem.row_bytes
    guess = 1.5 * limit_us(message, ranks.size, 3 * message) + gemm_us(rows, hidden, k, dtype.itemsize)
    inner, rounds = repeats(guess, rounds)
    gemm = Gemm(ranks, rows, hidden, k, dtype, inner)
    generator = torch.Generator(ranks.device).manual_seed(0)
    residual = torch.randn(rows, hidden, device=ranks.device, dtype=dtype, generator=generator)
    weight = torch.rand(hidden, device=ranks.device, dtype=dtype, generator=generator) + 0.5
    x = gemm(inner - 1)
    right = right_ones(ranks, ladder.with_norm(problem, weight), (x, residual), reference_norm(x, residual, weight))
    first, second = (measure(ranks, gemm, right, rounds, inner, residual=residual)[0] for _ in range(2))
    return {name: first[name] for name in right}, {name: second[name] for name in right}


def summary(name: str, regrets: list[float]) -> str:
    mean = math.exp(sum(map(math.log, regrets)) / len(regrets))
    return f"{name}: geometric mean {mean:.4f}, worst {max(regrets):.3f}, over {len(regrets)} sizes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--candidates", nargs="+", default=CANDIDATES, metavar="NAME", help=f"of {', '.join(CANDIDATES)}")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a size once so many are spent")
    parser.add_argument("--out", default=RESULTS / "dispatch_regret.csv", help="the second pass")
    args = parser.parse_args()
    wanted = dict.fromkeys((*args.candidates, "dispatch"))

    def run(ranks: Ranks) -> int:
        budget, ladder = Budget(ranks, args.seconds), Ladder(ranks, tuple(wanted))
        drawn = shapes(args.count, args.seed)
        ladder.prepare(norm_problem(MOST_ROWS, max(HIDDEN), DTYPES[args.dtype]))
        writer = Writer(ranks, args.out)
        regrets: dict[str, list[float]] = {"dispatch": [], "first pass": []}
        for rows, hidden in drawn:
            if budget.spent():
                ranks.say(f"stopped after {budget.elapsed()}")
                break
            first, second = two_passes(ladder, rows, hidden, args.k, DTYPES[args.dtype], args.rounds)
            writer.add(second, op=ALL_REDUCE_RMS_NORM, rows=rows, hidden=hidden, k=args.k, dtype=args.dtype)
            if "dispatch" not in second:
                ranks.say(f"H={hidden} T={rows}: dispatch was not timed")
                continue
            best, guess = min(second, key=lambda name: second[name]), min(first, key=lambda name: first[name])
            regrets["dispatch"].append(second["dispatch"] / second[best])
            regrets["first pass"].append(second[guess] / second[best])
            chosen = ladder.chosen(norm_problem(rows, hidden, DTYPES[args.dtype]))
            figures = " ".join(f"{name} {us:.2f}" for name, us in second.items())
            told = f"regret {regrets['dispatch'][-1]:.3f} (first pass: {guess}, {regrets['first pass'][-1]:.3f})"
            ranks.say(f"H={hidden} T={rows}: {figures} best={best} chosen={chosen} {told} [{budget.elapsed()}]")
        for name, each in regrets.items():
            if each:
                ranks.say(summary(name, each))
        covered = (
            "a table covers this machine: dispatch is judged"
            if ladder.dispatcher.table
            else "no table: judge by first pass"
        )
        ranks.say(f"{covered}; {ladder.dispatcher.source}")
        ladder.close()
        return 0

    launch(run)


if __name__ == "__main__":
    main()
