"""Reading and writing fx nodes: the vocabulary that all passes share.

Nothing here installs a guard: shapes are compared with ``statically_known_true`` only, so a graph stays as general as it
would be without tpfuse.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tpfuse.comm import groups

#: fx types a node's arguments as a union of everything, which no pass could use without a cast a line.
Node: TypeAlias = Any

aten, prims, collectives = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional

ALL_REDUCE = collectives.all_reduce.default
REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
ALL_GATHER = collectives.all_gather_into_tensor.default
#: Other spellings, which are listed and left.
OTHER_ALL_REDUCES = {
    collectives.all_reduce_.default: "it reduces in place, in a form that tpfuse does not rewrite",
    collectives.all_reduce_coalesced.default: "it reduces several tensors in one call",
    collectives.all_reduce_coalesced_.default: "it reduces several tensors in one call",
}
WAIT = collectives.wait_tensor.default
CONVERT = prims.convert_element_type.default
ADD, MUL = aten.add.Tensor, aten.mul.Tensor
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
#: Ops that return their input's values unchanged and in the same shape: left behind by in-place collectives.
COPIES = {aten.clone.default, aten.alias.default, aten.detach.default}


WHERE, ORDER = "tpfuse_where", "tpfuse_order"  # places in the model, position in the graph (Context.locate)
SHARDED = "tpfuse_sharded"  # marks a node that computes this rank's rows only
ROWS_OF = "tpfuse_rows_of"  # (node, group): it has this rank's rows of that node's value, for ``verify``
TAG, BACKWARD = "partitioner_tag", "is_backward"  # torch: which half of a joint graph a node is of
RECOMPUTE = "recompute"  # torch: what activation checkpointing says about it
#: What a new node takes over from the one it stands for; in training also of when that is computed.
TRAINING = (TAG, "autograd_backward", RECOMPUTE, "ac_graph_id")
INHERITED = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", WHERE, ORDER)


def is_node(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node)


def is_call(node: Any, *targets: Callable) -> bool:
    return is_node(node) and node.op == "call_function" and node.target in targets


def is_sum_of_rows(node: Node) -> bool:
    """Whether it is an all-reduce that ``enable_sp`` has made, of what the ranks' own rows add up to: a vector."""
    return is_call(node, ALL_REDUCE) and node.meta.get(SHARDED, False)


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    return (
        node.op == "call_function" and getattr(node.target, "namespace", "") == WAIT.namespace and node.target is not WAIT
    )


def value(node: Node) -> Any:
    """The fake tensor (or symbolic number) that the node computes, None if unknown."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    return is_node(node) and isinstance(value(node), torch.Tensor)


def dtype(node: Node) -> torch.dtype | None:
    found = value(node)
    return found.dtype if isinstance(found, torch.Tensor) else None


def same_sizes(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether two shapes are equal for every value of their symbols."""
    a, b = list(a), list(b)
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def same_shape(a: Node, b: Node) -> bool:
    return is_tensor(a) and is_tensor(b) and same_sizes(value(a).shape, value(b).shape)


def is_vector(node: Any, size: Any) -> bool:
    """Whether the node is a tensor of shape [size]."""
    return is_tensor(node) and same_sizes(value(node).shape, [size])


def is_contiguous(node: Node) -> bool:
    """Row-major and dense, for every value of the symbols; dimensions of one element may have any stride."""
    expected: Any = 1
    tensor = value(node)
    if any(statically_known_true(size == 0) for size in tensor.shape):
        return True
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def arguments(node: Node) -> dict[str, Any]:
    """What a call of an operator was given, positionally or by name, under the names of its schema."""
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def sole_user(node: Node) -> Node:
    """The only user, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_backward(node: Node) -> bool:
    """Whether it computes gradients, in a graph that has both the forward and the backward."""
    return node.meta.get(TAG) in (BACKWARD, "must_be_in_backward")


def sole_forward_user(node: Node) -> Node:
    """The only user outside the backward, or None."""
    users = [user for user in node.users if not is_backward(user)]
    return users[0] if len(users) == 1 else None


def plain_binary(node: Any, target: Callable) -> tuple[Any, Any] | None:
    """The operands of add or mul without alpha or other extras."""
    if is_call(node, target) and len(node.args) == 2 and not node.kwargs:
        return node.args[0], node.args[1]
    return None


def number(argument: Any) -> float | None:
    """A Python number among a node's arguments (never a symbol or a tensor)."""
    return float(argument) if isinstance(argument, (int, float)) and not isinstance(argument, bool) else None


def keeps_last(node: Node) -> bool:
    """Whether it is a view or a copy with the last dimension of its source, and thus has its rows in their order."""
    return is_call(node, *VIEWS, *COPIES) and same_sizes(value(node).shape[-1:], value(node.args[0]).shape[-1:])


def peel_copies(node: Node) -> Node:
    """What the value was before copies of it."""
    while is_call(node, *COPIES) and not node.kwargs.get("memory_format") and is_node(node.args[0]):
        node = node.args[0]
    return node


def latest(nodes: Iterable[Node]) -> Node:
    """The node that comes last in its graph."""
    return max(nodes, key=lambda n: n._sort_key)


def is_before(a: Node, b: Node) -> bool:
    return a._sort_key < b._sort_key


def next_call(node: Node) -> Node:
    """The next node that is not an input of the graph."""
    following = node.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    return following


def unused_cone(node: Node) -> set[Node]:
    """The node and all that only it needs: what would go if it went."""
    cone, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source.op == "call_function" and source not in cone and all(user in cone for user in source.users):
                cone.add(source)
                pending.append(source)
    return cone


def erase_cone(graph: Graph, node: Node) -> set[Node]:
    """Erase the node and all that only it needs, and return that."""
    cone = unused_cone(node)
    for gone in sorted(cone, key=lambda n: n._sort_key, reverse=True):
        graph.erase_node(gone)
    return cone


def erase_unused(graph: Graph, node: Node) -> None:
    """Erase a chain of one-input nodes, from its end, as far as nothing uses it. An all-reduce ends the chain."""
    while not node.users and node.op == "call_function":
        source = node.args[0]
        graph.erase_node(node)
        if node.target is ALL_REDUCE or not is_node(source):
            return
        node = source


def reapply(graph: Graph, views: Iterable[Node], source: Node, *, like: Node) -> Node:
    """The same views of another tensor of the same shape."""
    for view in views:
        target = aten.reshape.default if view.target is aten._unsafe_view.default else view.target
        source = emit(graph, target, (source, *view.args[1:]), like=like)
    return source


def emit(
    graph: Graph, target: Callable, args: tuple, kwargs: dict[str, Any] | None = None, *, like: Node, fake: Any = None
) -> Node:
    """Add a call at the graph's insertion point, with its fake value; where it came from is taken from ``like``.

    fake  its value, where running the operation on fake values would ask something about symbols
    """
    kwargs = kwargs or {}
    node = graph.call_function(target, args, kwargs)
    # One of several results is computed where all of them are, wherever it is used.
    for keys, source in ((INHERITED, like), (TRAINING, args[0] if target is operator.getitem else like)):
        node.meta.update({key: source.meta[key] for key in keys if key in source.meta})
    if fake is not None:
        node.meta["val"] = fake
        return node
    fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value)
    mode = detect_fake_mode(torch.utils._pytree.tree_leaves((fake_args, fake_kwargs)))
    if mode is not None:
        with mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
    else:  # graphs of real tensors, as tests make them
        with torch.no_grad():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def why_not_a_sum(reduction: Node, done: str) -> str:
    """What about a reduction over ranks forbids what ``done`` names; empty if nothing does."""
    kind, group = reduction.args[1], reduction.args[-1]
    if kind != "sum":
        return f"it reduces by {kind!r}, only a sum is {done}"
    if not isinstance(group, str):
        return "its process group is not a constant of the graph"
    return "world size 1" if groups.size(group) == 1 else ""
