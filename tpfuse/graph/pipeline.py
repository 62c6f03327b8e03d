"""The passes over one graph, in their order.

merge   first: two all-reduces that meet in a sum are one site
shard   before norms are looked for: it takes all-reduces that a fusion with a norm would, and norms by their parts
raise   before fusing: fusions only know canonical norms
fuse    takes canonical nodes, one pass per fusion
gemms   after sharding, which makes collectives for them; an all-reduce is left to a norm behind it
plain   after fusing: an all-reduce that no fusion took is still one
lower   what nobody took becomes what it was
name    what stands in the graph now, where the environment asks for it
order   last: pins the order of the collectives that there are now; in each half of a joint graph, once it is split
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from torch.fx import Graph, GraphModule

from tpfuse.config import FUSION_LEVELS, FusionConfig, Resolved
from tpfuse.errors import ConfigError
from tpfuse.graph import (
    act_mul_quantize_fp8,
    all_gather_matmul,
    all_reduce,
    all_reduce_rms_norm,
    annotate,
    dual_rms_norm,
    joint,
    lower,
    matmul_all_reduce,
    matmul_reduce_scatter,
    merge_all_reduces,
    order,
    qk_norm_rope,
    raise_,
    raise_act,
    raise_quantize,
    rms_norm_pad,
    rms_norm_quantize_fp8,
    rope_kvcache,
    sequence_parallel,
)
from tpfuse.graph.context import (
    ACT_PADDING,
    ACT_QUANT,
    DUAL_NORM,
    FUSION,
    GEMM_COMMS,
    NORM_QUANT,
    QK_NORM_ROPE,
    ROPE_KVCACHE,
    SEQUENCE_PARALLEL,
    Context,
)
from tpfuse.graph.nodes import ALL_GATHER, ALL_REDUCE, OTHER_ALL_REDUCES, REDUCE_SCATTER, is_call, value
from tpfuse.ops.all_reduce import OP as PLAIN_OP
from tpfuse.ops.all_reduce_rms_norm import OP as FUSED_OP
from tpfuse.ops.all_reduce_rms_norm_quantize_fp8 import OP as FP8_OP

PIPELINE: tuple[Callable[[Graph, Context], None], ...] = (
    merge_all_reduces.run,
    sequence_parallel.run,
    raise_.run,
    raise_act.run,
    raise_quantize.run,
    all_reduce_rms_norm.run,
    rms_norm_quantize_fp8.run,
    act_mul_quantize_fp8.run,
    rope_kvcache.run,
    qk_norm_rope.run,
    rms_norm_pad.run,
    dual_rms_norm.run,
    matmul_reduce_scatter.run,
    all_gather_matmul.run,
    matmul_all_reduce.run,
    all_reduce.run,
    lower.run,
    annotate.run,
    order.run,
)

#: Fusions that this version has a pass for, and the operation that each of them puts into a graph.
OPS = {
    FUSION: all_reduce_rms_norm.NAME,
    SEQUENCE_PARALLEL: "reduce_scatter_tensor",
    GEMM_COMMS: matmul_reduce_scatter.NAME,
    NORM_QUANT: rms_norm_quantize_fp8.NAME,
    ACT_QUANT: act_mul_quantize_fp8.NAME,
    QK_NORM_ROPE: qk_norm_rope.NAME,
    ROPE_KVCACHE: rope_kvcache.NAME,
    ACT_PADDING: rms_norm_pad.NAME,
    DUAL_NORM: dual_rms_norm.NAME,
}
#: Those that no level turns on, with the reason. The rotary ones: until decoding in CUDA graphs has been seen to be right.
BY_NAME_ONLY = dict.fromkeys(
    (SEQUENCE_PARALLEL, GEMM_COMMS, QK_NORM_ROPE, ROPE_KVCACHE), "only where it is asked for by name"
)

#: Those whose results depend on the batch, with the reason.
BATCH_DEPENDENT = {
    SEQUENCE_PARALLEL: "batch_invariant, and the order in which a row is summed depends on the rank that it falls to",
    GEMM_COMMS: "batch_invariant, and tilings of these GEMMs are chosen by the number of rows",
}


def unavailable() -> dict[str, str]:
    """Fusions that this version cannot do on any machine, with the reason."""
    return {name: "not in this version of tpfuse" for name in FUSION_LEVELS if name not in OPS}


def resolve(config: FusionConfig) -> dict[str, Resolved]:
    """What the configuration comes to in this version. Raises ConfigError: it cannot be honoured."""
    resolved = config.resolve(unavailable() | (BATCH_DEPENDENT if config.batch_invariant else {}), BY_NAME_ONLY)
    if config.batch_invariant and not resolved[FUSION].on:
        raise ConfigError(f"batch_invariant=True cannot be honoured without {FUSION}: {resolved[FUSION].reason}")
    return resolved


def group_names(graph: Graph, fusions: Mapping[str, Resolved]) -> list[str]:
    """Names of the process groups of the collectives in the graph that a fusion may rewrite, in order of first use."""
    places = {ALL_REDUCE: 2, FUSED_OP: 2, FP8_OP: 2, PLAIN_OP: 1}  # of the group among the arguments
    if fusions[GEMM_COMMS].on:
        places |= {REDUCE_SCATTER: 3, ALL_GATHER: 2}
    names = (node.args[places[node.target]] for node in graph.nodes if is_call(node, *places))
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def digest(graph: Graph) -> str:
    """Equal for graphs of the same operations, whatever constants and local sizes: what ranks must have in common."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    outputs = [len(node.all_input_nodes) for node in graph.nodes if node.op == "output"]
    return hashlib.sha256(repr((names, outputs)).encode()).hexdigest()[:16]


def on_cuda(graph: Graph) -> bool:
    """Whether the graph has collectives of CUDA tensors."""
    kinds = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, FUSED_OP, FP8_OP, PLAIN_OP)
    found = (node for node in graph.nodes if is_call(node, *kinds))
    return any(value(node.args[0]).device.type == "cuda" for node in found)


def run(module: GraphModule, context: Context) -> None:
    """Rewrite one graph in place and leave a decision for every all-reduce in it.

    A joint graph is not finished: torch splits it first.
    """
    graph = module.graph
    joint.tell_backward(graph)
    context.locate(graph)
    for node in graph.nodes:
        if is_call(node, *OTHER_ALL_REDUCES):
            reason = OTHER_ALL_REDUCES[node.target]
            context.decide("skipped", node, fusion=FUSION, reason=reason, group=str(node.args[-1]))
    for step in PIPELINE:
        step(graph, context)
    if joint.is_joint(graph):
        joint.keep_collectives(graph)
    if context.rewrites:
        graph.lint()
        module.recompile()
    context.publish()


def finish(module: GraphModule, backward: bool) -> None:
    """What is left to do with the forward or the backward that torch has made of a joint graph."""
    graph = module.graph
    if backward:
        joint.drop_copies(graph)
    order.pin(graph)
    graph.lint()
    module.recompile()
