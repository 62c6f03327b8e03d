"""FUSE: [norms of heads ->] rotary embedding of q and k, and the writes of k and v, become ``tpfuse::rope_kvcache``.

    k_cache, v_cache = index_put(k_cache, [.., positions], rotated k), index_put(v_cache, [.., positions], v)

as Hugging Face's StaticCache has it ([B, K, S, D], the same positions of every sequence), and as a server of its own has it
(slots [S, K, D]). The operation writes in place; in the graph it stands within ``auto_functionalized``, from which
Inductor takes it where nothing else reads the cache as it was. Inductor is the candidate to beat, at few tokens.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import Graph

from tpfuse.graph.context import ROPE_KVCACHE, Context
from tpfuse.graph.joint import is_joint
from tpfuse.graph.nodes import (
    ORDER,
    Node,
    aten,
    dtype,
    emit,
    erase_cone,
    is_before,
    is_call,
    is_tensor,
    latest,
    next_call,
    same_shape,
    same_sizes,
    sole_user,
    value,
)
from tpfuse.graph.qk_norm_rope import Heads, choose, heads_dim, inputs, obstacle, operands, pairs, permuted, swap
from tpfuse.graph.quantised import decide
from tpfuse.graph.rotations import same
from tpfuse.ops.rope_kvcache import NAME, OP

_PUT = aten.index_put.default


@dataclasses.dataclass(frozen=True)
class _Writes:
    """Of k and of v: the nodes that write; at which positions.

    own_page  each sequence writes into its own part of the cache
    """

    k: Node
    v: Node
    positions: Node
    own_page: bool


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[ROPE_KVCACHE].on or is_joint(graph):
        return
    for q, k in pairs(graph)[0]:
        dim = heads_dim(q.rotation, k.rotation)
        writes = _writes(k, dim) or _writes(q, dim)
        if writes is None:
            continue
        if writes.k.args[2] is q.rotation.out:  # k is rotated first
            q, k = k, q
        kernel, reason = choose(q, k, ROPE_KVCACHE, context)
        reason = reason or obstacle(q, k, dim) or _too_many(q, dim, context)
        place = next_call(latest([*inputs(q, k), writes.k.args[0], writes.v.args[0], writes.v.args[2], writes.positions]))
        used = [*q.rotation.out.users, *writes.k.users, *writes.v.users]
        if not reason and any(is_before(user, place) for user in used):
            reason = "one of the two is used before the other can be computed"
        if decide(context, ROPE_KVCACHE, NAME, writes.k, kernel, reason):
            assert dim is not None
            _rewrite(graph, q, k, writes, dim, place)


def _writes(heads: Heads, dim: int | None) -> _Writes | None:
    """Where rotated heads are written, and v at the same positions of a cache alike."""
    put: Any = sole_user(heads.rotation.out)
    found = _positions(put, dim)
    if found is None or put.args[2] is not heads.rotation.out:
        return None
    positions, own_page = found
    others = [node for node in put.graph.find_nodes(op="call_function", target=_PUT) if node is not put]
    for other in sorted(others, key=lambda n: abs(n.meta[ORDER] - put.meta[ORDER])):
        theirs = _positions(other, dim)
        alike = theirs is not None and theirs[1] == own_page and same(theirs[0], positions)
        if alike and same_shape(other.args[2], put.args[2]) and _same_cache(other.args[0], put.args[0]):
            return _Writes(put, other, positions, own_page)
    return None


def _same_cache(a: Node, b: Node) -> bool:
    return a is not b and same_shape(a, b) and dtype(a) is dtype(b)


def _positions(put: Any, dim: int | None) -> tuple[Node, bool] | None:
    """(positions [T], whether each sequence has its own part of the cache) of a write of all heads at once."""
    if put is None or not is_call(put, _PUT) or len(put.args) != 3 or put.kwargs or not is_tensor(put.args[2]):
        return None
    cache, indices, heads = put.args
    rank = value(cache).dim()
    where = [i for i, index in enumerate(indices) if index is not None]
    if len(where) != 1 or value(heads).dim() != rank or dtype(cache) is not dtype(heads) or value(cache).stride(-1) != 1:
        return None
    positions = indices[where[0]]
    own_page = rank == 4 and where == [2] and dim == 1  # [B, K, S, D]
    if not (own_page or (rank == 3 and where == [0] and dim == 1)):  # or [S, K, D]
        return None
    if not isinstance(value(cache).shape[where[0]], int):
        return None
    integers = value(positions).dim() == 1 and value(positions).dtype in (torch.int32, torch.int64)
    others = [d for d in range(rank) if d != where[0]]
    fits = same_sizes([value(cache).shape[d] for d in others], [value(heads).shape[d] for d in others])
    return (positions, own_page) if integers and fits else None


def _too_many(q: Heads, dim: int | None, context: Context) -> str:
    shape = value(q.rotation.x).shape
    sizes = [size for d, size in enumerate(shape[:-1]) if d != dim]
    most = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else context.rows[1]
    limit = context.rope_kvcache_rows
    return f"at most {most} rows, more than rope_kvcache_fusion_max_token_num={limit}" if most > limit else ""


def _slots(graph: Graph, positions: Node, places: Any, place: Node, like: Node) -> Node:
    """Positions that count from the front: to the operation a negative one is none. Once for all layers."""
    for user in positions.users:
        from_end = is_call(user, aten.add.Tensor) and user.args[1] == places
        for found in user.users if from_end else ():
            if is_call(found, aten.where.self) and found.args[1:] == (user, positions) and is_before(found, place):
                return found
    below = emit(graph, aten.lt.Scalar, (positions, 0), like=like)
    return emit(
        graph, aten.where.self, (below, emit(graph, aten.add.Tensor, (positions, places), like=like), positions), like=like
    )


def _rewrite(graph: Graph, q: Heads, k: Heads, writes: _Writes, dim: int, place: Node) -> None:
    like, (k_cache, _, _), (v_cache, _, v) = writes.k, writes.k.args, writes.v.args
    with graph.inserting_before(place):
        sources, tables, options = operands(graph, q, k, dim)
        caches = [k_cache, v_cache]
        if not writes.own_page:  # one page
            caches = [emit(graph, aten.unsqueeze.default, (cache, 0), like=like) for cache in caches]
        rows = permuted(graph, v, swap(q, dim), like)
        places = value(k_cache).shape[2 if writes.own_page else 0]
        slots = _slots(graph, writes.positions, places, place, like)
        given = (*sources, rows, *tables, *caches, slots, None, None, 1 if writes.own_page else 2, writes.own_page)
        names = [argument.name for argument in OP._schema.arguments]
        named: dict[str, Any] = dict(zip(names, (*given, *options), strict=False))
        functional = torch.ops.higher_order.auto_functionalized
        fused = emit(graph, functional, (OP,), named, like=like)
        results = [emit(graph, operator.getitem, (fused, i), like=like) for i in range(3)]
        rotated = permuted(graph, results[0], swap(q, dim), like)
        if not writes.own_page:
            results[1:] = [emit(graph, aten.squeeze.dim, (cache, 0), like=like) for cache in results[1:]]
    q.rotation.out.replace_all_uses_with(rotated)
    for put, cache in zip((writes.k, writes.v), results[1:], strict=True):
        put.replace_all_uses_with(cache)
        erase_cone(graph, put)
    erase_cone(graph, q.rotation.out)
