"""Rotary embeddings in decomposed aten, recognised by what they compute: which elements of a head meet which.

    x * cos + cat(-x[R/2:], x[:R/2]) * sin        halves; as Hugging Face spells it
    x * cos + stack(-x[1::2], x[::2]) * sin       neighbours
    cat or stack of (a * cos - b * sin, b * cos + a * sin)        with a, b the halves or neighbours of x
    view_as_real(view_as_complex(x) * table)      neighbours

all of x, or of its first R elements with the others behind; in x's dtype, or in fp32 and rounded at the end. Tables are
what is multiplied with, broadcast over heads.

R  elements that are rotated
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch

from tpfuse.graph.nodes import (
    ADD,
    CONVERT,
    MUL,
    Node,
    aten,
    dtype,
    is_call,
    is_node,
    is_tensor,
    plain_binary,
    same_shape,
    same_sizes,
    sole_user,
    value,
)

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """One rotated tensor.

    x            [..., D], what is rotated; of the shape of the result ``out``
    cos, sin     what multiplies, [..., R], or [..., R / 2] where both elements that meet share a number; of x's rank
    wide         products are not rounded to x's dtype
    as_complex   cos and sin are one table of complex numbers
    """

    x: Node
    out: Node
    cos: Node
    sin: Node
    rotary: int
    interleaved: bool
    wide: bool = False
    as_complex: bool = False


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Elements first, first + step, ... of the last dimension of x."""

    x: Node
    first: int
    step: int
    count: int


def find(node: Node) -> Rotation | None:
    """The rotation that ``node`` ends, before it is rounded or what is not rotated is put behind it."""
    found = _of_whole(node) or _of_parts(node) or _of_complex(node)
    return None if found is None else _finished(found)


def same(a: Any, b: Any, depth: int = 6) -> bool:
    """Whether two nodes compute the same: one node, or the same operation of the same (graphs come with copies)."""
    if a is b or not (is_node(a) and is_node(b)):
        return a is b or (not is_node(a) and not is_node(b) and a == b)
    if not depth or a.op != "call_function" or b.op != "call_function" or a.target is not b.target or a.kwargs != b.kwargs:
        return False
    return len(a.args) == len(b.args) and all(same(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def _piece(node: Node) -> _Piece:
    """What ``node`` has of what it was cut from; casts to fp32 do not matter."""
    size = value(node).shape[-1]
    if is_call(node, CONVERT) and dtype(node) is torch.float32:
        return _piece(node.args[0])
    if is_call(node, aten.slice.Tensor) and _is_last(node, node.args[1] if len(node.args) > 1 else 0):
        start, step = node.args[2] if len(node.args) > 2 else 0, node.args[4] if len(node.args) > 4 else 1
        if isinstance(start, int) and isinstance(step, int) and start >= 0:
            return _within(_piece(node.args[0]), start, step, size)
    if is_call(node, operator.getitem) and is_call(node.args[0], *_SPLITS):
        split = node.args[0]
        if _is_last(node, split.args[2] if len(split.args) > 2 else 0):
            sizes = split.args[1]
            start = sizes * node.args[1] if isinstance(sizes, int) else sum(sizes[: node.args[1]])
            return _within(_piece(split.args[0]), start, 1, size)
    if is_call(node, aten.select.int) and _pairs_of(node.args[0]) is not None:
        x = _pairs_of(node.args[0])
        if node.args[1] in (-1, value(node.args[0]).dim() - 1) and node.args[2] in (0, 1):
            return _within(_piece(x), node.args[2], 2, size)
    return _Piece(node, 0, 1, size)


def _within(piece: _Piece, start: int, step: int, count: int) -> _Piece:
    return _Piece(piece.x, piece.first + start * piece.step, piece.step * step, count)


def _is_last(node: Node, dim: int) -> bool:
    return dim in (-1, value(node).dim() - 1)


def _pairs_of(node: Node) -> Node | None:
    """x of ``x.reshape(..., D / 2, 2)``."""
    if not is_call(node, aten.view.default, aten.reshape.default) or not is_tensor(node.args[0]):
        return None
    return node.args[0] if _flattens(node, node.args[0]) else None


def _swapped(node: Node) -> Iterator[tuple[Any, Any]]:
    """Operands of a product, in both orders."""
    operands = plain_binary(node, MUL)
    if operands and is_tensor(operands[0]) and is_tensor(operands[1]):
        yield operands
        yield operands[::-1]


def _joined(node: Node) -> tuple[Node, Node, bool] | None:
    """(a, b, whether in turns rather than one behind the other) of a ``cat`` or a ``stack`` that is flattened."""
    inner = node.args[0] if is_call(node, aten.view.default, aten.reshape.default) else node
    if not is_call(inner, aten.cat.default) or len(inner.args[0]) != 2:
        return None
    if not _is_last(inner, inner.args[1] if len(inner.args) > 1 else 0):
        return None
    parts = inner.args[0]
    if inner is node:
        return (*parts, False)
    last = value(inner).dim() - 1
    stacked = all(is_call(p, aten.unsqueeze.default) and p.args[1] in (-1, last) for p in parts)
    return (parts[0].args[0], parts[1].args[0], True) if stacked and _flattens(inner, node) else None


def _flattens(paired: Node, flat: Node) -> bool:
    """Whether one is [..., n, 2], and the other [..., 2 n]."""
    a, b = value(paired).shape, value(flat).shape
    return len(a) == len(b) + 1 and same_sizes([*a[:-2], a[-2] * 2, a[-1]], [*b, 2])


def _are_partners(a: _Piece, b: _Piece, interleaved: bool) -> bool:
    """Whether a and b are what a rotation from the first element on turns against each other."""
    if a.x is not b.x or a.count != b.count or not isinstance(a.count, int):
        return False
    return (a.first, b.first, a.step, b.step) == ((0, 1, 2, 2) if interleaved else (0, a.count, 1, 1))


def _of_whole(node: Node) -> Rotation | None:
    """x * cos + turned(x) * sin."""
    terms = plain_binary(node, ADD) or ()
    for straight, crossed in (terms, terms[::-1]) if terms else ():
        for turned, sin in _swapped(crossed):
            joined = _joined(turned)
            if joined is None or not is_call(joined[0], aten.neg.default):
                continue
            b, a, interleaved = _piece(joined[0].args[0]), _piece(joined[1]), joined[2]
            for whole, cos in _swapped(straight):
                if not _are_partners(a, b, interleaved) or _piece(whole) != _Piece(a.x, 0, 1, 2 * a.count):
                    continue
                if _lasts(cos, sin) == (2 * a.count, 2 * a.count):
                    return Rotation(a.x, node, cos, sin, 2 * a.count, interleaved, dtype(node) is not dtype(a.x))
    return None


def _of_parts(node: Node) -> Rotation | None:
    """cat or stack of (a * cos - b * sin, b * cos + a * sin)."""
    joined = _joined(node)
    if joined is None:
        return None
    difference, total = plain_binary(joined[0], aten.sub.Tensor), plain_binary(joined[1], ADD)
    if not difference or not total:
        return None
    for left, cos in _swapped(difference[0]):
        for right, sin in _swapped(difference[1]):
            a, b = _piece(left), _piece(right)
            if not _are_partners(a, b, joined[2]) or _lasts(cos, sin) != (a.count, a.count):
                continue
            for x, y in (total, total[::-1]):
                if _is_product(x, b, cos) and _is_product(y, a, sin):
                    wide = dtype(node) is not dtype(a.x)
                    return Rotation(a.x, node, cos, sin, 2 * a.count, joined[2], wide)
    return None


def _lasts(*nodes: Node) -> tuple[Any, ...]:
    """Sizes of last dimensions where they are numbers."""
    sizes = (value(node).shape[-1] if value(node).dim() else None for node in nodes)
    return tuple(size if isinstance(size, int) else None for size in sizes)


def _is_product(node: Node, piece: _Piece, table: Node) -> bool:
    return any(_piece(x) == piece and same(t, table) for x, t in _swapped(node))


def _of_complex(node: Node) -> Rotation | None:
    """view_as_real(view_as_complex(x as pairs) * table), flattened."""
    real = node.args[0] if is_call(node, aten.view.default, aten.reshape.default) else None
    if real is None or not is_call(real, aten.view_as_real.default) or not _flattens(real, node):
        return None
    for x, table in _swapped(real.args[0]):
        pairs = _pairs_of(x.args[0]) if is_call(x, aten.view_as_complex.default) else None
        if pairs is not None and dtype(table) is torch.complex64:
            whole, size = _piece(pairs), value(pairs).shape[-1]
            if (whole.first, whole.step, whole.count) == (0, 1, size):
                return Rotation(whole.x, node, table, table, size, True, True, as_complex=True)
    return None


def _finished(found: Rotation) -> Rotation | None:
    """Extended over the cast back to x's dtype and over what is put behind; None if it is no whole head of x's dtype."""
    size = value(found.x).shape[-1]
    for _ in range(2):
        user = sole_user(found.out)
        if dtype(found.out) is not dtype(found.x) and is_call(user, CONVERT) and dtype(user) is dtype(found.x):
            found = dataclasses.replace(found, out=user)
        joined = _joined(sole_user(found.out)) if sole_user(found.out) is not None else None
        if joined is not None and not joined[2] and joined[0] is found.out and found.rotary < size:
            rest = _piece(joined[1])
            if rest == _Piece(found.x, found.rotary, 1, size - found.rotary):
                found = dataclasses.replace(found, out=sole_user(found.out))
    fits = dtype(found.out) is dtype(found.x) and same_shape(found.out, found.x)
    return found if fits and isinstance(size, int) else None
