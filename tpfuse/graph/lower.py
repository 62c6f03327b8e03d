"""LOWER: canonical norms that nothing fused become again the very nodes they were raised from.

So what is not fused is compiled exactly as ``torch.compile`` alone would compile it.
"""

from __future__ import annotations

from torch.fx import Graph

from tpfuse.graph.context import Context
from tpfuse.graph.nodes import is_call
from tpfuse.graph.raise_ import ORIGINAL
from tpfuse.ops import rms_norm


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        if is_call(node, rms_norm.OP):
            node.replace_all_uses_with(node.meta[ORIGINAL])
            graph.erase_node(node)
