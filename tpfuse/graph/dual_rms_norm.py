"""FUSE: two RMSNorms of the same tokens become ``tpfuse::dual_rms_norm``, on one GPU.

    one projection -> split -> norm, norm            or            x -> projection -> norm,  x -> projection -> norm

as in DeepSeek's attention. What the second one needs is computed before the first, where it can be. Inductor, with two
kernels, is the candidate to beat.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse.graph.context import DUAL_NORM, Context
from tpfuse.graph.joint import is_joint
from tpfuse.graph.nodes import (
    Node,
    aten,
    dtype,
    emit,
    is_before,
    is_call,
    is_collective,
    is_node,
    same_sizes,
    value,
)
from tpfuse.graph.quantised import KERNEL, cpu_kernel, decide, norm_obstacle, whole_of
from tpfuse.kernels import norms
from tpfuse.ops import rms_norm
from tpfuse.ops.dual_rms_norm import NAME, OP

_GEMMS = {aten.mm.default: 0, aten.addmm.default: 1, aten._scaled_mm.default: 0}


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[DUAL_NORM].on or is_joint(graph):
        return  # training: a gradient would need what the kernel does not keep
    waiting: dict[Node, Node] = {}  # what the projection reads, or the projection -> a norm
    for node in [n for n in graph.nodes if is_call(n, rms_norm.OP) and n.users]:
        origin = _origin(node.args[0])
        if origin is None:
            continue
        first = waiting.get(origin)
        if first is None or not same_sizes(value(first).shape[:-1], value(node).shape[:-1]):
            waiting[origin] = node
            continue
        del waiting[origin]
        kernel, reason = _choose(first, node, context)
        before = None if reason else _to_move(first, node)
        if not reason and before is None:
            reason = "one of the two is used before the other can be computed"
        if decide(context, DUAL_NORM, NAME, first, kernel, reason):
            for each in before or ():
                first.prepend(each)
            _rewrite(graph, first, node)


def _origin(node: Node) -> Node | None:
    """What a projection reads whose result, or a part of it, is normalised."""
    node = whole_of(node)
    return whole_of(node.args[_GEMMS[node.target]]) if is_call(node, *_GEMMS) else None


def _choose(a: Node, b: Node, context: Context) -> tuple[str, str]:
    if a.args[3:5] != b.args[3:5] or dtype(a.args[0]) is not dtype(b.args[0]):
        return "", "its two norms are spelled in different ways"
    obstacle = norm_obstacle(a) or norm_obstacle(b)
    if value(a).device.type == "cpu":
        kernel, reason = cpu_kernel(DUAL_NORM, context)
        return kernel, reason or obstacle
    for norm in (a, b):
        x, weight, _, _, normed_dtype, _ = norm.args
        obstacle = obstacle or norms.cannot(
            value(x), value(x).shape[-1], None if weight is None else dtype(weight), normed_dtype
        )
    return KERNEL, obstacle


def _to_move(first: Node, second: Node) -> list[Node] | None:
    """What ``second`` needs and is computed after ``first``, in order; None if it cannot be computed before."""
    found: set[Node] = set()
    pending = [n for n in second.args[:2] if is_node(n)]
    while pending:
        node = pending.pop()
        if node in found or is_before(node, first):
            continue
        mutates = node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if node is first or node.op != "call_function" or mutates or is_collective(node) or node.is_impure():
            return None
        found.add(node)
        pending += node.all_input_nodes
    return sorted(found, key=lambda n: n._sort_key)


def _rewrite(graph: Graph, a: Node, b: Node) -> None:
    with graph.inserting_before(a):
        arguments = (a.args[0], b.args[0], a.args[1], b.args[1], a.args[2], b.args[2], *a.args[3:5])
        fused = emit(graph, OP, arguments, like=a)
        results = [emit(graph, operator.getitem, (fused, i), like=a) for i in range(2)]
    for norm, result in zip((a, b), results, strict=True):
        norm.replace_all_uses_with(result)
