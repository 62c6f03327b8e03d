"""Stacks of Llama layers: how much of the time that communication costs comes back, by row count.

    torchrun --nproc-per-node 2 benchmarks/layer_stack.py --model llama-8b --style hand --seconds 500
    torchrun --nproc-per-node 2 benchmarks/layer_stack.py --rows 2048 8192 --train      # forward and backward
    torchrun --nproc-per-node 2 benchmarks/layer_stack.py --model tiny --layers 1 --rows 8    # where there are no GPUs

Stacks are written by hand or Hugging Face's (llama.py).

plain           torch.compile of the tensor-parallel stack, its all-reduces as they are
torch_async_tp  its sequence-parallel twin, compiled with torch's ``_micro_pipeline_tp``
torch_sp        the twin without that (not by default)
tpfuse          tpfuse.apply with enable_sp and fuse_gemm_comms, sp_min_token_num as given
tpfuse_sharded, tpfuse_whole   the same with rows sharded at any row count, and at none (not by default): where the first
                begins to win is what sp_min_token_num should be, and what tpfuse tune --sequence-parallel finds
no_comm         plain with every all-reduce taken out of the graph: wrong numbers, but the time that is left
limit           no_comm, and under 1024 rows also 2.5 us + wire time for each all-reduce: two a layer, four in training

Each starts from the same replicated rows, sequences without a cache, and ends with the last norm's, with no embedding or
logits. The loss of a training step is a weighted sum of those, its gradients are those of the rows and of all weights as a
rank has them (of the Hugging Face twin's norms not yet summed over ranks). Results and gradients of each candidate are
compared with plain's, before it is timed and after. The rows make up two sequences, for of one torch's pass does not
recognise the gathers that DTensor makes (seen with torch 2.13).

CUDA graphs of a few calls take turns in random order behind a GPU that waits until the host is ahead (as everywhere, see
tpfuse/tuner/timing.py); nothing flushes the cache, for the weights of a pass are many times its size. ``--uncaptured``, and
on CPU ranks: calls, by the wall clock. A time is the median over rounds, each that of the slowest rank;
share = (plain - t) / (plain - limit). Compile time is that of the first call, with caches as they are found; graphs of
torch_async_tp and no_comm never come from one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import TypeAlias

import llama
import torch
from plot import try_to_plot
from stack_candidates import APPLIED, CANDIDATES, DEFAULT, NO_COMM, PLAIN, TWINS, Case, first_calls, sites, wrong
from timing import LIMIT, RESULTS, Budget, Ranks, called_us, capture, commit, gemm_us, launch, limit_us, repeats, write_rows
from torch.distributed.device_mesh import init_device_mesh
from whole_models import let_go

from tpfuse.tuner.timing import replayed_us

ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192, 16384)
ROWS_HIDDEN = 1024  # from so many on a site can hide behind its GEMM
WANTED_SHARE, LONG_US, REST_S = 0.85, 3000, 0.06
Figures: TypeAlias = dict[str, tuple[float, float]]  # (us, seconds of the first call) by candidate
FIELDS = (
    "op", "model", "style", "layers", "rows", "sequences", "mode", "dtype", "captured", "idle", "sp_min_token_num",
    "world", "gpu", "torch", "transformers", "candidate", "us", "compile_s", "commit",
)  # fmt: skip


def measure(case: Case, rows: int) -> Figures:
    """The limit among them. Collective."""
    ranks, args, sizes = case.ranks, case.args, llama.SIZES[case.model]
    generator = torch.Generator(ranks.device).manual_seed(rows)
    x, toward = (
        torch.randn(rows, sizes["hidden_size"], device=ranks.device, generator=generator).to(case.dtype) for _ in range(2)
    )
    contestants, expected = first_calls(case, x.requires_grad_(args.train), toward if args.train else None)
    inner, rounds = repeats(guess_us(case, rows), args.rounds)
    inner = 1 if guess_us(case, rows) > LONG_US else inner
    bodies = {name: each.run for name, each in contestants.items()}
    if args.captured:
        pool = torch.cuda.graph_pool_handle()  # activations of training fill most of the memory
        captured = {name: capture(body, inner, pool) for name, body in bodies.items()}
        graphs = {name: graph for name, (graph, _) in captured.items()}
        times = replayed_us(graphs, rounds, ranks.device, idle_s=REST_S if args.idle else 0.0)
    else:
        times, outputs = called_us(ranks, bodies, rounds, inner)
    found = {}
    for name, each in times.items():
        if args.captured:
            graphs[name].replay()
            ranks.synchronize()
        failure = wrong(case, name, captured[name][1] if args.captured else outputs[name], expected)
        if failure:
            ranks.say(f"  {name} is not counted, after timing {failure}")
        else:
            found[name] = (statistics.median(each) / inner, contestants[name].compile_s)
    if NO_COMM in found:
        found[LIMIT] = (found[NO_COMM][0] + left_us(case, rows), 0.0)
    return found


def guess_us(case: Case, rows: int) -> float:
    """Of one call, to choose how often to repeat."""
    sizes, item = llama.SIZES[case.model], case.dtype.itemsize
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] + sizes["num_key_value_heads"]
    columns = 2 * heads * sizes["head_dim"] + 3 * sizes["intermediate_size"]
    us = case.args.layers * gemm_us(rows, hidden, columns // case.ranks.size, item)
    return 3 * us if case.args.train else us


def left_us(case: Case, rows: int) -> float:
    """What no implementation can hide of the communication."""
    if rows >= ROWS_HIDDEN:
        return 0.0
    message = rows * llama.SIZES[case.model]["hidden_size"] * case.dtype.itemsize
    return sites(case) * limit_us(message, case.ranks.size)


def shares(found: Figures) -> dict[str, float]:
    """By candidate, what came back of what there is to win; NaN where that is nothing."""
    if LIMIT not in found:
        return {}
    plain, limit = found[PLAIN][0], found[LIMIT][0]
    rest = {name: us for name, (us, _) in found.items() if name not in (PLAIN, NO_COMM, LIMIT)}
    return {name: (plain - us) / (plain - limit) if plain > limit else float("nan") for name, us in rest.items()}


def tell(case: Case, rows: int, found: Figures, budget: Budget) -> None:
    """One line of figures, and one for each candidate that loses to plain; of ours also if it wins back too little."""
    won, plain = shares(found), found[PLAIN][0]
    figures = " ".join(f"{name} {us:.1f}" for name, (us, _) in found.items())
    told = "".join(f" {name} {share:.2f}" for name, share in won.items())
    case.ranks.say(f"{case.model} {case.style} rows={rows}: {figures} us{told and f'; share{told}'} [{budget.elapsed()}]")
    for name, (us, _) in found.items():
        if us > plain and name not in (NO_COMM, LIMIT):
            case.ranks.say(f"  {name} LOSES to plain: {us / plain:.3f} of its time")
        elif name in APPLIED and not won.get(name, WANTED_SHARE) >= WANTED_SHARE:
            case.ranks.say(f"  {name} wins back {won[name]:.2f}, less than {WANTED_SHARE}")


def summarize(ranks: Ranks, results: Sequence[tuple[Case, int, Figures]]) -> None:
    """The worst of each candidate over the row counts of a model and style."""
    for model, style in dict.fromkeys((case.model, case.style) for case, _, _ in results):
        mine = [(rows, found) for case, rows, found in results if (case.model, case.style) == (model, style)]
        for name in (*TWINS, *APPLIED):
            there = [(rows, found) for rows, found in mine if name in found]
            if there:
                ratio, at = max((found[name][0] / found[PLAIN][0], rows) for rows, found in there)
                worst = [(shares(found)[name], rows) for rows, found in there if LIMIT in found]
                share = "share {:.2f} at {} rows".format(*min(worst)) if worst else "no share without no_comm"
                ranks.say(f"{model} {style}, {name}, at worst: {share}, {ratio:.3f} of plain's time at {at} rows")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=llama.SIZES, default=["llama-8b", "llama-70b"])
    parser.add_argument("--style", nargs="+", choices=llama.STYLES, default=[*llama.STYLES])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[*ROWS])
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=[*DEFAULT], metavar="NAME")
    parser.add_argument("--train", action="store_true", help="forward and backward, instead of inference")
    parser.add_argument(
        "--sp-min-token-num", type=int, default=512, help="rows from which tpfuse shards them (default: 512)"
    )
    parser.add_argument(
        "--sequences", type=int, default=2, help="that the rows make up, where they divide (default: 2, see above)"
    )
    parser.add_argument("--uncaptured", action="store_true", help="calls instead of CUDA graphs")
    parser.add_argument("--idle", action="store_true", help="let the GPUs rest before each graph")
    parser.add_argument("--explain", action="store_true", help="print tpfuse's whole report for each row count")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a size once so many are spent")
    parser.add_argument("--out", help="default: layer_stack.csv or layer_stack_train.csv among the results")
    args = parser.parse_args()
    args.candidates = [PLAIN, *(name for name in CANDIDATES if name in args.candidates and name != PLAIN)]
    args.out = args.out or RESULTS / f"layer_stack{'_train' if args.train else ''}.csv"
    return args


def run(ranks: Ranks, args: argparse.Namespace) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    on_gpus = ranks.device.type == "cuda"
    args.captured = on_gpus and not args.uncaptured
    budget, mesh = Budget(ranks, args.seconds), init_device_mesh(ranks.device.type, (ranks.size,))
    mode, dtype = ("train" if args.train else "inference"), (torch.bfloat16 if on_gpus else torch.float32)
    how = (mode, "bf16" if on_gpus else "fp32", args.captured, args.idle, args.sp_min_token_num)
    where = (ranks.size, ranks.machine, torch.__version__, transformers.__version__)
    results: list[tuple[Case, int, Figures]] = []
    lines: list[tuple] = []
    for model, style in ((model, style) for model in args.model for style in args.style):
        if budget.spent():
            ranks.say(f"stopped after {budget.elapsed()}, before {model} {style}")
            break
        case = Case(model, style, args, ranks, mesh, dtype)
        case.build()
        for rows in args.rows:
            if budget.spent():
                ranks.say(f"stopped after {budget.elapsed()}, before {model} {style} rows={rows}")
                break
            found = measure(case, rows)
            let_go(*(stack for name, stack in case.stacks.items() if name in APPLIED))
            tell(case, rows, found, budget)
            results.append((case, rows, found))
            common = ("layer_stack", model, style, args.layers, rows, case.sequences(rows), *how, *where)
            lines += [(*common, name, f"{us:.2f}", f"{s:.1f}", commit()) for name, (us, s) in found.items()]
            if ranks.rank == 0:
                write_rows(args.out, FIELDS, lines)
        case.stacks.clear()
        let_go()
    summarize(ranks, results)
    if ranks.rank == 0 and lines:
        print(try_to_plot(args.out))
    return 0


if __name__ == "__main__":
    arguments = parse()
    launch(lambda ranks: run(ranks, arguments), without_gpus=True)
