"""RAISE: quantisation of activations to FP8 in decomposed aten becomes one canonical ``tpfuse::quantize_fp8`` node.

    a = amax(abs(x), -1, keepdim)            or over a group of the last dimension, or over everything
    s = (a / 448).float()                    in a's own dtype (torchao), or in fp32 (compressed-tensors)
    q = clamp(x.float() / s, -448, 448).to(fp8)

or by a given scale (static), or with a floor, by the reciprocal, in float64 (torchao's training), or without a clamp where
the scale is of these very values, which it then bounds (DeepGEMM, Hugging Face). Recognised by operations and dtypes, both
of which decide about bytes. What several consumers of one value repeat (a quantised gate and up projection, say) is one
node afterwards.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph

from tpfuse.graph.context import ACT_QUANT, FUSION, NORM_QUANT, Context
from tpfuse.graph.joint import is_joint
from tpfuse.graph.nodes import (
    CONVERT,
    MUL,
    VIEWS,
    Node,
    aten,
    dtype,
    emit,
    erase_cone,
    is_call,
    is_tensor,
    latest,
    next_call,
    number,
    plain_binary,
    same_shape,
    same_sizes,
    value,
)
from tpfuse.graph.raise_ import ORIGINAL
from tpfuse.graph.sizes import Sizes
from tpfuse.ops.matmul import FP8
from tpfuse.ops.quantize_fp8 import OP, Recipe


@dataclasses.dataclass(frozen=True)
class _Quantisation:
    """x and what it becomes: ``out``, by ``scale``, both nodes of the graph. recipe: None where the scale is given."""

    x: Node
    out: Node
    scale: Node
    recipe: Recipe | None


def run(graph: Graph, context: Context) -> None:
    if not any(context.fusions[name].on for name in (FUSION, NORM_QUANT, ACT_QUANT)) or is_joint(graph):
        return  # training: the backward reads what a fused operation would not give
    sizes, raised = Sizes(graph), dict[tuple, tuple[Node, Node]]()
    for node in list(graph.nodes):
        found = None if node._erased else _match(node)
        if found is None or not all(map(sizes.known, (*value(found.out).shape, *value(found.scale).shape))):
            continue
        shapes = str(value(found.out).shape), str(value(found.scale).shape)
        key = (found.x, dtype(found.out), found.recipe, found.recipe or found.scale, shapes)
        repeated = key in raised
        if not repeated:
            raised[key] = _insert(graph, found, sizes)
        values, scales = raised[key]
        found.out.replace_all_uses_with(values, lambda user, values=values: user is not values)
        if found.recipe:
            found.scale.replace_all_uses_with(scales, lambda user, found=found: not _leads(user, found.out))
        if repeated:
            erase_cone(graph, found.out)


def _insert(graph: Graph, found: _Quantisation, sizes: Sizes) -> tuple[Node, Node]:
    """(values, scales) of a new canonical node, in the shapes of the original ones. It stands where x is known."""
    given, recipe = (None, found.recipe) if found.recipe else (found.scale, Recipe())
    assert recipe is not None
    with graph.inserting_before(next_call(latest([found.x, given] if given else [found.x]))):
        canonical = emit(graph, OP, (found.x, dtype(found.out), given, *recipe.arguments), like=found.out)
        values, scales = (emit(graph, operator.getitem, (canonical, index), like=found.out) for index in (0, 1))
        values = _shaped(graph, values, found.out, sizes, found.out)
        if found.recipe:
            scales = _shaped(graph, scales, found.scale, sizes, found.out)
    values.meta[ORIGINAL], scales.meta[ORIGINAL] = found.out, found.scale
    return values, scales


def _shaped(graph: Graph, node: Node, original: Node, sizes: Sizes, like: Node) -> Node:
    """The node in the shape of what it stands for: a graph may have groups as a dimension, or scales without theirs."""
    if same_shape(node, original):
        return node
    shape = [sizes.of(size) for size in value(original).shape]
    return emit(graph, aten.view.default, (node, shape), like=like, fake=value(original))


def _leads(node: Node, end: Node) -> bool:
    """Whether a chain of only users leads from a node to ``end``."""
    while node is not end and len(node.users) == 1:
        node = next(iter(node.users))
    return node is end


def _match(node: Node) -> _Quantisation | None:
    fp8 = dtype(node) if is_call(node, CONVERT) else None
    if fp8 is None or fp8 not in FP8:
        return None
    most = torch.finfo(fp8).max
    clamped = _unclamp(node.args[0], most)
    scaled = node.args[0] if clamped is None else clamped
    if not is_tensor(scaled) or dtype(scaled) is not torch.float32 or not same_shape(scaled, node):
        return None
    for wide, scale, how in _applied(scaled):
        x = _unwiden(wide)
        if x is None or not same_shape(wide, scaled) or not is_tensor(scale) or dtype(scale) is not torch.float32:
            continue
        found = _dynamic(node, x, scale, most, how)
        if found is not None:
            return found
        one = all(isinstance(size, int) and size == 1 for size in value(scale).shape)
        if one and clamped is not None and not how and not _depends(scale, x):
            return _Quantisation(x, node, scale, None)
    return None


def _applied(scaled: Node) -> Iterator[tuple[Node, Node, dict[str, Any]]]:
    """(what is quantised, its scale, what of a recipe tells how it is applied) of a quotient or a product."""
    if is_call(scaled, aten.div.Tensor) and len(scaled.args) == 2:
        wide, scale = scaled.args
        if is_tensor(wide) and is_tensor(scale):
            yield wide, scale, {}
            least = _at_least(scale)
            if least is not None:
                yield wide, least[0], {"least": least[1]}
    operands = plain_binary(scaled, MUL)
    for wide, factor in (operands, operands[::-1]) if operands else ():
        if not is_tensor(wide) or not is_tensor(factor):
            continue
        yield wide, factor, {"inverse": True}
        inner = factor.args[0] if plain_binary(factor, MUL) and number(factor.args[1]) == 1 else factor  # 1.0 / scale
        if is_call(inner, aten.reciprocal.default):
            yield wide, inner.args[0], {"by_reciprocal": True}


def _unclamp(node: Node, most: float) -> Node | None:
    """z of clamp(z, -most, most), in one operation or two."""
    if is_call(node, aten.clamp.default) and [number(a) for a in node.args[1:3]] == [-most, most]:
        return node.args[0]
    if is_call(node, aten.clamp_max.default) and number(node.args[1]) == most:
        inner = node.args[0]
        if is_call(inner, aten.clamp_min.default) and number(inner.args[1]) == -most:
            return inner.args[0]
    return None


def _at_least(node: Node) -> tuple[Node, float] | None:
    """(z, a) of clamp(z, min=a)."""
    if not is_call(node, aten.clamp_min.default, aten.clamp.default) or any(a is not None for a in node.args[2:]):
        return None
    least = number(node.args[1]) if len(node.args) > 1 else None
    return None if least is None or least <= 0 else (node.args[0], least)


def _unwiden(node: Node) -> Node | None:
    """x of ``x.float()``, with views before or after it; of x's own shape, or with its last dimension in groups. A product
    with an fp32 scale widens x without being asked."""
    node = _unview(node)
    if is_call(node, CONVERT) and dtype(node) is torch.float32:
        node = _unview(node.args[0])
    return node if dtype(node) in (torch.bfloat16, torch.float16) else None


def _unview(node: Node) -> Node:
    """What is seen through views, as far as they keep rows or only divide them."""
    while is_call(node, *VIEWS) and is_tensor(node.args[0]):
        inner = node.args[0]
        a, b = value(node).shape, value(inner).shape
        if same_sizes(a, b) or _divides(a, b):
            node = inner
            continue
        break
    return node


def _divides(a: torch.Size, b: torch.Size) -> bool:
    """Whether shape a is b with its last dimension in groups, and perhaps the other dimensions as one."""
    if len(a) < 2 or not len(b) or not all(isinstance(size, int) for size in (*a[-2:], b[-1])):
        return False
    if a[-2] * a[-1] != b[-1]:
        return False
    return same_sizes(a[:-2], b[:-1]) or (len(a) == 3 and same_sizes(a[:-2], [math.prod(b[:-1])]))


def _dynamic(out: Node, x: Node, applied: Node, most: float, how: dict[str, Any]) -> _Quantisation | None:
    """With a scale that is computed from x. applied: the scale, in the shape in which it is applied."""
    scale = _unview_any(applied)
    inverse = how.get("inverse", False)
    narrow, power_of_two = scale, False
    if is_call(scale, aten.exp2.default) or (is_call(scale, aten.pow.Scalar) and number(scale.args[0]) == 2):
        rounded, power_of_two = scale.args[-1], True
        if not is_call(rounded, aten.floor.default if inverse else aten.ceil.default):
            return None
        if not is_call(rounded.args[0], aten.log2.default):
            return None
        narrow = _unview_any(rounded.args[0].args[0])
    quotient = _unview_any(narrow.args[0]) if is_call(narrow, CONVERT) else narrow
    magnitude = _divided(quotient, most, inverse)
    found = None if magnitude is None else _magnitude(_unview_any(magnitude))
    if found is None:
        return None
    absolute, dims, rest = found
    if not is_call(absolute, aten.abs.default) or not _same_source(absolute.args[0], x):
        return None
    group = _group(value(absolute).shape, dims, value(out).shape)
    if group is None or not _broadcasts(value(applied).shape, value(out).shape, group):
        return None
    recipe = Recipe(
        group=group or None, scale_dtype=dtype(quotient) or torch.float32, power_of_two=power_of_two, **rest, **how
    )
    return _Quantisation(x, out, scale, recipe)


def _divided(quotient: Node, most: float, inverse: bool) -> Node | None:
    """m of m / most, or of most / m, which is the reciprocal times most."""
    if not inverse:
        ours = is_call(quotient, aten.div.Tensor) and len(quotient.args) == 2 and number(quotient.args[1]) == most
        return quotient.args[0] if ours else None
    operands = plain_binary(quotient, MUL)
    if not operands or not is_call(operands[0], aten.reciprocal.default) or number(operands[1]) != most:
        return None
    return operands[0].args[0]


def _magnitude(node: Node) -> tuple[Node, list[int], dict[str, Any]] | None:
    """(what is reduced, its dimensions, what of a recipe is done to the result) of a greatest magnitude."""
    rest: dict[str, Any] = {}
    if is_call(node, aten.where.self):
        condition, node, other = node.args
        positive = is_call(condition, aten.gt.Scalar) and condition.args == (node, 0)
        if not positive or not _is_one(other):
            return None
        rest["zero_to_one"] = True
    elif (least := _at_least(node)) is not None:
        node, rest["floor"] = _unview_any(least[0]), least[1]
    if is_call(node, CONVERT) and dtype(node) in (torch.float32, torch.float64):
        node = _unview_any(node.args[0])
    if is_call(node, aten.max.default):
        absolute, dims = node.args[0], list(range(value(node.args[0]).dim()))
    elif is_call(node, aten.amax.default) and len(node.args) > 1:
        absolute, dims = node.args[:2]
    else:
        return None
    if is_call(absolute, CONVERT) and dtype(absolute) is torch.float32:  # after the magnitude, rather than before it
        absolute = absolute.args[0]
    return absolute, dims, rest


def _unview_any(node: Node) -> Node:
    while is_call(node, *VIEWS):
        node = node.args[0]
    return node


def _is_one(node: Node) -> bool:
    return number(node) == 1 or (is_call(node, aten.full.default, aten.scalar_tensor.default) and 1 in node.args[-1:])


def _same_source(node: Node, x: Node) -> bool:
    node = _unview(node)
    if is_call(node, CONVERT) and dtype(node) is torch.float32:
        node = _unview(node.args[0])
    return node is x


def _group(reduced: torch.Size, dims: list[int], out: torch.Size) -> int | None:
    """Elements that share a scale where ``dims`` of a shape like ``out`` are reduced; 0: all; None: something else."""
    rank = len(reduced)
    places = sorted(dim % rank for dim in dims)
    if not same_sizes(reduced, out):
        return None
    if places == list(range(rank)) and rank > 1:
        return 0
    return reduced[-1] if places == [rank - 1] and isinstance(reduced[-1], int) else None


def _broadcasts(scale: torch.Size, out: torch.Size, group: int) -> bool:
    """Whether a scale is applied to what it was computed from."""
    return same_sizes(scale, [1] * len(scale)) if group == 0 else same_sizes(scale, [*out[:-1], 1])


def _depends(node: Node, source: Node) -> bool:
    """Whether ``node`` is computed from ``source``, as far as a few steps tell."""
    pending, seen = [node], set[Node]()
    while pending and len(seen) < 64:
        each = pending.pop()
        if each is source:
            return True
        if each not in seen:
            seen.add(each)
            pending += each.all_input_nodes
    return False
