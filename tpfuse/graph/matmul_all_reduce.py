"""FUSE: GEMM -> all-reduce becomes ``tpfuse::matmul_all_reduce``, where no fusion with a norm took the all-reduce."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph

from tpfuse.graph.context import GEMM_COMMS, Context
from tpfuse.graph.nodes import ALL_REDUCE, WAIT, Node, aten, emit, erase_cone, is_call, sole_user, value, why_not_a_sum
from tpfuse.graph.products import Product, name_of, product, source_of_rows, used_only_for, what_runs
from tpfuse.graph.sizes import Sizes
from tpfuse.ops.matmul_all_reduce import NAME, OP


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[GEMM_COMMS].on:
        return
    sizes = Sizes(graph)
    for node in [node for node in graph.nodes if is_call(node, ALL_REDUCE)]:
        made, reason, kernels = _judge(node, sizes, context)
        decided: Any = {"fusion": GEMM_COMMS, "group": str(node.args[-1])}
        if made is None or reason:
            context.decide("skipped", node, **decided, reason=reason)
            continue
        context.decide("fused", node, **decided, kernel="/".join(kernels))
        context.rewrites += 1
        _rewrite(graph, node, made, sizes)


def _judge(reduce: Node, sizes: Sizes, context: Context) -> tuple[Product | None, str, list[str]]:
    """The product, why it is not fused, and what would run it."""
    partial, group = reduce.args[0], reduce.args[-1]
    reason = why_not_a_sum(reduce, "fused")
    if reason or not context.ranks_alike:
        return None, reason or "ranks have different graphs or forward hooks", []
    source = source_of_rows(partial)
    made = product(source)
    if made is None:
        return None, f"what it reduces comes from {name_of(source)}, not from a GEMM", []
    if not is_call(sole_user(reduce), WAIT):
        return None, "its result has other users than one wait", []
    if not used_only_for(source, partial):
        return None, "the GEMM's result has other users", []
    if made.bias is not None:
        return None, "the GEMM adds a bias on each rank, and the sum has all of them", []
    if not all(sizes.known(size) for size in value(reduce).shape):
        return None, "its row count is no sum or product of input sizes", []
    return made, *what_runs(NAME, [made], group, context)


def _rewrite(graph: Graph, reduce: Node, made: Product, sizes: Sizes) -> None:
    partial, group, wait, like = reduce.args[0], reduce.args[-1], sole_user(reduce), value(reduce)
    with graph.inserting_before(reduce):
        arguments = (made.input, made.weight, group, None, *(made.scales or (None, None)), made.out_dtype)
        found = emit(graph, OP, arguments, like=reduce, fake=value(made.node).new_empty(value(made.node).shape))
        if like.dim() != 2:
            shape = [sizes.of(size) for size in like.shape]
            found = emit(graph, aten.reshape.default, (found, shape), like=reduce, fake=like)
    wait.replace_all_uses_with(found)
    graph.erase_node(wait)
    graph.erase_node(reduce)
    erase_cone(graph, partial)
