"""Rewritten graphs of all ranks, run side by side in one process: node by node, collectives by looking at every rank.

So numbers are those of different ranks with different inputs, without any process. That every node has the shape that the
graph says it has is held on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.unit.graphs import Backend
from tpfuse.graph.backend import TpfuseBackend
from tpfuse.ops.all_gather_matmul import OP as GATHERED
from tpfuse.ops.matmul import product
from tpfuse.ops.matmul_all_reduce import OP as REDUCED
from tpfuse.ops.matmul_reduce_scatter import OP as SCATTERED
from tpfuse.report import Report
from tpfuse.testing import fake_world

collectives = torch.ops._c10d_functional
ALL_REDUCE = collectives.all_reduce.default
REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
ALL_GATHER = collectives.all_gather_into_tensor.default


@dataclasses.dataclass
class Ranks:
    """One function compiled on every rank, and what it gave there."""

    graphs: list[torch.fx.GraphModule]
    outputs: list[list[torch.Tensor]]  # of each rank
    report: Report
    config: Any

    @property
    def nodes(self) -> list[torch.fx.Node]:
        return list(self.graphs[0].graph.nodes)

    @property
    def counts(self) -> tuple[int, int, int]:
        """(reduce-scatters, all-gathers, all-reduces) of a rank."""
        targets = [n.target for n in self.nodes]
        return targets.count(REDUCE_SCATTER), targets.count(ALL_GATHER), targets.count(ALL_REDUCE)

    @property
    def joined(self) -> tuple[int, int, int]:
        """(GEMM -> reduce-scatter, all-gather -> GEMM, GEMM -> all-reduce) of a rank."""
        targets = [n.target for n in self.nodes]
        return targets.count(SCATTERED), targets.count(GATHERED), targets.count(REDUCED)

    @property
    def left(self) -> list[str]:
        """Why all-reduces were not sharded."""
        return [s.reason for s in self.report.sites if s.fusion == "enable_sp" and s.outcome == "skipped"]


def run(
    function: Callable,
    inputs: Callable[[int], tuple],
    size: int,
    config: Any,
    dynamic: int | None = None,
    alike: bool = False,
) -> Ranks:
    """Compile and call ``function`` with ``inputs(rank)`` on each of ``size`` ranks.

    dynamic  a dimension of the first input that varies
    alike    no constant of the graph depends on the rank: the first one's is every rank's
    Outputs are those of the graph, flat.
    """
    calls: list[tuple[torch.fx.GraphModule, list[Any]]] = []
    for worlds in [range(size)] if alike else [[rank] for rank in range(size)]:
        with fake_world(size, worlds[0]), _keep(calls), torch.no_grad():
            backend = Backend(config)
            compiled = torch.compile(function, backend=backend, fullgraph=True)
            for rank in worlds:
                given = inputs(rank)
                if dynamic is not None:
                    torch._dynamo.mark_dynamic(given[0], dynamic)
                compiled(*given)
            assert len(backend.graphs) == 1
    outputs = interpret([module for module, _ in calls], [args for _, args in calls])
    return Ranks([module for module, _ in calls], outputs, backend.recorder.report(), config)


@contextlib.contextmanager
def _keep(calls: list[tuple[torch.fx.GraphModule, list[Any]]]) -> Iterator[None]:
    """Graphs are not run, only kept with their arguments; what they would return is made up."""

    def keep(module: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        def call(*args: Any) -> Any:
            flat = args[0] if len(args) == 1 and isinstance(args[0], list) else list(args)
            calls.append((module, list(flat)))
            return module(*flat)  # a fake group's collectives return something of the right shape

        return call

    before, TpfuseBackend.codegen = TpfuseBackend.codegen, staticmethod(keep)
    try:
        yield
    finally:
        TpfuseBackend.codegen = before
        torch._dynamo.reset()


def interpret(modules: list[torch.fx.GraphModule], arguments: list[list[Any]]) -> list[list[torch.Tensor]]:
    """Outputs of each rank."""
    graphs = [list(module.graph.nodes) for module in modules]
    assert all([n.target for n in nodes] == [n.target for n in graphs[0]] for nodes in graphs), "ranks differ"
    values: list[dict[torch.fx.Node, Any]] = [{} for _ in modules]
    inputs = [iter(args) for args in arguments]
    for nodes in zip(*graphs, strict=True):
        first = nodes[0]
        if first.op == "output":
            return [torch.fx.map_arg(list(n.args[0]), env.__getitem__) for n, env in zip(nodes, values, strict=True)]
        args = [torch.fx.map_arg(n.args, env.__getitem__) for n, env in zip(nodes, values, strict=True)]
        kwargs = [torch.fx.map_arg(n.kwargs, env.__getitem__) for n, env in zip(nodes, values, strict=True)]
        if first.op == "placeholder":
            results = [next(given) for given in inputs]
        elif first.op == "get_attr":
            results = [getattr(module, str(n.target)) for module, n in zip(modules, nodes, strict=True)]
        elif getattr(first.target, "namespace", "") == "_c10d_functional":
            results = _collective(first.target, args)
        elif first.target in _JOINED:
            results = _JOINED[first.target](args, kwargs)
        else:
            results = [n.target(*a, **k) for n, a, k in zip(nodes, args, kwargs, strict=True)]
        for node, result, env in zip(nodes, results, values, strict=True):
            env[node] = result
            _hold_shape(node, result)
    raise AssertionError("a graph without an output")


def _collective(target: Any, args: list[Any]) -> list[Any]:
    inputs = [a[0] for a in args]
    if target is collectives.wait_tensor.default:
        return inputs
    assert all(x.is_contiguous() for x in inputs), "collectives read memory as it is"
    if target is ALL_GATHER:
        return [torch.cat(inputs) for _ in inputs]
    assert args[0][1] == "sum"
    total = torch.stack(inputs).sum(0)
    if target is ALL_REDUCE:
        return [total.clone() for _ in inputs]
    assert target is REDUCE_SCATTER, target
    assert total.shape[0] % len(inputs) == 0
    return list(total.chunk(len(inputs)))


def _total(args: list[Any], kwargs: list[Any]) -> torch.Tensor:
    """GEMMs, one or several of each rank, and their sum over ranks."""
    total = torch.stack([product(a[0], a[1], a[4], a[5], a[6]) for a in args]).sum(0)
    for more in kwargs:
        for input, weight in zip(more.get("more_inputs", ()), more.get("more_weights", ()), strict=True):
            total = total + input @ weight
    return total


def _scattered(args: list[Any], kwargs: list[Any]) -> list[torch.Tensor]:
    """Rows of a sum: as many for each rank as the call says."""
    total = _total(args, kwargs)
    share = args[0][8]
    padded = total.new_zeros(share * len(args), total.shape[1])
    padded[: total.shape[0]] = total
    assert all(a[3] is None and a[7] is None and a[8] == share for a in args) and padded.shape[0] >= total.shape[0]
    return list(padded.chunk(len(args)))


def _gathered(args: list[Any], kwargs: list[Any]) -> list[list[torch.Tensor]]:
    """GEMMs of all ranks' rows."""
    rows = args[0][3]
    whole = torch.cat([a[0] for a in args])[:rows]
    assert whole.shape[0] == rows and all(a[5] is None and not a[6] for a in args)
    results = []
    for a in args:
        products = [product(whole, weight, out_dtype=a[7]) for weight in a[1]]
        added = [p if bias is None else p + bias for p, bias in zip(products, a[4] or [None] * len(products), strict=True)]
        results.append([*added, whole] if a[8] else added)
    return results


def _reduced(args: list[Any], kwargs: list[Any]) -> list[torch.Tensor]:
    total = _total(args, kwargs)
    return [total.clone() for _ in args]


_JOINED = {SCATTERED: _scattered, GATHERED: _gathered, REDUCED: _reduced}


def _hold_shape(node: torch.fx.Node, result: Any) -> None:
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor):
        _hold_shape_of(expected, result, node)
    elif isinstance(expected, list):
        for fake, tensor in zip(expected, result, strict=True):
            _hold_shape_of(fake, tensor, node)
    elif isinstance(expected, torch.SymInt):
        assert result == expected.node.hint, node


def _hold_shape_of(fake: torch.Tensor, result: torch.Tensor, node: torch.fx.Node) -> None:
    sizes = [size if isinstance(size, int) else size.node.hint for size in fake.shape]
    assert list(result.shape) == sizes and result.dtype == fake.dtype, f"{node}: {result.shape}, not {sizes}"
