"""Rewriting a graph so that chosen values exist as this rank's rows only.

Nodes are visited in the order of the graph. A chosen value is computed again, on rows, in front of where it was computed;
the first node that needs all of it finds an all-gather in front of itself, which others share. Fake values are made from
shapes, never by running operations on them: those ask whether a row count is one, and torch would compile anew for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph

from tpfuse.comm import groups
from tpfuse.graph import rows as rowwise
from tpfuse.graph.nodes import (
    ALL_GATHER,
    ALL_REDUCE,
    COPIES,
    REDUCE_SCATTER,
    ROWS_OF,
    SHARDED,
    TAG,
    VIEWS,
    WAIT,
    Node,
    aten,
    emit,
    erase_unused,
    is_call,
    is_contiguous,
    keeps_last,
    prims,
    statically_known_true,
    value,
)
from tpfuse.graph.rows import Rows
from tpfuse.graph.sizes import Sizes, number_or_value
from tpfuse.ops.matmul import FP8


class Rewriter:
    """One region of a graph.

    rows   its members
    kept   values of them (all-reduces and what is computed) that are to be sharded
    """

    def __init__(self, graph: Graph, rows: Rows, kept: set[Node], sizes: Sizes) -> None:
        self._graph, self._rows, self._kept, self._sizes = graph, rows, kept, sizes
        self._ranks, self._rank = groups.size(rows.group), groups.resolve(rows.group).rank()
        self._count: Any = sizes.of(rows.count)
        self._even = statically_known_true(rows.count % self._ranks == 0)
        # Where the count varies, one row more a rank: torch asks whether a size is one, so that none may ever be.
        spare = self._ranks - 1 if isinstance(rows.count, int) else 2 * self._ranks - 1
        up = self._count if self._even else sizes.add(self._count, spare)
        self._share: Any = sizes.divide(up, self._ranks)  # rows of a rank
        self._padded: Any = self._count if self._even else sizes.multiply(self._share, self._ranks)
        self._local: dict[Node, Node] = {}  # value -> this rank's rows of it
        self._sliced: dict[Node, Node] = {}  # what stays whole -> this rank's rows of it
        self._gathered: dict[Node, Node] = {}  # value -> all rows of it, as a matrix
        self._shaped: dict[Node, Node] = {}  # the same in its own shape
        self._summed: set[Node] = set()  # sums over rows that ranks add up from their own
        self._mask: Node | None = None
        self._like: Node | None = None

    def run(self) -> None:
        graph = self._graph
        members = [node for node, root in self._rows.members.items() if root in self._kept]
        self._summed = self._sums(members)
        standing = self._standing(members)
        for node in list(graph.nodes):
            root = self._rows.members.get(node)
            self._like = node
            if node in self._summed:
                with graph.inserting_before(node):
                    node.replace_all_uses_with(self._sum(node))
                graph.erase_node(node)
                continue
            if root not in self._kept or node in standing or is_call(node, ALL_REDUCE):
                for source in node.all_input_nodes:
                    if self._rows.members.get(source) in self._kept and source not in standing:
                        with graph.inserting_before(node):
                            node.replace_input_with(source, self._whole(source))
            if root is node and root in self._kept:
                with graph.inserting_before(node):
                    self._local[node] = self._scatter(node) if is_call(node, ALL_REDUCE) else self._compute(node)
                self._local[node].meta[ROWS_OF] = node, self._rows.group
        inputs = [node.args[0] for node in members if is_call(node, ALL_REDUCE)]
        for node in reversed([node for node in members if node not in standing]):
            graph.erase_node(node)
        for node in dict.fromkeys(inputs):
            if not node.users:
                erase_unused(graph, node)

    def _standing(self, members: list[Node]) -> set[Node]:
        """Views and copies of sharded values that stay in the graph, of the gathered value: what reads them needs all rows.

        A view that is nothing but the rows, as a matrix, is the gathered value itself.
        """
        standing: set[Node] = set()
        for node in reversed(members):
            stays = is_call(node, *VIEWS, *COPIES) and not self._is_matrix(node)
            if stays and any(self._needs_whole(user) or user in standing for user in node.users):
                standing.add(node)
        return standing

    def _needs_whole(self, user: Node) -> bool:
        needs = self._rows.members.get(user) not in self._kept or is_call(user, ALL_REDUCE)
        return needs and user not in self._summed

    def _sums(self, members: list[Node]) -> set[Node]:
        """Sums over rows that ranks add up from their own rows: not those of what is gathered for others in any case."""
        users = [(self._rows.members[node], user) for node in members for user in node.users]
        gathered = {root for root, user in users if self._needs_whole(user) and user not in self._rows.sums}
        return {user for root, user in users if user in self._rows.sums and root not in gathered}

    def _is_matrix(self, node: Node) -> bool:
        """Whether a view has exactly the rows of its value, with no copy in between."""
        if value(node).dim() != 2:
            return False
        while is_call(node, *VIEWS):
            node = node.args[0]
        return not is_call(node, *COPIES)

    # -- this rank's rows ------------------------------------------------------------------------------------------------

    def _scatter(self, reduce: Node) -> Node:
        """The reduce-scatter that takes the all-reduce's place."""
        matrix = self._pad(self._matrix(reduce.args[0], dense=True))
        arguments = (matrix, "sum", self._ranks, self._rows.group)
        return self._emit(WAIT, (self._emit(REDUCE_SCATTER, arguments, self._share, matrix),), self._share, matrix)

    def _compute(self, node: Node) -> Node:
        """A row-wise operation on this rank's rows."""
        args = torch.fx.map_arg(node.args, lambda operand: self._operand(operand, node))
        kwargs: dict[str, Any] = torch.fx.map_arg(node.kwargs, lambda operand: self._operand(operand, node))
        if is_call(node, aten.expand.default):
            args = (args[0], [self._share, value(node).shape[-1]])
        if node.target in rowwise.REDUCTIONS:
            args, kwargs = _over_last(args, kwargs)
        return self._emit(node.target, args, self._share, node, kwargs)

    def _sum(self, node: Node) -> Node:
        """A sum over all rows, of the sums over those of each rank."""
        local = self._local[self._rows.members[node.args[0]]]
        if not self._even:
            zero = self._emit(
                aten.full.default, ([], 0), (), local, {"dtype": value(local).dtype, "device": value(local).device}
            )
            local = self._emit(aten.where.self, (self._present(local), local, zero), self._share, local)
        size, kwargs = (value(local).shape[-1],), {"dtype": node.kwargs["dtype"]} if "dtype" in node.kwargs else {}
        found = self._emit(aten.sum.dim_IntList, (local, [0]), size, node, kwargs)
        for target, args in ((ALL_REDUCE, ("sum", self._rows.group)), (WAIT, ())):
            found = self._emit(target, (found, *args), size, found)
        return self._emit(aten.reshape.default, (found, list(value(node).shape)), value(node).shape, found)

    def _present(self, local: Node) -> Node:
        """Which of this rank's rows there are: what was filled up counts for nothing."""
        if self._mask is None:
            first, device = self._sizes.multiply(self._share, self._rank), value(local).device
            numbers = {"start": first, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
            index = self._emit(prims.iota.default, (self._share,), (self._share,), local, numbers, dtype=torch.int64)
            there = self._emit(aten.lt.Scalar, (index, self._count), (self._share,), index, dtype=torch.bool)
            self._mask = self._emit(aten.unsqueeze.default, (there, 1), (self._share, 1), there)
        return self._mask

    def _operand(self, operand: Node, node: Node) -> Node:
        if isinstance(value(operand), (int, torch.SymInt)):
            return operand
        root = self._rows.members.get(operand)
        if root in self._kept:
            return self._local[root]
        if operand not in self._rows.members and rowwise.is_same_on_all_rows(operand, node):
            return operand if value(operand).dim() <= 2 else self._vector(operand)
        if operand not in self._sliced:
            blocks = (self._ranks, self._share, value(operand).shape[-1])
            padded = self._pad(self._matrix(operand))
            stacked = self._emit(aten.reshape.default, (padded, list(blocks)), blocks, operand)
            self._sliced[operand] = self._emit(aten.select.int, (stacked, 0, self._rank), self._share, operand)
            self._sliced[operand].meta[ROWS_OF] = operand, self._rows.group
        return self._sliced[operand]

    def _vector(self, operand: Node) -> Node:
        size = value(operand).shape[-1]
        return self._emit(aten.reshape.default, (operand, [size]), (size,), operand)

    def _matrix(self, node: Node, dense: bool = False) -> Node:
        """[rows, last] of a tensor with rows; what was a matrix before views and copies is taken from there.

        dense  collectives read memory as it is
        """
        found, source = None, node
        while True:
            if value(source).dim() == 2 and (not dense or is_contiguous(source)):
                found = source
            if not dense or not keeps_last(source) or value(source.args[0]).dim() < 2:
                break
            source = source.args[0]
        if found is not None:
            return found
        if dense and not is_contiguous(node):
            like = value(node).shape
            node = self._emit(aten.clone.default, (node,), like, node, {"memory_format": torch.contiguous_format})
        if value(node).dim() == 2:
            return node
        return self._emit(aten.reshape.default, (node, [self._count, value(node).shape[-1]]), self._count, node)

    def _pad(self, matrix: Node) -> Node:
        """Zeros below, so that every rank has equally many rows."""
        if self._even:
            return matrix
        missing = self._sizes.subtract(self._padded, self._count)
        return self._emit(aten.constant_pad_nd.default, (matrix, [0, 0, 0, missing], 0), self._padded, matrix)

    # -- all rows --------------------------------------------------------------------------------------------------------

    def _whole(self, node: Node) -> Node:
        """All rows of a member that is sharded."""
        root = self._rows.members[node]
        like = root if root.meta.get("nn_module_stack") else None  # else it is told by what reads it
        if root not in self._gathered:
            local = self._local[root]
            bits = value(local).dtype
            if bits in FP8:  # as bytes, which every backend can send
                local = self._emit(aten.view.dtype, (local, torch.uint8), self._share, local, like=like, dtype=torch.uint8)
            gather = self._emit(ALL_GATHER, (local, self._ranks, self._rows.group), self._padded, local, like=like)
            found = self._emit(WAIT, (gather,), self._padded, local, like=like)
            if bits in FP8:
                found = local = self._emit(aten.view.dtype, (found, bits), self._padded, found, like=like, dtype=bits)
            if not self._even:
                found = self._emit(aten.slice.Tensor, (found, 0, 0, self._count), self._count, local, like=like)
            self._gathered[root] = found
        if value(node).dim() == 2:
            return self._gathered[root]
        if root not in self._shaped:
            shape = [self._sizes.of(size) for size in value(root).shape]
            source = self._gathered[root]
            self._shaped[root] = self._emit(aten.reshape.default, (source, shape), value(root).shape, source, like=like)
        return self._shaped[root]

    # -- nodes -----------------------------------------------------------------------------------------------------------

    def _emit(
        self,
        target: Callable,
        args: tuple,
        shape: Any,
        model: Node,
        kwargs: dict[str, Any] | None = None,
        like: Node | None = None,
        dtype: torch.dtype | None = None,
    ) -> Node:
        """A node whose value has this shape (or this many rows), and dtype (and last dimension) of what ``model`` has.

        like   where it comes from, if not from the node that is visited
        dtype  another one
        """
        node = emit(
            self._graph,
            target,
            args,
            kwargs,
            like=like or self._like or model,
            fake=torch.utils._pytree.tree_map(lambda tensor: _resized(tensor, shape, dtype), value(model)),
        )
        node.meta[SHARDED] = True
        if self._like is not None and TAG in self._like.meta:
            node.meta[TAG] = self._like.meta[TAG]  # a value of the forward may be gathered for the backward alone
        return node


def _resized(tensor: torch.Tensor, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor like this one: of that shape, or a matrix of that many rows."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape, tensor.shape[-1])
    return tensor.new_empty([number_or_value(size) for size in sizes], dtype=dtype)


def _over_last(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a reduction over the last dimension of a matrix."""
    if "dim" in kwargs:
        return args, {**kwargs, "dim": [-1]}
    return (args[0], [-1], *args[2:]), kwargs
