"""ORDER: our collectives are computed in the order in which they stand in the graph, also after those of torch.

Inductor moves a call that it does not know next to its first user. The order would still be the same on ranks with the same
graph, but nothing promises that Inductor decides alike on all of them. So each call takes a result of the collective
before it as an argument that it ignores.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse.graph import joint
from tpfuse.graph.context import Context
from tpfuse.graph.nodes import WAIT, Node, emit, is_call
from tpfuse.ops.all_gather_matmul import OP as ALL_GATHER_MATMUL
from tpfuse.ops.all_reduce import OP as PLAIN_OP
from tpfuse.ops.all_reduce_rms_norm import OP as FUSED_OP
from tpfuse.ops.all_reduce_rms_norm_quantize_fp8 import OP as FP8_OP
from tpfuse.ops.matmul_all_reduce import OP as MATMUL_ALL_REDUCE
from tpfuse.ops.matmul_reduce_scatter import OP as MATMUL_REDUCE_SCATTER

#: Operations of one result, and of several.
ONE, SEVERAL = (PLAIN_OP, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE), (FUSED_OP, FP8_OP, ALL_GATHER_MATMUL)


def run(graph: Graph, context: Context) -> None:
    if not joint.is_joint(graph):  # its forward must not wait for a value of the backward, nor this keep one of it
        pin(graph)


def pin(graph: Graph) -> None:
    before: Node | None = None
    for node in list(graph.nodes):
        if is_call(node, *ONE, *SEVERAL) and before is not None:
            node.update_kwarg("after", before)
        if is_call(node, WAIT, *ONE):
            before = node
        elif is_call(node, *SEVERAL):
            before = _result(graph, node)


def _result(graph: Graph, fused: Node) -> Node:
    """A tensor of those that the operation returns: one that is used, if there is one."""
    found = [user for user in fused.users if is_call(user, operator.getitem)]
    if found:
        return max(found, key=lambda user: len(user.users))
    with graph.inserting_after(fused):
        return emit(graph, operator.getitem, (fused, 0), like=fused)
