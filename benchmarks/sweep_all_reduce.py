"""The plain all-reduce from 1 KB to 256 MB: NCCL, torch's symmetric memory with its copy, our ring, what dispatch takes.

    torchrun --nproc-per-node 2 benchmarks/sweep_all_reduce.py --seconds 300

One line per size: us that each candidate adds to the GEMM before it. limit = 2.5 us + wire, see timing.py.
"""

from __future__ import annotations

import argparse

import torch
from ladder import PLAIN, Ladder, reference_sum
from plot import try_to_plot
from timing import (
    DTYPES,
    GEMM_ALONE,
    LIMIT,
    RESULTS,
    Budget,
    Gemm,
    Ranks,
    Writer,
    drop_wrong,
    gemm_us,
    launch,
    limit_us,
    measure,
    repeats,
    right_ones,
)

from tpfuse.kernels.candidates import ALL_REDUCE, Problem

KILOBYTES = (1, 2, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
WIDEST = 8192  # elements of a row of the GEMM's output


def shape_of(kilobytes: int, dtype: torch.dtype) -> tuple[int, int]:
    """(rows, hidden) of a GEMM's output of that size."""
    elements = kilobytes * 1024 // dtype.itemsize
    hidden = next(h for h in (WIDEST, 4096, 2048, 1024, 512, 256) if elements % h == 0 and elements >= h)
    return elements // hidden, hidden


def one_size(
    ladder: Ladder, rows: int, hidden: int, k: int, dtype: torch.dtype, rounds: int, captured: bool
) -> dict[str, float]:
    """us by candidate, the GEMM alone and the limit among them."""
    ranks, problem = ladder.ranks, Problem(ALL_REDUCE, rows * hidden, 1, dtype)
    limit = limit_us(problem.rows * problem.row_bytes, ranks.size)
    inner, rounds = repeats(1.5 * limit + gemm_us(rows, hidden, k, dtype.itemsize), rounds)
    inner = inner if captured else 30
    gemm = Gemm(ranks, rows, hidden, k, dtype, inner)
    x = gemm(inner - 1)
    expected = (reference_sum(x),)
    right = right_ones(ranks, ladder.plain(problem), (x,), expected)
    times, outputs = measure(ranks, gemm, right, rounds, inner, captured)
    return {**drop_wrong(ranks, times, outputs, expected), LIMIT: limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=KILOBYTES)
    parser.add_argument("--dtype", choices=tuple(DTYPES), nargs="+", default=["bf16"])
    parser.add_argument("--k", type=int, default=1024, help="inner dimension of the GEMM, on each rank (default: 1024)")
    parser.add_argument("--candidates", nargs="+", default=PLAIN, metavar="NAME", help=f"of {', '.join(PLAIN)}")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a size once so many are spent")
    parser.add_argument("--uncaptured", action="store_true", help="eager calls, wall-clock time, no CUDA graphs")
    parser.add_argument("--out", default=RESULTS / "sweep_all_reduce.csv")
    args = parser.parse_args()

    def run(ranks: Ranks) -> int:
        budget, ladder = Budget(ranks, args.seconds), Ladder(ranks, args.candidates)
        ladder.prepare(Problem(ALL_REDUCE, max(args.kilobytes) * 512, 1, torch.bfloat16))
        writer = Writer(ranks, args.out)
        for dtype, kilobytes in ((d, s) for d in args.dtype for s in args.kilobytes):
            if budget.spent():
                ranks.say(f"stopped after {budget.elapsed()}, before {dtype} {kilobytes} KB")
                break
            rows, hidden = shape_of(kilobytes, DTYPES[dtype])
            times = one_size(ladder, rows, hidden, args.k, DTYPES[dtype], args.rounds, not args.uncaptured)
            figures = " ".join(f"{name} {us:.2f}" for name, us in times.items() if name != GEMM_ALONE)
            chosen = ladder.chosen(Problem(ALL_REDUCE, rows * hidden, 1, DTYPES[dtype]))
            figures += f" ({GEMM_ALONE} {times[GEMM_ALONE]:.1f})"
            ranks.say(f"{dtype} {kilobytes} KB: {figures} chosen={chosen} [{budget.elapsed()}]")
            writer.add(times, op=ALL_REDUCE, rows=rows, hidden=hidden, k=args.k, dtype=dtype)
        ladder.close()
        if ranks.rank == 0:
            print(try_to_plot(args.out), flush=True)
        return 0

    launch(run)


if __name__ == "__main__":
    main()
