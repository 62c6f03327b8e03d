"""What ``tpfuse.apply`` adds to compile time: a Llama-shaped model over 2 ranks, against plain ``torch.compile``.

    python benchmarks/compile_time.py                          # 32 layers; NCCL if there are two GPUs, else gloo
    python benchmarks/compile_time.py --layers 8 --repeats 1

Every figure comes from fresh processes: once on an empty compile cache ("cold"), then on the cache that this left
("warm"). The two compilers take turns, and which one begins alternates. A time is that of the first call, of the
slowest rank, without imports; figures are medians over the repeats. CPU seconds are told as well: they say more where
other work runs on the machine (Triton's worker processes are not in them). Exits with 1 if a compiled model gives
wrong logits.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import platform
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import tpfuse
from tpfuse.models import families
from tpfuse.testing import spawn

WORLD_SIZE, TOKENS, SEED = 2, 64, 0
COMPILERS, CACHES = ("torch.compile", "tpfuse"), ("cold", "warm")
#: Largest difference to the eager model, as a share of the largest logit: roundings of every layer in fp32 and bf16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def first_call(rank: int, compiler: str, layers: int, hidden: int, device: str) -> dict[str, float]:
    """Compile the model in this process and time its first call. Runs on every rank."""
    import torch._inductor.compile_fx  # imported by both compilers at their first graph
    import transformers

    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh(device, (WORLD_SIZE,))
    config = families.family_config("llama", num_hidden_layers=layers, hidden_size=hidden)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = families.build_sharded(config, mesh, dtype, SEED)
    ids = torch.randint(3, config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(SEED)).to(device)
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).logits.float()
        _synchronize(device)
        start, start_cpu = time.perf_counter(), _cpu_seconds()
        call = tpfuse.apply(model, fullgraph=True) if compiler == "tpfuse" else torch.compile(model, fullgraph=True)
        logits = call(input_ids=ids, use_cache=False).logits.float()
        _synchronize(device)
        seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - start_cpu
    error = ((logits - eager).abs().max() / eager.abs().max()).item()
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "error": error, "tolerance": TOLERANCES[dtype]}
    if compiler == "tpfuse":
        report = tpfuse.explain(model)
        reduces = [site for site in report.sites if site.op == "all_reduce"]
        figures["pass_seconds"] = report.pass_seconds
        figures["all_reduces"], figures["fused"] = len(reduces), sum(site.outcome == "fused" for site in reduces)
        tpfuse.remove(model)
    return figures


def _cpu_seconds() -> float:
    """Processor time of this process and of the C++ compilers that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, float]]]:
    """(compiler, cache) -> per repeat the figures of the slowest rank (CPU seconds: of all ranks)."""
    caches = CACHES[:1] if args.cold_only else CACHES
    found: dict[tuple[str, str], list[dict[str, float]]] = {(c, k): [] for c in COMPILERS for k in caches}
    with tqdm(total=args.repeats * len(found), disable=None) as bar:
        for repeat in range(args.repeats):
            for compiler in COMPILERS if repeat % 2 == 0 else COMPILERS[::-1]:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    for cache in caches:
                        bar.set_description(f"{compiler}, {cache}")
                        ranks = spawn(
                            first_call,
                            WORLD_SIZE,
                            compiler,
                            args.layers,
                            args.hidden,
                            args.device,
                            backend="nccl" if args.device == "cuda" else "gloo",
                            timeout_s=args.timeout_s,
                            env={"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"},
                        )
                        run = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
                        run["cpu_seconds"] = sum(rank["cpu_seconds"] for rank in ranks)
                        found[compiler, cache].append(run)
                        bar.write(f"{compiler}, {cache}: {run['seconds']:.1f} s, {run['cpu_seconds']:.1f} CPU seconds")
                        bar.update()
    return found


def summarize(found: dict[tuple[str, str], list[dict[str, float]]], args: argparse.Namespace) -> dict[str, Any]:
    """One CSV row: medians, their ratios, and what they were measured on."""
    import transformers

    caches = [cache for compiler, cache in found if compiler == "tpfuse"]
    passes = [run for cache in caches for run in found["tpfuse", cache]]
    row: dict[str, Any] = {
        "device": args.device,
        "device_name": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "world_size": WORLD_SIZE,
        "layers": args.layers,
        "hidden": args.hidden,
        "tokens": TOKENS,
        "dtype": "bf16" if args.device == "cuda" else "fp32",
        "repeats": args.repeats,
        "all_reduces": passes[0]["all_reduces"],
        "fused": passes[0]["fused"],
        "pass_seconds": round(statistics.median(run["pass_seconds"] for run in passes), 3),
    }
    for cache in caches:
        for key, unit in (("seconds", "s"), ("cpu_seconds", "cpu_s")):
            plain, ours = ([run[key] for run in found[compiler, cache]] for compiler in COMPILERS)
            ratios = [b / a for a, b in zip(plain, ours, strict=True)]
            row[f"{cache}_torch_compile_{unit}"] = round(statistics.median(plain), 2)
            row[f"{cache}_tpfuse_{unit}"] = round(statistics.median(ours), 2)
            row[f"{cache}_ratio_{unit}"] = round(statistics.median(ours) / statistics.median(plain), 3)
            row[f"{cache}_ratio_{unit}_range"] = f"{min(ratios):.3f}..{max(ratios):.3f}"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "tpfuse": tpfuse.__version__}
    return {**row, **versions}


def main() -> int:
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= WORLD_SIZE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096 if gpus else 256, help="default: 4096, or 256 on the CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--cold-only", action="store_true", help="leave out the runs on a warm cache")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for one process pair (default: 900)")
    args = parser.parse_args()
    found = measure(args)
    row = summarize(found, args)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / f"compile_time_{args.device}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerow(row)
    width = max(len(key) for key in row)
    print("\n".join(f"{key.ljust(width)}  {value}" for key, value in row.items()))
    wrong = [(key, run) for key, runs in found.items() for run in runs if not run["error"] <= run["tolerance"]]
    for (compiler, cache), run in wrong:
        print(f"FAILED {compiler}, {cache}: logits differ by {run['error']:.2g} of the largest", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
