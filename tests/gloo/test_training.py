"""Training steps of applied models on CPU ranks: the gradients of the model as it was, collectives of both passes fused.

T  tokens     D  hidden size     H  intermediate size
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpfuse
from tests.gloo import test_gemm_comms as titan
from tpfuse.models.families import build_sharded, family_config
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow

D, H, LAYERS, VOCABULARY = 16, 24, 3, 12
LIMIT = 1e-5
NORMS = {"fuse_allreduce_rms": True}
SHARDED = {"enable_sp": True}
JOINED = {**SHARDED, "fuse_gemm_comms": True}
COLLECTIVES = ("_c10d_functional", "tpfuse")

Gradients = dict[str, torch.Tensor]


def _far(found: Gradients, expected: Gradients) -> float:
    """The largest relative error of a gradient."""
    assert found.keys() == expected.keys()
    return max(((found[name] - g).norm() / g.norm().clamp(min=1e-20)).item() for name, g in expected.items())


def _gradients(model: nn.Module) -> Gradients:
    """This rank's parts of them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


def _counts(graphs: list[torch.fx.GraphModule]) -> list[dict[str, int]]:
    """Collectives of each graph, by name."""
    targets = [[n.target for n in graph.graph.nodes if n.op == "call_function"] for graph in graphs]
    ours = [[t for t in each if getattr(t, "namespace", "") in COLLECTIVES and "wait" not in str(t)] for each in targets]
    return [dict(collections.Counter(t._schema.name.partition("::")[2] for t in each)) for each in ours]


# -- written by hand ---------------------------------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """Into a column-parallel layer: the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return funcol.all_reduce(gradient.contiguous(), "sum", dist.group.WORLD)


class Leave(torch.autograd.Function):
    """Out of a row-parallel layer: the ranks' results are added up."""

    @staticmethod
    def forward(ctx, x):
        return funcol.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Block(nn.Module):
    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator) / shape[0] ** 0.5  # noqa: E731
        up, gate, down = draw(D, H), draw(D, H), draw(H, D)
        self.up, self.gate = (nn.Parameter(w.chunk(ranks, 1)[rank].contiguous()) for w in (up, gate))
        self.down, self.bias = nn.Parameter(down.chunk(ranks)[rank].contiguous()), nn.Parameter(draw(D))
        self.norm, self.sharded = nn.RMSNorm(D, eps=1e-5), ranks > 1
        self.norm.weight.data = 1 + draw(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        a, b = (Enter.apply(n), Enter.apply(n)) if self.sharded else (n, n)
        y = (nn.functional.silu(a @ self.gate) * (b @ self.up)) @ self.down
        return x + ((Leave.apply(y) if self.sharded else y) + self.bias)


class Stack(nn.Module):
    """checkpointed  activations are computed again in the backward"""

    def __init__(self, rank: int = 0, ranks: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rank, ranks, seed) for seed in range(LAYERS))
        self.norm, self.checkpointed = nn.RMSNorm(D, eps=1e-5), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.norm(x)


def _step(model: nn.Module, shape: tuple[int, ...]) -> Gradients:
    x, toward = (torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    x.requires_grad_()
    (model(x) * toward).sum().backward()
    return {**_gradients(model), "x": x.grad}


def _stack(rank: int, config: dict[str, bool], shape: tuple[int, ...], checkpointed: bool) -> dict[str, object]:
    ranks = dist.get_world_size()
    whole = _step(Stack(), shape)
    parts = {"up": 1, "gate": 1, "down": 0}  # dimension along which a parameter is cut
    cut = lambda name, g: g.chunk(ranks, parts[name])[rank] if name in parts else g  # noqa: E731
    expected = {name: cut(name.rpartition(".")[2], g) for name, g in whole.items()}
    with interpret_graphs() as graphs:
        model = tpfuse.apply(Stack(rank, ranks, checkpointed), config, strict=True, fullgraph=True)
        return {"error": _far(_step(model, shape), expected), "counts": _counts(graphs)}


def _stacks(rank: int) -> dict[str, dict[str, object]]:
    return {
        "norms": _stack(rank, NORMS, (3, 5), False),
        "norms, checkpointed": _stack(rank, NORMS, (3, 5), True),
        "sharded": _stack(rank, SHARDED, (3, 5), False),
        "sharded, uneven": _stack(rank, SHARDED, (8,), False),
        "joined": _stack(rank, JOINED, (3, 5), False),
        "joined, checkpointed": _stack(rank, JOINED, (7,), True),
    }


def _lengths(rank: int, config: dict[str, bool]) -> float:
    """Steps of several lengths, with fewer rows than ranks among them, of one graph for all but one row."""
    model = tpfuse.apply(Stack(rank, dist.get_world_size()), config, strict=True, fullgraph=True)
    parts = {"up": 1, "gate": 1, "down": 0}
    far = []
    with interpret_graphs():
        for shape in ((8,), (5,), (1,), (2,), (11,)):
            model.zero_grad()
            whole = _step(Stack(), shape)
            cut = {
                k: g.chunk(dist.get_world_size(), parts[n])[rank] if (n := k.rpartition(".")[2]) in parts else g
                for k, g in whole.items()
            }
            far.append(_far(_step(model, shape), cut))
    return max(far)


class Vocabulary(nn.Module):
    """An embedding whose rows are cut. Ids of others are masked by a product, and the gradient by the same mask.

    told  where this rank's part starts: by a "number", which is a constant of the graph, or by a "buffer"
    """

    def __init__(self, rank: int, ranks: int, told: str) -> None:
        super().__init__()
        table = torch.randn(VOCABULARY, D, generator=torch.Generator().manual_seed(7))
        self.weight, self.rows = nn.Parameter(table.chunk(ranks)[rank].contiguous()), VOCABULARY // ranks
        self.start: int | torch.Tensor = self.rows * rank
        if told == "buffer":
            del self.start
            self.register_buffer("start", torch.tensor(self.rows * rank))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mine = (ids >= self.start) & (ids < self.start + self.rows)
        rows = nn.functional.embedding((ids - self.start) * mine, self.weight)
        return Leave.apply(rows * mine.unsqueeze(-1).to(rows.dtype))


class Experts(nn.Module):
    """Each rank computes the rows whose expert is its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.blocks, self.rank, self.ranks = nn.ModuleList(Block(rank, ranks, seed) for seed in range(2)), rank, ranks

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        mine = (expert % self.ranks == self.rank).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            n = Enter.apply(block.norm(x)) * mine
            x = x + Leave.apply((nn.functional.silu(n @ block.gate) * (n @ block.up)) @ block.down)
        return x


def _constants(rank: int) -> dict[str, float]:
    ranks = dist.get_world_size()
    draw = lambda seed: torch.randn(3, 5, D, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    ids = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(5))

    def language_model(told: str) -> tuple[nn.Module, tuple]:
        return nn.Sequential(Vocabulary(rank, ranks, told), Stack(rank, ranks)), (ids,)

    cases = {
        "number": lambda: language_model("number"),
        "buffer": lambda: language_model("buffer"),
        "experts": lambda: (Experts(rank, ranks), (draw(1), ids)),
    }
    far = {}
    for name, make in cases.items():
        found = []
        for apply in (lambda model: model, lambda model: tpfuse.apply(model, SHARDED, strict=True, fullgraph=True)):
            model, given = make()
            with interpret_graphs():
                (apply(model)(*given) * draw(2)).sum().backward()
            found.append(_gradients(model))
        far[name] = _far(found[1], found[0])
    return far


def test_constants_that_differ_between_ranks():
    """A mask that a rank makes from its own part of the vocabulary or experts is not taken for everybody's."""
    for found in spawn(_constants, 2, timeout_s=150):
        assert max(found.values()) < LIMIT, found


def test_lengths_that_vary():
    assert max(spawn(_lengths, 2, JOINED, timeout_s=150)) < LIMIT


def test_by_hand():
    """Norms in the forward's all-reduces; two gradients a block added up at once; a norm's weight gets one vector of sums.

    What is computed again in the backward is what activation checkpointing has it compute.
    """
    for found in spawn(_stacks, 3, timeout_s=200):
        assert max(each["error"] for each in found.values()) < LIMIT, found
        counts = {name: each["counts"] for name, each in found.items()}
        fused, reduced = {"all_reduce_rms_norm": LAYERS}, {"all_reduce": LAYERS}
        assert counts["norms"] == [fused, reduced]
        assert counts["norms, checkpointed"] == [fused, {**fused, **reduced}]
        rows = {"reduce_scatter_tensor": LAYERS, "all_gather_into_tensor": LAYERS}
        assert counts["sharded"][0] == counts["sharded, uneven"][0] == rows
        for name in ("sharded", "sharded, uneven"):
            assert {k: n for k, n in counts[name][1].items() if k != "all_reduce"} == rows, counts[name]
        forward, backward = counts["joined"]
        assert forward["matmul_reduce_scatter"] == backward["matmul_reduce_scatter"] == LAYERS, counts
        assert forward["all_gather_matmul"] == LAYERS - 1 == backward["all_gather_matmul"], counts


def _frozen(rank: int) -> dict[str, object]:
    model = tpfuse.apply(Stack(rank, dist.get_world_size()), SHARDED, fullgraph=True)
    with interpret_graphs() as graphs:
        with torch.no_grad():
            model(torch.ones(8, D))
        if rank:
            model.blocks[1].norm.weight.requires_grad_(False)
        _step(model, (8,))
        return {"counts": _counts(graphs), "report": str(tpfuse.explain(model))}


def test_weights_frozen_on_one_rank():
    """Graphs of inference are alike, those of training are not: there, no collective is changed."""
    for found in spawn(_frozen, 2, timeout_s=60):
        inference, forward, _ = found["counts"]
        assert inference["reduce_scatter_tensor"] == LAYERS and "reduce_scatter_tensor" not in forward, found
        assert "ranks have different graphs" in found["report"], found


# -- models of others --------------------------------------------------------------------------------------------------


def _compare(model: nn.Module, step: Callable[[], object], config: dict[str, bool]) -> dict[str, object]:
    """A step of the model as it is, and one of it applied."""
    step()
    expected = _gradients(model)
    model.zero_grad()
    with interpret_graphs() as graphs:
        tpfuse.apply(model, config, strict=True, fullgraph=True)
        step()
        report = tpfuse.explain(model)
        return {
            "error": _far(_gradients(model), expected),
            "counts": _counts(graphs),
            "left": report.count("enable_sp", "skipped"),
            "table": str(report),
        }


def _families(rank: int, names: tuple[str, ...], alone: bool = False) -> dict[str, dict[str, object]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {}
    for name in names:
        sizes = family_config(name, num_hidden_layers=1)
        sizes._experts_implementation = "batched_mm"  # whose backward torch can compile
        model = build_sharded(sizes, mesh, torch.float32)
        if alone:
            model.model.layers[0].mlp.gate.weight.data += 0.01 * rank
        ids = torch.randint(3, 128, (3, 5), generator=torch.Generator().manual_seed(1))
        toward = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(2))
        step = lambda m=model, i=ids, t=toward: (m(i, use_cache=False).logits * t).sum().backward()  # noqa: E731
        found[name] = _compare(model, step, JOINED)
    return found


def test_hugging_face():
    """Every all-reduce of rows sharded, in both directions; Qwen3 and Gemma3 with hooks on norms of heads.

    All families: benchmarks/sequence_parallel.py.
    """
    names = ("llama", "qwen3", "gemma3", "mixtral")
    for found in spawn(_families, 2, names, timeout_s=280):
        for name, each in found.items():
            assert each["error"] < LIMIT, (name, each)
            forward, backward = each["counts"]
            assert forward.get("matmul_reduce_scatter", 0) >= 1 and "all_reduce" not in forward, (name, each)
            assert backward["matmul_reduce_scatter"] >= 1 and backward["all_gather_matmul"] >= 1, (name, each)


def test_weights_that_only_seem_to_be_replicated():
    """A router whose weights differ between ranks: what its GEMM gives is not taken for the same on all of them."""
    for found in spawn(_families, 2, ("mixtral",), True, timeout_s=100):
        each = found["mixtral"]
        assert each["error"] < LIMIT and each["counts"][1]["matmul_reduce_scatter"] == 1, each
        assert "all_gather_matmul" not in each["counts"][1] and "may differ between ranks" in each["table"], each


def _titan(rank: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = titan._sharded(titan.Model())
    ids = torch.randint(0, titan.V, (3, 8), generator=torch.Generator().manual_seed(1))
    toward = torch.randn(3, 8, titan.V, generator=torch.Generator().manual_seed(2))
    return _compare(model, lambda: (model(ids) * toward).sum().backward(), {"fuse_gemm_comms": True})


def test_sequence_parallel_by_dtensor():
    for found in spawn(_titan, 2, timeout_s=100):
        assert found["error"] < LIMIT
        forward, backward = found["counts"]
        assert (forward["matmul_reduce_scatter"], forward["all_gather_matmul"]) == (2, 3), found
        assert (backward["matmul_reduce_scatter"], backward["all_gather_matmul"]) == (3, 2), found
