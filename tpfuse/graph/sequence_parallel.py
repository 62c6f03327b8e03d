"""SHARD: an all-reduce becomes a reduce-scatter of rows; what is row-wise after it is computed on this rank's rows only.

    all_reduce -> row-wise ... -> GEMM      becomes      reduce_scatter -> row-wise ... -> all_gather -> GEMM

No norm or block is looked for: what is row-wise follows from each operation (``rows``), and where to gather is whatever
moves the fewest bytes (``placement``), which is never more than before. Rows are all dimensions but the last, flattened;
each rank has ceil(rows / ranks) of them (one more where their number varies), filled up with zeros that nobody reads. What
stays whole enters by the rows that are this rank's; a residual thus stays sharded from block to block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from tpfuse.graph import placement, repeated
from tpfuse.graph import rows as rowwise
from tpfuse.graph.context import NOT_ALIKE, SEQUENCE_PARALLEL, Context
from tpfuse.graph.nodes import (
    ALL_REDUCE,
    WAIT,
    Node,
    aten,
    dtype,
    is_call,
    is_contiguous,
    sole_user,
    statically_known_true,
    value,
    why_not_a_sum,
)
from tpfuse.graph.rows import Rows
from tpfuse.graph.shard_rows import Rewriter
from tpfuse.graph.sizes import Sizes

#: What the report says runs there.
KERNEL = "reduce_scatter, all_gather"
_LEAST_BYTES = 4  # of a row: a number per row that is narrower costs no less to gather, as scales before they are widened


def run(graph: Graph, context: Context) -> None:
    if not context.fusions[SEQUENCE_PARALLEL].on:
        return
    repeated.run(graph)
    families: list[list[Node]] = []
    sizes = Sizes(graph)
    for node in graph.nodes:
        if not is_call(node, ALL_REDUCE):
            continue
        reason = _unfit(node, context) or _too_few(node, context)
        if not reason and not sizes.known(rowwise.count(node)):
            reason = "its row count is no sum or product of input sizes"
        if reason:
            _decide(context, node, reason)
            continue
        family = next((f for f in families if _belongs(node, f[0])), None)
        if family is None:
            families.append(family := [])
        family.append(node)
    for family in families:
        _shard(graph, family, sizes, context)


def _shard(graph: Graph, family: list[Node], sizes: Sizes, context: Context) -> None:
    """All-reduces of one group and equally many rows: rewrite those for which it pays."""
    group = str(family[0].args[2])
    replicated, unlike = (known.get(group, set()) for known in (context.replicated, context.unlike))
    rows = rowwise.find(graph, family, group, replicated, unlike)
    kept = placement.sharded(_values(rows))
    for reduce in family:
        _decide(context, reduce, "" if reduce in kept else _why_not(reduce, rows))
    if kept:
        context.rewrites += 1
        Rewriter(graph, rows, kept, sizes).run()


def _values(rows: Rows) -> dict[Node, placement.Value]:
    """What placement has to know of each value among the members."""
    readers: dict[Node, dict[Node, None]] = {root: {} for root in rows.members.values()}
    whole: dict[Node, bool] = dict.fromkeys(readers, False)
    for node, root in rows.members.items():
        for user in node.users:
            if user in rows.sums:
                continue  # ranks add what their own rows come to, which is next to nothing
            reader = rows.members.get(user)
            if reader is None or is_call(user, ALL_REDUCE):
                whole[root] = True
            elif reader is not root:
                readers[root].setdefault(reader)
    return {
        root: placement.Value(
            row_bytes=_row_bytes(root),
            reduced=is_call(root, ALL_REDUCE),
            over_last=is_call(root, *rowwise.REDUCTIONS),
            readers=tuple(found),
            whole=whole[root],
        )
        for root, found in readers.items()
    }


def _row_bytes(node: Node) -> int | None:
    tensor = value(node)
    if not isinstance(tensor, torch.Tensor) or is_call(node, aten.expand.default):
        return None
    return max(_LEAST_BYTES, tensor.shape[-1] * tensor.element_size())


def _unfit(reduce: Node, context: Context) -> str:
    """What about the all-reduce itself forbids it."""
    reason = why_not_a_sum(reduce, "scattered")
    if reason:
        return reason
    if not context.ranks_alike:
        return NOT_ALIKE
    if not value(reduce).is_floating_point():
        return f"dtype {dtype(reduce)}"
    if value(reduce).dim() < 2 or not isinstance(value(reduce).shape[-1], int):
        return "it has no rows: " + ("one dimension" if value(reduce).dim() < 2 else "its last dimension varies")
    if not is_contiguous(reduce):
        return "it is not contiguous"
    if not is_call(sole_user(reduce), WAIT):
        return "its result has other users than one wait"
    return ""


def _too_few(reduce: Node, context: Context) -> str:
    """Whether its rows are too few, by what the configuration says."""
    count, fewest = rowwise.count(reduce), context.sp_min_rows or 1
    low, high = (count, count) if isinstance(count, int) else context.rows
    if high < fewest:
        told = f"{count} rows" if isinstance(count, int) else f"at most {high} rows"
        return f"{told}, fewer than sp_min_token_num={fewest}"
    if low < fewest:
        context.note(
            f"sp_min_token_num={fewest} is not applied to single calls where torch.compile has one graph for any number "
            "of rows: tpfuse.apply has one for fewer"
        )
    return ""


def _belongs(reduce: Node, other: Node) -> bool:
    same_group = reduce.args[2] == other.args[2]
    return same_group and statically_known_true(rowwise.count(reduce) == rowwise.count(other))


def _decide(context: Context, reduce: Node, reason: str) -> None:
    """Leave the decision about one all-reduce: sharded, if there is no reason against it."""
    outcome: Any = "skipped" if reason else "fused"
    kernel = "" if reason else KERNEL
    group = str(reduce.args[2])
    context.decide(outcome, reduce, fusion=SEQUENCE_PARALLEL, reason=reason, group=group, kernel=kernel)


def _why_not(reduce: Node, rows: Rows) -> str:
    """Why a reduce-scatter and what it would have to be followed by do not pay."""
    same = [node for node, root in rows.members.items() if root is reduce]
    users = [user for node in same for user in node.users if user not in same]
    blocked = ", ".join(dict.fromkeys(rows.blocked[user] for user in users if user in rows.blocked))
    if all(user in rows.blocked for user in users):
        return f"all rows are needed at once by {blocked}" if blocked else "nothing uses it"
    return "its rows are needed whole again too soon for a norm to be sharded, or too often"
