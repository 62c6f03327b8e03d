"""A joint graph: forward and backward of a training step, before torch splits it into the two that it compiles.

Only there can a value of the forward be replaced for both. Our operations are collectives: torch must not compute them
twice, unless activation checkpointing says so, and must not leave a copy of one in the other half.
"""

from __future__ import annotations

import operator

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from tpfuse.graph.nodes import BACKWARD, RECOMPUTE, TAG, WAIT, Node, is_backward, is_call

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def is_joint(graph: Graph) -> bool:
    return any(is_tangent(node) for node in graph.nodes)


def tell_backward(graph: Graph) -> None:
    """Mark all that gradients are computed by: torch does not where an autograd.Function does it."""
    for node in graph.nodes:
        if node.op == "call_function" and any(is_tangent(source) or is_backward(source) for source in node.all_input_nodes):
            node.meta.setdefault(TAG, BACKWARD)


def outputs_of_tangents(graph: Graph) -> dict[Node, Node]:
    """Input that holds the gradient of an output -> that output; None where torch does not tell which."""
    found = {}
    output = next(node for node in graph.nodes if node.op == "output")
    told = dict(zip(output.meta.get("desc") or (), output.args[0], strict=False))
    for node in graph.nodes:
        if is_tangent(node):
            found[node] = told.get(getattr(node.meta.get("desc"), "output", None))
    return found


def keep_collectives(graph: Graph) -> None:
    """Forbid torch to compute ours again in the backward, as it forbids itself for its own, and their results with them."""
    for node in graph.nodes:
        if _is_ours(node) and node.meta.get(RECOMPUTE) not in _AGAIN:
            for kept in (node, *(user for user in node.users if is_call(user, operator.getitem))):
                kept.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE


def drop_copies(graph: Graph) -> None:
    """Erase what the backward has of the forward and does not use.

    Torch copies all that could be computed and drops what is unused, but never a call with effects on other ranks.
    """
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users or is_backward(node):
            continue
        if _is_ours(node) or _is_torchs(node) or not node.is_impure():
            graph.erase_node(node)


def _is_torchs(node: Node) -> bool:
    """Whether it is a collective of torch that changes none of its inputs, or the wait for one."""
    return getattr(node.target, "namespace", "") == WAIT.namespace and not node.target._schema.is_mutable


def _is_ours(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "tpfuse"


def is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("tangents")
