"""MERGE: all_reduce(a) + all_reduce(b) over one group becomes all_reduce(a + b).

A sum is linear, so one message does the work of two (DeepSeek's shared expert, Cohere's parallel block). Taken only where
the results have no other use. The sum is re-associated: results differ by rounding alone.
"""

from __future__ import annotations

import dataclasses

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
    is_before,
    is_call,
    is_node,
    peel_copies,
    plain_binary,
    same_shape,
    sole_user,
)


@dataclasses.dataclass(frozen=True)
class _Term:
    """One all-reduce among the terms of a sum."""

    node: Node  # as the sum sees it: the wait, or a view of it
    add: Node  # the addition it is an operand of
    all_reduce: Node


def run(graph: Graph, context: Context) -> None:
    for root in list(graph.nodes):
        if plain_binary(root, ADD) and not _is_inner(root):
            _merge_terms(graph, context, _terms(root))


def _is_inner(node: Node) -> bool:
    """Whether the addition is itself a term of a larger sum that nothing else looks at."""
    user = sole_user(node)
    return user is not None and plain_binary(user, ADD) is not None and same_shape(node, user)


def _terms(root: Node) -> list[_Term]:
    """All-reduces that the sum adds up, in graph order."""
    found: list[_Term] = []
    pending = [root]
    while pending:
        add = pending.pop()
        for operand in plain_binary(add, ADD) or ():
            if not is_node(operand) or not same_shape(operand, root) or dtype(operand) is not dtype(root):
                continue
            if plain_binary(operand, ADD) and len(operand.users) == 1:
                pending.append(operand)
            elif (reduce := _all_reduce_of(operand)) is not None:
                found.append(_Term(operand, add, reduce))
    return sorted(found, key=lambda term: term.all_reduce._sort_key)


def _all_reduce_of(node: Node) -> Node | None:
    """The all-reduce behind a term, if nothing but this sum uses its result."""
    while len(node.users) == 1:
        if is_call(node, WAIT):
            reduce = node.args[0]
            usable = is_call(reduce, ALL_REDUCE) and len(reduce.users) == 1 and reduce.args[1] == "sum"
            return reduce if usable else None
        if not is_call(node, *VIEWS) and peel_copies(node) is node:
            return None
        node = node.args[0]
    return None


def _merge_terms(graph: Graph, context: Context, terms: list[_Term]) -> None:
    by_group: dict[object, list[_Term]] = {}
    for term in terms:
        by_group.setdefault(term.all_reduce.args[2], []).append(term)
    for same_group in by_group.values():
        last = same_group[-1]
        for term in reversed(same_group[:-1]):
            merged = _merge(graph, term, last)
            if merged is None:
                continue
            context.rewrites += 1
            into = last.all_reduce.meta.get(WHERE, "")
            context.decide(
                "merged",
                term.all_reduce,
                reason=f"summed before the all-reduce of {into}",
                group=str(term.all_reduce.args[2]),
            )
            erase_unused(graph, term.node)
            erase_unused(graph, last.node)
            last = merged


def _merge(graph: Graph, term: _Term, last: _Term) -> _Term | None:
    """Replace both terms by one; None if the sum cannot do without the first one's addition."""
    keep, drop = (last, term) if _rest(term) is not None else (term, last)
    rest = _rest(drop)
    if rest is None or not all(is_before(t.node, keep.add) for t in (term, last)):
        return None
    with graph.inserting_before(keep.add):
        a, b = (_as_term(graph, t) for t in (term, last))
        total = emit(graph, ADD, (a, b), like=last.all_reduce)
        reduce = emit(graph, ALL_REDUCE, (total, "sum", last.all_reduce.args[2]), like=last.all_reduce)
        wait = emit(graph, WAIT, (reduce,), like=last.all_reduce)
    if keep.add is drop.add:  # all_reduce(a) + all_reduce(b) and nothing else
        keep.add.replace_all_uses_with(wait)
        graph.erase_node(keep.add)
        user = sole_user(wait)
        return _Term(wait, user if user is not None else wait, reduce)
    drop.add.replace_all_uses_with(rest)
    graph.erase_node(drop.add)
    keep.add.replace_input_with(keep.node, wait)
    return _Term(wait, keep.add, reduce)


def _rest(term: _Term) -> Node | None:
    """The other operand of the term's addition, if the sum can go on with it alone."""
    a, b = plain_binary(term.add, ADD) or (None, None)
    rest = b if a is term.node else a
    ok = is_node(rest) and same_shape(rest, term.add) and dtype(rest) is dtype(term.add)
    return rest if ok else None


def _as_term(graph: Graph, term: _Term) -> Node:
    """The all-reduce's input in the shape that the sum has."""
    source = term.all_reduce.args[0]
    if same_shape(source, term.node):
        return source
    view = term.node
    while not is_call(view, *VIEWS):
        view = view.args[0]
    return emit(graph, aten.reshape.default, (source, view.args[1]), like=term.all_reduce)
