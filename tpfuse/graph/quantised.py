"""What fusions on one GPU share: whether a kernel pays, what lies in memory anyway, and what of a norm can be joined."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch.fx import Graph

from tpfuse.graph.context import NORM_QUANT, Context
from tpfuse.graph.nodes import (
    ADD,
    COPIES,
    VIEWS,
    WAIT,
    Node,
    aten,
    dtype,
    erase_cone,
    is_call,
    is_node,
    keeps_last,
    plain_binary,
    same_shape,
    value,
)
from tpfuse.graph.raise_ import ORIGINAL
from tpfuse.kernels import REFERENCE, quantize
from tpfuse.ops import quantize_fp8
from tpfuse.ops.quantize_fp8 import Recipe
from tpfuse.report import Outcome

KERNEL = "tpfuse"
#: What Inductor does not compute itself: its result is written to memory whatever follows.
_STORED = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default, WAIT, operator.getitem)
_PARTS = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)


def whole_of(node: Node) -> Node:
    """What a value is a view, a copy or a part of."""
    while is_call(node, *VIEWS, *COPIES, *_PARTS) or (is_call(node, operator.getitem) and is_call(node.args[0], *_PARTS)):
        node = node.args[0]
    return node


def is_stored(node: Node) -> bool:
    """Whether a value lies in memory, whoever reads it: an input of the graph, or what no kernel of Inductor computes."""
    node = whole_of(node)
    return node.op in ("placeholder", "get_attr") or is_call(node, *_STORED)


def summands(norm: Node) -> tuple[Node, ...]:
    """(x,) of a canonical norm, or (x, residual) where it is of a sum that an operation can compute too."""
    total = norm.args[0]
    operands = plain_binary(total, ADD)
    if not operands or not all(is_node(o) and same_shape(o, total) and dtype(o) is dtype(total) for o in operands):
        return (total,)
    return operands if operands[0] is not operands[1] and all(map(is_stored, operands)) else (total,)


def norm_obstacle(norm: Node) -> str:
    """Why no kernel gives what a canonical norm gives, whatever the device; "" if one may."""
    x, out_dtype = norm.args[0], norm.args[5]
    return "" if out_dtype is dtype(x) else f"the norm gives {out_dtype} of {dtype(x)}"


def source_of(node: Node, target: Callable) -> Node | None:
    """The canonical ``target`` that a canonical quantisation reads, through views that keep rows."""
    if not is_call(node, quantize_fp8.OP):
        return None
    source = node.args[0]
    while keeps_last(source):
        source = source.args[0]
    return source if is_call(source, target) else None


def release(graph: Graph, node: Node) -> None:
    """Erase what a canonical quantisation was raised from: it is going to be fused."""
    results = list(node.users)
    originals = [n.meta.pop(ORIGINAL) for n in (*results, *(u for r in results for u in r.users)) if ORIGINAL in n.meta]
    for original in sorted(originals, key=lambda n: n._sort_key, reverse=True):
        if not original._erased and not original.users:
            erase_cone(graph, original)


def needed_elsewhere(source: Node, *nodes: Node) -> bool:
    """Whether anything but the quantisations ``nodes`` reads a value, or a view of it."""
    users = list(source.users)
    for user in users:  # grows as it goes
        if keeps_last(user):
            users += user.users
        elif user not in nodes:
            return True
    return False


def replace(graph: Graph, node: Node, values: Node, scales: Node) -> None:
    """Let the results of a fused operation stand for those of the canonical quantisation."""
    for result in list(node.users):
        result.replace_all_uses_with((values, scales)[result.args[1]])
        graph.erase_node(result)
    graph.erase_node(node)


def cpu_kernel(fusion: str, context: Context) -> tuple[str, str]:
    """(what runs a fusion of one device on a CPU, why it is left to Inductor or "")."""
    reason = "Inductor's kernel on a CPU, unless asked for by name"
    return REFERENCE, "" if context.fusions[fusion].explicit else reason


def choose(node: Node, fusion: str, source: Node, stored: bool, context: Context) -> tuple[str, str]:
    """(what would run a fusion that ends in the canonical quantisation ``node``, why it is left to Inductor or "").

    source  what is quantised    stored  whether all that the operation reads lies in memory anyway
    """
    tensor, scale = value(source), node.args[2] if len(node.args) > 2 else None
    recipe = Recipe(*node.args[3:])
    if tensor.device.type == "cpu":
        return cpu_kernel(fusion, context)
    reason = quantize.cannot(tensor, recipe.arguments, scale is not None, fusion == NORM_QUANT)
    if reason:
        return "", reason
    return KERNEL, quantize.why_not_faster(scale is None and recipe.group != tensor.shape[-1], stored)


def decide(context: Context, fusion: str, op: str, source: Node, kernel: str, reason: str) -> bool:
    """Leave a decision about the place of ``source``: fused by ``kernel``, unless there is a reason not to. Whether it is
    fused."""
    outcome: Outcome = "skipped" if reason else "fused"
    context.decide(outcome, source, fusion=fusion, op=op, reason=reason, kernel="" if reason else kernel)
    context.rewrites += not reason
    return not reason
