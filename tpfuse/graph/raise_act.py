"""RAISE: gated activations in decomposed aten become one canonical ``tpfuse::act_mul`` node.

h = gate.float();  a = (h / (1 + exp(-h))).to(gate.dtype)     or h * sigmoid(h), or GELU by tanh
y = a * up                                                    either order
"""

from __future__ import annotations

import math

import torch
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
        gate, act = _activated(node)
        product = sole_user(node) if gate is not None else None
        operands = plain_binary(product, MUL)
        if gate is None or not operands or operands[0] is operands[1]:
            continue
        up = operands[1] if operands[0] is node else operands[0]
        if not is_tensor(up) or not same_shape(up, gate) or dtype(up) is not dtype(gate):
            continue
        assert product is not None
        with graph.inserting_after(product):
            canonical = emit(graph, act_mul.OP, (gate, up, act), like=product)
        product.replace_all_uses_with(canonical)
        canonical.meta["val"] = value(product)
        canonical.meta[ORIGINAL] = product


def _activated(node: Node) -> tuple[Node | None, str]:
    """(gate, activation) of ``act(gate)``, computed in fp32 and rounded to gate's 16-bit dtype again."""
    if is_call(node, aten.gelu.default) and node.kwargs.get("approximate") == "tanh":
        return node.args[0], "gelu_tanh"
    if not is_call(node, CONVERT) or not is_tensor(node.args[0]):
        return None, ""
    for argument_of, act in ((_silu_argument, "silu"), (_gelu_argument, "gelu_tanh")):
        h = argument_of(node.args[0])
        if h is not None and is_call(h, CONVERT) and is_tensor(h.args[0]):
            gate = h.args[0]
            if dtype(gate) is dtype(node) and dtype(h) is torch.float32 and dtype(gate) is not torch.float32:
                return gate, act
    return None, ""


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


def _gelu_argument(node: Node) -> Node | None:
    """h of 0.5 h (1 + tanh(sqrt(2 / pi) (h + 0.044715 h^3)))."""
    operands = plain_binary(node, MUL)
    half = plain_binary(operands[0], MUL) if operands else None
    ones = plain_binary(operands[1], ADD) if operands else None
    if not half or number(half[1]) != 0.5 or not ones or number(ones[1]) != 1 or not is_call(ones[0], aten.tanh.default):
        return None
    h, inner = half[0], plain_binary(ones[0].args[0], MUL)
    terms = plain_binary(inner[0], ADD) if inner and number(inner[1]) == math.sqrt(2 / math.pi) else None
    cubic = plain_binary(terms[1], MUL) if terms and terms[0] is h else None
    cube = plain_binary(cubic[0], MUL) if cubic and number(cubic[1]) == 0.044715 else None
    if not cube or cube[1] is not h or plain_binary(cube[0], MUL) != (h, h):
        return None
    return h
