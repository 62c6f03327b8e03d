"""What benchmarks of whole models share: graphs without their all-reduces, and letting go of what was compiled."""

from __future__ import annotations

import gc

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

import tpfuse
from tpfuse.graph.nodes import emit, is_collective
from tpfuse.ops.all_reduce import OP as ALL_REDUCE

MET_ELEMENTS = 64


class DropAllReduces(CustomGraphPass):
    """Takes the all-reduces and their waits out of a graph, and remembers of how many bytes each was, and what it left.

    meet  leave an all-reduce of a few elements in their places
    """

    def __init__(self, meet: bool = False) -> None:
        self.meet = meet
        self.messages: list[int] = []
        self.left: list[str] = []  # other collectives

    def __call__(self, graph: torch.fx.Graph) -> None:
        functional = torch.ops._c10d_functional
        for node in list(graph.nodes):
            if node.target not in (functional.all_reduce.default, functional.all_reduce_.default):
                continue
            partial = node.args[0]
            value = node.meta["val"]
            self.messages.append(value.numel() * value.dtype.itemsize)
            if self.meet:
                with graph.inserting_before(node):
                    flat = emit(graph, torch.ops.aten.reshape.default, (partial, [-1]), like=node)
                    few = emit(graph, torch.ops.aten.slice.Tensor, (flat, 0, 0, MET_ELEMENTS), like=node)
                    emit(graph, ALL_REDUCE, (few, node.args[2]), like=node)
            for user in list(node.users):
                if user.target is functional.wait_tensor.default:
                    user.replace_all_uses_with(partial)
                    graph.erase_node(user)
            node.replace_all_uses_with(partial)
            graph.erase_node(node)
        self.left += [str(node.target) for node in graph.nodes if is_collective(node)]
        graph.lint()

    def uuid(self) -> None:
        """Never cached: from a cached graph nothing would be counted."""
        return None


def let_go(*applied: torch.nn.Module) -> None:
    """CUDA graphs and compiled code of every model: they hold memory, and NCCL calls that keep the group from ending."""
    for model in applied:
        tpfuse.remove(model)
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
