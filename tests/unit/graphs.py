"""What the unit tests share: a world of ranks that do not exist, and functions compiled through the passes in it.

The fake group's own all-reduce does nothing, so a bias that slipped to the wrong side of a sum would go unseen. Here every
rank is taken to hold what this one holds: a sum over a group multiplies by its size, which is exact for powers of two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._guards import detect_fake_mode
from torch.distributed import distributed_c10d as c10d

from tpfuse.config import FusionConfig
from tpfuse.graph import pipeline
from tpfuse.graph.backend import TpfuseBackend
from tpfuse.ops.all_reduce_rms_norm import OP as FUSED
from tpfuse.report import Recorder, Report
from tpfuse.testing import fake_world, interpret_graphs

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


# -- the world ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def world(size: int = 2) -> Iterator[dist.ProcessGroup]:
    """A fake world whose ranks all hold the same tensors, without gradients; graphs are interpreted."""
    with fake_world(size) as group, interpret_graphs(), _equal_ranks(), torch.no_grad():
        yield group


@contextlib.contextmanager
def replaced(namespace: str, **kernels: Callable) -> Iterator[None]:
    """Operations of a namespace have other kernels on the CPU."""
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced, which is the point
            for op, kernel in kernels.items():
                library.impl(op, kernel, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def _equal_ranks() -> Iterator[None]:
    functional = replaced("_c10d_functional", all_reduce=_all_reduce, all_gather_into_tensor=_all_gather)
    with functional, replaced("c10d", allreduce_=_all_reduce_in_place):
        yield


def _all_reduce(x: torch.Tensor, kind: str, group: str) -> torch.Tensor:
    size = c10d._resolve_process_group(group).size()
    return x.contiguous() * size if kind == "sum" else x.clone(memory_format=torch.contiguous_format)


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return torch.cat([x] * size)


def _all_reduce_in_place(tensors: list[torch.Tensor], group: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
    for tensor in tensors:
        tensor.mul_(dist.ProcessGroup.unbox(group).size())
    done = torch.futures.Future()
    done.set_result(tensors)
    return tensors, torch._C._distributed_c10d._create_work_from_future(done).boxed()


def all_reduce(x: torch.Tensor, kind: str = "sum", group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """As a hand-written model spells it."""
    return funcol.all_reduce(x, kind, group or dist.group.WORLD)


def all_reduce_in_place(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's tensor parallelism spells it: on a value of its own."""
    dist.all_reduce(x)
    return x


# -- compiling ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """One function compiled and called."""

    outputs: Any
    graphs: list[torch.fx.GraphModule]
    report: Report

    @property
    def graph(self) -> torch.fx.GraphModule:
        assert len(self.graphs) == 1, f"{len(self.graphs)} graphs"
        return self.graphs[0]

    def calls(self, target: Callable) -> list[torch.fx.Node]:
        """Every call of an operation in all graphs."""
        return [n for g in self.graphs for n in g.graph.nodes if n.op == "call_function" and n.target is target]

    @property
    def fused_arguments(self) -> dict[str, Any]:
        """Arguments of the one fused call, by the operation's own names."""
        (node,) = self.calls(FUSED)
        return dict(zip([argument.name for argument in FUSED._schema.arguments], node.args, strict=False))

    @property
    def skipped(self) -> list[str]:
        """Why all-reduces were left."""
        return [s.reason for s in self.report.sites if s.op == "all_reduce" and s.outcome == "skipped"]


class Backend(TpfuseBackend):
    """Keeps the graphs that went to code generation, and the conditions on their symbols."""

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        loaded = FusionConfig.load(config)
        fusions = pipeline.resolve(loaded)
        super().__init__(fusions, Recorder(fusions), config=loaded, **kwargs)
        self.graphs: list[torch.fx.GraphModule] = []
        self.guards: list[list[str]] = []

    def _inner_compile(
        self, joints: list, module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        self.graphs.append(module)
        result = super()._inner_compile(joints, module, example_inputs, **kwargs)
        self.guards.append(_guards(example_inputs))
        return result


class PlainBackend:
    """Inductor's front end without tpfuse: the graphs that ``torch.compile`` alone would generate code for, interpreted."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.guards: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx

        with functorch_config.patch(enable_autograd_cache=False, bundled_autograd_cache=False):
            return compile_fx(module, example_inputs, inner_compile=self._keep)

    def _keep(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        self.graphs.append(module)
        self.guards.append(_guards(example_inputs))
        return lambda *args: module(*args[0]) if len(args) == 1 and isinstance(args[0], list) else module(*args)


def _guards(example_inputs: Sequence[Any]) -> list[str]:
    mode = detect_fake_mode(example_inputs)
    return [str(guard.expr) for guard in mode.shape_env.guards] if mode is not None and mode.shape_env else []


def compile_with_tpfuse(function: Callable, *inputs: Any, config: Any = None, dynamic: bool | None = None) -> Run:
    """Compile through the passes and call once."""
    backend = Backend(config)
    outputs = torch.compile(_fresh(function), backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    return Run(outputs, backend.graphs, backend.recorder.report())


def compile_plainly(function: Callable, *inputs: Any, dynamic: bool | None = None) -> tuple[Any, PlainBackend]:
    """Compile as torch.compile alone would, and call once."""
    backend = PlainBackend()
    return torch.compile(_fresh(function), backend=backend, dynamic=dynamic, fullgraph=True)(*inputs), backend


def _fresh(function: Callable) -> Callable:
    torch._dynamo.reset()  # every compilation stands alone: no recompile limit, no shapes remembered
    return function


def check(
    function: Callable,
    *inputs: Any,
    fused: int = 1,
    merged: int = 0,
    skipped: int = 0,
    exact: bool = True,
    config: Any = None,
    dynamic: bool | None = None,
) -> Run:
    """Compile, then hold the outcome of every all-reduce and every bit of the result against the eager function.

    exact  False: the spelling rounds its root in another way, so compare to two units in the last place
    """
    expected = function(*inputs)
    run = compile_with_tpfuse(function, *inputs, config=config, dynamic=dynamic)
    count = run.report.count
    found = (count("fuse_allreduce_rms"), count("fuse_allreduce_rms", "merged"), len(run.skipped))
    assert found == (fused, merged, skipped), f"(fused, merged, skipped) = {found}\n{run.report}\n{run.graph.code}"
    assert len(run.calls(FUSED)) == fused
    assert len(run.calls(ALL_REDUCE)) == skipped
    assert_same(run.outputs, expected, exact)
    return run


def assert_same(found: Any, expected: Any, exact: bool = True) -> None:
    """The same values, dtypes, shapes and strides."""
    found, expected = (torch.utils._pytree.tree_leaves(v) for v in (found, expected))
    assert len(found) == len(expected)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        b = b + 0 if isinstance(b, funcol.AsyncCollectiveTensor) else b
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"output {index}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        if exact:
            different = (a != b) & ~(a.isnan() & b.isnan())
            assert not different.any(), f"output {index}: {int(different.sum())} of {a.numel()} values differ"
        else:
            bound = 2 * torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)


# -- values ------------------------------------------------------------------------------------------------------------


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Normal random numbers; another seed for each tensor of a test."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)
