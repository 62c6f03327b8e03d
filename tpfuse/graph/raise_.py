"""RAISE: every spelling of RMSNorm in decomposed aten becomes one canonical ``tpfuse::rms_norm`` node.

Recognised by what is computed, starting from the inverse root, never by a module's name:

    h = x.float()                                   absent when x is fp32 already
    y = h * rsqrt(mean(h ** 2, -1, keepdim) + eps)  h * h, square; pow(-0.5), 1 / sqrt, h / sqrt
    y = y.to(x.dtype)                               Llama: before the weight; Gemma, F.rms_norm: after it
    y = weight * y                                  either order; weight may be fp32, or (1 + weight) in fp32

The original nodes stay in the graph without users, so that ``lower`` can put them back exactly as they were. Look-alikes
(epsilon outside the root, another reduction, another dimension, LayerNorm) stay as they are, with a reason.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch.fx import Graph

from tpfuse.graph.context import FUSION, Context
from tpfuse.graph.nodes import (
    ADD,
    CONVERT,
    MUL,
    SHARDED,
    Node,
    aten,
    dtype,
    emit,
    is_call,
    is_node,
    is_tensor,
    is_vector,
    number,
    plain_binary,
    same_shape,
    sole_forward_user,
    value,
)
from tpfuse.ops import rms_norm

ORIGINAL = "tpfuse_original"
_NARROW = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class LookAlike:
    """A norm that is not an RMSNorm of ours: what it reduces, and what is different about it."""

    x: Node
    op: str
    reason: str


@dataclasses.dataclass(frozen=True)
class _Norm:
    x: Node
    out: Node
    eps: float
    weight: Node | None = None
    weight_offset: float = 0.0
    normed_dtype: torch.dtype | None = None


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        root = _inverse_root(node)
        if root is None or node.meta.get(SHARDED):
            continue  # no root, or one of this rank's rows, which no fusion takes
        found = _match(node, *root)
        if isinstance(found, LookAlike):
            context.look_alikes.setdefault(found.x, (found.op, found.reason))
            context.decide("skipped", node, fusion=FUSION, op=found.op, reason=found.reason)
        elif found is not None:
            _insert(graph, found)


def _insert(graph: Graph, norm: _Norm) -> None:
    with graph.inserting_after(norm.out):
        canonical = emit(
            graph,
            rms_norm.OP,
            (norm.x, norm.weight, norm.eps, norm.weight_offset, norm.normed_dtype, dtype(norm.out)),
            like=norm.out,
        )
    norm.out.replace_all_uses_with(canonical)
    canonical.meta["val"] = value(norm.out)
    canonical.meta[ORIGINAL] = norm.out


def _inverse_root(node: Node) -> tuple[Node, bool] | None:
    """(what the root is taken of, whether the node is the root itself rather than its inverse)."""
    if is_call(node, aten.rsqrt.default) or (is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5):
        return node.args[0], False
    if is_call(node, aten.sqrt.default) or (is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 0.5):
        user = sole_forward_user(node)
        if user is not None and is_call(user, aten.div.Tensor) and user.args[1] is node:
            return node.args[0], True
    if is_call(node, aten.reciprocal.default) and is_call(node.args[0], aten.sqrt.default):
        return node.args[0].args[0], False
    return None


def _match(node: Node, under: Node, divides: bool) -> _Norm | LookAlike | None:
    mean, eps = _split_epsilon(under)
    if is_call(mean, aten.var_mean.correction, aten.var.correction) or _is_getitem_of_var(mean):
        source = mean.args[0].args[0] if _is_getitem_of_var(mean) else mean.args[0]
        return LookAlike(_uncast(source), "layer_norm", "LayerNorm subtracts the mean; only RMSNorm is fused")
    squares = mean.args[0] if is_call(mean, aten.mean.dim, aten.sum.dim_IntList) else None
    h = _squared(squares)
    if h is None:
        return None  # some other use of a root: not a norm at all
    if is_call(h, aten.sub.Tensor):
        return LookAlike(_uncast(h.args[0]), "layer_norm", "LayerNorm subtracts the mean; only RMSNorm is fused")
    x = _uncast(h)
    different = _difference(mean, h, eps)
    if different:
        return LookAlike(x, "rms_norm", different)
    scaled = sole_forward_user(node)
    while 1 in (plain_binary(scaled, MUL) or ()):  # 1 / root, which becomes reciprocal * 1
        node, scaled = scaled, sole_forward_user(scaled)
    if scaled is None:
        return LookAlike(x, "rms_norm", "the inverse root has several users")
    operands = scaled.args[:1] if divides else (plain_binary(scaled, MUL) or ())
    if (divides and len(scaled.args) != 2) or not any(o is x or _same_values(o, h) for o in operands):
        return LookAlike(x, "rms_norm", "the inverse root does not multiply the value that was squared")
    assert eps is not None
    return _follow(_Norm(x=x, out=scaled, eps=eps))


def _difference(mean: Node, h: Node, eps: float | None) -> str:
    """What keeps a sum of squares under a root from being an RMSNorm; empty if nothing does."""
    rank = value(h).dim()
    if is_call(mean, aten.sum.dim_IntList):
        return "the reduction is a sum, not a mean"
    dims = [d % rank for d in (mean.args[1] or range(rank))]
    if dims != [rank - 1]:
        return f"the mean is over dimensions {dims}, not over the last one only"
    if len(mean.args) < 3 or not mean.args[2] or mean.kwargs:
        return "the mean drops the last dimension or changes the dtype"
    if eps is None:
        return "epsilon is not a number added to the mean inside the root"
    if dtype(h) is not torch.float32:
        return f"the norm is computed in {dtype(h)}, not in fp32"
    return ""


def _follow(norm: _Norm) -> _Norm:
    """Extend a match over the casts and the weight that come after ``h * inverse_root``."""
    size = value(norm.x).shape[-1]
    out, user = norm.out, sole_forward_user(norm.out)
    if _narrows(user, out):
        assert user is not None
        weighted = sole_forward_user(user)
        weight = _weight_operand(weighted, user, size)
        if weight is None:
            return dataclasses.replace(norm, out=user)
        assert weighted is not None
        plain, offset = _split_offset(weight)
        if not offset:  # the product is in the weight's own dtype: a widened weight is not the same as a narrow one
            plain = weight
        norm = dataclasses.replace(norm, out=weighted, weight=plain, weight_offset=offset, normed_dtype=dtype(user))
    else:
        weight = _weight_operand(user, out, size)
        if weight is None:
            return norm
        assert user is not None
        plain, offset = _split_offset(weight)
        norm = dataclasses.replace(norm, out=user, weight=plain, weight_offset=offset)
    last = sole_forward_user(norm.out)
    return dataclasses.replace(norm, out=last) if last is not None and _narrows(last, norm.out) else norm


def _narrows(user: Node | None, source: Node) -> bool:
    """Whether ``user`` rounds an fp32 value to 16 bits. A widening cast belongs to whoever asked for it."""
    return is_call(user, CONVERT) and dtype(source) is torch.float32 and dtype(user) in _NARROW


def _weight_operand(product: Node | None, normed: Node, size: object) -> Node | None:
    for a, b in (operands, operands[::-1]) if (operands := plain_binary(product, MUL)) else ():
        if a is normed and is_vector(b, size) and value(b).is_floating_point():
            return b
    return None


def _split_offset(weight: Node) -> tuple[Node, float]:
    """(w, offset) of an fp32 expression ``w.float() + offset``; casts to fp32 are exact and dropped."""
    offset = 0.0
    inner = weight
    if (
        dtype(weight) is torch.float32
        and is_call(weight, ADD, aten.add.Scalar)
        and len(weight.args) == 2
        and not weight.kwargs
        and number(weight.args[1]) is not None
        and dtype(weight.args[0]) is torch.float32
    ):
        inner, offset = weight.args[0], float(weight.args[1])
    return _uncast(inner), offset


def _split_epsilon(node: Node) -> tuple[Node, float | None]:
    if is_call(node, ADD, aten.add.Scalar) and len(node.args) == 2 and not node.kwargs:
        for mean, eps in (node.args, node.args[::-1]):
            if is_node(mean) and number(eps) is not None:
                return mean, number(eps)
            if is_call(mean, aten.mean.dim) and is_tensor(eps):
                return mean, None
    return node, 0.0 if is_call(node, aten.mean.dim) else None  # torch 2.14 drops "+ 0.0"


def _squared(node: Node) -> Node | None:
    if is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if is_call(node, aten.square.default):
        return node.args[0]
    operands = plain_binary(node, MUL)
    if operands and is_tensor(operands[0]) and is_tensor(operands[1]) and _same_values(*operands):
        return operands[0]
    return None


def _is_getitem_of_var(node: Node) -> bool:
    return is_call(node, operator.getitem) and is_call(node.args[0], aten.var_mean.correction)


def _uncast(node: Node) -> Node:
    """x of ``x.float()``: widening to fp32 loses nothing."""
    if is_call(node, CONVERT) and dtype(node) is torch.float32 and dtype(node.args[0]) in _NARROW:
        return node.args[0]
    return node


def _same_values(a: Node, b: Node) -> bool:
    """Whether two nodes hold the same values in the same dtype: one node, or two casts of one."""
    if a is b:
        return True
    return (
        is_tensor(a)
        and dtype(a) is dtype(b)
        and same_shape(a, b)
        and is_call(a, CONVERT)
        and is_call(b, CONVERT)
        and a.args[0] is b.args[0]
    )
