"""FUSE: all-reduce [+ bias] [* scale] [+ residual] -> RMSNorm becomes ``tpfuse::all_reduce_rms_norm``.

Both outputs of the operation are the values that the graph had: the norm and the sum it normalises. So post-norm order
(Gemma, GLM4), a residual that goes on and one that does not, and any number of further users are one and the same case.
"""

from __future__ import annotations

import math
import operator

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from tpfuse.graph import all_reduce_rms_norm_quantize_fp8 as quantised
from tpfuse.graph import chain as chains
from tpfuse.graph.chain import Chain
from tpfuse.graph.context import FUSION, NOT_ALIKE, Context
from tpfuse.graph.nodes import (
    ADD,
    ALL_REDUCE,
    CONVERT,
    COPIES,
    MUL,
    RECOMPUTE,
    TAG,
    VIEWS,
    WAIT,
    Node,
    aten,
    dtype,
    emit,
    erase_cone,
    erase_unused,
    is_before,
    is_call,
    is_collective,
    is_contiguous,
    is_node,
    is_sum_of_rows,
    is_tensor,
    latest,
    reapply,
    same_shape,
    unused_cone,
    value,
    why_not_a_sum,
)
from tpfuse.graph.products import bring_before
from tpfuse.graph.raise_ import ORIGINAL
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import BATCH_INVARIANT, DTYPES, Problem, Wish
from tpfuse.ops import rms_norm
from tpfuse.ops.all_reduce_rms_norm import NAME, OP


def run(graph: Graph, context: Context) -> None:
    reduces: dict[Node, str] = {}  # all-reduces that stay -> why
    norms: dict[Node, str] = {}
    for norm in list(graph.nodes) if context.fusions[FUSION].on else ():
        if not is_call(norm, rms_norm.OP):
            continue
        found = [(chain, *_judge(norm, chain, context)) for chain in chains.trace(norm.args[0])]
        chain, kernels = next(((chain, kernels) for chain, obstacle, kernels in found if not obstacle), (None, []))
        if chain is None:
            norms[norm] = found[0][1] if found else _unreached(norm)
            for blocked, obstacle, _ in found:
                reduces.setdefault(blocked.all_reduce, obstacle)
            continue
        group = str(chain.all_reduce.args[2])
        quantisation, kernels, reason = _quantised(norm, chain, kernels, context)
        if reason:
            context.decide("skipped", norm, fusion=FUSION, op=quantised.NAME, reason=reason)
        context.decide("fused", chain.all_reduce, fusion=FUSION, group=group, kernel="/".join(kernels))
        context.rewrites += 1
        _rewrite(graph, norm, chain, quantisation, context.wish)
    for node in [node for node in graph.nodes if is_call(node, ALL_REDUCE) and not is_sum_of_rows(node)]:
        reason, norm = (reduces[node], None) if node in reduces else _why_not(node, context)
        if norm is not None:
            norms[norm] = reason
        context.decide("skipped", node, fusion=FUSION, reason=reason, group=str(node.args[2]))
    for norm, reason in norms.items():
        context.decide("skipped", norm, fusion=FUSION, op="rms_norm", reason=reason)


def _judge(norm: Node, chain: Chain, context: Context) -> tuple[str, list[str]]:
    """Why this chain must not be fused, "" if it may; names of what would run it, over all row counts of the graph."""
    obstacle = _obstacle(norm, chain, context)
    if obstacle:
        return obstacle, []
    problem, most_rows = _problem(norm, chain, context)
    group, device = str(chain.all_reduce.args[2]), value(norm).device.type
    unfit = dispatch.cannot(group, device, problem, BATCH_INVARIANT) if context.batch_invariant else ""
    if unfit:
        return f"batch_invariant, and the kernel for that cannot do it: {unfit}", []
    kernels = dispatch.may_run(group, device, problem, most_rows, context.wish)
    if device != "cpu":
        context.note(dispatch.told(group, problem, kernels, context.wish))
    return "NCCL and the unfused norm are chosen for these rows" if kernels == ["nccl"] else "", kernels


def _quantised(
    norm: Node, chain: Chain, kernels: list[str], context: Context
) -> tuple[quantised.Quantised | None, list[str], str]:
    """How the operation quantises the norm, if it does; what runs it; why it does not, where the norm is quantised."""
    found = quantised.find(norm)
    if found is None:
        return None, kernels, ""
    group = str(chain.all_reduce.args[2])
    reason, names = quantised.judge(found, norm, *_problem(norm, chain, context), group, context)
    needed = [] if found.scale is None else [found.scale]
    if not reason and not bring_before(needed, _place(norm, chain), chain.all_reduce):
        reason = "its scale is computed from what is reduced"
    return (None, kernels, reason) if reason else (found, [name + quantised.TO_FP8 for name in names], "")


def _obstacle(norm: Node, chain: Chain, context: Context) -> str:
    """Why this chain must not be fused, whatever its size; empty if it may."""
    reduce, total = chain.all_reduce, chain.total
    device = value(norm).device.type
    general = _unfit_all_reduce(reduce)
    if general:
        return general
    if chain.shared or len(reduce.users) > 1:
        return "something else uses the all-reduced value before the residual is added"
    if not is_contiguous(total):
        return "the summed value is not contiguous"
    if not is_before(latest(_inputs(norm, chain)), _first_use(norm, chain)):
        return "an input of the norm is computed after the sum is used"
    if _overtakes(norm, chain):
        return "an input is computed after another collective, which the all-reduce would have to wait for"
    if device != "cpu" and not context.ranks_alike:  # there the operation is made of the model's own collectives
        return NOT_ALIKE
    return dispatch.obstacle(str(reduce.args[2]), device)


def _problem(norm: Node, chain: Chain, context: Context) -> tuple[Problem, int]:
    """The smallest call of the site, and the most rows of one."""
    total = value(chain.total)
    *leading, hidden = total.shape
    low, high = context.rows
    if all(isinstance(size, int) for size in leading):
        low = high = max(1, math.prod(leading))
    _, weight, _, _, normed_dtype, out_dtype = norm.args
    problem = Problem(
        op=NAME,
        rows=low,
        hidden=hidden if isinstance(hidden, int) else hidden.node.hint,  # of this call: it only says what may run
        dtype=total.dtype,
        weight_dtype=dtype(weight) if is_node(weight) else None,
        normed_dtype=normed_dtype,
        out_dtype=out_dtype,
        modifiers=chain.bias is not None or chain.scale is not None,
    )
    return problem, high


def _unfit_all_reduce(reduce: Node) -> str:
    """What about the all-reduce itself forbids every fusion of it."""
    reason = why_not_a_sum(reduce, "fused")
    return reason or ("" if dtype(reduce) in DTYPES else f"dtype {dtype(reduce)}")


def _unreached(norm: Node) -> str:
    """Why no chain ends in this norm."""
    source = norm.args[0]
    while is_call(source, *VIEWS, *COPIES):
        source = source.args[0]
    if is_call(source, operator.getitem) and is_call(source.args[0], OP, quantised.OP):
        return "its sum is fused with another norm"
    return "no all-reduce reaches this norm"


def _inputs(norm: Node, chain: Chain) -> list[Node]:
    """Every node that the fused operation (and the views of its input) will read."""
    found = [chain.all_reduce.args[0], norm.args[1], chain.residual, chain.bias, chain.scale]
    sizes = [size for view in chain.views for size in view.all_input_nodes[1:]]
    return [n for n in (*found, *sizes) if is_node(n)]


def _place(norm: Node, chain: Chain) -> Node:
    """The node before which the fused operation goes: the all-reduce itself, or what follows its last input."""
    last_input = latest(_inputs(norm, chain))
    return chain.all_reduce if is_before(last_input, chain.all_reduce) else last_input.next


def _overtakes(norm: Node, chain: Chain) -> bool:
    """Whether another collective stands between the all-reduce and where it would go.

    Ranks run collectives in the order of their graphs, and a rank whose graph differs (a hook that keeps a value) may not
    fuse here: the order must not depend on it.
    """
    place, node = _place(norm, chain), chain.all_reduce
    while is_before(node, place):
        node = node.next
        if node is not place and (is_collective(node) or is_call(node, OP, quantised.OP)):
            return True
    return False


def _first_use(norm: Node, chain: Chain) -> Node:
    """The earliest node that needs the sum or the norm; the norm's original nodes, which nothing uses now, aside."""
    unused = unused_cone(norm.meta[ORIGINAL])
    users = [u for u in (*chain.total.users, *norm.users) if u not in unused and u is not norm]
    return min(users, key=lambda n: n._sort_key, default=norm)


def _originals(norm: Node) -> set[Node]:
    """The nodes that the norm was raised from, without what its input and its weight are made of."""
    found, pending = set(), [norm.meta[ORIGINAL]]
    while pending:
        node = pending.pop()
        if node.op == "call_function" and node not in found and node not in norm.args[:2]:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _rewrite(graph: Graph, norm: Node, chain: Chain, found: quantised.Quantised | None, wish: Wish) -> None:
    _, weight, eps, offset, normed_dtype, out_dtype = norm.args
    number, tensor = (chain.scale, None) if isinstance(chain.scale, float) else (None, chain.scale)
    total, reduce = chain.total, chain.all_reduce
    originals = _originals(norm)
    for node in originals - erase_cone(graph, norm.meta[ORIGINAL]):
        if (
            TAG in node.meta and RECOMPUTE not in node.meta
        ):  # the backward reads it: it has the sum, and need not be given what follows from that
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    kept = found is None or quantised.prepare(graph, norm, found)
    with graph.inserting_before(_place(norm, chain)):
        source = reapply(graph, chain.views, reduce.args[0], like=reduce)
        modifiers = (chain.residual, chain.bias, number, tensor, offset, normed_dtype)
        arguments, wishes = (source, weight, reduce.args[2], eps, *modifiers), (wish.kernel, wish.flashinfer_bytes)
        if found is None:
            fused = emit(graph, OP, (*arguments, out_dtype, *wishes), like=reduce)
            normed = emit(graph, operator.getitem, (fused, 0), like=norm)
            summed = emit(graph, operator.getitem, (fused, 1), like=total)
        else:
            normed, summed = quantised.insert(graph, arguments, wishes, norm, total, found, kept)
    if kept:
        with graph.inserting_before(norm):
            normed = reapply(graph, chain.norm_views, normed, like=norm)
        norm.replace_all_uses_with(normed)
    graph.erase_node(norm)
    total.replace_all_uses_with(summed)
    if chain.norm_views:
        erase_unused(graph, chain.norm_views[-1])
    for link in (*chain.links, reduce):
        graph.erase_node(link)


def _why_not(reduce: Node, context: Context) -> tuple[str, Node | None]:
    """Why an all-reduce that no fusible chain starts from is left, and the RMSNorm that it nearly reached."""
    if not context.fusions[FUSION].on:
        return f"off: {context.fusions[FUSION].reason}", None
    general = _unfit_all_reduce(reduce)
    if general:
        return general, None
    paths: list[tuple[Node, ...]] = [(reduce,)]
    seen = {reduce}
    for path in paths:  # grows as it goes: breadth first
        node = path[-1]
        if node in context.look_alikes:
            name, reason = context.look_alikes[node]
            return f"reaches a {name} that is not fused: {reason}", None
        for user in node.users:
            if is_call(user, rms_norm.OP):
                return _blocker(path), user
            if user not in seen and is_call(user, WAIT, ADD, MUL, aten.div.Tensor, CONVERT, *VIEWS, *COPIES):
                seen.add(user)
                paths.append((*path, user))
    after = [user for path in paths for user in path[-1].users if user not in seen]
    names = list(dict.fromkeys(getattr(user.target, "__name__", user.target) for user in after if user.op != "output"))
    target = f"goes to {', '.join(map(str, names[:3]))}" if names else "is an output of the graph"
    return f"no norm follows: it {target}", None


def _blocker(path: tuple[Node, ...]) -> str:
    """What on the way from an all-reduce to an RMSNorm no chain allows for."""
    reduce = path[0]
    for node in path[1:]:
        if is_call(node, ADD) and (node.kwargs or len(node.args) != 2):
            return "the residual is added with a factor"
        if is_call(node, CONVERT) or dtype(node) is not dtype(reduce):
            return f"the value is {dtype(node)} when it reaches the norm, {dtype(reduce)} when it is reduced"
        if is_call(node, ADD, MUL) and any(is_tensor(a) and not same_shape(a, node) for a in node.args):
            return "it is broadcast, or what is added to it is"
        if any(is_call(node, kind) and node.args[0] is node.args[1] for kind in (ADD, MUL)):
            return "it is combined with itself"
    return "between it and the norm stand more operations than bias, scale, view and residual add"
