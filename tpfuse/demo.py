"""The main job on one page: a Hugging Face causal LM, sharded over all ranks, before and after ``tpfuse.apply``.

    torchrun --nproc-per-node 2 -m tpfuse.demo --family llama       (or: tpfuse demo --family llama)

Both models answer the same random prompt greedily with a static KV cache. Logits are compared on the same tokens
(teacher forcing through the cache, so prefill and decode are both checked), tokens until the first near tie, and the
speed of both is told with the report of what was fused. Exit status: 0 equal, 1 not equal, 2 asked for what cannot be.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tpfuse
from tpfuse.graph import pipeline
from tpfuse.models import families

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Up to this size a process also runs the model alone, unsharded.
MAX_UNSHARDED_PARAMETERS = 100_000_000
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")  # how families name a mixture of experts
GROUP_TIMEOUT_S = 120
WARM_UP_RUNS, TIMED_RUNS = 2, 5
LOWEST_TOKEN = 3  # below are the families' pad, begin and end tokens

#: Command line option -> field of the Hugging Face configuration.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def maximum(self, number: float) -> float:
        """The largest of all ranks' numbers, on every rank."""
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()


@dataclasses.dataclass(frozen=True)
class Answer:
    """Greedy continuation of the prompt. N new tokens, V vocabulary: tokens [N], logits [N, V] in fp32."""

    tokens: torch.Tensor
    logits: torch.Tensor


# -- command line ----------------------------------------------------------------------------------------------------


def parse(
    argv: Sequence[str] | None = None, prog: str = "tpfuse.demo", parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.Namespace:
    """Arguments of the demo; a bad one ends the process with status 2 before any rank does any work."""
    parser = argparse.ArgumentParser(
        prog=prog,
        parents=list(parents),
        allow_abbrev=False,
        description="Compare a tensor-parallel model before and after tpfuse.apply.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="FOLDER", help="local Hugging Face checkpoint folder")
    what.add_argument(
        "--family",
        choices=families.FAMILIES,
        default="llama",
        metavar="NAME",
        help=f"small random model (default: llama): {', '.join(families.FAMILIES)}",
    )
    for option, field in SIZES.items():
        default = {"layers": 2, "hidden": 256}.get(option)
        told = f"default: {default}" if default else "default: follows from the hidden size"
        told = "default: 128" if option == "vocab" else told
        parser.add_argument(f"--{option.replace('_', '-')}", type=positive, metavar="N", help=f"{field} ({told})")
    parser.add_argument("--prompt-tokens", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument("--new-tokens", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on the CPU, bf16 on CUDA")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if each local rank has its own GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and the prompt (default: 0)")
    parser.add_argument(
        "--set",
        dest="fields",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="fields of tpfuse.FusionConfig, for example fuse_allreduce_rms=off",
    )
    args = parser.parse_args(argv)
    sized = [f"--{option.replace('_', '-')}" for option in SIZES if getattr(args, option)]
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    if args.model and sized:
        parser.error(f"a checkpoint has its own sizes: {', '.join(sized)} cannot go with --model")
    if args.model and not os.path.isdir(args.model):
        parser.error(f"--model: no folder {args.model!r}")
    try:
        pipeline.resolve(tpfuse.FusionConfig.load(args.fields))
    except tpfuse.ConfigError as error:
        parser.error(f"--set: {error}")
    return args


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo on this rank; the exit status, the same on every rank."""
    args = parse(argv)
    if "RANK" not in os.environ:
        sys.exit("tpfuse.demo: start it with 'tpfuse demo' or 'torchrun --nproc-per-node 2 -m tpfuse.demo'")
    _quiet()
    world = _start(args.device)
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


def _start(device_type: str | None) -> World:
    """Make the default process group: NCCL where each local rank has a GPU of its own, gloo otherwise."""
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device_type is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
        device_type = "cuda" if enough else "cpu"
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    return World(rank, size, device, init_device_mesh(device.type, (size,)))


# -- the job ---------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace, world: World) -> int:
    from tqdm import tqdm

    dtype = DTYPES[args.dtype or ("bf16" if world.device.type == "cuda" else "fp32")]
    source = args.model or _config(args, world.size)
    runs = 2 * (WARM_UP_RUNS + TIMED_RUNS)
    shown = None if world.rank == 0 else True  # None: shown on a terminal only
    with tqdm(total=runs + 5, disable=shown, leave=False) as bar:
        progress = _Progress(bar)
        model = progress("building the model", lambda: families.build_sharded(source, world.mesh, dtype, args.seed))
        _settle(model)
        prompt = _prompt(model, args, world.device)
        ask = lambda m, **k: _answer(m, prompt, args.new_tokens, **k)  # noqa: E731
        unfused = progress("unfused", lambda: ask(model))
        alone = progress("unsharded", lambda: _alone(source, model, dtype, args.seed, world, ask, unfused))
        unfused_s = _time(model, prompt, args.new_tokens, world, progress, "unfused")
        vars(model).pop("_compiled_call", None)  # what generate() compiled by itself (CUDA only)

        tpfuse.apply(model, args.fields)
        start = time.perf_counter()
        forced = progress("applied: compiling", lambda: ask(model, forced=unfused.tokens))
        compile_s = time.perf_counter() - start
        free = progress("applied", lambda: ask(model))
        applied_s = _time(model, prompt, args.new_tokens, world, progress, "applied")
    report = str(tpfuse.explain(model))
    tpfuse.remove(model)

    layers, size = model.config.get_text_config().num_hidden_layers, model.config.get_text_config().hidden_size
    world.say(
        f"{args.model or args.family}: {layers} layers, hidden {size}, {str(dtype).removeprefix('torch.')}, "
        f"{world.size} rank(s) on {world.device.type}, {args.prompt_tokens} prompt + {args.new_tokens} new tokens"
    )
    failures = _compare(unfused, alone, forced, free, _tolerance(unfused.logits, dtype, layers), world)
    world.say(f"\n{report}\n")
    speeds = [args.new_tokens / seconds for seconds in (unfused_s, applied_s)]
    how = "decode compiled by generate()" if world.device.type == "cuda" else "eager"
    world.say(
        f"tokens/s of generate(): {speeds[0]:.1f} unfused ({how}), {speeds[1]:.1f} applied (compiled)\n"
        f"  prefill included; median of {TIMED_RUNS} runs after {WARM_UP_RUNS} warm-up runs, slowest rank; "
        f"the first applied answer took {compile_s:.1f} s, mostly compiling"
    )
    return _verdict(failures, world)


def _config(args: argparse.Namespace, world_size: int) -> Any:
    """The family's configuration at the sizes asked for, with heads that can be shared out over the ranks."""
    given = {field: getattr(args, option) for option, field in SIZES.items() if getattr(args, option)}
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, **given}
    sizes["max_position_embeddings"] = max(256, args.prompt_tokens + args.new_tokens)
    config = families.family_config(args.family, **sizes)
    heads = config.num_attention_heads
    if config.num_key_value_heads % world_size and not args.kv_heads and heads % world_size == 0:
        fits = next(n for n in range(world_size, heads + 1, world_size) if heads % n == 0)
        config = families.family_config(args.family, **sizes, num_key_value_heads=fits)
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, field) % world_size:
            raise ValueError(f"{field}={getattr(config, field)} cannot be shared out over {world_size} ranks")
    return config


def _settle(model: Any) -> None:
    """Plain greedy search of a fixed length, whatever a checkpoint's generation_config says."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0)  # no end token


def _prompt(model: Any, args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    """[1, prompt tokens] of random token ids, the same on every rank."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(args.seed)
    low = min(LOWEST_TOKEN, vocabulary - 1)
    return torch.randint(low, vocabulary, (1, args.prompt_tokens), generator=generator).to(device)


def _answer(
    model: Any, prompt: torch.Tensor, new_tokens: int, forced: torch.Tensor | None = None, compiled: bool = True
) -> Answer:
    """Let generate() continue the prompt; ``forced`` [N] is taken for its own choices (teacher forcing)."""
    processors: list[Callable] = []
    if forced is not None:

        def force(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            choice = forced[tokens.shape[1] - prompt.shape[1]].expand(scores.shape[0], 1)
            return torch.full_like(scores, -torch.inf).scatter_(1, choice, 0.0)

        processors.append(force)
    result = _generate(
        model,
        prompt,
        new_tokens,
        logits_processor=processors,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=not compiled,
    )
    return Answer(result.sequences[0, prompt.shape[1] :].clone(), torch.stack(result.logits, 1)[0].float())


def _generate(model: Any, prompt: torch.Tensor, new_tokens: int, **arguments: Any) -> Any:
    # A static cache keeps all shapes but two: one graph for prefill, one for decode.
    with torch.no_grad():
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            cache_implementation="static",
            **arguments,
        )


def _alone(
    source: Any, model: Any, dtype: torch.dtype, seed: int, world: World, ask: Callable[..., Answer], unfused: Answer
) -> Answer | None:
    """The same tokens through one unsharded model in this process.

    None if it is too large for that, or if rounding decides which experts it takes (16-bit mixture of experts).
    """
    config = model.config.get_text_config()
    if dtype is not torch.float32 and any(hasattr(config, field) for field in EXPERT_FIELDS):
        return None
    if sum(parameter.numel() for parameter in model.parameters()) > MAX_UNSHARDED_PARAMETERS:
        return None
    unsharded = families.build(source, world.device, dtype, seed)
    _settle(unsharded)
    return ask(unsharded, forced=unfused.tokens, compiled=False)


def _time(model: Any, prompt: torch.Tensor, new_tokens: int, world: World, progress: _Progress, name: str) -> float:
    """Seconds of one generate() call: median over the timed runs, of the slowest rank."""
    seconds = []
    for _ in range(WARM_UP_RUNS + TIMED_RUNS):
        dist.barrier()
        start = time.perf_counter()
        progress(f"{name}: timing", lambda: _generate(model, prompt, new_tokens))
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(world.maximum(time.perf_counter() - start))
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


# -- comparison ------------------------------------------------------------------------------------------------------


def _tolerance(logits: torch.Tensor, dtype: torch.dtype, layers: int) -> float:
    """Largest difference that rounding explains: it grows as a random walk over the layers."""
    relative = max(1e-5, 2 * torch.finfo(dtype).eps * math.sqrt(layers))
    return relative * max(1.0, logits.abs().max().item())


def _compare(
    unfused: Answer, alone: Answer | None, forced: Answer, free: Answer, tolerance: float, world: World
) -> list[str]:
    """What is wrong on this rank; tells rank 0's figures."""
    pairs = [("applied and unfused TP", forced, unfused)]
    if alone is not None:
        pairs += [("applied and unsharded", forced, alone), ("unfused TP and unsharded", unfused, alone)]
    failures, told = [], []
    for name, a, b in pairs:
        difference = (a.logits - b.logits).abs().max().item()
        told.append(f"{difference:.1e} {name}")
        if not difference <= tolerance:  # NaN fails too
            failures.append(f"logits of {name} differ by {difference:.3g}, more than {tolerance:.3g}")
    world.say(f"logits, largest difference on the same tokens: {', '.join(told)} (tolerance {tolerance:.1e})")
    differing = (free.tokens != unfused.tokens).nonzero()
    if not len(differing):
        world.say(f"tokens: all {len(free.tokens)} equal")
        return failures
    step = int(differing[0])
    logits = unfused.logits[step]
    margin = (logits.max() - logits[free.tokens[step]]).item()
    world.say(f"tokens: {step} of {len(free.tokens)} equal, then a choice between logits {margin:.1e} apart")
    if margin > 2 * tolerance:  # either logit may have moved by the tolerance
        failures.append(f"token {step} differs: its logit is {margin:.3g} (> {2 * tolerance:.3g}) below the best")
    return failures


def _verdict(failures: list[str], world: World) -> int:
    """0 if no rank found anything wrong, else 1; the same on every rank."""
    count = torch.tensor([len(failures)], device=world.device)
    dist.all_reduce(count)
    for failure in failures:
        print(f"tpfuse.demo: FAILED on rank {world.rank}: {failure}", file=sys.stderr, flush=True)
    world.say("OK" if not count.item() else f"FAILED: {int(count)} check(s) over all ranks")
    return 1 if count.item() else 0


if __name__ == "__main__":
    sys.exit(main())
