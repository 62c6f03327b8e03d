"""Tokens per second of Hugging Face ``generate()``: the tensor-parallel model as it is, against the same after ``apply``.

    python benchmarks/generate.py                              # 2 ranks; NCCL if there are two GPUs, else gloo
    python benchmarks/generate.py --layers 32 --hidden 4096    # an 8B Llama's dimensions

Two models with the same weights take turns on the same prompts, one generation each, so that drift hits both alike. A time
is that of the slowest rank; figures are medians over the repeats, after warm-up on every prompt length. With a static cache
plain ``generate`` compiles its own decode step, in its own mode; with a dynamic cache it runs eagerly.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import platform
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse.models import families
from tpfuse.testing import spawn

WORLD_SIZE = 2
CACHES = ("static", "dynamic")
RESULTS = pathlib.Path(__file__).resolve().parent / "results"
FIELDS = (
    "cache", "prompt_tokens", "new_tokens", "plain_tokens_per_s", "applied_tokens_per_s", "ratio", "same_tokens",
    "layers", "hidden", "dtype", "device", "world_size", "torch", "tpfuse",
)  # fmt: skip


def run(rank: int, args: argparse.Namespace, device: str) -> list[dict]:
    """One row per cache and prompt length. Runs on every rank."""
    import transformers

    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh(device, (WORLD_SIZE,))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    limits = {"max_position_embeddings": 8192, "vocab_size": args.vocab}
    config = families.family_config(args.family, num_hidden_layers=args.layers, hidden_size=args.hidden, **limits)
    plain, applied = (families.build_sharded(config, mesh, dtype) for _ in range(2))
    tpfuse.apply(applied)
    rows = []
    for cache in CACHES:
        prompts = [_prompt(length, args.vocab).to(device) for length in args.prompt_tokens]
        for model in (plain, applied):
            for _ in range(3):
                for prompt in prompts:
                    _generate(model, prompt, args.new_tokens, cache)
        for prompt in prompts:
            times: dict[str, list[float]] = {"plain": [], "applied": []}
            for repeat in range(args.repeats):
                order = (("plain", plain), ("applied", applied))
                for name, model in order if repeat % 2 == 0 else order[::-1]:
                    times[name].append(_timed(model, prompt, args.new_tokens, cache, device))
            tokens = [_generate(model, prompt, args.new_tokens, cache) for model in (plain, applied)]
            rate = {name: args.new_tokens / statistics.median(seconds) for name, seconds in times.items()}
            rows.append(
                {
                    "cache": cache,
                    "prompt_tokens": prompt.shape[1],
                    "new_tokens": args.new_tokens,
                    "plain_tokens_per_s": round(rate["plain"], 2),
                    "applied_tokens_per_s": round(rate["applied"], 2),
                    "ratio": round(rate["applied"] / rate["plain"], 3),
                    "same_tokens": torch.equal(*tokens),
                    "layers": args.layers,
                    "hidden": args.hidden,
                    "dtype": str(dtype).removeprefix("torch."),
                    "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
                    "world_size": WORLD_SIZE,
                    "torch": torch.__version__,
                    "tpfuse": tpfuse.__version__,
                }
            )
            if rank == 0:
                print(" ".join(f"{name}={rows[-1][name]}" for name in FIELDS[:7]), flush=True)
    if rank == 0:
        print(tpfuse.explain(applied), flush=True)
    tpfuse.remove(applied)
    return rows


def _prompt(length: int, vocab: int) -> torch.Tensor:
    return torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(length))


def _generate(model, prompt: torch.Tensor, new_tokens: int, cache: str) -> torch.Tensor:
    kwargs = {"cache_implementation": "static"} if cache == "static" else {}
    return model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs)


def _timed(model, prompt: torch.Tensor, new_tokens: int, cache: str, device: str) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    _generate(model, prompt, new_tokens, cache)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="llama", choices=families.FAMILIES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[7, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for everything")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() >= WORLD_SIZE else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    rows = spawn(run, WORLD_SIZE, args, device, backend=backend, timeout_s=args.timeout)[0]
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"generate_{device}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
