"""``verify``: a fault put into any operation, or by a pass, is found on every rank, where it is; and nothing else is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tests.gloo.test_training import D, Enter, Leave, Stack
from tests.unit.graphs import replaced
from tpfuse.errors import AgreementError, ConfigError, VerificationError
from tpfuse.graph import merge_all_reduces, raise_, shard_rows
from tpfuse.graph.verify import Verification
from tpfuse.models.families import build_sharded, family_config
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow
SHARDED = {"enable_sp": True}
JOINED = {**SHARDED, "fuse_gemm_comms": True}
REDUCED = {"fuse_allreduce_rms": False, "fuse_gemm_comms": True}
#: Operation -> a configuration that puts it into a graph, and where its second call stands.
WHERE: dict[str, tuple[dict, str]] = {
    "all_reduce_rms_norm": ({}, "blocks.1"),
    "all_reduce": ({"batch_invariant": True}, "last.0"),
    "matmul_reduce_scatter": (JOINED, "blocks.1"),
    "all_gather_matmul": (JOINED, "blocks.2"),
    "matmul_all_reduce": (REDUCED, "blocks.1"),
    "reduce_scatter_tensor": (SHARDED, "blocks.1"),
    "all_gather_into_tensor": (SHARDED, "blocks.2"),
}
ROWS = (1, 7, 8)


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Leave.apply(torch.relu(Enter.apply(x)))


class Model(nn.Module):
    """Blocks with norms, all-reduces that no norm follows, and two that meet in a sum."""

    def __init__(self) -> None:
        super().__init__()
        inner = Stack(dist.get_rank(), dist.get_world_size())
        self.blocks, self.norm, self.last = inner.blocks, inner.norm, nn.ModuleList([Last(), Last()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x + Leave.apply(torch.relu(x)) + Leave.apply(torch.tanh(x)))
        for last in self.last:
            x = last(x)
        return x


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(3))


# -- faults --------------------------------------------------------------------------------------------------------------


def _spoiled(results: object) -> object:
    """The results of an operation with one element wrong, by less than half of the largest."""
    listed = list(results) if isinstance(results, (list, tuple)) else [results]
    wrong = listed[0].clone()
    wrong.view(-1)[0] += 0.4 * wrong.abs().max()
    spoiled = [wrong, *listed[1:]]
    return type(results)(spoiled) if isinstance(results, (list, tuple)) else wrong


def _scatter(input: torch.Tensor, kind: str, ranks: int, group: str) -> torch.Tensor:
    total = input.clone()
    dist.all_reduce(total)
    return total.chunk(ranks)[dist.get_rank()].clone()


def _gather(input: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    parts = [torch.empty_like(input) for _ in range(ranks)]
    dist.all_gather(parts, input.contiguous())
    return torch.cat(parts)


def _runs(op: str) -> tuple[str, Callable]:
    """The namespace of an operation, and what computes it on the CPU."""
    collectives = {"reduce_scatter_tensor": _scatter, "all_gather_into_tensor": _gather}
    if op in collectives:
        return "_c10d_functional", collectives[op]
    return "tpfuse", importlib.import_module(f"tpfuse.ops.{op}")._run


@contextlib.contextmanager
def _fault(op: str, call: int = 1) -> Iterator[None]:
    """One call of an operation gives something wrong on rank 1."""
    (namespace, run), calls = _runs(op), []

    def faulty(*args: object, **kwargs: object) -> object:
        calls.append(op)
        results = run(*args, **kwargs)
        return _spoiled(results) if len(calls) == call + 1 and dist.get_rank() == 1 else results

    with replaced(namespace, **{op: faulty}):
        yield


@contextlib.contextmanager
def _patched(owner: object, name: str, put: Callable) -> Iterator[None]:
    """``owner.name`` made by ``put`` of what it was."""
    before = getattr(owner, name)
    setattr(owner, name, put(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _pass_faults() -> dict[str, tuple[dict, contextlib.AbstractContextManager]]:
    def epsilon(insert: Callable) -> Callable:
        return lambda graph, norm: insert(graph, dataclasses.replace(norm, eps=norm.eps + 1e-3))

    def placement(init: Callable) -> Callable:
        def wrong(self: shard_rows.Rewriter, *args: object) -> None:
            init(self, *args)
            self._rank = 1 - self._rank

        return wrong

    def merge(one: Callable) -> Callable:
        return lambda graph, context, terms: one(graph, context, [terms[0], terms[0]])

    return {
        "epsilon": ({}, _patched(raise_, "_insert", epsilon)),
        "placement": (SHARDED, _patched(shard_rows.Rewriter, "__init__", placement)),
        "merge": ({}, _patched(merge_all_reduces, "_one", merge)),
    }


# -- what happens --------------------------------------------------------------------------------------------------------


def _call(config: dict, fault: contextlib.AbstractContextManager | None = None) -> str:
    """The error of the first call of a model with a fault in it, "" if there is none."""
    x = _input(7)
    with torch.no_grad(), interpret_graphs(), fault or contextlib.nullcontext():
        model = tpfuse.apply(Model(), config, fullgraph=True, verify=1)
        try:
            model(x)
        except VerificationError as error:
            return str(error)
    return ""


def _faults() -> dict[str, str]:
    found = {op: _call(config, _fault(op)) for op, (config, _) in WHERE.items()}
    return found | {name: _call(config, fault) for name, (config, fault) in _pass_faults().items()}


def _steps() -> dict[str, object]:
    """Training: a fault in the forward, one in the backward, none, and forwards whose backwards come in another order."""
    rank, found = dist.get_rank(), dict[str, object]()

    def step(model: nn.Module, *shapes: tuple[int, ...]) -> None:
        results = [model(_input(*shape)).sum() for shape in shapes]
        for each in reversed(results):
            each.backward()

    for name, call, config in (
        ("matmul_reduce_scatter", 0, JOINED),  # of the forward
        ("matmul_reduce_scatter", 9, JOINED),  # three compared, three run, three as the backward reads them, and its own
    ):
        with interpret_graphs(), _fault(name, call):
            model = tpfuse.apply(Stack(rank, 2), config, fullgraph=True, verify=1)
            try:
                step(model, (7,))
            except VerificationError as error:
                found[f"{name} {call}"] = str(error)
    with interpret_graphs():
        for name, config in (("norms", {}), ("joined", JOINED)):
            plain, model = Stack(rank, 2), tpfuse.apply(Stack(rank, 2), config, fullgraph=True, verify=2)
            for each in (plain, model):
                step(each, (7,), (7,), (7,))
            pairs = zip(plain.parameters(), model.parameters(), strict=True)
            found[name] = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
            found[f"{name} notes"] = [note for note in tpfuse.explain(model).notes if note.startswith("verify")]
    return found


class Cached(nn.Module):
    """A model that writes into a buffer of its own, which it also reads, as into a static cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(dist.get_rank(), dist.get_world_size())
        self.register_buffer("cache", torch.zeros(32, D))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, self.inner(x))
        return self.inner(x + self.cache.mean(0))


def _cached() -> dict[str, object]:
    """Three calls that write to different places, compared and not."""
    models = {}
    with torch.no_grad(), interpret_graphs():
        for name in ("as it was", "verified"):
            model = models[name] = Cached()
            if name == "verified":
                tpfuse.apply(model, fullgraph=True, verify=1)
            results = [model(_input(4), torch.arange(start, start + 4)) for start in (0, 4, 2)]
            models[name] = torch.cat([*results, model.cache])
    return {"error": (models["verified"] - models["as it was"]).abs().max().item()}


def _llama() -> dict[str, object]:
    """A Llama without faults: nothing is raised, nothing is changed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = build_sharded(family_config("llama", num_hidden_layers=1), mesh, torch.float32)
    ids = {rows: torch.randint(3, 128, (1, rows), generator=torch.Generator().manual_seed(rows)) for rows in ROWS}
    found: dict[str, object] = {}
    with torch.no_grad(), interpret_graphs():
        expected = {rows: model(ids[rows], use_cache=False).logits for rows in ROWS}
        tpfuse.apply(model, JOINED, verify=1)
        found["error"] = max((model(ids[n], use_cache=False).logits - expected[n]).abs().max().item() for n in ROWS)
        found["notes"] = [note for note in tpfuse.explain(model).notes if note.startswith("verify")]
    return found


def _out_of_step() -> list[str]:
    """One rank has made a call more; ranks run other kernels; ranks ask for other things."""
    rank, found = dist.get_rank(), []
    with torch.no_grad(), interpret_graphs():
        model = tpfuse.apply(Stack(rank, 2), verify=2)
        model(_input(8))
        before = Verification._verify

        def late(self: Verification, *args: object) -> bool:
            self._calls += rank
            return before(self, *args)

        Verification._verify = late
        try:
            model(_input(8))
        except VerificationError as error:
            found.append(str(error))
        finally:
            Verification._verify = before
        told = lambda kernel: (f"blocks.0: all_reduce by {kernel} [8]",)  # noqa: E731
        from tpfuse.graph.shadow import Comparison
        from tpfuse.graph.verify import judge

        assert dist.group.WORLD is not None
        with pytest.raises(VerificationError) as raised:
            judge([dist.group.WORLD.group_name], [Comparison(*told("ab"[rank]), 0.5, 0.0)], alike=True)
        found.append(str(raised.value))
        with pytest.raises(AgreementError) as differ:
            tpfuse.apply(Stack(rank, 2), group=dist.group.WORLD, verify=1 + rank)
        found.append(str(differ.value))
    return found


def _everything(rank: int) -> dict[str, object]:
    parts = {"faults": _faults, "steps": _steps, "cached": _cached, "llama": _llama, "out of step": _out_of_step}
    return {name: part() for name, part in parts.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict]]:
    """What happened on both ranks: starting them is what costs."""
    return spawn(_everything, 2, timeout_s=400)


def test_every_fault_is_found(found):
    """The same words on every rank: place, operation, kernel, how much, and who saw it."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tpfuse::")]
    schemas = {name.removeprefix("tpfuse::"): str(torch._C._get_schema(name, "")) for name in names}
    collective = {name for name, schema in schemas.items() if "str group" in schema}
    assert collective and collective <= set(WHERE), "a collective operation that no test puts a fault into"
    first, second = (each["faults"] for each in found)
    assert first == second
    for op, (_, place) in WHERE.items():
        told = first[op]
        assert told.startswith("verify: rank 1: ") and f"{place}: {op}" in told.replace(".norm", ""), (op, told)
        assert "rank 0" not in told and "as rounding may" in told, (op, told)
        assert ("by reference" in told) == (not op.endswith("_tensor")), told
    assert "blocks.0: all_reduce_rms_norm" in first["epsilon"] and "rank 0:" in first["epsilon"], first["epsilon"]
    assert "rank 0:" in first["placement"] and "rank 1:" in first["placement"], first["placement"]
    assert "all_reduce" in first["merge"], first["merge"]


def test_training(found):
    for each in (both["steps"] for both in found):
        assert "blocks.0: matmul_reduce_scatter by reference" in each["matmul_reduce_scatter 0"], each
        assert "(backward)" in each["matmul_reduce_scatter 9"], each
        assert ": matmul_reduce_scatter by reference" in each["matmul_reduce_scatter 9"], each
        assert each["norms"] < 1e-4 and each["joined"] < 1e-4, each
        assert "training" in str(each["joined notes"]), each


def test_nothing_else_is_found(found):
    """All fusions, one row and several; graphs that write into their inputs, which are written once."""
    for each in found:
        told = str(each["llama"]["notes"])
        assert each["llama"]["error"] < 1e-5 and "comparisons" in told and " 0 comparisons" not in told, each["llama"]
        assert each["cached"]["error"] < 1e-5


def test_ranks_that_are_not_in_step(found):
    """Told on all of them, at once."""
    first, second = (each["out of step"] for each in found)
    assert first == second
    assert "make different calls" in first[0] and "call 1, not compared" in first[0] and "call 2, compared" in first[0]
    assert "rank 0: blocks.0: all_reduce by a [8]; rank 1: blocks.0: all_reduce by b [8]" in first[1]
    assert "differ in verify" in first[2]


@pytest.mark.parametrize("verify", [-1, 1.5, True, "2"])
def test_bad_values(verify):
    with pytest.raises(ConfigError, match="verify must be None or a whole number"):
        tpfuse.apply(nn.Linear(2, 2), verify=verify)
