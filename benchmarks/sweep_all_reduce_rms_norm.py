"""All-reduce + add + RMSNorm over rows and hidden sizes: every candidate of the ladder against the limit.

    torchrun --nproc-per-node 2 benchmarks/sweep_all_reduce_rms_norm.py --hidden 4096 --seconds 500

One line per size: us that each candidate adds to the GEMM before it, the share of what can be won over NCCL + torch.compile
that dispatch wins, (nccl - dispatch) / (nccl - limit), and FlashInfer's best over dispatch. Sizes where it loses are told
like any others. limit = 2.5 us + wire + three messages of memory traffic (residual in, both outputs), see timing.py.
"""

from __future__ import annotations

import argparse

import torch
from ladder import WITH_NORM, Ladder, norm_problem, reference_norm, reference_sum
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

from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM

ROWS = (1, 2, 3, 4, 7, 8, 16, 32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)
HIDDEN = (2880, 4096, 5120, 7168, 8192)


def one_size(
    ladder: Ladder, rows: int, hidden: int, k: int, dtype: torch.dtype, rounds: int, captured: bool
) -> dict[str, float]:
    """us by candidate, the GEMM alone and the limit among them."""
    ranks, problem = ladder.ranks, norm_problem(rows, hidden, dtype)
    message = rows * problem.row_bytes
    limit = limit_us(message, ranks.size, 3 * message)
    inner, rounds = repeats(1.5 * limit + gemm_us(rows, hidden, k, dtype.itemsize), rounds)
    inner = inner if captured else 30
    gemm = Gemm(ranks, rows, hidden, k, dtype, inner)
    generator = torch.Generator(ranks.device).manual_seed(0)
    residual = torch.randn(rows, hidden, device=ranks.device, dtype=dtype, generator=generator)
    weight = torch.rand(hidden, device=ranks.device, dtype=dtype, generator=generator) + 0.5
    x = gemm(0)
    right = right_ones(ranks, ladder.with_norm(problem, weight), (x, residual), reference_norm(x, residual, weight))
    times, outputs = measure(ranks, gemm, right, rounds, inner, captured, residual)
    carried = residual.double()
    for turn in range(inner - 1):
        carried += reference_sum(gemm(turn))
    expected = reference_norm(gemm(inner - 1), carried, weight)
    return {**drop_wrong(ranks, times, outputs, expected), LIMIT: limit}


def told(times: dict[str, float]) -> str:
    """One line of figures."""
    text = " ".join(f"{name} {us:.2f}" for name, us in times.items() if name != GEMM_ALONE)
    text += f" ({GEMM_ALONE} {times[GEMM_ALONE]:.1f})"
    if "dispatch" in times and "nccl" in times:
        text += f" share={(times['nccl'] - times['dispatch']) / (times['nccl'] - times[LIMIT]):.3f}"
        theirs = [us for name, us in times.items() if name.startswith("flashinfer")]
        if theirs:
            text += f" flashinfer/dispatch={min(theirs) / times['dispatch']:.3f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), nargs="+", default=["bf16", "fp16"])
    parser.add_argument("--k", type=int, default=2048, help="inner dimension of the GEMM, on each rank (default: 2048)")
    parser.add_argument(
        "--candidates", nargs="+", default=WITH_NORM, metavar="NAME", help=f"of {', '.join(WITH_NORM)}, nccl_norm"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a size once so many are spent")
    parser.add_argument("--uncaptured", action="store_true", help="eager calls, wall-clock time, no CUDA graphs")
    parser.add_argument("--out", default=RESULTS / "sweep_all_reduce_rms_norm.csv")
    args = parser.parse_args()

    def run(ranks: Ranks) -> int:
        budget, ladder = Budget(ranks, args.seconds), Ladder(ranks, args.candidates)
        ladder.prepare(norm_problem(max(args.rows), max(args.hidden), DTYPES[args.dtype[0]]))
        writer = Writer(ranks, args.out)
        for dtype, hidden, rows in ((d, h, r) for d in args.dtype for h in args.hidden for r in args.rows):
            if budget.spent():
                ranks.say(f"stopped after {budget.elapsed()}, before {dtype} H={hidden} T={rows}")
                break
            times = one_size(ladder, rows, hidden, args.k, DTYPES[dtype], args.rounds, not args.uncaptured)
            chosen = ladder.chosen(norm_problem(rows, hidden, DTYPES[dtype]))
            ranks.say(f"{dtype} H={hidden} T={rows}: {told(times)} chosen={chosen} [{budget.elapsed()}]")
            writer.add(times, op=ALL_REDUCE_RMS_NORM, rows=rows, hidden=hidden, k=args.k, dtype=dtype)
        ladder.close()
        if ranks.rank == 0:
            print(try_to_plot(args.out), flush=True)
        return 0

    launch(run)


if __name__ == "__main__":
    main()
