"""What sequence parallelism and joined GEMMs make of each model family: the second table in the README.

    python benchmarks/sequence_parallel.py                     # all families on 2 and 4 CPU ranks
    python benchmarks/sequence_parallel.py --families llama    # some of them, without writing files
    python benchmarks/sequence_parallel.py --update-readme

Each family is a small random fp32 model, applied with enable_sp and fuse_gemm_comms. For inference it is called with 1 to
256 rows in batches of 1 and 3: with a graph for the first size, then with one for any. Logits are compared with those of
the same model as it is; of a training step, for 8 and for 3 times 5 rows, the gradients of all parameters. Graphs are run
by an interpreter. Exits with 1 if a number is off.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import pathlib
import sys
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import tpfuse
from tpfuse.graph.nodes import ALL_GATHER, REDUCE_SCATTER, SHARDED, is_sum_of_rows, value
from tpfuse.models import families
from tpfuse.ops.all_gather_matmul import OP as ALL_GATHER_MATMUL
from tpfuse.ops.matmul_reduce_scatter import OP as MATMUL_REDUCE_SCATTER
from tpfuse.testing import interpret_graphs, spawn

WORLD_SIZES, BATCHES, TOKENS = (2, 4), (1, 3), (8, 1, 7, 127, 256, 255)
STEPS = ((1, 8), (3, 5))  # batch and tokens of training steps
LAYERS, SEED, MAX_DIFFERENCE = 2, 0, 1e-5
CONFIG = {"enable_sp": True, "fuse_gemm_comms": True, "sp_min_token_num": 1}
#: Heads and experts enough for four ranks.
FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
HERE = pathlib.Path(__file__).resolve().parent
CSV_PATH, README_PATH = HERE / "results" / "sequence_parallel_cpu.csv", HERE.parent / "README.md"
BEGIN, END = "<!-- sequence_parallel:begin -->", "<!-- sequence_parallel:end -->"


def measure(rank: int, name: str) -> list[dict[str, Any]]:
    """A row for inference and one for training. Runs on every rank; what fails has an "error" instead of figures."""
    import transformers

    transformers.logging.set_verbosity_error()
    world = torch.distributed.get_world_size()
    rows = []
    for mode, run in (("inference", _infer), ("training", _train)):
        try:
            with interpret_graphs() as graphs:
                config = families.family_config(name, num_hidden_layers=LAYERS, **(FOUR if world == 4 else {}))
                model = families.build_sharded(config, init_device_mesh("cpu", (world,)), torch.float32, SEED)
                difference = run(model, config)
                figures = {**_counts(model, graphs, mode), "difference": difference}
                tpfuse.remove(model)
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        rows.append({"family": name, "ranks": world, "mode": mode, **figures})
    return rows


@torch.no_grad()
def _infer(model: torch.nn.Module, config: Any) -> float:
    """The largest difference of a logit from those of the model as it was; it is applied after that."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = [(batch, tokens) for tokens in TOKENS for batch in BATCHES]
    inputs = [torch.randint(3, config.vocab_size, size, generator=generator) for size in sizes]
    expected = [model(input_ids=ids, use_cache=False).logits for ids in inputs]
    tpfuse.apply(model, CONFIG, fullgraph=True)
    got = [model(input_ids=ids, use_cache=False).logits for ids in inputs]
    return max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))


def _train(model: torch.nn.Module, config: Any) -> float:
    """The largest relative difference of a parameter's gradient."""
    config._experts_implementation = "batched_mm"  # whose backward torch can compile
    generator = torch.Generator().manual_seed(SEED)
    inputs = [torch.randint(3, config.vocab_size, size, generator=generator) for size in STEPS]
    toward = [torch.randn(*size, config.vocab_size, generator=generator) for size in STEPS]

    def gradients() -> list[torch.Tensor]:
        found = []
        for ids, direction in zip(inputs, toward, strict=True):
            model.zero_grad()
            (model(input_ids=ids, use_cache=False).logits * direction).sum().backward()
            given = [p.grad for p in model.parameters() if p.grad is not None]
            found += [(g.to_local() if isinstance(g, DTensor) else g).clone() for g in given]
        return found

    expected = gradients()
    tpfuse.apply(model, CONFIG, fullgraph=True)
    pairs = zip(gradients(), expected, strict=True)
    return max(((a - b).norm() / b.norm().clamp(min=1e-20)).item() for a, b in pairs)


def _counts(model: torch.nn.Module, graphs: list[torch.fx.GraphModule], mode: str) -> dict[str, Any]:
    """What stands in the last graph, which is that of any size; in both of the last ones, if the model is trained."""
    report = tpfuse.explain(model)
    nodes = [node for graph in graphs[-2 if mode == "training" else -1 :] for node in graph.graph.nodes]
    targets = [node.target for node in nodes]
    gathers = sum(node.target is ALL_GATHER and node.meta.get(SHARDED, False) for node in nodes)
    reduces = [n for n in nodes if "all_reduce" in str(n.target) and n.meta["val"] is not None and not is_sum_of_rows(n)]
    left = [s for s in report.sites if s.outcome == "skipped" and s.fusion in CONFIG and s.op != "all_gather"]
    return {
        "reduce_scatters": targets.count(REDUCE_SCATTER) + targets.count(MATMUL_REDUCE_SCATTER),
        "gathers": gathers + targets.count(ALL_GATHER_MATMUL),
        "gemm_reduce_scatters": targets.count(MATMUL_REDUCE_SCATTER),
        "gather_gemms": targets.count(ALL_GATHER_MATMUL),
        "all_reduces": sum(value(n.args[0]).dim() > 1 for n in reduces),
        "reasons": "; ".join(dict.fromkeys(f"{site.op}: {site.reason}" for site in left)),
        "graphs": report.graphs,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    names = ("family", "", "reduce-scatters", "with their GEMM", "all-gathers", "with their GEMMs", "all-reduces left")
    titles = (*names, "max difference to unfused TP", "why left")
    rows = _alike(rows)
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    keys = ("reduce_scatters", "gemm_reduce_scatters", "gathers", "gather_gemms", "all_reduces")
    for row in rows:
        start = f"| {row['family']} | {row['mode']}{row.get('only', '')} | "
        if "error" in row:
            lines.append(f"{start}failed: {row['error']} |" + " |" * 6)
        else:
            counts = " | ".join(str(row[key]) for key in keys)
            lines.append(f"{start}{counts} | {row['difference']:.1e} | {row['reasons'] or '-'} |")
    return "\n".join(lines)


def _alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row where all numbers of ranks have the same, but for the difference: the largest."""
    found = []
    for row in rows:
        same = [
            r for r in rows if all(r.get(key) == row.get(key) for key in {*r, *row} - {"ranks", "difference", "graphs"})
        ]
        if len(same) < len(WORLD_SIZES):
            found.append({**row, "only": f", {row['ranks']} ranks"})
        elif row is same[0]:
            found.append({**row, "difference": max(r.get("difference", 0.0) for r in same)})
    return found


def write_csv(rows: list[dict[str, Any]]) -> None:
    fixed = {"layers": LAYERS, "dtype": "fp32", "torch": torch.__version__, "tpfuse": tpfuse.__version__}
    with open(CSV_PATH, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, list(dict.fromkeys([*(key for row in rows for key in row), *fixed])), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows({**row, "difference": f"{row.get('difference', float('nan')):.2e}", **fixed} for row in rows)


def _seen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks have to have in common: not the gradients of their own shards."""
    return [{key: row[key] for key in row if (row["mode"], key) != ("training", "difference")} for row in rows]


def update_readme(table: str) -> None:
    head, _, rest = README_PATH.read_text(encoding="utf-8").partition(BEGIN)
    README_PATH.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families", nargs="+", choices=families.FAMILIES, metavar="NAME", help="only these; writes no files"
    )
    parser.add_argument("--jobs", type=int, default=1, help="families at a time: each takes two to four cores")
    parser.add_argument("--update-readme", action="store_true", help=f"write the table between {BEGIN} and {END}")
    args = parser.parse_args()
    names, rows, failed = args.families or families.FAMILIES, [], []
    runs = [(name, world) for name in names for world in WORLD_SIZES]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        measured = pool.map(lambda run: spawn(measure, run[1], run[0], timeout_s=600), runs)
        for first, *others in tqdm(measured, total=len(runs), disable=None):
            if any(_seen(other) != _seen(first) for other in others):
                failed.append(f"{first[0]['family']}: {first[0]['ranks']} ranks differ in what they saw")
            rows += first
    rows.sort(key=lambda row: (names.index(row["family"]), row["mode"]))
    for row in rows:
        if not row.get("difference", float("nan")) <= MAX_DIFFERENCE:
            failed.append(f"{row['family']} on {row['ranks']} ranks: {row.get('error') or row['difference']}")
    print(markdown(rows))
    if not args.families:
        write_csv(rows)
        if args.update_readme and not failed:
            update_readme(markdown(rows))
    for text in failed:
        print(f"FAILED {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
