"""FUSE: act(gate) * up -> quantisation to FP8 becomes ``tpfuse::act_mul_quantize_fp8``, on one GPU.

As for norms (rms_norm_quantize_fp8.py), a site is left to Inductor where the kernel was not measured to be faster.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse.graph.context import ACT_QUANT, Context
from tpfuse.graph.nodes import Node, emit, is_node, latest, next_call
from tpfuse.graph.quantised import choose, decide, is_stored, needed_elsewhere, release, replace, source_of
from tpfuse.ops import act_mul
from tpfuse.ops.act_mul_quantize_fp8 import NAME, OP


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes) if context.fusions[ACT_QUANT].on else ():
        product = source_of(node, act_mul.OP)
        if product is None:
            continue
        kernel, reason = choose(node, ACT_QUANT, product, all(map(is_stored, product.args[:2])), context)
        if decide(context, ACT_QUANT, NAME, product, kernel, reason):
            _rewrite(graph, node, product)


def _rewrite(graph: Graph, node: Node, product: Node) -> None:
    gate, up, act = product.args
    _, fp8, scale, *recipe = node.args
    release(graph, node)
    kept = needed_elsewhere(product, node)
    with graph.inserting_before(next_call(latest([n for n in (gate, up, scale) if is_node(n)]))):
        fused = emit(graph, OP, (gate, up, act, kept, fp8, scale, *recipe), like=product)
        values, scales, whole = (emit(graph, operator.getitem, (fused, index), like=product) for index in range(3))
    replace(graph, node, values, scales)
    if kept:
        product.replace_all_uses_with(whole)
