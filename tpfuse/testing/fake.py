"""Many ranks in one process: a fake process group whose collectives return at once, and graphs run by an interpreter.

Enough to see what the passes do to a graph; numbers of a fake group mean nothing (each "sum" is this rank's part).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import make_boxed_func

from tpfuse.graph.backend import TpfuseBackend


@contextlib.contextmanager
def fake_world(world_size: int = 2, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """The default process group of a world that has only this rank in it; destroyed at the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


@contextlib.contextmanager
def interpret_graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """Applied models run their rewritten graphs node by node instead of through Inductor. Yields those graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def interpret(module: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module.forward)

    before, TpfuseBackend.codegen = TpfuseBackend.codegen, staticmethod(interpret)
    try:
        yield graphs
    finally:
        TpfuseBackend.codegen = before
        torch._dynamo.reset()
