"""FUSE: [residual add ->] RMSNorm -> quantisation to FP8 becomes ``tpfuse::rms_norm_quantize_fp8``, on one GPU.

Inductor is the candidate to beat: a site is left to it where the kernel was not measured to be faster, or where what the
norm reads is computed by operations that Inductor joins with the norm and that a kernel of ours would make it write out.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse.graph.context import NORM_QUANT, Context
from tpfuse.graph.nodes import (
    ADD,
    Node,
    dtype,
    emit,
    is_before,
    is_node,
    latest,
    next_call,
    plain_binary,
    same_shape,
    value,
)
from tpfuse.graph.quantised import choose, decide, is_stored, needed_elsewhere, release, replace, source_of
from tpfuse.kernels import quantize
from tpfuse.ops import rms_norm
from tpfuse.ops.rms_norm_quantize_fp8 import NAME, OP


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes) if context.fusions[NORM_QUANT].on else ():
        norm = source_of(node, rms_norm.OP)
        if norm is None:
            continue
        summands = _summands(norm)
        kernel, reason = choose(node, NORM_QUANT, norm, all(map(is_stored, summands)), context)
        reason = reason or _obstacle(norm)
        if decide(context, NORM_QUANT, NAME, norm, kernel, reason):
            _rewrite(graph, node, norm, summands)


def _summands(norm: Node) -> tuple[Node, ...]:
    """(x,) of the norm, or (x, residual) where it is a sum that the operation can compute too."""
    total = norm.args[0]
    operands = plain_binary(total, ADD)
    if not operands or not all(is_node(o) and same_shape(o, total) and dtype(o) is dtype(total) for o in operands):
        return (total,)
    return operands if operands[0] is not operands[1] and all(map(is_stored, operands)) else (total,)


def _obstacle(norm: Node) -> str:
    x, weight, _, _, normed_dtype, out_dtype = norm.args
    if out_dtype is not dtype(x):
        return f"the norm gives {out_dtype} of {dtype(x)}"
    return quantize.norm_cannot(value(x).dtype, dtype(weight) if weight is not None else None, normed_dtype)


def _rewrite(graph: Graph, node: Node, norm: Node, summands: tuple[Node, ...]) -> None:
    total, weight, eps, offset, normed_dtype, _ = norm.args
    _, fp8, scale, *recipe = node.args
    release(graph, node)
    kept = needed_elsewhere(norm, node)
    inputs = [n for n in (*summands, weight, scale) if is_node(n)]
    place = next_call(latest(inputs))
    if len(summands) == 2 and any(is_before(user, place) for user in total.users):
        summands, place = (total,), next_call(latest([*inputs, total]))
    x, residual = summands[0], summands[1] if len(summands) == 2 else None
    with graph.inserting_before(place):
        arguments = (x, residual, weight, eps, offset, normed_dtype, kept, fp8, scale, *recipe)
        fused = emit(graph, OP, arguments, like=norm)
        values, scales, normed, summed = (emit(graph, operator.getitem, (fused, i), like=norm) for i in range(4))
    replace(graph, node, values, scales)
    if kept:
        norm.replace_all_uses_with(normed)
    if residual is not None:
        total.replace_all_uses_with(summed)
