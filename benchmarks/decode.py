"""Time per decode step of a Llama-3-8B-shaped model (random weights, static cache): torch.compile, tpfuse.apply, the limit.

    torchrun --nproc-per-node 2 benchmarks/decode.py --batch 1 16                # 32 layers: about 2 minutes per batch size
    torchrun --nproc-per-node 2 benchmarks/decode.py --layers 8 --uncaptured

plain    torch.compile, mode="reduce-overhead"
applied  tpfuse.apply with the same mode
no_comm  torch.compile with CUDA graphs, every all-reduce taken out of the graph: wrong numbers, but the time that is left
limit    no_comm + (2.5 us + wire) for each all-reduce
met      (with --profile) no_comm, but the ranks wait for each other wherever an all-reduce was: an all-reduce of 64
         elements whose result nobody uses. What it takes more is launches, latency, and how unevenly the ranks run

The three take turns on the same tokens, in runs of a few steps. A time is the median over the runs, and then that of the
slowest rank; share = (plain - applied) / (plain - limit). Logits of plain and applied are compared first. ``--uncaptured``
also times mode "default" by the wall clock, plain over applied.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from llama import SIZES
from timing import LIMIT, RESULTS, Budget, Ranks, commit, launch, limit_us, write_rows
from torch.distributed.device_mesh import init_device_mesh
from whole_models import DropAllReduces, let_go

import tpfuse
from tpfuse.models import families

DTYPE, VOCABULARY = torch.bfloat16, 128256
STEPS = 8  # of one timed run
LEAD_CYCLES = 250_000_000  # 0.13 s or more: longer than the host takes for one run
WARM_UPS = 4  # two before CUDA graphs are recorded, the recording, a replay
TOLERANCE = 1e-1  # largest difference of logits as a share of the largest: roundings of every layer
FIELDS = ("batch", "layers", "world", "gpu", "torch", "what", "us", "commit")


class Decoder:
    """One model with a cache of its own, and how it is called."""

    def __init__(self, name: str, model: Any, batch: int, context: int, ranks: Ranks) -> None:
        from transformers import StaticCache

        config = model.config
        self.name, self.call = name, model
        self.cache = StaticCache(config=config, max_cache_len=context)
        self.cache.early_initialization(
            batch, config.num_key_value_heads // ranks.size, config.head_dim, DTYPE, ranks.device
        )
        self.context = context
        generator = torch.Generator(ranks.device).manual_seed(7)
        self.tokens = torch.randint(3, config.vocab_size, (batch, 1), device=ranks.device, generator=generator)

    def rewind(self) -> None:
        """Back to where a run starts: what is behind it in the cache stays."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context - STEPS - 1)

    def step(self) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return self.call(input_ids=self.tokens, past_key_values=self.cache, use_cache=True).logits


def build(ranks: Ranks, args: argparse.Namespace) -> dict[str, Any]:
    """The same model several times, sharded, made on the device."""
    import transformers

    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh("cuda", (ranks.size,))
    sizes = {**SIZES["llama-8b"], "vocab_size": args.vocab, "max_position_embeddings": max(8192, args.context)}
    config = families.family_config("llama", num_hidden_layers=args.layers, **sizes)
    models = {}
    for name in ("plain", "applied", "no_comm", *(["met"] if args.profile else [])):
        models[name] = families.build_sharded(config, mesh, DTYPE)
        gc.collect()
        torch.cuda.empty_cache()
    return models


def device_us(decoder: Decoder, token: torch.Tensor) -> float:
    """us per step of one run, by the device's clock: it waits until the host, which can be slower, is far enough ahead."""
    decoder.rewind()
    torch.cuda._sleep(LEAD_CYCLES)
    dist.all_reduce(token)  # lets the ranks start together
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(STEPS):
        decoder.step()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / STEPS


def profile(ranks: Ranks, decoder: Decoder, heading: str, path: pathlib.Path) -> None:
    """Append to a file which kernels one run of this rank is made of: what differs between models, and where they wait."""
    from torch.profiler import ProfilerActivity

    token = torch.zeros(1, device=ranks.device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        device_us(decoder, token)
    kernels: dict[str, list[tuple[float, float]]] = {}
    for event in profiler.events():
        if event.device_type is torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
    spans = sorted(span for each in kernels.values() for span in each)
    if not spans:
        ranks.say(f"  {decoder.name}: the profiler sees no kernels on this machine")
        return
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    lines = [
        f"{heading}, {decoder.name}: {(until - spans[0][0]) / STEPS:.1f} us a step, {busy / STEPS:.1f} of it in kernels"
    ]
    for name, each in sorted(kernels.items(), key=lambda item: -sum(end - start for start, end in item[1])):
        times = [end - start for start, end in each]
        parts = statistics.quantiles(times, n=10) if len(times) > 1 else times * 9
        lines.append(
            f"  {sum(times) / STEPS:9.1f} us in {len(times) / STEPS:6.1f} calls, "
            f"{parts[0]:.2f}/{parts[4]:.2f}/{parts[8]:.2f} at 10/50/90 %: {name[:100]}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.stem}_profile_{ranks.rank}.txt"), "a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def wall_us(decoder: Decoder, token: torch.Tensor) -> float:
    """us per step of one run, by the host's clock to the end of the last one."""
    decoder.rewind()
    dist.all_reduce(token)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        decoder.step()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / STEPS


def take_turns(
    ranks: Ranks, decoders: list[Decoder], clock: Callable[[Decoder, torch.Tensor], float], rounds: int
) -> dict[str, float]:
    """us per step by name: median over the rounds, slowest rank."""
    token = torch.zeros(1, device=ranks.device)
    times: dict[str, list[float]] = {decoder.name: [] for decoder in decoders}
    for turn in range(rounds):
        for decoder in decoders if turn % 2 == 0 else decoders[::-1]:
            times[decoder.name].append(clock(decoder, token))
    return dict(zip(times, ranks.maximum([statistics.median(each) for each in times.values()]), strict=True))


def warm_up(ranks: Ranks, decoder: Decoder, budget: Budget) -> torch.Tensor:
    """Compile and record; the logits of the first step after that, from an empty cache."""
    start = time.monotonic()
    for _ in range(WARM_UPS):
        decoder.rewind()
        decoder.step()
    decoder.cache.reset()
    decoder.rewind()
    logits = decoder.step().float().clone()
    torch.cuda.synchronize()
    dist.barrier()
    ranks.say(f"  {decoder.name}: compiled in {time.monotonic() - start:.0f} s [{budget.elapsed()}]")
    return logits


def compiled(model: Any, dropped: DropAllReduces | None, captured: bool) -> Any:
    """A callable of the model by torch.compile."""
    if dropped is None:
        return torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead" if captured else None)
    options = {"triton.cudagraphs": captured, "post_grad_custom_post_pass": dropped, "fx_graph_cache": False}
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def one_batch(
    ranks: Ranks, models: dict[str, Any], batch: int, args: argparse.Namespace, budget: Budget, captured: bool
) -> dict[str, float]:
    """us per step by name; with the limit, if captured."""
    passes = {"no_comm": DropAllReduces(), "met": DropAllReduces(meet=True)}
    decoders = []
    for name in models if captured else ("plain", "applied"):
        decoder = Decoder(name, models[name], batch, args.context, ranks)
        if name == "applied":
            mode = {"mode": "reduce-overhead"} if captured else {}
            tpfuse.apply(models[name], fullgraph=True, dynamic=False, **mode)
        else:
            decoder.call = compiled(models[name], passes.get(name), captured)
        decoders.append(decoder)
    logits = {decoder.name: warm_up(ranks, decoder, budget) for decoder in decoders}
    difference = (logits["plain"] - logits["applied"]).abs().max() / logits["plain"].abs().max()
    error = ranks.maximum([difference.item()])[0]
    if not error <= TOLERANCE:
        raise RuntimeError(f"batch {batch}: logits of plain and applied differ by {error:.2g} of the largest")
    report = tpfuse.explain(models["applied"])
    sites = [site for site in report.sites if site.op == "all_reduce"]
    fused = sum(site.outcome == "fused" for site in sites)
    ranks.say(f"  {fused} of {len(sites)} all-reduces fused, logits differ by {error:.2g} of the largest")
    times = take_turns(ranks, decoders, device_us if captured else wall_us, args.rounds)
    if args.profile:
        for decoder in decoders:
            profile(ranks, decoder, f"{commit()} batch {batch}{'' if captured else ' uncaptured'}", pathlib.Path(args.out))
    if captured:
        messages = passes["no_comm"].messages
        if not messages:
            raise RuntimeError("no_comm: its pass found no all-reduce to take out")
        times[LIMIT] = times["no_comm"] + sum(limit_us(message, ranks.size) for message in messages)
    decoders.clear()
    let_go(models["applied"])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=VOCABULARY)
    parser.add_argument("--context", type=int, default=256, help="tokens that the cache holds (default: 256)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="which kernels a step is made of, in files beside --out")
    parser.add_argument("--uncaptured", action="store_true", help="also without CUDA graphs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a batch once so many are spent")
    parser.add_argument("--out", default=RESULTS / "decode.csv")
    args = parser.parse_args()
    if args.context <= STEPS + 1:
        parser.error(f"--context must be more than {STEPS + 1}")

    def run(ranks: Ranks) -> int:
        budget = Budget(ranks, args.seconds)
        models = build(ranks, args)
        ranks.say(f"models built [{budget.elapsed()}]")
        common = (args.layers, ranks.size, torch.cuda.get_device_name(ranks.device), torch.__version__)
        rows: list[tuple] = []
        for batch, captured in ((b, c) for b in args.batch for c in ((True, False) if args.uncaptured else (True,))):
            if budget.spent():
                ranks.say(f"stopped after {budget.elapsed()}, before batch {batch}")
                break
            times = one_batch(ranks, models, batch, args, budget, captured)
            text = " ".join(f"{name} {us:.1f}" for name, us in times.items())
            text += f" us, plain/applied={times['plain'] / times['applied']:.3f}"
            if captured:
                share = (times["plain"] - times["applied"]) / (times["plain"] - times[LIMIT])
                text += f" share={share:.3f}"
            ranks.say(f"batch {batch}{'' if captured else ', uncaptured'}: {text} [{budget.elapsed()}]")
            suffix = "" if captured else "_uncaptured"
            rows += [(batch, *common, name + suffix, f"{us:.1f}", commit()) for name, us in times.items()]
            if ranks.rank == 0:
                write_rows(args.out, FIELDS, rows)
        models.clear()
        return 0

    launch(run)


if __name__ == "__main__":
    main()
