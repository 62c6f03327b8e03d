"""From a norm's input back to the all-reduce that feeds it.

    input -> all_reduce -> wait -> [+ bias] -> [* scale] -> [view] -> [+ residual] = total -> [view] -> norm

Views may stand anywhere: they are moved to the input, so that they hide nothing. Between the all-reduce and the total
nothing else may use the value, since the fused operation does not return it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tpfuse.graph.nodes import (
    ADD,
    ALL_REDUCE,
    MUL,
    VIEWS,
    WAIT,
    Node,
    dtype,
    is_before,
    is_call,
    is_tensor,
    is_vector,
    number,
    peel_copies,
    plain_binary,
    same_shape,
    same_sizes,
    value,
)


@dataclasses.dataclass(frozen=True)
class Chain:
    """An all-reduce and what is applied to its result.

    total      the value that is normalised (before ``norm_view``)
    links      every node from the total back to the wait, the total first
    view       the last view between the all-reduce and the total, None if the shape never changes
    norm_view  the last view between the total and the norm
    """

    all_reduce: Node
    total: Node
    links: tuple[Node, ...]
    residual: Node | None = None
    bias: Node | None = None
    scale: float | Node | None = None
    view: Node | None = None
    norm_view: Node | None = None
    shared: Node | None = None  # a link other than the total that something else uses too


def trace(norm_input: Node) -> Chain | None:
    """The chain that ends in this norm's input, None if no all-reduce does."""
    norm_view, node = _through_views(norm_input)
    found: list[Chain] = []
    direct = _trace_sum(node)
    if direct is not None:
        found.append(direct)
    for branch, other in (operands, operands[::-1]) if (operands := plain_binary(node, ADD)) else ():
        if branch is other or not (is_tensor(branch) and is_tensor(other)) or is_vector(other, value(node).shape[-1]):
            continue
        chain = _trace_sum(branch)
        if chain is not None and same_shape(branch, other) and dtype(branch) is dtype(other) is dtype(node):
            links = (node, *chain.links)
            found.append(dataclasses.replace(chain, total=node, links=links, residual=other, shared=_shared(links)))
    if not found:
        return None
    best = found[0]
    for chain in found[1:]:  # two all-reduces meet in one sum: take the one that comes last
        best = chain if is_before(best.all_reduce, chain.all_reduce) else best
    return dataclasses.replace(best, norm_view=norm_view)


def _trace_sum(node: Node) -> Chain | None:
    """wait -> [+ bias] -> [* scale], with views anywhere, backwards from ``node``."""
    total, links, view = node, [], None
    bias: Node | None = None
    scale: float | Node | None = None
    while True:
        if is_call(node, WAIT) and is_call(node.args[0], ALL_REDUCE):
            links.append(node)
            if bias is not None and not is_vector(bias, value(total).shape[-1]):
                return None  # a view between them split what the bias belongs to
            return Chain(node.args[0], total, tuple(links), None, bias, scale, view, None, _shared(tuple(links)))
        step: tuple[Node, Any] | None = None
        if is_call(node, *VIEWS):
            view, step = view or node, (node.args[0], None)
        elif peel_copies(node) is not node:
            step = (node.args[0], None)
        elif scale is None and bias is None and (step := _scaled(node)):
            scale = step[1]
        elif bias is None and (step := _biased(node)):
            bias = step[1]
        if step is None:
            return None
        links.append(node)
        node = step[0]


def _scaled(node: Node) -> tuple[Node, float | Node] | None:
    """(x, s) of x * s with a number or a tensor of one element and no dimensions."""
    for x, s in (operands, operands[::-1]) if (operands := plain_binary(node, MUL)) else ():
        if is_tensor(x) and dtype(x) is dtype(node) and same_shape(x, node):
            if number(s) is not None:
                return x, number(s)
            if is_tensor(s) and value(s).dim() == 0 and dtype(s) is dtype(node):
                return x, s
    return None


def _biased(node: Node) -> tuple[Node, Node] | None:
    """(x, b) of x + b with b of shape [D]."""
    for x, b in (operands, operands[::-1]) if (operands := plain_binary(node, ADD)) else ():
        if not is_tensor(x) or not same_shape(x, node) or value(x).dim() < 2:
            continue
        if dtype(x) is dtype(node) and is_vector(b, value(node).shape[-1]) and dtype(b) is dtype(node):
            return x, b
    return None


def _through_views(node: Node) -> tuple[Node | None, Node]:
    """(outermost view, what is viewed) of views that keep the last dimension."""
    view = None
    while True:
        source = peel_copies(node)
        if is_call(source, *VIEWS) and _same_last(source, source.args[0]):
            view = view or source
            source = source.args[0]
        if source is node:
            return view, node
        node = source


def _same_last(a: Node, b: Node) -> bool:
    sizes = value(a).shape, value(b).shape
    return bool(sizes[0]) and bool(sizes[1]) and same_sizes(sizes[0][-1:], sizes[1][-1:])


def _shared(links: tuple[Node, ...]) -> Node | None:
    """A link below the total with a user outside the chain."""
    return next((link for link in links[1:] if len(link.users) > 1), None)
