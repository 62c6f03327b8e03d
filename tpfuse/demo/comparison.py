"""Are two answers the same, and did every rank find so?"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist

from tpfuse.demo.answers import Answer
from tpfuse.demo.world import World


def tolerance_of(logits: torch.Tensor, dtype: torch.dtype, layers: int) -> float:
    """Largest difference that rounding explains: it grows as a random walk over the layers."""
    relative = max(1e-5, 2 * torch.finfo(dtype).eps * math.sqrt(layers))
    return relative * max(1.0, logits.abs().max().item())


def compare(
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


def verdict(failures: list[str], world: World) -> int:
    """0 if no rank found anything wrong, else 1; the same on every rank."""
    count = torch.tensor([len(failures)], device=world.device)
    dist.all_reduce(count)
    for failure in failures:
        print(f"tpfuse.demo: FAILED on rank {world.rank}: {failure}", file=sys.stderr, flush=True)
    world.say("OK" if not count.item() else f"FAILED: {int(count)} check(s) over all ranks")
    return 1 if count.item() else 0
