"""The candidates of ``layer_stack.py``: how each is compiled, and whether its numbers are plain's.

T  rows     D  hidden size
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import llama
import torch
from timing import Ranks
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from whole_models import DropAllReduces

import tpfuse
from tpfuse.graph.nodes import is_collective

PLAIN, ASYNC, NO_COMM = "plain", "torch_async_tp", "no_comm"
TWINS = (ASYNC, "torch_sp")
APPLIED = ("tpfuse", "tpfuse_sharded", "tpfuse_whole")
CANDIDATES, DEFAULT = (PLAIN, *TWINS, *APPLIED, NO_COMM), (PLAIN, ASYNC, "tpfuse", NO_COMM)
#: Largest relative error (L2) against plain, of results and of gradients: roundings of every layer.
TOLERANCES = {torch.bfloat16: (3e-2, 1e-1), torch.float32: (1e-4, 1e-3)}
NEGLIGIBLE = 1e-3


class CountFused(CustomGraphPass):
    """What torch's own pass has made of collectives and GEMMs, and which collectives it left."""

    def __init__(self) -> None:
        self.joined: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[str] = collections.Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if getattr(node.target, "namespace", "") == "symm_mem":
                self.joined[node.target._opname] += 1
            elif is_collective(node):
                self.left[node.target._opname] += 1

    def uuid(self) -> None:
        """Never cached: from a cached graph nothing would be counted."""
        return None


@dataclasses.dataclass
class Case:
    """What all row counts of one model and style have in common: a stack for each candidate."""

    model: str
    style: str
    args: argparse.Namespace
    ranks: Ranks
    mesh: DeviceMesh
    dtype: torch.dtype
    stacks: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> None:
        sizes, args, first = llama.SIZES[self.model], self.args, None
        for name in args.candidates:
            if name in TWINS and all(obstacle(self.ranks, name, rows) for rows in args.rows):
                continue
            arguments = (self.style, sizes, args.layers, max(args.rows), self.mesh, self.dtype)
            self.stacks[name] = llama.build(*arguments, sharded_rows=name in TWINS, like=first)
            first = self.stacks[name] if first is None else first

    def sequences(self, rows: int) -> int:
        """As many as asked for, where the rows of each can be sharded evenly."""
        return self.args.sequences if rows % (self.args.sequences * self.ranks.size) == 0 else 1


@dataclasses.dataclass
class Contestant:
    """A candidate at one row count. ``run`` returns results and, in training, gradients."""

    run: Callable[[int], tuple[torch.Tensor, ...]]
    note: Callable[[], str]  # after the first call: what was made of it
    compile_s: float = 0.0


def obstacle(ranks: Ranks, name: str, rows: int) -> str:
    """Why torch cannot run its twin."""
    if rows % ranks.size:
        return f"{rows} rows cannot be split evenly"
    if name == ASYNC and ranks.device.type != "cuda":
        return "torch's symmetric memory is for CUDA devices only"
    return ""


def contestant(case: Case, name: str, x: torch.Tensor, toward: torch.Tensor | None) -> Contestant:
    """toward  [T, D], what the loss weighs the results with; None: no gradients"""
    stack, note = case.stacks[name], lambda: ""
    passes: dict[str, Any] = {}
    if name in APPLIED:
        tpfuse.apply(stack, tpfuse_config(name, case.args), fullgraph=True, dynamic=False)
        compiled, note = stack, lambda: told(stack, case.args.explain)
    else:
        if name == NO_COMM:
            dropped = DropAllReduces()
            passes, note = {"post_grad_custom_post_pass": dropped}, lambda: check_dropped(dropped, sites(case))
        elif name == ASYNC:
            enable_symmetric_memory(case.mesh)
            counted = CountFused()
            passes = {"post_grad_custom_post_pass": counted, "_micro_pipeline_tp": True}
            note = lambda: check_counted(counted)  # noqa: E731
        options: Any = {**passes, "fx_graph_cache": False} if passes else None
        compiled = torch.compile(stack, fullgraph=True, dynamic=False, options=options)
    parameters, sequences = llama.trained(stack), case.sequences(x.shape[0])

    def run(turn: int) -> tuple[torch.Tensor, ...]:
        if toward is None:
            return (llama.call(case.style, compiled, x, sequences),)
        with torch.enable_grad():
            y = llama.call(case.style, compiled, x, sequences)
            return (y.detach(), *torch.autograd.grad(y, [x, *parameters], toward))

    return Contestant(run, note)


def tpfuse_config(name: str, args: argparse.Namespace) -> dict[str, Any]:
    whole = {"fuse_gemm_comms": True}
    if name == "tpfuse_whole":
        return whole
    fewest = 1 if name == "tpfuse_sharded" else args.sp_min_token_num
    return {**whole, "enable_sp": True, "sp_min_token_num": fewest}


def enable_symmetric_memory(mesh: DeviceMesh) -> None:
    """Where torch still wants to be asked, its pass does nothing without this."""
    from torch.distributed import _symmetric_memory

    group_name: Any = mesh.get_group().group_name  # from 2.13 on a type of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group_name)


def told(stack: torch.nn.Module, everything: bool) -> str:
    report = tpfuse.explain(stack)
    if everything:
        return f"\n{report}"
    return ", ".join(f"{name} {report.count(name)}" for name, fusion in report.fusions.items() if fusion.on)


def check_dropped(dropped: DropAllReduces, least: int) -> str:
    if len(dropped.messages) < least or dropped.left:
        found = f"{len(dropped.messages)} all-reduces of at least {least}, and left {dropped.left}"
        raise RuntimeError(f"no_comm: its pass took out {found}")
    return f"{len(dropped.messages)} all-reduces taken out"


def check_counted(counted: CountFused) -> str:
    if not counted.joined:
        raise RuntimeError("torch's pass joined nothing")
    lists = (", ".join(f"{name} {count}" for name, count in each.items()) for each in (counted.joined, counted.left))
    return "joined: {}; left: {}".format(*lists)


def sites(case: Case) -> int:
    """All-reduces that the computation has to have."""
    return (4 if case.args.train else 2) * case.args.layers


def largest_errors(ranks: Ranks, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[float, float]:
    """(of the result, of the gradients), relative, the largest of all ranks'. Collective.

    A gradient far smaller than the others is rounding alone (those of queries and keys in sequences of one row, where they
    cancel): its error is a share of ``NEGLIGIBLE`` times the largest, by root mean square.
    """
    differences, sizes = [], []
    for g, e in zip(got, expected, strict=True):
        g, e = (tensor.float() for tensor in _comparable(g, e))
        differences.append((g - e).square().mean().sqrt().item())
        sizes.append(e.square().mean().sqrt().item())
    floor = max(1e-30, NEGLIGIBLE * max(sizes[1:], default=0.0))
    floors = [1e-30, *[floor] * (len(sizes) - 1)]
    errors = [d / max(size, least) for d, size, least in zip(differences, sizes, floors, strict=True)]
    result, *gradients = ranks.maximum(errors)
    return result, max(gradients, default=0.0)


def _comparable(*tensors: torch.Tensor) -> list[torch.Tensor]:
    placements = [tensor.placements if isinstance(tensor, DTensor) else None for tensor in tensors]
    if len(set(placements)) == 1:
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def wrong(case: Case, name: str, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """How a candidate's numbers are off; empty if they are not. Collective."""
    if name == NO_COMM:
        return ""
    errors = largest_errors(case.ranks, got, expected)
    if all(error <= allowed for error, allowed in zip(errors, TOLERANCES[case.dtype], strict=True)):
        return ""
    return "WRONG: relative error {:.2g}, of gradients {:.2g}".format(*errors)


def first_calls(case: Case, x: torch.Tensor, toward: torch.Tensor | None) -> tuple[dict[str, Contestant], Any]:
    """(the candidates that may be timed, plain's results): compiled, called, compared. Of the others the reason is told."""
    ranks, right = case.ranks, {}
    expected: Any = None
    for name in case.args.candidates:
        mine, got, note, failure = first_call(case, name, x, toward)
        if ranks.maximum([float(bool(failure))])[0]:
            failure = failure or "it failed on another rank"
        else:
            expected = got if name == PLAIN else expected
            failure = wrong(case, name, got, expected)
        if failure and name == PLAIN:
            raise RuntimeError(f"{name}, the baseline: {failure}")
        if failure:
            ranks.say(f"  {name} is not timed: {failure}")
            continue
        mine.compile_s = ranks.maximum([mine.compile_s])[0]
        right[name] = mine
        ranks.say(f"  {name}: first call {mine.compile_s:.1f} s{'; ' if note else ''}{note}")
    return right, expected


def first_call(case: Case, name: str, x: torch.Tensor, toward: torch.Tensor | None) -> tuple[Any, Any, str, str]:
    """(contestant, what it returned, what was made of it, why there is none of these)"""
    failure = obstacle(case.ranks, name, x.shape[0]) if name in TWINS else ""
    if failure:
        return None, None, "", failure
    start = time.monotonic()
    try:
        mine = contestant(case, name, x, toward)
        got = mine.run(0)
        case.ranks.synchronize()
        mine.compile_s = time.monotonic() - start
        return mine, got, mine.note(), ""
    except (RuntimeError, ValueError, AssertionError) as error:
        return None, None, "", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
