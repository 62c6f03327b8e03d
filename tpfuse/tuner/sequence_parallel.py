"""From how many rows on sharding them is faster: a stack of blocks applied with and without ``enable_sp``, by row counts.

What its GEMMs and all-reduces run goes by the machine's table, as in a model: tune those first. On GPUs CUDA graphs are
timed, on CPU ranks calls. A threshold is chosen by one series of rounds; the times that are printed are another one's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import tpfuse
from tpfuse.comm import agreement
from tpfuse.errors import AgreementError, TpfuseError, first_line
from tpfuse.tables import SEQUENCE_PARALLEL, SHARDED, WHOLE, Choice, Entries, Size
from tpfuse.tuner import selection, timing
from tpfuse.tuner.arguments import DTYPES
from tpfuse.tuner.block_stack import Stack
from tpfuse.tuner.proposals import coarse_to_fine

LAYERS, ROUNDS, WARM_UPS = 2, 25, 2
GRAPH_FLOP, MOST_CALLS = 3e12, 8  # of what is timed at once
#: Largest relative error (L2) of sharded rows against whole ones: roundings of every layer.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
VARIANTS = (Choice(WHOLE), Choice(SHARDED))
#: By rows, microseconds of a call of each variant.
Times = dict[int, dict[Choice, float]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a block, and whether GEMMs are joined with collectives (in both variants)."""

    hidden: int
    intermediate: int
    gemm_comms: bool
    dtype: torch.dtype

    @property
    def op(self) -> str:
        return SEQUENCE_PARALLEL[self.gemm_comms]

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def calls(self, rows: int, world: int) -> int:
        """How many are timed at once."""
        columns = LAYERS * (4 * self.hidden + 3 * self.intermediate) + self.intermediate
        flop = 2 * rows * columns * self.hidden / world
        return max(1, min(MOST_CALLS, int(GRAPH_FLOP / flop)))

    def __str__(self) -> str:
        return f"{self.op} of {self.hidden}x{self.intermediate}"


def tune(
    args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device, talk: Any
) -> tuple[dict[str, dict[Size, Entries]], str]:
    """(the table's entries, a text that shows them with times), the same on every rank. Collective."""
    shapes = [
        Shape(hidden, intermediate, gemm_comms, DTYPES[args.dtype])
        for hidden, intermediate in args.sequence_parallel
        for gemm_comms in SEQUENCE_PARALLEL
    ]
    end, done, total = time.monotonic() + args.seconds, 0, len(shapes) * len(args.rows)
    chosen: dict[str, dict[Size, Entries]] = {}
    lines = [_line("op", "size", "rows", "whole us", "sharded us")]
    for shape in shapes:
        contest = Contest(shape, group, device)
        first: Times = {}
        again: Times = {}
        for rows in coarse_to_fine(args.rows):
            (late,) = timing.largest([time.monotonic() - end], device, group)  # ranks stop together
            if late > 0:
                talk.say(f"{args.seconds:g} s are spent: {done} of {total} sizes were measured")
                break
            talk.show(f"{shape}, {rows} rows", done, total)
            first[rows], again[rows], why = contest.measure(rows)
            if why:
                talk.say(f"{shape}, {rows} rows: {why}")
            done += 1
        contest.end()
        if first:
            entries = selection.sharding(first)
            chosen.setdefault(shape.op, {})[shape.row_bytes] = entries
            lines += _told(shape, entries, again)
    return chosen, "\n".join(lines)


class Contest:
    """One shape's stack, whole and sharded, over the same weights. Collective: all ranks call each method alike."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup, device: torch.device) -> None:
        self.shape, self.group, self.device = shape, group, device
        self.stacks: dict[Choice, torch.nn.Module] = {}
        first = None
        for choice in VARIANTS:
            stack = Stack(shape.hidden, shape.intermediate, LAYERS, group, shape.dtype, device, like=first)
            first = first or stack
            sharded = {"enable_sp": choice.candidate == SHARDED, "sp_min_token_num": 1}
            self.stacks[choice] = tpfuse.apply(stack, {**sharded, "fuse_gemm_comms": shape.gemm_comms}, fullgraph=True)

    def measure(self, rows: int) -> tuple[dict[Choice, float], dict[Choice, float], str]:
        """(us of a call of each variant that is right, the same of another series of rounds, what is wrong)."""
        random = torch.Generator(self.device).manual_seed(rows)
        x = torch.randn(rows, self.shape.hidden, generator=random, device=self.device).to(self.shape.dtype)
        torch._dynamo.maybe_mark_dynamic(x, 0)  # one graph for all row counts, as most models have
        why = self._refusal(x)
        right = [choice for choice in VARIANTS if choice.candidate == WHOLE or not why]
        calls = self.shape.calls(rows, self.group.size())
        bodies = [functools.partial(self.stacks[choice], x) for choice in right]
        times = _timer(bodies, calls, self.device, self.group)
        first, again = (dict(zip(right, times(), strict=True)) for _ in range(2))
        tpfuse.check()
        return first, again, why

    def _refusal(self, x: torch.Tensor) -> str:
        """Why sharded rows are left out, the same on every rank; "" if they are right."""
        whole, why = self.stacks[VARIANTS[0]](x).float(), ""
        try:
            sharded = self.stacks[VARIANTS[1]](x).float()
            error = ((sharded - whole).norm() / whole.norm().clamp(min=1e-30)).item()
            if not error <= TOLERANCES[self.shape.dtype]:  # NaN too
                why = f"its result is off by {error:.2g}"
        except TpfuseError:
            raise
        except RuntimeError as error:  # what a compiler raises is up to it
            why = f"{type(error).__name__}: {first_line(error)}"
        everybody = agreement.exchange(self.group, f"tuning {self.shape.op}", {"why": why})
        if "Error" in why and not all(each["why"] for each in everybody):
            raise AgreementError(f"{self.shape} failed on some ranks only: {agreement.told(everybody, 'why')}")
        return agreement.told(everybody, "why")

    def end(self) -> None:
        """Let go of compiled code: CUDA graphs with NCCL's calls would keep the group from ending."""
        for stack in self.stacks.values():
            tpfuse.remove(stack)
        self.stacks.clear()
        torch._dynamo.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _timer(
    bodies: Sequence[Callable[[], Any]], calls: int, device: torch.device, group: dist.ProcessGroup
) -> Callable[[], list[float]]:
    """What times so many calls of each body, in turns, once more each time: the median us of one of them."""

    def many(body: Callable[[], Any]) -> None:
        for _ in range(calls):
            body()

    if device.type != "cuda":
        runs = {index: functools.partial(many, body) for index, body in enumerate(bodies)}
        time_all = functools.partial(timing.called_us, runs, ROUNDS, device, group)
    else:
        pool, graphs = torch.cuda.graph_pool_handle(), {}
        for index, body in enumerate(bodies):
            for _ in range(WARM_UPS):
                body()
            torch.cuda.synchronize(device)
            graphs[index] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[index], pool=pool):
                many(body)
        time_all = functools.partial(timing.replayed_us, graphs, ROUNDS, device, group)
    return lambda: [statistics.median(each) / calls for each in time_all().values()]


def _told(shape: Shape, entries: Entries, again: Times) -> list[str]:
    """A line for each row count, and one on the threshold: how it holds in the series that it was not chosen by."""
    size = f"{shape.hidden}x{shape.intermediate}"
    lines = []
    for rows, times in sorted(again.items()):
        told = [f"{times[choice]:.1f}" if choice in times else "-" for choice in VARIANTS]
        lines.append(_line(shape.op, size, str(rows), *told))
    whole, sharded = VARIANTS
    start, last = entries[-1]
    if last == whole:
        return [*lines, f"{shape}: not sharded"]
    above = [times for rows, times in again.items() if rows >= start]
    held = sum(times.get(sharded, math.inf) < times[whole] for times in above)
    return [*lines, f"{shape}: sharded from {start} rows on, which again was faster at {held} of {len(above)} sizes"]


def _line(*cells: str) -> str:
    widths = (30, 14, 7, 12, 12)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
