"""MERGE: all_reduce(a) + all_reduce(b) over one group becomes all_reduce(a + b).

A sum is linear, so one message does the work of two (DeepSeek's shared expert, Cohere's parallel block). Taken only where
the results have no other use. The sum is re-associated: results differ by rounding alone.
"""

from __future__ import annotations

from functools import reduce as fold

from torch.fx import Graph

from tpfuse.graph.context import WHERE, Context
from tpfuse.graph.nodes import (
    ADD,
    ALL_REDUCE,
    VIEWS,
    WAIT,
    Node,
    aten,
    dtype,
    emit,
    erase_unused,
    is_call,
    is_tensor,
    peel_copies,
    plain_binary,
    same_shape,
    sole_user,
)

#: Merging prepares this fusion and goes by its switch.
FUSION = "fuse_allreduce_rms"


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[FUSION].on:
        return
    for root in list(graph.nodes):
        if plain_binary(root, ADD) and is_tensor(root) and not _is_inner(root):
            _merge(graph, context, root)


def _is_inner(node: Node) -> bool:
    """Whether the addition is only a part of a larger sum of the same kind."""
    user: Node = sole_user(node)
    return plain_binary(user, ADD) is not None and user.args[0] is not user.args[1] and _same_kind(node, user)


def _same_kind(a: Node, b: Node) -> bool:
    return same_shape(a, b) and dtype(a) is dtype(b)


def _merge(graph: Graph, context: Context, root: Node) -> None:
    """Write one sum anew, if there is something to merge in it."""
    terms, inner = _flatten(root)
    by_group: dict[object, list[Node]] = {}
    for term in terms:
        found = _all_reduce_of(term) if terms.count(term) == 1 and _same_kind(term, root) else None
        if found is not None:
            by_group.setdefault(found.args[2], []).append(term)
    merging = {group: same for group, same in by_group.items() if len(same) > 1}
    if not merging:
        return
    context.rewrites += 1
    taken = {term for same in merging.values() for term in same}
    others = [term for term in terms if term not in taken]
    with graph.inserting_before(root):
        total = fold(lambda a, b: emit(graph, ADD, (a, b), like=root), [_one(graph, context, s) for s in merging.values()])
        for term in sorted(others, key=lambda t: is_tensor(t) and same_shape(t, root)):  # biases first, then the residual
            total = emit(graph, ADD, (total, term), like=root)
    root.replace_all_uses_with(total)
    for node in (root, *inner):
        graph.erase_node(node)
    for term in taken:
        erase_unused(graph, term)


def _flatten(root: Node) -> tuple[list[Node], list[Node]]:
    """(terms of the sum from left to right, its inner additions from the outermost inwards)."""
    terms: list[Node] = []
    inner: list[Node] = []
    for operand in plain_binary(root, ADD) or ():
        if plain_binary(operand, ADD) and is_tensor(operand) and _is_inner(operand):
            deeper = _flatten(operand)
            terms += deeper[0]
            inner += [operand, *deeper[1]]
        else:
            terms.append(operand)
    return terms, inner


def _one(graph: Graph, context: Context, terms: list[Node]) -> Node:
    """The all-reduce of the sum of what these terms reduce."""
    ordered = sorted(terms, key=lambda term: term._sort_key)
    last: Node = _all_reduce_of(ordered[-1])
    for term in ordered[:-1]:
        node: Node = _all_reduce_of(term)
        reason = f"summed before the all-reduce of {last.meta[WHERE][0]}"
        context.decide("merged", node, reason=reason, group=str(node.args[2]))
    parts = [_unreduced(graph, term) for term in ordered]
    total = fold(lambda a, b: emit(graph, ADD, (a, b), like=last), parts)
    return emit(graph, WAIT, (emit(graph, ALL_REDUCE, (total, "sum", last.args[2]), like=last),), like=last)


def _all_reduce_of(node: Node) -> Node | None:
    """The all-reduce behind a term, if nothing but this sum uses its result."""
    while len(node.users) == 1:
        if is_call(node, WAIT):
            found = node.args[0]
            usable = is_call(found, ALL_REDUCE) and len(found.users) == 1 and found.args[1] == "sum"
            return found if usable and isinstance(found.args[2], str) else None
        if not is_call(node, *VIEWS) and peel_copies(node) is node:
            return None
        node = node.args[0]
    return None


def _unreduced(graph: Graph, term: Node) -> Node:
    """The all-reduce's input, in the shape that the sum has."""
    found: Node = _all_reduce_of(term)
    source = found.args[0]
    if same_shape(source, term):
        return source
    view = term
    while not is_call(view, *VIEWS):
        view = view.args[0]
    return emit(graph, aten.reshape.default, (source, view.args[1]), like=found)
