"""How a model continues a prompt: by ``generate()``, or through the stages of a pipeline."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.demo.world import World

LOWEST_TOKEN = 3  # below are the families' pad, begin and end tokens


@dataclasses.dataclass(frozen=True)
class Answer:
    """Greedy continuation of the prompt. N new tokens, V vocabulary: tokens [N], logits [N, V] in fp32."""

    tokens: torch.Tensor
    logits: torch.Tensor


def settle(model: Any) -> None:
    """Plain greedy search of a fixed length, whatever a checkpoint's generation_config says."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0)  # no end token


def prompt_of(model: Any, args: argparse.Namespace, world: World) -> torch.Tensor:
    """[1, prompt tokens] of random token ids, the same on every rank of a replica."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(args.seed + world.replica)
    low = min(LOWEST_TOKEN, vocabulary - 1)
    return torch.randint(low, vocabulary, (1, args.prompt_tokens), generator=generator).to(world.device)


def by_generate(
    model: Any, prompt: torch.Tensor, new_tokens: int, forced: torch.Tensor | None = None, compiled: bool = True
) -> Answer:
    """Let generate() continue the prompt; ``forced`` [N] is taken for its own choices (teacher forcing)."""
    processors: list[Callable] = []
    if forced is not None:

        def force(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            choice = forced[tokens.shape[1] - prompt.shape[1]].expand(scores.shape[0], 1)
            return torch.full_like(scores, -torch.inf).scatter_(1, choice, 0.0)

        processors.append(force)
    result = generate(
        model,
        prompt,
        new_tokens,
        logits_processor=processors,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=not compiled,
    )
    return Answer(result.sequences[0, prompt.shape[1] :].clone(), torch.stack(result.logits, 1)[0].float())


def generate(model: Any, prompt: torch.Tensor, new_tokens: int, **arguments: Any) -> Any:
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


class Pipeline:
    """One rank's stage, and the schedule that sends one microbatch through all of them.

    There is no cache: a sequence of the final length, padded behind, goes through for each new token. Attention is causal,
    so that what stands behind a token does not change its logits, and all calls have one shape.
    """

    def __init__(self, stage: torch.nn.Module, config: Any, tokens: int, dtype: torch.dtype, world: World) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        self._world, self._tokens, self._group = world, tokens, world.group("pp")
        self._first, self._last = world.stage == 0, world.stage == world.stages - 1
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, device="meta")
        ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        logits = torch.empty(1, tokens, config.vocab_size, dtype=dtype, device="meta")
        self._logits = logits
        self._schedule = ScheduleGPipe(
            PipelineStage(
                stage,
                world.stage,
                world.stages,
                world.device,
                input_args=ids if self._first else hidden,
                output_args=logits if self._last else hidden,
                group=self._group,
            ),
            n_microbatches=1,
        )

    def logits(self, sequence: torch.Tensor) -> torch.Tensor:
        """[1, T, V] in fp32 for [1, T] token ids, on every stage."""
        with torch.no_grad():
            got = self._schedule.step(*([sequence] if self._first else []))
        result = got if self._last else torch.empty_like(self._logits, device=self._world.device)
        result = result.float().contiguous()
        dist.broadcast(result, group=self._group, group_src=self._world.stages - 1)
        return result

    def answer(self, prompt: torch.Tensor, new_tokens: int, forced: torch.Tensor | None = None) -> Answer:
        """As ``by_generate``: greedy, or with ``forced`` for its choices; then one pass has all logits."""
        start = prompt.shape[1]
        sequence = torch.nn.functional.pad(prompt, (0, self._tokens - start))
        if forced is not None:
            sequence[0, start:] = forced
            logits = self.logits(sequence)[0, start - 1 : start - 1 + new_tokens]
            return Answer(forced.clone(), logits)
        steps = []
        for position in range(start, start + new_tokens):
            steps.append(self.logits(sequence)[0, position - 1])
            sequence[0, position] = steps[-1].argmax()
        return Answer(sequence[0, start:].clone(), torch.stack(steps))
