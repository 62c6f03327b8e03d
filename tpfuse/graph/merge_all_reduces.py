"""MERGE: all_reduce(a) + all_reduce(b) over one group becomes all_reduce(a + b).

A sum is linear, so one message does the work of two (DeepSeek's shared expert, Cohere's parallel block). Taken only where
the results have no other use. The sum is re-associated: results differ by rounding alone.
"""

from __future__ import annotations

import dataclasses
from functools import reduce as fold

from torch.fx import Graph

from tpfuse.comm import groups
from tpfuse.graph.context import FUSION, SEQUENCE_PARALLEL, Context
from tpfuse.graph.nodes import (
    ADD,
    ALL_REDUCE,
    VIEWS,
    WAIT,
    WHERE,
    Node,
    dtype,
    emit,
    erase_unused,
    is_call,
    is_tensor,
    peel_copies,
    plain_binary,
    reapply,
    same_shape,
    sole_user,
)


@dataclasses.dataclass(frozen=True)
class _Term:
    """One all-reduce among the terms of a sum: the sum's operand, the all-reduce, and the views between them."""

    node: Node
    all_reduce: Node
    views: tuple[Node, ...]


def run(graph: Graph, context: Context) -> None:
    if not (context.fusions[FUSION].on or context.fusions[SEQUENCE_PARALLEL].on) or not context.ranks_alike:
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
    by_group: dict[object, list[_Term]] = {}
    for node in terms:
        term = _as_term(node) if terms.count(node) == 1 and _same_kind(node, root) else None
        if term is not None:
            by_group.setdefault(term.all_reduce.args[2], []).append(term)
    merging = [sorted(same, key=lambda t: t.node._sort_key) for same in by_group.values() if len(same) > 1]
    if not merging:
        return
    context.rewrites += 1
    taken = {term.node for same in merging for term in same}
    others = [node for node in terms if node not in taken]
    with graph.inserting_before(root):
        total = fold(lambda a, b: emit(graph, ADD, (a, b), like=root), [_one(graph, context, same) for same in merging])
        for node in sorted(others, key=lambda n: same_shape(n, root)):  # biases first, then the residual
            total = emit(graph, ADD, (total, node), like=root)
    root.replace_all_uses_with(total)
    for node in (root, *inner):
        graph.erase_node(node)
    for node in taken:
        erase_unused(graph, node)


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


def _one(graph: Graph, context: Context, terms: list[_Term]) -> Node:
    """The all-reduce of the sum of what these terms reduce."""
    last = terms[-1].all_reduce
    for term in terms[:-1]:
        reason = f"summed before the all-reduce of {last.meta[WHERE][0]}"
        context.decide("merged", term.all_reduce, fusion=FUSION, reason=reason, group=str(last.args[2]))
    parts = [reapply(graph, term.views, term.all_reduce.args[0], like=term.all_reduce) for term in terms]
    total = fold(lambda a, b: emit(graph, ADD, (a, b), like=last), parts)
    return emit(graph, WAIT, (emit(graph, ALL_REDUCE, (total, "sum", last.args[2]), like=last),), like=last)


def _as_term(node: Node) -> _Term | None:
    """The all-reduce behind an operand, if nothing but this sum uses its result."""
    term = node
    views: list[Node] = []
    while len(node.users) == 1:
        if is_call(node, WAIT):
            found = node.args[0]
            usable = is_call(found, ALL_REDUCE) and len(found.users) == 1 and found.args[1] == "sum"
            shared = usable and isinstance(found.args[2], str) and groups.size(found.args[2]) > 1
            return _Term(term, found, tuple(views)) if shared else None
        if is_call(node, *VIEWS):
            views.insert(0, node)
        elif peel_copies(node) is node:
            return None
        node = node.args[0]
    return None
