"""FUSE: GEMM -> all-reduce becomes ``tpfuse::matmul_all_reduce``, where no fusion with a norm took the all-reduce."""

from __future__ import annotations

from torch.fx import Graph

from tpfuse.graph.context import Context
from tpfuse.graph.nodes import ALL_REDUCE, Node, emit, value
from tpfuse.graph.products import (
    Judged,
    Product,
    join,
    more_products,
    replace,
    source_of_rows,
    summed_products,
    unfit_sizes,
    what_runs,
)
from tpfuse.graph.sizes import Sizes
from tpfuse.ops.matmul_all_reduce import NAME, OP


def run(graph: Graph, context: Context) -> None:
    join(graph, context, ALL_REDUCE, "all_reduce", _judge, _rewrite)


def _judge(graph: Graph, reduce: Node, sizes: Sizes, context: Context) -> Judged:
    made, reason = summed_products(reduce, source_of_rows(reduce.args[0]), context)
    if reason:
        return made, reason, []
    reason = unfit_sizes((reduce,), sizes)
    if reason:
        return made, reason, []
    return made, *what_runs(NAME, made, reduce.args[-1], context)


def _rewrite(graph: Graph, reduce: Node, made: list[Product], sizes: Sizes) -> None:
    first = made[0]
    with graph.inserting_before(reduce):
        arguments = (first.input, first.weight, reduce.args[-1], None, *(first.scales or (None, None)), first.out_dtype)
        fake = value(first.node).new_empty(value(first.node).shape)
        found = emit(graph, OP, arguments, more_products(made), like=reduce, fake=fake)
    replace(graph, reduce, found, sizes)
