"""What can be computed on some of the rows of a graph, and what every rank of a group has alike.

The rows of a tensor are all its dimensions but the last. An operation is row-wise if each row of its result depends on the
same row of what varies over rows, and on nothing else of it. Only operations that are listed here are, each in the form
that is checked here: whatever else reads a value needs all rows of it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Set
from typing import Any

import torch
from torch.fx import Graph

from tpfuse.graph import joint
from tpfuse.graph.nodes import (
    ADD,
    ALL_GATHER,
    ALL_REDUCE,
    CONVERT,
    COPIES,
    MUL,
    VIEWS,
    WAIT,
    Node,
    arguments,
    aten,
    is_backward,
    is_call,
    is_contiguous,
    is_node,
    is_tensor,
    prims,
    same_sizes,
    value,
)

#: Element by element, with operands broadcast against each other.
_ELEMENTWISE = {
    ADD,
    MUL,
    CONVERT,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.pow.Tensor_Scalar,
    aten.square.default,
    aten.rsqrt.default,
    aten.sqrt.default,
    aten.reciprocal.default,
    aten.neg.default,
    aten.abs.default,
    aten.exp.default,
    aten.log.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.erf.default,
    aten.relu.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.gt.Scalar,
    aten.where.self,
}
#: Over dimensions that are their second argument, and must be the last one, which stays as one element.
REDUCTIONS = {
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.var_mean.correction,
}
#: Besides what torch tags as pointwise: alike on all ranks if their inputs are, also where these are only taken to be.
_PLAIN = {
    *VIEWS,
    *COPIES,
    *REDUCTIONS,
    CONVERT,
    operator.getitem,
    aten.expand.default,
    aten.permute.default,
    aten.embedding.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.arange.start_step,
    aten.cumsum.default,
    aten.any.dim,
    prims.iota.default,
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Everything that can be computed on some of the ``count`` rows that all-reduces of one group reduce.

    members  node -> the node whose rows it has: itself, or what it is a wait, a view or a copy of
    sums     sums of a member over all its rows, which are sums of what ranks make of theirs: gradients of what all rows
             share, as a norm's weight
    blocked  what else reads a member -> why it needs all rows
    """

    count: Any
    group: str
    members: dict[Node, Node] = dataclasses.field(default_factory=dict)
    sums: set[Node] = dataclasses.field(default_factory=set)
    blocked: dict[Node, str] = dataclasses.field(default_factory=dict)


def count(node: Node) -> Any:
    """Rows of a tensor: a number, or a symbolic one."""
    total: Any = 1
    for size in value(node).shape[:-1]:
        total = total * size
    return total


def find(graph: Graph, reduces: list[Node], group: str, replicated: set[Node], unlike: Set[Node] = frozenset()) -> Rows:
    """The rows of these all-reduces, which have equally many, and all that is row-wise in them.

    replicated  inputs of the graph that are known to be no shards of weights
    unlike      nodes that are known to have other constants on other ranks, or inputs other values
    """
    rows = Rows(count(reduces[0]), group)
    alike = _alike(graph, group, replicated, unlike)
    for node in graph.nodes:
        if node in reduces:
            rows.members[node] = node
        elif _sums_rows(node) and node.args[0] in rows.members:
            rows.sums.add(node)
        elif any(source in rows.members for source in node.all_input_nodes):
            reason = _obstacle(node, rows, alike)
            if reason:
                rows.blocked[node] = reason
            elif is_call(node, WAIT, *VIEWS, *COPIES):
                rows.members[node] = rows.members[node.args[0]]
            else:
                rows.members[node] = node
    return rows


def is_same_on_all_rows(operand: Node, result: Node) -> bool:
    """Whether the operand of an element-wise operation has no rows of its own: it is broadcast over those of the result."""
    if len(value(operand).shape) == len(value(result).shape) and same_sizes(
        value(operand).shape[:-1], value(result).shape[:-1]
    ):
        return False
    return same_sizes(value(operand).shape[:-1], [1] * max(0, value(operand).dim() - 1))


def _obstacle(node: Node, rows: Rows, alike: set[Node]) -> str:
    """Why the node, which reads rows, is not row-wise in them; empty if it is."""
    name = getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else "an output of the graph"
    if node.op != "call_function":
        return name
    if is_call(node, operator.getitem):
        return "" if is_call(node.args[0], aten.var_mean.correction) else name
    if is_call(node, WAIT):
        return ""
    source = node.args[0]
    if is_call(node, *VIEWS, *COPIES):
        fits = _fits(node) and source in rows.members and same_sizes(value(node).shape[-1:], value(source).shape[-1:])
        return "" if fits else f"{name}, which mixes rows"
    if is_call(node, aten.expand.default):
        kept = isinstance(value(node).shape[-1], int) and same_sizes(value(node).shape[:-1], value(source).shape[:-1])
        return "" if kept else f"{name}, whose rows are not those of its input"
    if is_call(node, *REDUCTIONS):
        return "" if _over_last(node) else f"{name}, which is not over the last dimension alone"
    if not is_call(node, *_ELEMENTWISE):
        return name
    if not _fits(node):
        return f"{name}, whose result is not in rows"
    return next((f"{name}, {reason}" for o in node.all_input_nodes if (reason := _unfit(o, node, rows, alike))), "")


def _unfit(operand: Node, result: Node, rows: Rows, alike: set[Node]) -> str:
    """Why a row-wise operation cannot read this operand on some of the rows; empty if it can."""
    if not is_tensor(operand):
        return "whose other operand is a size"
    sizes, wanted = value(operand).shape, value(result).shape
    in_rows = len(sizes) == len(wanted) and same_sizes(sizes[:-1], wanted[:-1])
    if operand in rows.members:
        return "" if in_rows else "which is broadcast over other rows"
    if operand not in alike:
        return "whose other operand may differ between ranks"
    if sizes and not isinstance(sizes[-1], int):
        return "whose other operand has a last dimension that varies"
    if in_rows or is_same_on_all_rows(operand, result):
        return ""
    return "whose other operand is broadcast over some of the rows"


def _fits(node: Node) -> bool:
    """Whether the value is a dense matrix of rows, under whatever leading dimensions."""
    tensor = value(node)
    return (
        isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and isinstance(tensor.shape[-1], int) and is_contiguous(node)
    )


def _over_last(node: Node) -> bool:
    """Whether a reduction is over the last dimension alone, and keeps it."""
    last = value(node.args[0]).dim() - 1
    results = value(node) if isinstance(value(node), (tuple, list)) else (value(node),)
    kept = all(result.dim() == last + 1 for result in results)
    return bool(last and kept and arguments(node).get("keepdim") and _dims(node) == [last])


def _sums_rows(node: Node) -> bool:
    """Whether it sums over all dimensions but the last."""
    return is_call(node, aten.sum.dim_IntList) and _dims(node) == list(range(value(node.args[0]).dim() - 1)) != []


def _dims(node: Node) -> list[int]:
    """Dimensions that a reduction is over."""
    return sorted(dim % value(node.args[0]).dim() for dim in arguments(node).get("dim") or ())


def _alike(graph: Graph, group: str, replicated: set[Node], unlike: Set[Node]) -> set[Node]:
    """Nodes whose value is the same on every rank of the group, as far as the graph tells.

    Inputs of the graph are taken to be: that is what a residual, a bias and a norm's weight are in any tensor-parallel
    model, and what ``all_reduce_rms_norm`` requires of them. Not where a GEMM reads them, or what else is not plain: their
    weights are sharded, but for those that are known to be replicated. The gradient of an output is alike where the output
    is. Values of one operation on two ranks may differ by roundings.
    """
    alike: set[Node] = set()
    assumed: set[Node] = set()  # inputs, and what is made of them and of constants alone
    constant: set[Node] = set()  # made of numbers
    outputs, differing = joint.outputs_of_tangents(graph), {*unlike}
    for node in sorted(graph.nodes, key=is_backward):  # all of the forward first
        if node in outputs:
            known = outputs[node] in alike
        elif node.op == "call_function" and not _is_result_of_all(node, group):
            sources = [source for source in node.all_input_nodes if source in differing or not _is_size(source)]
            known = alike.issuperset(sources) and (_is_plain(node) or (_is_pure(node) and assumed.isdisjoint(sources)))
            given = [source for source in sources if source not in constant]
            if not given:
                constant.add(node)
            elif assumed.issuperset(given):
                assumed.add(node)
        else:
            known = node.op != "output"
            if node.op == "placeholder" and node not in replicated:
                assumed.add(node)
        if _is_size(node) and not differing.isdisjoint(node.all_input_nodes):
            differing.add(node)
        if known and node not in differing:
            alike.add(node)
    return alike


def _is_result_of_all(node: Node, group: str) -> bool:
    """Whether it is what a collective gave to every rank of the group alike."""
    return (
        is_call(node, WAIT)
        and is_node(node.args[0])
        and is_call(node.args[0], ALL_REDUCE, ALL_GATHER)
        and node.args[0].args[2] == group
    )


def _is_size(node: Node) -> bool:
    """A number that follows from shapes: ranks of a group that call one operation have the same."""
    return isinstance(value(node), (int, torch.SymInt))


def _is_plain(node: Node) -> bool:
    return node.target in _PLAIN or (_is_pure(node) and torch.Tag.pointwise in node.target.tags)


def _is_pure(node: Node) -> bool:
    """Whether the same inputs give the same values, on another rank too."""
    if getattr(node.target, "namespace", "") not in ("aten", "prims") or node.target._schema.is_mutable:
        return False
    if node.target.__name__.startswith("_scaled_dot_product"):  # random by its tag
        return not arguments(node).get("dropout_p")
    return torch.Tag.nondeterministic_seeded not in node.target.tags and "inductor_" not in node.target.__name__
