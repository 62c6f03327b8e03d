"""What a graph quantises more than once becomes one: each consumer of a norm quantises it for itself (torchao).

Before ``enable_sp`` decides where rows are gathered: FP8 values are half as many bytes, but not if they are gathered twice.
"""

from __future__ import annotations

from torch.fx import Graph

from tpfuse.graph.nodes import CONVERT, VIEWS, Node, aten, dtype, is_call
from tpfuse.ops.matmul import FP8

_STEPS = {
    *VIEWS,
    CONVERT,
    aten.abs.default,
    aten.amax.default,
    aten.div.Tensor,
    aten.gt.Scalar,
    aten.where.self,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
}


def run(graph: Graph) -> None:
    """Merge steps of quantisations that have the same arguments. Outputs of the graph stay apart."""
    if not any(is_call(node, CONVERT) and dtype(node) in FP8 for node in graph.nodes):
        return
    first: dict[tuple, Node] = {}
    for node in list(graph.nodes):
        if not is_call(node, *_STEPS) or any(user.op == "output" for user in node.users):
            continue
        kept = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
