"""RAISE: quantisation of activations to FP8 in decomposed aten becomes one canonical ``tpfuse::quantize_fp8`` node.

    a = amax(abs(x), -1, keepdim)            or over a group of the last dimension, or over everything
    s = (a / 448).float()                    in a's own dtype (torchao), or in fp32 (compressed-tensors)
    q = clamp(x.float() / s, -448, 448).to(fp8)

or by a given scale (static). Recognised by operations and dtypes, both of which decide about bytes. What several consumers
of one value repeat (a quantised gate and up projection, say) is one node afterwards.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch.fx import Graph

from tpfuse.graph.context import ACT_QUANT, NORM_QUANT, Context
from tpfuse.graph.joint import is_joint
from tpfuse.graph.nodes import (
    CONVERT,
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
    if not any(context.fusions[name].on for name in (NORM_QUANT, ACT_QUANT)) or is_joint(graph):
        return  # training: the backward reads what a fused operation would not give
    sizes, raised = Sizes(graph), dict[tuple, tuple[Node, Node]]()
    for node in list(graph.nodes):
        found = None if node._erased else _match(node)
        if found is None or not all(map(sizes.known, value(found.out).shape)):
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
        if value(values).dim() < value(found.out).dim():  # the graph has groups as a dimension
            shape = [sizes.of(size) for size in value(found.out).shape]
            values = emit(graph, aten.view.default, (values, shape), like=found.out, fake=value(found.out))
            scales = emit(graph, aten.unsqueeze.default, (scales, -1), like=found.out)
    values.meta[ORIGINAL], scales.meta[ORIGINAL] = found.out, found.scale
    return values, scales


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
    scaled = _unclamp(node.args[0], most)
    if scaled is None or dtype(scaled) is not torch.float32 or not is_call(scaled, aten.div.Tensor):
        return None
    wide, scale = scaled.args[:2]
    if not is_tensor(wide) or not is_tensor(scale) or dtype(scale) is not torch.float32 or len(scaled.args) > 2:
        return None
    x = _unwiden(wide)
    if x is None or not same_shape(wide, scaled) or not same_shape(scaled, node):
        return None
    found = _dynamic(node, x, scale, most)
    if found is not None:
        return found
    one = all(isinstance(size, int) and size == 1 for size in value(scale).shape)
    return _Quantisation(x, node, scale, None) if one and not _depends(scale, x) else None


def _unclamp(node: Node, most: float) -> Node | None:
    """z of clamp(z, -most, most), in one operation or two."""
    if is_call(node, aten.clamp.default) and [number(a) for a in node.args[1:3]] == [-most, most]:
        return node.args[0]
    if is_call(node, aten.clamp_max.default) and number(node.args[1]) == most:
        inner = node.args[0]
        if is_call(inner, aten.clamp_min.default) and number(inner.args[1]) == -most:
            return inner.args[0]
    return None


def _unwiden(node: Node) -> Node | None:
    """x of ``x.float()``, with views before or after it; of x's own shape, or with its last dimension in groups."""
    node = _unview(node)
    if not is_call(node, CONVERT) or dtype(node) is not torch.float32:
        return None
    source = _unview(node.args[0])
    return source if dtype(source) in (torch.bfloat16, torch.float16) else None


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
    """Whether shape a is b with its last dimension in groups."""
    return len(a) == len(b) + 1 and same_sizes(a[:-2], b[:-1]) and all(isinstance(size, int) for size in (*a[-2:], b[-1]))


def _dynamic(out: Node, x: Node, scale: Node, most: float) -> _Quantisation | None:
    """With a scale that is computed from x."""
    quotient = _unview_any(scale)
    narrow = is_call(quotient, CONVERT)
    if narrow:
        quotient = _unview_any(quotient.args[0])
    if not is_call(quotient, aten.div.Tensor) or number(quotient.args[1]) != most:
        return None
    magnitude, zero_to_one = quotient.args[0], False
    if is_call(magnitude, aten.where.self):
        condition, magnitude, other = magnitude.args
        positive = is_call(condition, aten.gt.Scalar) and condition.args == (magnitude, 0)
        if not positive or not _is_one(other):
            return None
        zero_to_one = True
    if is_call(magnitude, CONVERT) and dtype(magnitude) is torch.float32:
        magnitude = magnitude.args[0]
    if not is_call(magnitude, aten.amax.default) or len(magnitude.args) < 3 or not magnitude.args[2]:
        return None
    absolute = magnitude.args[0]
    if not is_call(absolute, aten.abs.default) or not _same_source(absolute.args[0], x):
        return None
    group = _group(value(absolute).shape, magnitude.args[1], value(out).shape)
    if group is None or not same_sizes(value(scale).shape, _expected(value(out).shape, group)):
        return None
    recipe = Recipe(
        group=None if group == 0 else group, scale_dtype=dtype(quotient) or torch.float32, zero_to_one=zero_to_one
    )
    return _Quantisation(x, out, scale, recipe)


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


def _expected(out: torch.Size, group: int) -> list:
    """Shape of a scale that is broadcast to ``out``."""
    return [1] * len(out) if group == 0 else [*out[:-1], 1]


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
