"""What tpfuse does to each model family: the table in the README.

    python benchmarks/families.py                              # all families, graphs run by an interpreter
    python benchmarks/families.py --inductor                   # compiled for real
    python benchmarks/families.py --update-readme

Each family is a small random fp32 model over 2 gloo ranks, applied with fullgraph=True. All-reduces are counted twice,
without tpfuse (as the eager model issues them) and in its report; logits are compared with the unfused tensor-parallel
model and with the unsharded one. Exits with 1 if a count or a number is off.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import pathlib
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from tqdm import tqdm

import tpfuse
from tpfuse.models import families
from tpfuse.testing import interpret_graphs, spawn

WORLD_SIZE, DEVICE, SEED = 2, "cpu", 0
BATCH, TOKENS, LAYERS = 2, 7, 2
MAX_DIFFERENCE = 1e-5
#: Least number of fused all-reduces in a layer: after attention and after the MLP, but Cohere normalises by LayerNorm
#: and the plan of DeepSeek-V3 leaves attention whole.
FUSED_PER_LAYER = {"cohere": 0, "deepseek_v3": 1}
HERE = pathlib.Path(__file__).resolve().parent
CSV_PATH = HERE / "results" / f"families_{DEVICE}.csv"
README_PATH = HERE.parent / "README.md"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"


def measure(rank: int, names: Sequence[str], inductor: bool) -> list[dict[str, Any]]:
    """One row per family. Runs on every rank; a family that fails has an "error" instead of figures."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "For backward hooks to be called")  # from CommDebugMode
    mesh = init_device_mesh(DEVICE, (WORLD_SIZE,))
    rows = []
    for name in tqdm(names, disable=None if rank == 0 else True):
        row: dict[str, Any] = {"family": name}
        start = time.perf_counter()
        try:
            with contextlib.nullcontext() if inductor else interpret_graphs():
                row.update(_measure_family(name, mesh))
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        torch._dynamo.reset()
        rows.append({**row, "seconds": round(time.perf_counter() - start, 1)})
    return rows


@torch.no_grad()
def _measure_family(name: str, mesh: Any) -> dict[str, Any]:
    config = families.family_config(name, num_hidden_layers=LAYERS)
    ids = torch.randint(3, config.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(SEED))
    unsharded = families.build(config, DEVICE, torch.float32, SEED)
    model = families.build_sharded(config, mesh, torch.float32, SEED)
    alone = unsharded(input_ids=ids, use_cache=False).logits
    with CommDebugMode() as counter:
        unfused = model(input_ids=ids, use_cache=False).logits
    before = sum(n for op, n in counter.get_comm_counts().items() if "all_reduce" in str(op) or "allreduce" in str(op))
    tpfuse.apply(model, fullgraph=True)
    applied = model(input_ids=ids, use_cache=False).logits
    report = tpfuse.explain(model)
    tpfuse.remove(model)
    sites = [site for site in report.sites if site.op == "all_reduce"]
    left = [site for site in sites if site.outcome == "skipped"]
    difference = lambda other: (applied - other).abs().max().item()  # noqa: E731
    return {
        "all_reduces": before,
        "merged": sum(site.outcome == "merged" for site in sites),
        "fused": sum(site.outcome == "fused" for site in sites),
        "left": len(left),
        "reasons": "; ".join(dict.fromkeys(site.reason for site in left)),
        "graphs": report.graphs,
        "vs_unfused": difference(unfused),
        "vs_unsharded": difference(alone),
        "largest_logit": alone.abs().max().item(),
    }


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row; empty if nothing is."""
    if "error" in row:
        return [row["error"]]
    found = []
    if row["all_reduces"] != row["merged"] + row["fused"] + row["left"]:
        found.append("the report does not list every all-reduce of the model")
    if row["left"] and not row["reasons"]:
        found.append("an all-reduce was left without a reason")
    if row["fused"] < FUSED_PER_LAYER.get(row["family"], 2) * LAYERS:
        found.append(f"only {row['fused']} fused")
    if row["graphs"] != 1:
        found.append(f"{row['graphs']} graphs")
    for key in ("vs_unfused", "vs_unsharded"):
        if not row[key] <= MAX_DIFFERENCE:  # NaN fails too
            found.append(f"logits {key.replace('_', ' ')}: {row[key]:.3g} > {MAX_DIFFERENCE:.0e}")
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| family | all-reduces | merged | fused | left | why left | max difference to unfused TP | to one process |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['family']} | failed: {row['error']} |" + " |" * 6)
            continue
        counts = " | ".join(str(row[key]) for key in ("all_reduces", "merged", "fused", "left"))
        differences = f"{row['vs_unfused']:.1e} | {row['vs_unsharded']:.1e}"
        lines.append(f"| {row['family']} | {counts} | {row['reasons'] or '-'} | {differences} |")
    return "\n".join(lines)


def write_csv(rows: list[dict[str, Any]], compiler: str) -> None:
    import transformers

    fixed = {
        "compiler": compiler,
        "device": DEVICE,
        "world_size": WORLD_SIZE,
        "dtype": "fp32",
        "layers": LAYERS,
        "batch": BATCH,
        "tokens": TOKENS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tpfuse": tpfuse.__version__,
    }
    CSV_PATH.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys([*(key for row in rows for key in row if key != "seconds"), *fixed]))
    with open(CSV_PATH, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        rounded = lambda value: f"{value:.2e}" if isinstance(value, float) else value  # noqa: E731
        writer.writerows({key: rounded(value) for key, value in {**row, **fixed}.items()} for row in rows)


def update_readme(table: str) -> bool:
    """Replace the table between the markers; False if they are not there."""
    text = README_PATH.read_text(encoding="utf-8") if README_PATH.exists() else ""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        return False
    README_PATH.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families", nargs="+", choices=families.FAMILIES, metavar="NAME", help="only these; writes no files"
    )
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor: about half a minute a family")
    parser.add_argument("--update-readme", action="store_true", help=f"write the table between {BEGIN} and {END}")
    args = parser.parse_args()
    if args.families and args.update_readme:
        parser.error("--update-readme needs all families")
    names = args.families or families.FAMILIES
    timeout_s = 60 + len(names) * (120 if args.inductor else 30)
    per_rank = spawn(measure, WORLD_SIZE, names, args.inductor, timeout_s=timeout_s)
    rows = per_rank[0]
    failed = [f"{row['family']}: {text}" for row in rows for text in problems(row)]
    same = [[{k: v for k, v in row.items() if k != "seconds"} for row in rank] for rank in per_rank]
    if any(other != same[0] for other in same[1:]):
        failed.append("ranks differ in what they saw")
    print(markdown(rows))
    if not args.families:
        write_csv(rows, "inductor" if args.inductor else "interpreter")
        if args.update_readme and not failed and not update_readme(markdown(rows)):
            failed.append(f"{README_PATH.name} has no {BEGIN} ... {END}")
    for text in failed:
        print(f"FAILED {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
