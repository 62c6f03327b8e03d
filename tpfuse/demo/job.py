"""The job: build, answer unfused, apply, answer again, compare, report."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import tpfuse
from tpfuse.demo import arguments, stages
from tpfuse.demo.answers import Answer, Pipeline, by_generate, generate, prompt_of, settle
from tpfuse.demo.comparison import compare, tolerance_of, verdict
from tpfuse.demo.world import World, start
from tpfuse.models import families

#: Up to this size a process also runs the model alone, unsharded.
MAX_UNSHARDED_PARAMETERS = 100_000_000
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")  # how families name a mixture of experts
WARM_UP_RUNS, TIMED_RUNS = 2, 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo on this rank; the exit status, the same on every rank."""
    args = arguments.parse(argv)
    if "RANK" not in os.environ:
        sys.exit("tpfuse.demo: start it with 'tpfuse demo' or 'torchrun --nproc-per-node 2 -m tpfuse.demo'")
    _quiet()
    size = int(os.environ["WORLD_SIZE"])
    if args.mesh and arguments.ranks(args.mesh) != size:
        if os.environ["RANK"] == "0":
            told = f"--mesh needs {arguments.ranks(args.mesh)} rank(s), and there are {size}"
            print(f"tpfuse.demo: {told}", file=sys.stderr, flush=True)
        return 2
    world = start(args.device, args.mesh)
    try:
        status = _run(args, world)
    except (tpfuse.TpfuseError, ValueError, ModuleNotFoundError) as error:
        # Wrong arguments: every rank meets the same error at the same place.
        if world.rank == 0:
            print(f"tpfuse.demo: {error}", file=sys.stderr, flush=True)
        status = 2
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for ranks that are still in a collective; torchrun ends those
    torch._dynamo.reset()  # CUDA graphs that hold NCCL calls would keep the group from ending
    dist.destroy_process_group()
    return status


def _quiet() -> None:
    """Only our own lines: Hugging Face's advice and torch's deprecations say nothing about the comparison."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging = families.import_transformers().logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _run(args: argparse.Namespace, world: World) -> int:
    from tqdm import tqdm

    dtype = arguments.DTYPES[args.dtype or ("bf16" if world.device.type == "cuda" else "fp32")]
    source = args.model or _config(args, world.tp.size())
    runs = 2 * (WARM_UP_RUNS + TIMED_RUNS)
    shown = None if world.rank == 0 else True  # None: shown on a terminal only
    with tqdm(total=runs + 5, disable=shown, leave=False) as bar:
        progress = _Progress(bar)
        model: Any = progress("building the model", lambda: families.build_sharded(source, world.tp, dtype, args.seed))
        config, parameters = model.config.get_text_config(), sum(parameter.numel() for parameter in model.parameters())
        settle(model)
        prompt = prompt_of(model, args, world)
        ask: Callable[..., Answer] = lambda **k: by_generate(model, prompt, args.new_tokens, **k)  # noqa: E731
        run: Callable[[], Any] = lambda: generate(model, prompt, args.new_tokens)  # noqa: E731
        if world.stages > 1:
            model = stages.split(model, world.stage, world.stages)
            pipeline = Pipeline(model, config, args.prompt_tokens + args.new_tokens, dtype, world)
            ask = lambda **k: pipeline.answer(prompt, args.new_tokens, **k)  # noqa: E731
            run = ask
        unfused = progress("unfused", ask)
        alone = progress("unsharded", lambda: _alone(source, config, parameters, dtype, args, world, prompt, unfused))
        unfused_s = _time(run, world, progress, "unfused")
        vars(model).pop("_compiled_call", None)  # what generate() compiled by itself (CUDA only)

        tpfuse.apply(model, args.fields)
        begin = time.perf_counter()
        forced = progress("applied: compiling", lambda: ask(forced=unfused.tokens))
        compile_s = time.perf_counter() - begin
        free = progress("applied", ask)
        applied_s = _time(run, world, progress, "applied")
    report = tpfuse.explain(model)
    tpfuse.remove(model)

    told = f"{args.prompt_tokens} prompt + {args.new_tokens} new tokens"
    layout = " x ".join(f"{name} {world.mesh[name].size()}" for name in world.mesh.mesh_dim_names or ())
    world.say(
        f"{args.model or args.family}: {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{str(dtype).removeprefix('torch.')}, {world.size} rank(s) on {world.device.type}"
        f"{f' ({layout})' if world.mesh.ndim > 1 else ''}, {told}"
    )
    failures = compare(unfused, alone, forced, free, tolerance_of(unfused.logits, dtype, config.num_hidden_layers), world)
    failures += _tell(report, world)
    speeds = [world.replicas * args.new_tokens / seconds for seconds in (unfused_s, applied_s)]
    how = "decode compiled by generate()" if world.device.type == "cuda" and world.stages == 1 else "eager"
    what = "generate()" if world.stages == 1 else "the pipeline, without a cache"
    world.say(
        f"tokens/s of {what}: {speeds[0]:.1f} unfused ({how}), {speeds[1]:.1f} applied (compiled)\n"
        f"  prefill included; median of {TIMED_RUNS} runs after {WARM_UP_RUNS} warm-up runs, slowest rank; "
        f"the first applied answer took {compile_s:.1f} s, mostly compiling"
    )
    return verdict(failures, world)


def _tell(report: tpfuse.Report, world: World) -> list[str]:
    """Print the report of each stage; what is wrong: that replicas, or ranks of a group, have different ones."""
    sites = sorted({(site.where, site.op, site.outcome, site.reason) for site in report.sites})
    mine = (world.stage, sites, str(report))
    everybody: list[Any] = [mine] * world.size
    dist.all_gather_object(everybody, mine)
    first = {stage: (sites, text) for stage, sites, text in reversed(everybody)}  # of the lowest rank
    for stage, (_, text) in sorted(first.items()):
        world.say(f"\nstage {stage}:\n{text}" if world.stages > 1 else f"\n{text}")
    world.say("")
    return [] if first[world.stage][0] == sites else ["its report is not that of the other ranks of its stage"]


def _config(args: argparse.Namespace, ranks: int) -> Any:
    """The family's configuration at the sizes asked for, with heads that can be shared out over the ranks."""
    given = {field: getattr(args, option) for option, field in arguments.SIZES.items() if getattr(args, option)}
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, **given}
    sizes["max_position_embeddings"] = max(256, args.prompt_tokens + args.new_tokens)
    config = families.family_config(args.family, **sizes)
    heads = config.num_attention_heads
    if config.num_key_value_heads % ranks and not args.kv_heads and heads % ranks == 0:
        fits = next(n for n in range(ranks, heads + 1, ranks) if heads % n == 0)
        config = families.family_config(args.family, **sizes, num_key_value_heads=fits)
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, field) % ranks:
            raise ValueError(f"{field}={getattr(config, field)} cannot be shared out over {ranks} ranks")
    return config


def _alone(
    source: Any,
    config: Any,
    parameters: int,
    dtype: torch.dtype,
    args: argparse.Namespace,
    world: World,
    prompt: torch.Tensor,
    told: Answer,
) -> Answer | None:
    """The tokens that were told through one unsharded model in this process.

    None if it is too large for that, or if rounding decides which experts it takes (16-bit mixture of experts).
    """
    if dtype is not torch.float32 and any(hasattr(config, field) for field in EXPERT_FIELDS):
        return None
    if parameters > MAX_UNSHARDED_PARAMETERS:
        return None
    unsharded = families.build(source, world.device, dtype, args.seed)
    settle(unsharded)
    return by_generate(unsharded, prompt, args.new_tokens, forced=told.tokens, compiled=False)


def _time(run: Callable[[], Any], world: World, progress: _Progress, name: str) -> float:
    """Seconds of one answer: median over the timed runs, of the slowest rank."""
    seconds = []
    for _ in range(WARM_UP_RUNS + TIMED_RUNS):
        dist.barrier()
        begin = time.perf_counter()
        progress(f"{name}: timing", run)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(world.maximum(time.perf_counter() - begin))
    return statistics.median(seconds[WARM_UP_RUNS:])


class _Progress:
    """Runs a step under its name in the progress bar."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def __call__(self, name: str, step: Callable[[], Any]) -> Any:
        self.bar.set_description(name)
        result = step()
        self.bar.update()
        return result
