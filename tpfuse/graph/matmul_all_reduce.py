"""FUSE: GEMM -> all-reduce becomes ``tpfuse::matmul_all_reduce``, where no fusion with a norm took the all-reduce."""

from __future__ import annotations

from torch.fx import Graph

from tpfuse.graph.context import Context
from tpfuse.graph.nodes import ALL_REDUCE, Node, emit, value
from tpfuse.graph.products import Judged, Product, join, replace, source_of_rows, summed_product, unfit_sizes, what_runs
from tpfuse.graph.sizes import Sizes
from tpfuse.ops.matmul_all_reduce import NAME, OP


def run(graph: Graph, context: Context) -> None:
    join(graph, context, ALL_REDUCE, "all_reduce", _judge, _rewrite)


def _judge(graph: Graph, reduce: Node, sizes: Sizes, context: Context) -> Judged:
    made, reason = summed_product(reduce, source_of_rows(reduce.args[0]), context)
    if reason or made is None:
        return made, reason, []
    reason = unfit_sizes((reduce,), sizes)
    if reason:
        return made, reason, []
    return made, *what_runs(NAME, [made], reduce.args[-1], context)


def _rewrite(graph: Graph, reduce: Node, made: Product, sizes: Sizes) -> None:
    with graph.inserting_before(reduce):
        arguments = (made.input, made.weight, reduce.args[-1], None, *(made.scales or (None, None)), made.out_dtype)
        found = emit(graph, OP, arguments, like=reduce, fake=value(made.node).new_empty(value(made.node).shape))
    replace(graph, reduce, found, sizes)
