"""From a norm's input back to the all-reduce that feeds it.

    input -> all_reduce -> wait -> [+ bias] -> [* scale] -> [view] -> [+ residual] = total -> [view] -> norm

Views may stand anywhere: they are moved to the input, so that they hide nothing. Between the all-reduce and the total
nothing else may use the value, since the fused operation does not return it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tpfuse.graph.nodes import (
    ADD,
    ALL_REDUCE,
    MUL,
    VIEWS,
    WAIT,
    Node,
    aten,
    dtype,
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
    views      between the all-reduce and the total, in the order of the graph
    norm_views between the total and the norm
    shared     something else uses a link other than the total
    """

    all_reduce: Node
    total: Node
    links: tuple[Node, ...]
    residual: Node | None = None
    bias: Node | None = None
    scale: float | Node | None = None
    views: tuple[Node, ...] = ()
    norm_views: tuple[Node, ...] = ()

    @property
    def shared(self) -> bool:
        return any(len(link.users) > 1 for link in self.links[1:])


def trace(norm_input: Node) -> list[Chain]:
    """Chains that end in this norm's input, the one with the latest all-reduce first; none if no all-reduce does."""
    norm_views, node = _through_views(norm_input)
    found = [_trace_sum(node)]
    for branch, other in (operands, operands[::-1]) if (operands := plain_binary(node, ADD)) else ():
        if branch is other or not same_shape(branch, other) or dtype(branch) is not dtype(other):
            continue
        chain = _trace_sum(branch)
        if chain is not None:
            found.append(dataclasses.replace(chain, total=node, links=(node, *chain.links), residual=other))
    chains = [dataclasses.replace(chain, norm_views=norm_views) for chain in found if chain is not None]
    return sorted(chains, key=lambda chain: chain.all_reduce._sort_key, reverse=True)


def _trace_sum(node: Node) -> Chain | None:
    """wait -> [+ bias] -> [* scale], with views anywhere, backwards from ``node``."""
    total = node
    links: list[Node] = []
    views: list[Node] = []
    bias: Node | None = None
    scale: float | Node | None = None
    while not is_call(node, WAIT):
        step: tuple[Node, Any] | None = None
        if is_call(node, *VIEWS):
            views.insert(0, node)
            step = node.args[0], None
        elif peel_copies(node) is not node:
            step = node.args[0], None
        elif scale is None and bias is None and (step := _scaled(node)):
            scale = step[1]
        elif bias is None and (step := _biased(node)):
            bias = step[1]
        if step is None:
            return None
        links.append(node)
        node = step[0]
    if not is_call(node.args[0], ALL_REDUCE):
        return None
    if bias is not None and not is_vector(bias, value(total).shape[-1]):
        return None  # a view between them split what the bias belongs to
    return Chain(node.args[0], total, (*links, node), bias=bias, scale=scale, views=tuple(views))


def _scaled(node: Node) -> tuple[Node, float | Node] | None:
    """(x, s) of x * s with a number, or a tensor of one element and no dimensions; or of x / number, where exact."""
    if is_call(node, aten.div.Tensor) and len(node.args) == 2 and same_shape(node.args[0], node):
        divisor = number(node.args[1])
        if divisor and math.frexp(divisor)[0] in (0.5, -0.5) and dtype(node.args[0]) is dtype(node):
            return node.args[0], 1 / divisor
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


def _through_views(node: Node) -> tuple[tuple[Node, ...], Node]:
    """(views that keep the last dimension, in the order of the graph; what they are views of)."""
    views: list[Node] = []
    while True:
        source = peel_copies(node)
        if is_call(source, *VIEWS) and _same_last(source, source.args[0]):
            views.insert(0, source)
            source = source.args[0]
        if source is node:
            return tuple(views), node
        node = source


def _same_last(a: Node, b: Node) -> bool:
    sizes = value(a).shape, value(b).shape
    return bool(sizes[0]) and bool(sizes[1]) and same_sizes(sizes[0][-1:], sizes[1][-1:])
