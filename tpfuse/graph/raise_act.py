"""RAISE: gated activations in decomposed aten become one canonical ``tpfuse::act_mul`` node.

h = gate.float();  a = (h / (1 + exp(-h))).to(gate.dtype)     or h * sigmoid(h)
y = a * up                                                    either order
"""

from __future__ import annotations

from torch.fx import Graph

from tpfuse.graph.context import ACT_QUANT, Context
from tpfuse.graph.joint import is_joint
from tpfuse.graph.nodes import (
    ADD,
    CONVERT,
    MUL,
    Node,
    aten,
    dtype,
    emit,
    is_call,
    is_tensor,
    number,
    plain_binary,
    same_shape,
    sole_user,
    value,
)
from tpfuse.graph.raise_ import ORIGINAL
from tpfuse.ops import act_mul


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[ACT_QUANT].on or is_joint(graph):
        return  # training: as for quantisation, which this is for
    for node in list(graph.nodes):
        gate = _silu_of(node)
        product = sole_user(node) if gate is not None else None
        operands = plain_binary(product, MUL)
        if gate is None or not operands or operands[0] is operands[1]:
            continue
        up = operands[1] if operands[0] is node else operands[0]
        if not is_tensor(up) or not same_shape(up, gate) or dtype(up) is not dtype(gate):
            continue
        assert product is not None
        with graph.inserting_after(product):
            canonical = emit(graph, act_mul.OP, (gate, up, "silu"), like=product)
        product.replace_all_uses_with(canonical)
        canonical.meta["val"] = value(product)
        canonical.meta[ORIGINAL] = product


def _silu_of(node: Node) -> Node | None:
    """gate of ``silu(gate)``, computed in fp32 and rounded to gate's 16-bit dtype again."""
    if not is_call(node, CONVERT) or not is_tensor(node.args[0]):
        return None
    inner = node.args[0]
    h = _silu_argument(inner)
    if h is None or not is_call(h, CONVERT) or not is_tensor(h.args[0]):
        return None
    gate = h.args[0]
    return gate if dtype(gate) is dtype(node) and dtype(h) is not dtype(gate) else None


def _silu_argument(node: Node) -> Node | None:
    """h of h / (1 + exp(-h)), or of h * sigmoid(h)."""
    if is_call(node, aten.div.Tensor) and len(node.args) == 2:
        h, below = node.args
        ones = plain_binary(below, ADD)
        exponential = next((a for a in ones if is_call(a, aten.exp.default)), None) if ones else None
        if exponential is None or 1 not in [number(a) for a in ones or ()]:
            return None
        negative = exponential.args[0]
        return h if is_call(negative, aten.neg.default) and negative.args[0] is h else None
    for h, gated in (operands, operands[::-1]) if (operands := plain_binary(node, MUL)) else ():
        if is_call(gated, aten.sigmoid.default) and gated.args[0] is h:
            return h
    return None
