"""FUSE: all-reduce [+ bias] [* scale] [+ residual] -> RMSNorm becomes ``tpfuse::all_reduce_rms_norm``.

Both outputs of the operation are the values that the graph had: the norm and the sum it normalises. So post-norm order
(Gemma, GLM4), a residual that goes on and one that does not, and any number of further users are one and the same case.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse import kernels
from tpfuse.comm import groups
from tpfuse.graph import chain as chains
from tpfuse.graph.chain import Chain
from tpfuse.graph.context import Context
from tpfuse.graph.nodes import (
    ADD,
    ALL_REDUCE,
    COPIES,
    MUL,
    VIEWS,
    WAIT,
    Node,
    aten,
    dtype,
    emit,
    erase_unused,
    is_before,
    is_call,
    is_contiguous,
    is_node,
    latest,
    same_numel,
    same_shape,
    unused_cone,
    value,
)
from tpfuse.graph.raise_ import ORIGINAL
from tpfuse.ops import rms_norm
from tpfuse.ops.all_reduce_rms_norm import DTYPES, NAME, OP

FUSION = "fuse_allreduce_rms"


def run(graph: Graph, context: Context) -> None:
    reasons: dict[Node, str] = {}
    for norm in list(graph.nodes):
        if not is_call(norm, rms_norm.OP):
            continue
        chain = chains.trace(norm.args[0])
        if chain is None:
            context.decide("skipped", norm, op="rms_norm", reason="no all-reduce reaches this norm")
            continue
        reason = _obstacle(norm, chain, context)
        if reason:
            reasons.setdefault(chain.all_reduce, reason)
            continue
        group = str(chain.all_reduce.args[2])
        kernel = kernels.name_for(NAME, value(norm).device.type) or ""
        context.decide("fused", chain.all_reduce, group=group, kernel=kernel)
        context.rewrites += 1
        _rewrite(graph, norm, chain)
    for node in graph.nodes:
        if is_call(node, ALL_REDUCE):
            reason = reasons.get(node) or _why_not(node, context)
            context.decide("skipped", node, reason=reason, group=str(node.args[2]))


def _obstacle(norm: Node, chain: Chain, context: Context) -> str:
    """Why this chain must not be fused; empty if it may."""
    reduce, total = chain.all_reduce, chain.total
    device = value(norm).device.type
    if not context.fusions[FUSION].on:
        return f"off: {context.fusions[FUSION].reason}"
    general = _unfit_all_reduce(reduce)
    if general:
        return general
    if chain.shared is not None or len(reduce.users) > 1:
        return "something else uses the all-reduced value before the residual is added"
    if chain.view is None and not same_shape(reduce, total):
        return "the all-reduced value is broadcast"
    if not is_contiguous(total):
        return "the summed value is not contiguous"
    if dtype(total) is not dtype(reduce):
        return f"the sum is {dtype(total)}, the all-reduce {dtype(reduce)}"
    if not is_before(latest(_inputs(norm, chain)), _first_use(norm, chain)):
        return "an input of the norm is computed after the sum is used"
    if kernels.name_for(NAME, device) is None:
        return f"no kernel for {device} in this version"
    return ""


def _unfit_all_reduce(reduce: Node) -> str:
    """What about the all-reduce itself forbids every fusion of it."""
    _, kind, group = reduce.args
    if kind != "sum":
        return f"it reduces by {kind!r}, only a sum is fused"
    if not isinstance(group, str):
        return "its process group is not a constant of the graph"
    if groups.size(group) == 1:
        return "world size 1"
    if dtype(reduce) not in DTYPES:
        return f"dtype {dtype(reduce)}"
    return ""


def _inputs(norm: Node, chain: Chain) -> list[Node]:
    """Every node that the fused operation (and the view of its input) will read."""
    found = [chain.all_reduce.args[0], norm.args[1], chain.residual, chain.bias, chain.scale]
    found += chain.view.args[1] if chain.view is not None else []
    return [n for n in found if is_node(n)]


def _first_use(norm: Node, chain: Chain) -> Node:
    """The earliest node that needs the sum or the norm; the norm's original nodes, which nothing uses now, aside."""
    unused = unused_cone(norm.meta[ORIGINAL])
    users = [u for u in (*chain.total.users, *norm.users) if u not in unused and u is not norm]
    return min(users, key=lambda n: n._sort_key, default=norm)


def _rewrite(graph: Graph, norm: Node, chain: Chain) -> None:
    _, weight, eps, offset, normed_dtype, out_dtype = norm.args
    number, tensor = (chain.scale, None) if isinstance(chain.scale, float) else (None, chain.scale)
    total, reduce = chain.total, chain.all_reduce
    source, last_input = reduce.args[0], latest(_inputs(norm, chain))
    # In the total's own place, unless an input (a computed weight) only comes after it.
    with graph.inserting_before(total if is_before(last_input, total) else last_input.next):
        if not same_shape(source, total):
            assert chain.view is not None
            source = emit(graph, aten.reshape.default, (source, chain.view.args[1]), like=reduce)
        modifiers = (chain.residual, chain.bias, number, tensor, offset, normed_dtype, out_dtype)
        fused = emit(graph, OP, (source, weight, reduce.args[2], eps, *modifiers), like=reduce)
        normed = emit(graph, operator.getitem, (fused, 0), like=norm)
        summed = emit(graph, operator.getitem, (fused, 1), like=total)
    if chain.norm_view is not None:
        with graph.inserting_before(norm):
            normed = emit(graph, aten.reshape.default, (normed, chain.norm_view.args[1]), like=norm)
    norm.replace_all_uses_with(normed)
    graph.erase_node(norm)
    total.replace_all_uses_with(summed)
    if chain.norm_view is not None:
        erase_unused(graph, chain.norm_view)
    for link in (*chain.links, reduce):
        graph.erase_node(link)


def _why_not(reduce: Node, context: Context) -> str:
    """Why no norm was even tried: what comes after the all-reduce instead."""
    general = _unfit_all_reduce(reduce)
    if general:
        return general
    pending, seen = [reduce], set()
    while pending:
        node = pending.pop(0)
        if node in context.look_alikes:
            name, reason = context.look_alikes[node]
            return f"reaches a {name} that is not fused: {reason}"
        for user in node.users:
            passes_on = is_call(user, WAIT, ADD, MUL, *VIEWS, *COPIES)
            if passes_on and user not in seen and same_numel(user, reduce):
                seen.add(user)
                pending.append(user)
    last = next((u for n in reversed([reduce, *seen]) for u in n.users if u not in seen), None)
    if last is None or last.op == "output":
        return "no norm follows: it is an output of the graph"
    return f"no norm follows: it goes to {getattr(last.target, '__name__', last.target)}"
