"""Plain all-reduces: what nothing fused and is waited for at once becomes ``tpfuse::all_reduce`` where that pays.

An all-reduce with work between it and its wait overlaps with that work, on a stream of its own: it is left to NCCL.
"""

from __future__ import annotations

import math

from torch.fx import Graph

from tpfuse.graph.context import FUSION, Context
from tpfuse.graph.nodes import ALL_REDUCE, WAIT, Node, dtype, emit, is_call, sole_user, value
from tpfuse.kernels import dispatch
from tpfuse.ops.all_reduce import DTYPES, NAME, OP


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes) if context.fusions[FUSION].on else ():
        if not is_call(node, ALL_REDUCE):
            continue
        wait = sole_user(node)
        if wait is None or not is_call(wait, WAIT) or not _fit(node) or _next_call(node) is not wait:
            continue
        kernel = dispatch.plain_kernel(NAME, node.args[2], value(node).device.type, _bytes(node))
        if not kernel:
            continue
        with graph.inserting_before(node):
            reduced = emit(graph, OP, (node.args[0], node.args[2], None), like=node)
        wait.replace_all_uses_with(reduced)
        context.amend(node, kernel=kernel)
        context.rewrites += 1
        graph.erase_node(wait)
        graph.erase_node(node)


def _fit(node: Node) -> bool:
    return node.args[1] == "sum" and isinstance(node.args[2], str) and dtype(node) in DTYPES


def _next_call(node: Node) -> Node:
    """The next node that does something."""
    following = node.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    return following


def _bytes(node: Node) -> int | None:
    """Size of the message; None where it varies."""
    tensor = value(node)
    if not all(isinstance(size, int) for size in tensor.shape):
        return None
    return math.prod(tensor.shape) * tensor.dtype.itemsize
