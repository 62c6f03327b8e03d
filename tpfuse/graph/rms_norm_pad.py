"""FUSE: [residual add ->] RMSNorm -> zeros behind each row becomes ``tpfuse::rms_norm_pad``, on one GPU.

Inductor is the candidate to beat.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse.graph.context import ACT_PADDING, Context
from tpfuse.graph.joint import is_joint
from tpfuse.graph.nodes import Node, aten, dtype, emit, is_before, is_call, is_node, keeps_last, latest, next_call, value
from tpfuse.graph.quantised import KERNEL, cpu_kernel, decide, is_stored, needed_elsewhere, norm_obstacle, summands
from tpfuse.kernels import norms
from tpfuse.ops import rms_norm
from tpfuse.ops.rms_norm_pad import NAME, OP

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[ACT_PADDING].on or is_joint(graph):
        return  # training: a gradient would need what the kernel does not keep
    for node in list(graph.nodes):
        norm = _padded_norm(node)
        if norm is None:
            continue
        kernel, reason = _choose(node, norm, context)
        if decide(context, ACT_PADDING, NAME, norm, kernel, reason):
            _rewrite(graph, node, norm)


def _padded_norm(node: Node) -> Node | None:
    """The canonical norm whose rows ``node`` puts zeros behind."""
    if not is_call(node, aten.constant_pad_nd.default):
        return None
    source, widths, *filled = node.args
    zeros = not filled or filled[0] == 0
    if not zeros or len(widths) != 2 or widths[0] != 0 or not isinstance(widths[1], int) or widths[1] <= 0:
        return None
    views = _views(node)
    source = views[0].args[0] if views else source
    return source if is_call(source, rms_norm.OP) else None


def _views(node: Node) -> list[Node]:
    """Between the norm and ``node``, in order."""
    found, source = [], node.args[0]
    while keeps_last(source) and len(source.args) == 2 and not source.kwargs:
        found.append(source)
        source = source.args[0]
    return found[::-1]


def _choose(node: Node, norm: Node, context: Context) -> tuple[str, str]:
    x, weight, _, _, normed_dtype, _ = norm.args
    obstacle = norm_obstacle(norm)
    if value(x).device.type == "cpu":
        kernel, reason = cpu_kernel(ACT_PADDING, context)
        return kernel, reason or obstacle
    reason = norms.cannot(value(x), value(node).shape[-1], None if weight is None else dtype(weight), normed_dtype)
    stored = all(map(is_stored, summands(norm)))
    return KERNEL, reason or obstacle or ("" if stored else "Inductor computes what it reads in the same kernel")


def _rewrite(graph: Graph, node: Node, norm: Node) -> None:
    total, weight, eps, offset, normed_dtype, _ = norm.args
    kept = needed_elsewhere(norm, node)
    parts = summands(norm)
    place = next_call(latest([n for n in (*parts, weight) if is_node(n)]))
    if len(parts) == 2 and any(is_before(user, place) for user in total.users):
        parts, place = (total,), next_call(latest([n for n in (total, weight) if is_node(n)]))
    x, residual = parts[0], parts[1] if len(parts) == 2 else None
    size = value(node).shape[-1]
    with graph.inserting_before(place):
        fused = emit(graph, OP, (x, residual, weight, eps, offset, normed_dtype, kept, size), like=norm)
        padded, normed, summed = (emit(graph, operator.getitem, (fused, i), like=norm) for i in range(3))
    with graph.inserting_before(node):
        for view in _views(node):
            shape = (*view.args[1][:-1], size) if is_call(view, *_RESHAPES) else view.args[1]
            padded = emit(graph, view.target, (padded, shape), like=norm)
    node.replace_all_uses_with(padded)
    graph.erase_node(node)
    if kept:
        norm.replace_all_uses_with(normed)
    if residual is not None:
        total.replace_all_uses_with(summed)
