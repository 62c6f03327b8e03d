"""FUSE: [RMSNorm of each head of q and of k ->] rotary embedding becomes ``tpfuse::qk_norm_rope``, on one GPU.

    projection(s) -> [view as heads] -> [norm] -> [transpose] -> rotary embedding -> attention

q and k are two rotations by the same tables, whose norms differ in their weights only. v is not read. Inductor is the
candidate to beat.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tpfuse.graph import rotations
from tpfuse.graph.context import QK_NORM_ROPE, Context
from tpfuse.graph.joint import is_joint
from tpfuse.graph.nodes import (
    COPIES,
    VIEWS,
    Node,
    aten,
    dtype,
    emit,
    erase_cone,
    is_before,
    is_call,
    latest,
    next_call,
    reapply,
    same_sizes,
    unused_cone,
    value,
)
from tpfuse.graph.quantised import KERNEL, cpu_kernel, decide, is_stored, norm_obstacle
from tpfuse.graph.rotations import Rotation, same
from tpfuse.kernels import rotary as kernels
from tpfuse.ops import rms_norm
from tpfuse.ops.qk_norm_rope import NAME, OP


@dataclasses.dataclass(frozen=True)
class Heads:
    """q or k: its rotation, and where it comes from.

    source  what is normalised, or rotated where there is no norm
    norm    the canonical norm, or None
    steps   views and permutes from the norm to what is rotated, in the order of the graph
    """

    rotation: Rotation
    source: Node
    norm: Node | None
    steps: tuple[Node, ...]

    @property
    def weight(self) -> Node | None:
        return self.norm.args[1] if self.norm is not None else None

    @property
    def norm_options(self) -> tuple[Any, ...]:
        """eps, weight_offset, normed_dtype."""
        return tuple(self.norm.args[2:5]) if self.norm is not None else (0.0, 0.0, None)


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[QK_NORM_ROPE].on or is_joint(graph):
        return  # training: a gradient would need what the kernel does not keep
    found, alone = pairs(graph)
    for q, k in found:
        _fuse(graph, q, k, context)
    for heads in alone:
        decide(context, QK_NORM_ROPE, NAME, heads.rotation.out, "", "no other heads are rotated by the same tables")


def pairs(graph: Graph) -> tuple[list[tuple[Heads, Heads]], list[Heads]]:
    """(q and k of each attention, what is rotated alone)."""
    found: list[tuple[Heads, Heads]] = []
    waiting: list[Heads] = []
    for node in list(graph.nodes):
        rotation = rotations.find(node) if node.op == "call_function" else None
        if rotation is None:
            continue
        heads = _heads(rotation)
        partner = next((w for w in waiting if _belong(w, heads)), None)
        if partner is None:
            waiting.append(heads)
        else:
            waiting.remove(partner)
            found.append((partner, heads))
    return found, waiting


def _heads(rotation: Rotation) -> Heads:
    node, steps, size = rotation.x, [], value(rotation.x).shape[-1]
    while is_call(node, aten.permute.default, *VIEWS) or (is_call(node, *COPIES) and not node.kwargs):
        if is_call(node, aten.permute.default) and not _keeps_heads(node, size):
            break
        steps.append(node)
        node = node.args[0]
    if not is_call(node, rms_norm.OP) or value(node).shape[-1] != size:
        return Heads(rotation, rotation.x, None, ())
    return Heads(rotation, node.args[0], node, tuple(reversed(steps)))


def _keeps_heads(permute: Node, size: int) -> bool:
    dims = permute.args[1]
    return dims[-1] in (-1, len(dims) - 1) and value(permute).shape[-1] == size


def _belong(a: Heads, b: Heads) -> bool:
    """Whether they are heads of one attention: rotated alike, by the same numbers."""
    one, other = a.rotation, b.rotation
    alike = ("rotary", "interleaved", "wide", "as_complex")
    return (
        all(getattr(one, field) == getattr(other, field) for field in alike)
        and same(one.cos, other.cos)
        and same(one.sin, other.sin)
        and value(one.x).dim() == value(other.x).dim()
    )


def _fuse(graph: Graph, q: Heads, k: Heads, context: Context) -> None:
    dim = heads_dim(q.rotation, k.rotation)
    kernel, reason = choose(q, k, QK_NORM_ROPE, context)
    reason = reason or obstacle(q, k, dim)
    place = next_call(latest(inputs(q, k)))
    if not reason and any(is_before(user, place) for user in q.rotation.out.users):
        reason = "one of the two is used before the other can be computed"
    if decide(context, QK_NORM_ROPE, NAME, q.rotation.out, kernel, reason):
        assert dim is not None
        _rewrite(graph, q, k, dim, place)


def inputs(q: Heads, k: Heads) -> list[Node]:
    nodes = [q.source, k.source, q.weight, k.weight, q.rotation.cos, q.rotation.sin]
    return [node for node in nodes if node is not None]


def choose(q: Heads, k: Heads, fusion: str, context: Context) -> tuple[str, str]:
    """(what would run it, why it is left to Inductor or "")."""
    a, b, rotation = value(q.rotation.x), value(k.rotation.x), q.rotation
    if a.device.type == "cpu":
        return cpu_kernel(fusion, context)
    tables = torch.float32 if rotation.as_complex else dtype(rotation.cos)
    weights = [dtype(heads.weight) for heads in (q, k) if heads.weight is not None]
    reason = kernels.cannot(a, b, (tables, tables), weights, q.norm_options[2])
    if reason:
        return "", reason
    stored = is_stored(q.source) and is_stored(k.source)
    return KERNEL, kernels.why_not_faster(stored)


def obstacle(q: Heads, k: Heads, dim: int | None) -> str:
    if dim is None:
        return "its tables are not the same for all heads of a token"
    if (q.norm is None) != (k.norm is None) or q.norm_options != k.norm_options:
        return "q and k have different norms"
    if (q.weight is None) != (k.weight is None):
        return "q and k have different norms"
    for heads in (q, k):
        if heads.norm is None:
            continue
        if norm_obstacle(heads.norm):
            return norm_obstacle(heads.norm)
        if heads.norm not in unused_cone(heads.rotation.out):
            return "something else reads what is normalised"
    orders = {_order(heads.rotation.out, dim) for heads in (q, k)}
    return "its result lies in memory in another order" if len(orders) > 1 or None in orders else ""


def heads_dim(q: Rotation, k: Rotation) -> int | None:
    """The dimension of heads: tables are broadcast over it, and q and k may differ in it alone."""
    table, a, b = value(q.cos), value(q.x), value(k.x)
    rank = a.dim()
    if rank not in (3, 4) or table.dim() > rank:
        return None
    found = []
    for dim in range(rank - 3, rank - 1):
        others = [d for d in range(rank) if d != dim]
        at = dim - rank + table.dim()
        broadcast = all(at < 0 or same_sizes(value(t).shape[at : at + 1], [1]) for t in (q.cos, q.sin))
        tokens = (rank - 3) + (rank - 2) - dim
        fits = all(_covers(value(t), tokens, a.shape[tokens], rank) for t in (q.cos, q.sin))
        if broadcast and fits and same_sizes([a.shape[d] for d in others], [b.shape[d] for d in others]):
            found.append(dim)
    known = [dim for dim in found if isinstance(a.shape[dim], int) and isinstance(b.shape[dim], int)]
    return max(known, key=lambda d: a.shape[d], default=None)


def _covers(table: torch.Tensor, dim: int, tokens: Any, rank: int) -> bool:
    """Whether a table has numbers for each token (dimension ``dim`` of what it multiplies)."""
    at = dim - rank + table.dim()
    return at >= 0 and same_sizes([table.shape[at]], [tokens])


def _order(out: Node, dim: int) -> bool | None:
    """Whether heads are the slower dimension in memory than tokens; None if it is neither row-major order."""
    tensor = value(out)
    first, second = tensor.dim() - 3, tensor.dim() - 2
    tokens = first + second - dim
    for heads_first, order in ((False, (tokens, dim)), (True, (dim, tokens))):
        if _is_dense(tensor, [*range(first), *order, second + 1]):
            return heads_first
    return None


def _is_dense(tensor: torch.Tensor, order: list[int]) -> bool:
    """Whether it is contiguous with its dimensions in that order; dimensions of one element may have any stride."""
    expected: Any = 1
    for dim in reversed(order):
        size = tensor.shape[dim]
        if not statically_known_true(size == 1) and not statically_known_true(tensor.stride(dim) == expected):
            return False
        expected = expected * size
    return True


def _rewrite(graph: Graph, q: Heads, k: Heads, dim: int, place: Node) -> None:
    with graph.inserting_before(place):
        sources, tables, options = operands(graph, q, k, dim)
        fused = emit(graph, OP, (*sources, *tables, *options), like=q.rotation.out)
        results = [emit(graph, operator.getitem, (fused, i), like=q.rotation.out) for i in range(2)]
        results = [permuted(graph, result, swap(q, dim), q.rotation.out) for result in results]
    for heads, result in zip((q, k), results, strict=True):
        heads.rotation.out.replace_all_uses_with(result)
        erase_cone(graph, heads.rotation.out)


def operands(graph: Graph, q: Heads, k: Heads, dim: int) -> tuple[list[Node], list[Node], tuple[Any, ...]]:
    """([q, k] as the operation takes them, [cos, sin], its other arguments), added to the graph where they are missing."""
    rotation = q.rotation
    sources = [permuted(graph, _brought(graph, heads), swap(q, dim), rotation.out) for heads in (q, k)]
    tables = [_table(graph, rotation, index, dim) for index in range(2)]
    options = (rotation.rotary, rotation.interleaved, rotation.wide, bool(_order(rotation.out, dim)))
    return sources, tables, (*options, q.norm is not None, q.weight, k.weight, *q.norm_options)


def swap(q: Heads, dim: int) -> list[int] | None:
    """The permutation between the model's order of dimensions and the operation's; None if they are the same."""
    rank = value(q.rotation.x).dim()
    return [*range(rank - 3), rank - 2, rank - 3, rank - 1] if dim == rank - 3 else None


def _brought(graph: Graph, heads: Heads) -> Node:
    """What is normalised, in the shape of what is rotated."""
    node = heads.source
    for step in heads.steps:
        if is_call(step, aten.permute.default):
            node = permuted(graph, node, step.args[1], heads.rotation.out)
        elif is_call(step, *VIEWS):
            node = reapply(graph, [step], node, like=heads.rotation.out)
    return node


def permuted(graph: Graph, node: Node, dims: list[int] | None, like: Node) -> Node:
    if dims is None:
        return node
    if is_call(node, aten.permute.default):
        inner, dims = node, [node.args[1][d] for d in dims]
        node = inner.args[0]
    if list(dims) == list(range(len(dims))):
        return node
    return emit(graph, aten.permute.default, (node, list(dims)), like=like)


def _table(graph: Graph, rotation: Rotation, index: int, dim: int) -> Node:
    """cos or sin, [B or 1, T, R or R / 2] or [T, R or R / 2]: without the dimension of heads."""
    node, like = (rotation.cos, rotation.sin)[index], rotation.out
    if rotation.as_complex:
        node = emit(graph, aten.view_as_real.default, (node,), like=like)
        node = emit(graph, aten.select.int, (node, -1, index), like=like)
    missing = value(rotation.x).dim() - value(node).dim()
    if dim >= missing:
        node = emit(graph, aten.squeeze.dim, (node, dim - missing), like=like)
    return node
