"""FUSE: GEMM -> reduce-scatter of rows becomes ``tpfuse::matmul_reduce_scatter``.

Zero rows that only fill up the ranks' shares are the operation's own matter: they are neither computed nor copied.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch.fx import Graph

from tpfuse.graph.context import Context
from tpfuse.graph.nodes import REDUCE_SCATTER, Node, emit, value
from tpfuse.graph.products import (
    Judged,
    Parts,
    Product,
    interchange,
    join,
    more_products,
    parts,
    replace,
    source_of_rows,
    summed_products,
    unfit_sizes,
    what_runs,
    without_padding,
)
from tpfuse.graph.sizes import Sizes
from tpfuse.ops.matmul_reduce_scatter import NAME, OP


def run(graph: Graph, context: Context) -> None:
    join(graph, context, REDUCE_SCATTER, "reduce_scatter", _judge, _rewrite)


def _judge(graph: Graph, scatter: Node, sizes: Sizes, context: Context) -> Judged:
    cut = parts(scatter.args[0])
    source = _source(scatter.args[0], cut)
    made, reason = summed_products(scatter, source, context)
    if reason:
        return made, reason, []
    scales = made[0].scales
    if cut is not None and scales and value(scales[0]).numel() > 1 and not cut.keeps_order:
        return made, "its rows have scales, and are scattered in another order", []
    reason = unfit_sizes((scatter, source), sizes)
    if reason:
        return made, reason, []
    return made, *what_runs(NAME, made, scatter.args[-1], context)


def _source(partial: Node, cut: Parts | None) -> Node:
    """What is scattered, before padding or, to scatter dimension 1, cutting into parts."""
    if cut is not None:
        return source_of_rows(cut.source) if (cut.cut, cut.joined) == (1, 0) else partial
    return source_of_rows(without_padding(partial))


def _rewrite(graph: Graph, scatter: Node, made: list[Product], sizes: Sizes) -> None:
    cut, share = parts(scatter.args[0]), _share(scatter)
    with graph.inserting_before(scatter):
        if cut is not None and not cut.keeps_order:
            order = (cut.outer, cut.count, scatter, sizes)
            made = [dataclasses.replace(each, input=interchange(graph, each.input, *order)) for each in made]
        first = made[0]
        scales = first.scales or (None, None)
        arguments = (first.input, first.weight, scatter.args[-1], None, *scales, first.out_dtype, None, sizes.of(share))
        fake = value(first.node).new_empty((share, value(first.node).shape[1]))
        found = emit(graph, OP, arguments, more_products(made), like=scatter, fake=fake)
    replace(graph, scatter, found, sizes)


def _share(scatter: Node) -> Any:
    """Rows of one rank, all dimensions but the last flattened."""
    return math.prod(value(scatter).shape[:-1])  # numel() would make a number of a symbol
