"""GEMMs in a graph, as far as the operations that join them with a collective can compute them.

M  rows     K  inner dimension     N  columns
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Graph

from tpfuse.comm import groups
from tpfuse.graph.context import GEMM_COMMS, NOT_ALIKE, Context
from tpfuse.graph.nodes import (
    ADD,
    SHARDED,
    WAIT,
    Node,
    arguments,
    aten,
    dtype,
    emit,
    erase_cone,
    is_before,
    is_call,
    is_sum_of_rows,
    keeps_last,
    plain_binary,
    same_shape,
    same_sizes,
    sole_user,
    statically_known_true,
    value,
    why_not_a_sum,
)
from tpfuse.graph.sizes import Sizes, number_or_value
from tpfuse.kernels import dispatch, matmul
from tpfuse.kernels.matmul_candidates import ALL_GATHER_MATMUL, NCCL, MatmulProblem

_MM, _ADDMM, _SCALED_MM = aten.mm.default, aten.addmm.default, aten._scaled_mm.default
PRODUCTS = (_MM, _ADDMM, _SCALED_MM)
MOST_JUDGED_ROWS = 1 << 16  # of a call whose row count varies


@dataclasses.dataclass(frozen=True)
class Product:
    """input [M, K] @ weight [K, N] [* scales] [+ bias [N]], in out_dtype (None: the input's)."""

    node: Node
    input: Node
    weight: Node
    bias: Node | None = None
    scales: tuple[Node, Node] | None = None
    out_dtype: torch.dtype | None = None


def product(node: Node) -> Product | None:
    """The product that a node computes; None: it is none, or one of a kind that the operations do not know."""
    if is_call(node, _MM) and len(node.args) == 2 and not node.kwargs:
        return Product(node, *node.args)
    if is_call(node, _ADDMM) and not node.kwargs:
        bias, input, weight = node.args
        fits = same_sizes(value(bias).shape, value(node).shape[1:]) and dtype(bias) is dtype(node)
        return Product(node, input, weight, bias) if fits else None
    if is_call(node, _SCALED_MM):
        return _scaled(node)
    return None


def _scaled(node: Node) -> Product | None:
    """Scales of one number each, or of each row and column; summed as exactly as the operations sum."""
    given = arguments(node)
    input, weight, scales = given["self"], given["mat2"], (given["scale_a"], given["scale_b"])
    out_dtype, bias = given.get("out_dtype"), given.get("bias")
    if given.get("scale_result") is not None or given.get("use_fast_accum") or out_dtype is None:
        return None
    rows, columns = value(node).shape
    one = all(value(scale).numel() == 1 for scale in scales)
    each = same_sizes(value(scales[0]).shape, (rows, 1)) and same_sizes(value(scales[1]).shape, (1, columns))
    if not (one or each) or (bias is not None and dtype(bias) is not out_dtype):
        return None
    return Product(node, input, weight, bias, scales, out_dtype)


def source_of_rows(node: Node) -> Node:
    """What a tensor was before views and copies that keep its last dimension, and thus its rows in their order."""
    while keeps_last(node):
        node = node.args[0]
    return node


def bring_before(nodes: list[Node], place: Node, gather: Node) -> bool:
    """Move what ``nodes`` are computed from in front of ``place``.

    False, and nothing moves: some of it depends on the gather, or must stay where it is.
    """
    late: dict[Node, None] = {}
    pending, seen = [*nodes], {*nodes}
    while pending:
        node = pending.pop()
        if node is gather:
            return False
        if is_before(node, gather):
            continue
        if not is_before(node, place):
            if not _movable(node):
                return False
            late[node] = None
        pending += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    for node in sorted(late, key=lambda each: each._sort_key):
        place.prepend(node)
    return True


def _movable(node: Node) -> bool:
    """Whether nobody can tell when the node is computed."""
    target = node.target
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or getattr(target, "namespace", "") not in ("aten", "prims") or target in PRODUCTS:
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


Judged: TypeAlias = tuple[Any, str, list[str]]  # what there is to join, why it is not joined, what would run it


def join(
    graph: Graph,
    context: Context,
    target: Callable,
    op: str,
    judge: Callable[[Graph, Node, Sizes, Context], Judged],
    rewrite: Callable[[Graph, Node, Any, Sizes], None],
) -> None:
    """Judge every collective of a kind, which the report calls ``op``, leave the decision, rewrite those that may be."""
    if not context.fusions[GEMM_COMMS].on:
        return
    sizes, left = Sizes(graph), dict[Node, str]()
    for node in [node for node in graph.nodes if is_call(node, target) and not is_sum_of_rows(node)]:
        if node._erased:
            continue
        found, left[node], kernels = judge(graph, node, sizes, context)
        if left[node]:
            continue
        context.decide("fused", node, fusion=GEMM_COMMS, op=op, group=str(node.args[-1]), kernel="/".join(kernels))
        context.rewrites += 1
        rewrite(graph, node, found, sizes)
    for node, reason in left.items():
        if reason and not node._erased:  # scales are gathered with the values that they are of
            context.decide("skipped", node, fusion=GEMM_COMMS, op=op, group=str(node.args[-1]), reason=reason)


def summed_products(reduction: Node, source: Node, context: Context) -> tuple[list[Product], str]:
    """The products that a reduction over ranks sums, ``source`` or what it adds up, and why they cannot be joined."""
    reason = why_not_a_sum(reduction, "joined with a GEMM")
    if reason or not context.ranks_alike:
        return [], reason or NOT_ALIKE
    addends = _addends(source)
    made = [each for each in map(product, addends) if each is not None]
    if len(made) < len(addends):
        other = next(node for node in addends if product(node) is None)
        return [], f"what it sums comes from {name_of(other)}, not from a GEMM"
    if not is_call(sole_user(reduction), WAIT):
        return [], "its result has other users than one wait"
    if not used_only_for(source, reduction.args[0]):
        return [], "the GEMM's result has other users"
    if any(each.bias is not None for each in made):
        return [], "the GEMM adds a bias on each rank, and the sum has all of them"
    if len(made) > 1 and any(each.scales for each in made):
        return [], "it sums GEMMs that scale FP8 values"
    return made, ""


def _addends(node: Node) -> list[Node]:
    """What a sum adds up that has no other use, views aside; the node itself if it is no such sum.

    A column-parallel layer's input gets its gradient from several GEMMs.
    """
    operands = plain_binary(node, ADD) or ()
    if len({*operands}) < 2 or not all(same_shape(each, node) and dtype(each) is dtype(node) for each in operands):
        return [node]
    found = []
    for each in operands:
        source = source_of_rows(each)
        if not used_only_for(source, each):
            return [node]
        found += _addends(source)
    return found


def more_products(made: Sequence[Product]) -> dict[str, list[Node]]:
    """Arguments of an operation for all products but the first."""
    rest = made[1:]
    return {"more_inputs": [p.input for p in rest], "more_weights": [p.weight for p in rest]} if rest else {}


def replace(graph: Graph, reduction: Node, result: Node, sizes: Sizes) -> None:
    """Put a matrix in the place of what a reduction gave, and drop that with what only it needed."""
    wait, partial, like = sole_user(reduction), reduction.args[0], value(reduction)
    if like.dim() != 2:
        with graph.inserting_before(reduction):
            shape = [sizes.of(size) for size in like.shape]
            result = emit(graph, aten.reshape.default, (result, shape), like=reduction, fake=like)
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(reduction)
    erase_cone(graph, partial)


def unfit_sizes(nodes: Iterable[Node], sizes: Sizes) -> str:
    """Why new nodes cannot be made of the shapes of these; "" if they can."""
    shapes = [size for node in nodes for size in value(node).shape]
    if any(statically_known_true(size == 0) for size in shapes):
        return "it is empty"
    return "" if all(map(sizes.known, shapes)) else "one of its sizes is no sum or product of input sizes"


def what_runs(op: str, made: Sequence[Product], group: str, context: Context) -> tuple[str, list[str]]:
    """(why not to join products and a collective, names of the kernels that do it over all row counts of the graph)"""
    device = value(made[0].node).device.type
    obstacle = dispatch.obstacle(group, device)
    if obstacle:
        return obstacle, []
    rows, widths = value(made[0].node).shape[0], tuple(value(each.weight).shape[1] for each in made)
    low, high = (rows, rows) if isinstance(rows, int) else (context.rows[0], min(MOST_JUDGED_ROWS, context.rows[1]))
    dtypes = (value(made[0].input).dtype, *(value(each.weight).dtype for each in made))
    inners = tuple(value(each.weight).shape[0] for each in made)
    if not all(isinstance(size, int) for size in (*inners, *widths)):
        return "its inner dimension varies", []
    if op == ALL_GATHER_MATMUL:
        problem = MatmulProblem(op, 0, widths, inners[0], dtypes, 0, made[0].out_dtype)
    else:
        problem = MatmulProblem(
            op, 0, widths[:1], sum(inners), dtypes, 0, made[0].out_dtype, None, inners if len(made) > 1 else ()
        )
    kernels = matmul.may_run(group, device, problem.with_rows(low, groups.size(group)), high)
    return "a GEMM and NCCL, one after the other, are chosen for these rows" if kernels == [NCCL] else "", kernels


def without_padding(node: Node) -> Node:
    """What a matrix was before ``enable_sp`` put rows of zeros below it.

    Nobody else's: what is recognised must not depend on numbers that may be others on another rank.
    """
    return node.args[0] if is_call(node, aten.constant_pad_nd.default) and node.meta.get(SHARDED) else node


def used_only_for(source: Node, end: Node) -> bool:
    """Whether all that is made of ``source`` is ``end``, by a chain of nodes of which each has one user."""
    while sole_user(end) is not None and end is not source:
        cut = parts(end)
        end = end.args[0] if cut is None else cut.source
    return end is source and sole_user(end) is not None


def name_of(node: Node) -> str:
    """How a report calls what computes a value."""
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else "an input"


@dataclasses.dataclass(frozen=True)
class Parts:
    """A tensor cut along one dimension, its parts put together along another: a collective over dimension 1 is spelled so.

    source  what was cut along dimension ``cut``, into ``count`` parts; they are put together along ``joined``
    """

    source: Node
    cut: int
    joined: int
    count: int

    @property
    def outer(self) -> Any:
        """How many sequences there are: with one, all rows are in the order that they were in."""
        return value(self.source).shape[0] if self.cut else value(self.source).shape[0] // self.count

    @property
    def keeps_order(self) -> bool:
        return statically_known_true(self.outer == 1)


def parts(node: Node) -> Parts | None:
    """What a node puts together, if that is all parts of a tensor with rows, equally large, in order and used only here."""
    if not is_call(node, aten.cat.default) or node.kwargs or value(node).dim() < 3:
        return None
    listed, joined = (*node.args, 0)[:2]
    split: Node = listed[0].args[0] if is_call(listed[0], operator.getitem) else None
    if not is_call(split, aten.split.Tensor):
        return None
    source, size, cut = (*split.args, 0)[:3]
    whole = statically_known_true(value(source).shape[cut] == number_or_value(size) * len(listed))
    in_order = all(is_call(part, operator.getitem) and part.args == (split, n) for n, part in enumerate(listed))
    alone = len(split.users) == len(listed) and all(sole_user(part) is node for part in listed)
    cut, joined = cut % value(node).dim(), joined % value(node).dim()
    return Parts(source, cut, joined, len(listed)) if whole and in_order and alone else None


def interchange(graph: Graph, matrix: Node, outer: Any, inner: Any, like: Node, sizes: Sizes) -> Node:
    """A matrix of [outer, inner, ...] rows as one of [inner, outer, ...] rows."""
    rows, columns = value(matrix).shape
    rest = (rows // (outer * inner), columns)

    def step(target: Any, argument: Any, *shape: Any) -> None:
        nonlocal matrix
        matrix = emit(graph, target, (matrix, argument), like=like, fake=value(matrix).new_empty(shape))

    step(aten.reshape.default, [*map(sizes.of, (outer, inner, *rest))], outer, inner, *rest)
    step(aten.permute.default, [1, 0, 2, 3], inner, outer, *rest)
    step(aten.reshape.default, [*map(sizes.of, (rows, columns))], rows, columns)
    return matrix
