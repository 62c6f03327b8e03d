"""FUSE: all-gather of rows -> GEMMs becomes ``tpfuse::all_gather_matmul``: one gather for all GEMMs that read it.

What else reads the gathered rows gets them from the operation, too. Gathers of the same tensor become one first.
"""

from __future__ import annotations

import dataclasses
import math
import operator

from torch.fx import Graph

from tpfuse.graph.context import GEMM_COMMS, NOT_ALIKE, Context
from tpfuse.graph.nodes import (
    ALL_GATHER,
    SHARDED,
    WAIT,
    Node,
    aten,
    emit,
    erase_cone,
    is_before,
    is_call,
    is_contiguous,
    is_node,
    keeps_last,
    same_shape,
    same_sizes,
    sole_user,
    value,
)
from tpfuse.graph.products import (
    Judged,
    Product,
    bring_before,
    interchange,
    join,
    name_of,
    parts,
    product,
    source_of_rows,
    unfit_sizes,
    what_runs,
)
from tpfuse.graph.sizes import Sizes
from tpfuse.ops.all_gather_matmul import NAME, OP


@dataclasses.dataclass
class Readers:
    """Who reads gathered rows.

    root      the node that has all of them, and no padding
    products  GEMMs of them
    others    nodes that read root, or what is a view of it
    scale     of FP8 values: this rank's rows of it, or one number; None: they are no FP8 values
    """

    root: Node
    products: list[Product]
    others: list[Node]
    scale: Node | None = None


def run(graph: Graph, context: Context) -> None:
    if context.fusions[GEMM_COMMS].on and context.ranks_alike:
        _merge(graph)
    join(graph, context, ALL_GATHER, "all_gather", _judge, _rewrite)


def _merge(graph: Graph) -> None:
    """Gathers of the same tensor, all read by GEMMs, become the first of them."""
    first: dict[tuple, Node] = {}
    for node in [node for node in graph.nodes if is_call(node, ALL_GATHER)]:
        wait = sole_user(node)
        if not is_call(wait, WAIT):
            continue
        readers = _readers(wait)
        if not readers.products or any(reader.op == "output" for reader in readers.others):
            continue  # outputs must not become one tensor
        kept = first.setdefault((source_of_rows(node.args[0]), *node.args[1:]), node)
        if kept is not node and same_shape(node, kept) and is_before(sole_user(kept), wait):
            wait.replace_all_uses_with(sole_user(kept))
            graph.erase_node(wait)
            graph.erase_node(node)


def _judge(graph: Graph, gather: Node, sizes: Sizes, context: Context) -> Judged:
    group, local = gather.args[-1], value(gather.args[0])
    if not context.ranks_alike:
        return None, NOT_ALIKE, []
    if not isinstance(group, str):
        return None, "its process group is not a constant of the graph", []
    if not is_call(sole_user(gather), WAIT):
        return None, "its result has other users than one wait", []
    if local.dim() < 2 or not is_contiguous(gather.args[0]):
        return None, "what it gathers are no rows", []
    readers = _readers(sole_user(gather))
    if not readers.products:
        names = ", ".join(dict.fromkeys(map(name_of, readers.others))) or "nothing"
        return None, f"no GEMM reads what it gathers, but {names}", []
    reason = unfit_sizes((gather.args[0], readers.root, *(made.node for made in readers.products)), sizes)
    if reason:
        return None, reason, []
    readers.scale, reason = _scale(readers.products, gather)
    if reason:
        return None, reason, []
    if len({(value(each.weight).dtype, each.out_dtype) for each in readers.products}) > 1:
        return None, "its GEMMs differ in dtype", []
    needed = [node for each in readers.products for node in (each.weight, each.bias) if is_node(node)]
    needed += [each.scales[1] for each in readers.products if each.scales]
    needed += [] if readers.scale is None else [readers.scale]
    if not bring_before(needed, _place(readers.root), gather):
        return None, "a weight of its GEMMs is computed from what is gathered", []
    return readers, *what_runs(NAME, readers.products, group, context)


def _readers(wait: Node) -> Readers:
    readers = Readers(_all_rows(wait), [], [])
    pending = [readers.root]
    while pending:
        node = pending.pop()
        for user in node.users:
            made = product(user)
            if made is not None and made.input is node and node not in (made.weight, made.bias):
                readers.products.append(made)
            elif keeps_last(user):
                pending.append(user)
            else:
                readers.others.append(user)
    readers.products.sort(key=lambda made: made.node._sort_key)
    return readers


def _scale(products: list[Product], gather: Node) -> tuple[Node | None, str]:
    """(the scale that the operation gets for FP8 values, why there is none)."""
    if not any(each.scales for each in products):
        return None, ""
    scales = [each.scales[0] if each.scales else None for each in products]
    if all(scale is scales[0] for scale in scales) and value(scales[0]).numel() == 1:
        return scales[0], ""
    found = {_of_one_rank(scale, gather) for scale in scales}
    if None in found or len(found) > 1:
        return None, "its GEMMs scale FP8 values by scales that are not gathered in the same way"
    return found.pop(), ""


def _of_one_rank(scale: Node, gather: Node) -> Node | None:
    """This rank's rows of a scale that is gathered as the values are; None: it is something else."""
    while keeps_last(scale) or (is_call(scale, aten.slice.Tensor) and scale.meta.get(SHARDED)):
        scale = scale.args[0]
    other: Node = scale.args[0] if is_call(scale, WAIT) else None
    if not is_call(other, ALL_GATHER) or other.args[1:] != gather.args[1:]:
        return None
    alike = same_sizes(value(other.args[0]).shape[:1], value(gather.args[0]).shape[:1])
    return other.args[0] if alike else None


def _in_bytes(node: Node) -> Node:
    """What a tensor was before ``enable_sp`` made bytes of its FP8 values."""
    return node.args[0] if is_call(node, aten.view.dtype) else node


def _all_rows(wait: Node) -> Node:
    """The node with which ``enable_sp`` makes FP8 values of bytes again and cuts off rows that fill up the shares, or which
    puts dimension 1 together."""
    user = sole_user(wait)
    if is_call(user, aten.view.dtype) and user.meta.get(SHARDED):
        wait, user = user, sole_user(user)
    if is_call(user, aten.split.Tensor):
        end = sole_user(next(iter(user.users)))
        cut = parts(end)
        return end if cut is not None and (cut.cut, cut.joined) == (0, 1) else wait
    return user if is_call(user, aten.slice.Tensor) and user.meta.get(SHARDED) else wait


def _place(root: Node) -> Node:
    """The first node that reads the gathered rows, be it a view of them."""
    return min(root.users, key=lambda node: node._sort_key)


def _rewrite(graph: Graph, gather: Node, readers: Readers, sizes: Sizes) -> None:
    local, group = _in_bytes(gather.args[0]), gather.args[2]
    root, products, cut = readers.root, readers.products, parts(readers.root)
    rows, shape = value(products[0].node).shape[0], value(local).shape
    fakes = [value(made.node).new_empty(value(made.node).shape) for made in products]
    if readers.others:
        fakes.append(value(root).new_empty((rows, shape[-1])))
    with graph.inserting_before(_place(root)):
        if len(shape) != 2:
            share = math.prod(shape[:-1])  # numel() would make a number of a symbol
            fake = value(local).new_empty((share, shape[-1]))
            local = emit(
                graph, aten.reshape.default, (local, [sizes.of(share), sizes.of(shape[-1])]), like=gather, fake=fake
            )
        weights, biases = [made.weight for made in products], [made.bias for made in products]
        added = biases if any(is_node(bias) for bias in biases) else []
        scales = [made.scales[1] for made in products if made.scales]
        kinds = (readers.scale, scales, products[0].out_dtype, bool(readers.others))
        results = emit(graph, OP, (local, weights, group, sizes.of(rows), added, *kinds), like=gather, fake=fakes)
        found = []
        for number, fake in enumerate(fakes):
            like = products[number].node if number < len(products) else gather
            each = emit(graph, operator.getitem, (results, number), like=like, fake=fake)
            if cut is not None and not cut.keeps_order:
                each = interchange(graph, each, cut.count, cut.outer, like, sizes)
            found.append(each)
        if readers.others:
            shape = value(root).shape
            arguments = (found[-1], [sizes.of(size) for size in shape])
            whole = emit(graph, aten.reshape.default, arguments, like=gather, fake=value(root).new_empty(shape))
            root.replace_all_uses_with(whole)
    for made, result in zip(products, found, strict=False):
        made.node.replace_all_uses_with(result)
        erase_cone(graph, made.node)
    if not root._erased and not root.users:
        erase_cone(graph, root)
