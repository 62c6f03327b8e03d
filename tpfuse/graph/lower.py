"""LOWER: canonical nodes that nothing fused become again the very nodes they were raised from.

So what is not fused is compiled exactly as ``torch.compile`` alone would compile it.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse.graph.context import Context
from tpfuse.graph.nodes import Node, is_call
from tpfuse.graph.raise_ import ORIGINAL
from tpfuse.ops import act_mul, quantize_fp8, rms_norm


def run(graph: Graph, context: Context) -> None:
    for node in reversed(list(graph.nodes)):
        if ORIGINAL in node.meta:
            node.replace_all_uses_with(node.meta[ORIGINAL])
            graph.erase_node(node)
        elif _is_canonical(node) or (is_call(node, operator.getitem) and _is_canonical(node.args[0])):
            graph.erase_node(node)


def _is_canonical(node: Node) -> bool:
    return is_call(node, rms_norm.OP, act_mul.OP, quantize_fp8.OP)
