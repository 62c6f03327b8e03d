"""FUSE: GEMM -> reduce-scatter of rows becomes ``tpfuse::matmul_reduce_scatter``.

Zero rows that only fill up the ranks' shares are the operation's own matter: they are neither computed nor copied.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Graph

from tpfuse.graph.context import GEMM_COMMS, Context
from tpfuse.graph.nodes import (
    REDUCE_SCATTER,
    WAIT,
    Node,
    aten,
    emit,
    erase_cone,
    is_call,
    sole_user,
    value,
    why_not_a_sum,
)
from tpfuse.graph.products import (
    Product,
    interchange,
    name_of,
    parts,
    product,
    source_of_rows,
    used_only_for,
    what_runs,
    without_padding,
)
from tpfuse.graph.sizes import Sizes
from tpfuse.ops.matmul_reduce_scatter import NAME, OP


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[GEMM_COMMS].on:
        return
    sizes = Sizes(graph)
    for node in [node for node in graph.nodes if is_call(node, REDUCE_SCATTER)]:
        made, reason, kernels = _judge(node, sizes, context)
        decided: Any = {"fusion": GEMM_COMMS, "op": "reduce_scatter", "group": str(node.args[-1])}
        if made is None or reason:
            context.decide("skipped", node, **decided, reason=reason)
            continue
        context.decide("fused", node, **decided, kernel="/".join(kernels))
        context.rewrites += 1
        _rewrite(graph, node, made, sizes)


def _judge(scatter: Node, sizes: Sizes, context: Context) -> tuple[Product | None, str, list[str]]:
    """The product, why it is not fused, and what would run it."""
    partial, group = scatter.args[0], scatter.args[-1]
    reason = why_not_a_sum(scatter, "scattered")
    if reason or not context.ranks_alike:
        return None, reason or "ranks have different graphs or forward hooks", []
    source = _source(partial)
    made = product(source)
    if made is None:
        return None, f"what it scatters comes from {name_of(source)}, not from a GEMM", []
    if not is_call(sole_user(scatter), WAIT):
        return None, "its result has other users than one wait", []
    if not used_only_for(source, partial):
        return None, "the GEMM's result has other users", []
    if made.bias is not None:
        return None, "the GEMM adds a bias on each rank, and the sum has all of them", []
    cut = parts(partial)
    if cut is not None and made.scales and value(made.scales[0]).numel() > 1 and not cut.keeps_order:
        return None, "its rows have scales, and are scattered in another order", []
    if not all(sizes.known(size) for size in (_share(scatter), *value(source).shape)):
        return None, "its row count is no sum or product of input sizes", []
    return made, *what_runs(NAME, [made], group, context)


def _source(partial: Node) -> Node:
    """What is scattered, before padding or, to scatter dimension 1, cutting into parts."""
    cut = parts(partial)
    if cut is not None:
        return source_of_rows(cut.source) if (cut.cut, cut.joined) == (1, 0) else partial
    return source_of_rows(without_padding(partial))


def _rewrite(graph: Graph, scatter: Node, made: Product, sizes: Sizes) -> None:
    partial, group, wait = scatter.args[0], scatter.args[3], sole_user(scatter)
    share = sizes.of(_share(scatter))
    like = value(scatter)
    cut = parts(partial)
    with graph.inserting_before(scatter):
        input = made.input
        if cut is not None and not cut.keeps_order:
            input = interchange(graph, input, cut.outer, cut.count, scatter, sizes)
        arguments = (input, made.weight, group, None, *(made.scales or (None, None)), made.out_dtype, None, share)
        fake = value(made.node).new_empty((_share(scatter), value(made.node).shape[1]))
        found = emit(graph, OP, arguments, like=scatter, fake=fake)
        if like.dim() != 2:
            shape = [sizes.of(size) for size in like.shape]
            found = emit(graph, aten.reshape.default, (found, shape), like=scatter, fake=like)
    wait.replace_all_uses_with(found)
    graph.erase_node(wait)
    graph.erase_node(scatter)
    erase_cone(graph, partial)


def _share(scatter: Node) -> Any:
    """Rows of one rank, all dimensions but the last flattened."""
    return math.prod(value(scatter).shape[:-1])  # numel() would make a number of a symbol
