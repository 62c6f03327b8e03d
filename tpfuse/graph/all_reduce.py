"""Plain all-reduces: what nothing fused and is waited for at once becomes ``tpfuse::all_reduce`` where that pays.

An all-reduce with work between it and its wait overlaps with that work, on a stream of its own: it is left to NCCL. Not so
where results must not depend on the batch: NCCL adds ranks up in an order that depends on the place in the message.
"""

from __future__ import annotations

import math

from torch.fx import Graph

from tpfuse.graph.context import FUSION, Context
from tpfuse.graph.nodes import ALL_REDUCE, WAIT, Node, dtype, emit, is_call, next_call, sole_user, value
from tpfuse.kernels import REFERENCE, dispatch
from tpfuse.kernels.candidates import BATCH_INVARIANT, DTYPES, Problem
from tpfuse.ops.all_reduce import NAME, OP

MOST_ELEMENTS = 1 << 31  # of a message whose size varies
ON = "cuda"  # elsewhere there is only one way to do it


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes) if context.fusions[FUSION].on and context.ranks_alike else ():
        if not is_call(node, ALL_REDUCE):
            continue
        wait = sole_user(node)
        overlaps = not context.batch_invariant and next_call(node) is not wait
        if wait is None or not is_call(wait, WAIT) or not _fit(node) or overlaps:
            continue
        kernels = _in_rank_order(node) if context.batch_invariant else _may_run(node, str(node.args[2]))
        if not kernels:
            continue
        name = BATCH_INVARIANT if context.batch_invariant else None
        with graph.inserting_before(node):
            reduced = emit(graph, OP, (node.args[0], node.args[2], name), like=node)
        wait.replace_all_uses_with(reduced)
        context.amend(node, kernel="/".join(kernels))
        context.rewrites += 1
        graph.erase_node(wait)
        graph.erase_node(node)


def _fit(node: Node) -> bool:
    return node.args[1] == "sum" and isinstance(node.args[2], str) and dtype(node) in DTYPES


def _in_rank_order(node: Node) -> list[str]:
    """Names of what sums in an order that no row count changes; none where that cannot run."""
    device = value(node).device.type
    if device == "cpu":
        return [REFERENCE]
    return [] if dispatch.obstacle(str(node.args[2]), device) else [BATCH_INVARIANT]


def _may_run(node: Node, group_name: str) -> list[str]:
    """Names of the kernels that run it instead of NCCL; none where nothing is measured to be faster."""
    tensor = value(node)
    if tensor.device.type != ON or dispatch.obstacle(group_name, ON):
        return []
    low, high = 1, MOST_ELEMENTS
    if all(isinstance(size, int) for size in tensor.shape):
        low = high = max(1, math.prod(tensor.shape))
    names = dispatch.may_run(group_name, ON, Problem(NAME, low, 1, tensor.dtype), high)
    return [name for name in names if name != "nccl"]
