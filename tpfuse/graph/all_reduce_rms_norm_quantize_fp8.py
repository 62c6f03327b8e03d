"""FUSE, part of ``all_reduce_rms_norm``: where the norm is quantised to FP8, the operation quantises it, too.

All consumers of one quantisation share what the operation gives. Others of the norm, which quantise it otherwise or not at
all, get the norm itself from it.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Graph

from tpfuse.graph.context import Context
from tpfuse.graph.nodes import Node, aten, dtype, emit, keeps_last, same_sizes, value
from tpfuse.graph.quantised import needed_elsewhere, release, replace, source_of
from tpfuse.graph.sizes import Sizes
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import CANDIDATES, NOT_PREPARED, Problem
from tpfuse.kernels.fp8 import Quantisation
from tpfuse.ops import rms_norm
from tpfuse.ops.all_reduce_rms_norm_quantize_fp8 import NAME, OP
from tpfuse.ops.quantize_fp8 import Recipe

TO_FP8 = "+fp8"  # what the report adds to the name of a kernel


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Canonical quantisations of a norm that are one and the same, and by which scale, where that is given."""

    nodes: tuple[Node, ...]
    scale: Node | None
    how: Quantisation


def find(norm: Node) -> Quantised | None:
    """How most readers of the norm quantise it; None: none does."""
    kinds: dict[tuple, list[Node]] = {}
    users = [*norm.users]
    for user in users:  # grows as it goes
        if keeps_last(user):
            users += user.users
        elif source_of(user, rms_norm.OP) is norm:
            kinds.setdefault(user.args[1:], []).append(user)
    if not kinds:
        return None
    nodes = max(kinds.values(), key=len)
    fp8, scale, *recipe = nodes[0].args[1:]
    return Quantised(tuple(nodes), scale, Quantisation(fp8, scale is not None, Recipe(*recipe).arguments))


def judge(found: Quantised, norm: Node, problem: Problem, most_rows: int, group: str, context: Context) -> tuple[str, Any]:
    """(why the operation must not quantise, names of what would run it), as of the operation without."""
    device, wish = value(norm).device.type, context.wish
    if found.how.recipe[0] is None and not found.how.static:
        return "one scale for the whole tensor is known only after a pass over it", []
    if norm.args[5] not in (None, dtype(norm.args[0])):
        return f"the norm gives {norm.args[5]} of {dtype(norm.args[0])}", []
    if wish.kernel is not None and wish.kernel not in CANDIDATES[NAME]:
        return f"{wish.kernel} was asked for, which cannot", []
    problem = dataclasses.replace(problem, op=NAME, fp8=found.how)
    unfit = dispatch.cannot(group, device, problem, wish.kernel or "nccl")
    if unfit and unfit != NOT_PREPARED:
        return unfit, []
    kernels = dispatch.may_run(group, device, problem, most_rows, wish)
    if device != "cpu":
        context.note(dispatch.told(group, problem, kernels, wish))
    return "NCCL and the unfused norm are chosen for these rows" if kernels == ["nccl"] else "", kernels


def prepare(graph: Graph, norm: Node, found: Quantised) -> bool:
    """Drop what the quantisations were raised from. Whether anything else needs the norm."""
    for node in found.nodes:
        release(graph, node)
    return needed_elsewhere(norm, *found.nodes)


def insert(
    graph: Graph, arguments: tuple, wishes: tuple, norm: Node, total: Node, found: Quantised, kept: bool
) -> tuple[Node, Node]:
    """The operation and its results, at the graph's insertion point; where the quantised ones go. (normed, total)

    arguments  up to normed_dtype
    """
    how = (kept, found.how.dtype, found.scale, *found.how.recipe)
    fused = emit(graph, OP, (*arguments, *how, *wishes), like=total)
    values, scales, normed, summed = (
        emit(graph, operator.getitem, (fused, place), like=total if place == 3 else norm) for place in range(4)
    )
    sizes = Sizes(graph)
    for node in found.nodes:
        source = node.args[0]
        shapes = [each.shape for each in value(node)]
        with graph.inserting_before(node):
            results = [_shaped(graph, *each, sizes, node) for each in zip((values, scales), shapes, strict=True)]
        replace(graph, node, *results)
        while source is not norm and not source.users:
            source, unused = source.args[0], source
            graph.erase_node(unused)
    for unused in (normed,) if not kept else ():
        graph.erase_node(unused)
    return normed, summed


def _shaped(graph: Graph, node: Node, shape: torch.Size, sizes: Sizes, like: Node) -> Node:
    if same_sizes(value(node).shape, shape):
        return node
    fake = value(node).new_empty(shape)
    return emit(graph, aten.reshape.default, (node, [sizes.of(size) for size in shape]), like=like, fake=fake)
