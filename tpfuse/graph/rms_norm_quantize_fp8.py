"""FUSE: [residual add ->] RMSNorm -> quantisation to FP8 becomes ``tpfuse::rms_norm_quantize_fp8``, on one GPU.

Inductor is the candidate to beat: a site is left to it where the kernel was not measured to be faster, or where what the
norm reads is computed by operations that Inductor joins with the norm and that a kernel of ours would make it write out.
"""

from __future__ import annotations

import operator

from torch.fx import Graph

from tpfuse.graph.context import NORM_QUANT, Context
from tpfuse.graph.nodes import (
    Node,
    dtype,
    emit,
    is_before,
    is_node,
    latest,
    next_call,
    value,
)
from tpfuse.graph.quantised import (
    choose,
    decide,
    is_stored,
    needed_elsewhere,
    norm_obstacle,
    release,
    replace,
    source_of,
    summands,
)
from tpfuse.kernels import quantize
from tpfuse.ops import rms_norm
from tpfuse.ops.rms_norm_quantize_fp8 import NAME, OP


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes) if context.fusions[NORM_QUANT].on else ():
        norm = source_of(node, rms_norm.OP)
        if norm is None:
            continue
        parts = summands(norm)
        kernel, reason = choose(node, NORM_QUANT, norm, all(map(is_stored, parts)), context)
        reason = reason or _obstacle(norm)
        if decide(context, NORM_QUANT, NAME, norm, kernel, reason):
            _rewrite(graph, node, norm, parts)


def _obstacle(norm: Node) -> str:
    x, weight, _, _, normed_dtype, _ = norm.args
    reason = norm_obstacle(norm)
    return reason or quantize.norm_cannot(value(x).dtype, dtype(weight) if weight is not None else None, normed_dtype)


def _rewrite(graph: Graph, node: Node, norm: Node, parts: tuple[Node, ...]) -> None:
    total, weight, eps, offset, normed_dtype, _ = norm.args
    _, fp8, scale, *recipe = node.args
    release(graph, node)
    kept = needed_elsewhere(norm, node)
    inputs = [n for n in (*parts, weight, scale) if is_node(n)]
    place = next_call(latest(inputs))
    if len(parts) == 2 and any(is_before(user, place) for user in total.users):
        parts, place = (total,), next_call(latest([*inputs, total]))
    x, residual = parts[0], parts[1] if len(parts) == 2 else None
    with graph.inserting_before(place):
        arguments = (x, residual, weight, eps, offset, normed_dtype, kept, fp8, scale, *recipe)
        fused = emit(graph, OP, arguments, like=norm)
        values, scales, normed, summed = (emit(graph, operator.getitem, (fused, i), like=norm) for i in range(4))
    replace(graph, node, values, scales)
    if kept:
        norm.replace_all_uses_with(normed)
    if residual is not None:
        total.replace_all_uses_with(summed)
