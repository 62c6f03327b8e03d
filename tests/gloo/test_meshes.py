"""Tensor parallelism beside other kinds, on four CPU ranks: groups that are not the world, and meshes of two dimensions.

Graphs are run by an interpreter; one spawn runs all scenarios. Groups and models made anew are in test_lifecycle.py.
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpfuse
from tests.gloo.layers import Stack, largest_difference
from tpfuse.models.find_groups import find_groups
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow
FUSION = "fuse_allreduce_rms"
FP32, BF16, GRADIENTS = 1e-5, 0.06, 2e-6
MICROBATCHES, LAYERS, H = 3, 3, 32
#: Whether this torch can make a group whose ranks are not sorted; dist.new_group sorts them.
UNSORTED = "sort_ranks" in inspect.signature(c10d._new_group_with_tag).parameters
PAIRS, CROSSED = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


def _groups(ranks: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """This rank's group of several, its ranks in the order given; every rank makes all of them, in one order."""
    make = (lambda each: c10d._new_group_with_tag(list(each), sort_ranks=False)) if UNSORTED else dist.new_group
    made = [make(each) for each in ranks]
    return next(group for group, each in zip(made, ranks, strict=True) if dist.get_rank() in each)


def _fused(model: nn.Module) -> int:
    return tpfuse.explain(model).count(FUSION)


# -- groups ------------------------------------------------------------------------------------------------------------


def _pairs(rank: int) -> dict[str, object]:
    """The second pair does not even apply its model before the first is done, and the first then waits for the second."""
    pair, store = _groups(PAIRS), c10d._get_default_store()
    mine, other = f"pair {rank // 2}", f"pair {1 - rank // 2}"
    if rank >= 2:
        store.wait([other])
    model = tpfuse.apply(Stack(pair, layers=2, seed=rank // 2), strict=True)
    error = max(largest_difference(model, t) for t in ((3, 5, 7) if rank < 2 else (8, 8, 8)))
    dist.barrier(pair)
    store.set(mine, "done")
    store.wait([other])
    sites = [site for site in tpfuse.explain(model).sites if site.op == "all_reduce"]
    return {"error": error, "fused": _fused(model), "groups": {s.group for s in sites} == {pair.group_name}}


def _in_another_order(rank: int) -> dict[str, object]:
    """Ranks of a group count backwards, or have other numbers than in the world."""
    turned = _groups([(1, 0), (3, 2)])
    crossed = _groups(CROSSED)
    whole = _groups([(3, 1, 0, 2)])
    assert crossed.rank() == rank // 2
    assert not UNSORTED or (turned.rank(), whole.rank()) == (1 - rank % 2, (3, 1, 0, 2).index(rank))
    styles = {"functional": turned, "inplace": crossed, "view": whole}
    models = [Stack(group, layers=1, style=style) for style, group in styles.items()]
    errors = [largest_difference(tpfuse.apply(model, strict=True), 5) for model in models]
    return {"error": max(errors), "fused": {_fused(model) for model in models}}


class _Overlapping(nn.Module):
    """A stack over one group, then one over another that shares this rank; data-parallel sums on the way.

    Neither a mean over replicas that leaves the graph, nor a sum over two groups is a fusion's to take.
    """

    def __init__(self, first: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
        super().__init__()
        self.attention, self.mlp = Stack(first, layers=1), Stack(second, layers=1, seed=5)
        self.tp_group, self.data_group = first, second
        self.norm = nn.RMSNorm(96, eps=1e-6)

    def forward(self, x, y, residual, other):
        normed, residual, _ = self.attention(x, residual)
        load = residual.square().mean()
        dist.all_reduce(load, group=self.data_group)
        after, residual, _ = self.mlp(y, residual)
        one, two = other.clone(), other * 2
        dist.all_reduce(one, group=self.tp_group)
        dist.all_reduce(two, group=self.data_group)
        return normed, after, residual, load, self.norm(residual + (one + two))

    def inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Alike on all ranks but for the parts that groups add up."""
        x, residual = self.attention.inputs(tokens)
        y, _ = self.mlp.inputs(tokens, seed=2)
        return x, y, residual, torch.full((tokens, 96), 1.0 + dist.get_rank())

    def unsharded(self, tokens: int) -> tuple[torch.Tensor, ...]:
        normed, residual, _ = self.attention.unsharded(tokens)
        load = 2 * residual.square().mean()
        y, _ = self.mlp._full_inputs((tokens,), 2)
        _, residual = self.mlp.layers[0].unsharded(y, residual)
        ranks = [dist.get_process_group_ranks(group) for group in (self.tp_group, self.data_group)]
        sums = [sum(1.0 + rank for rank in each) * factor for each, factor in zip(ranks, (1, 2), strict=True)]
        return normed, self.mlp.layers[0].norm(residual), residual, load, self.norm(residual + sum(sums))


def _overlapping(rank: int) -> dict[str, object]:
    first, second = _groups(PAIRS), _groups(CROSSED)
    model = tpfuse.apply(_Overlapping(first, second), strict=True, fullgraph=True)
    errors = []
    with torch.no_grad():
        for tokens in (4, 7, 1):
            got, expected = model(*model.inputs(tokens)), model.unsharded(tokens)
            errors.append(max((g - e).abs().max().item() for g, e in zip(got, expected, strict=True)))
    sites = [site for site in tpfuse.explain(model).sites if site.op == "all_reduce"]
    outcomes = {(s.outcome, "first" if s.group == first.group_name else "second") for s in sites if "layers" in s.where}
    merged = [s for s in sites if s.outcome == "merged"]
    left = [s for s in sites if s.outcome == "skipped"]
    return {
        "error": max(errors),
        "in layers": outcomes == {("fused", "first"), ("fused", "second")},
        "merged": len(merged),
        "left": {site.group for site in left} == {first.group_name, second.group_name} and all(s.reason for s in left),
    }


def _draft_and_target(rank: int) -> dict[str, object]:
    """Two models over different groups, of other width, dtype and epsilon; one rank drops its draft before the others."""
    target = tpfuse.apply(Stack(_groups(PAIRS), hidden=96, layers=1, eps=1e-5))
    draft = tpfuse.apply(Stack(_groups(CROSSED), hidden=160, layers=1, eps=1e-6, dtype=torch.bfloat16, seed=3))
    wide, narrow = [], []
    for tokens in (4, 5, 2, 9):
        wide.append(largest_difference(target, tokens))
        narrow.append(largest_difference(draft, tokens))
    fused = _fused(target), _fused(draft)
    if rank == 0:
        del draft
        gc.collect()
    wide += [largest_difference(target, tokens) for tokens in (6, 1)]
    if rank != 0:
        del draft
        gc.collect()
    wide += [largest_difference(target, tokens) for tokens in (2, 11)]
    return {"error": max(wide), "draft": max(narrow), "fused": fused}


# -- a submodule only --------------------------------------------------------------------------------------------------


class _Vlm(nn.Module):
    """A tower that no fusion is for, and a language model."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 96))
        self.language_model = Stack(group, layers=1)

    def forward(self, image, x, residual):
        return self.language_model(x, residual + self.vision(image))


def _submodule(rank: int) -> dict[str, object]:
    torch.manual_seed(7)
    model, image = _Vlm(_groups(PAIRS)), torch.randn(5, 8)
    found: dict[str, object] = {}
    with torch.no_grad():
        arguments = image, *model.language_model.inputs(5)
        expected = [each.clone() for each in model(*arguments)]
        far = lambda got: max((g - e).abs().max().item() for g, e in zip(got, expected, strict=True))  # noqa: E731
        tpfuse.apply(model.language_model, strict=True)
        found["inner"] = far(model(*arguments))
        found["fused"] = _fused(model.language_model)
        tpfuse.remove(model.language_model)
        tpfuse.apply(model.language_model)
        found["outer"] = far(torch.compile(model, backend="aot_eager", fullgraph=True)(*arguments))
        found["told"] = "only inside another torch.compile" in str(tpfuse.explain(model.language_model))
        found["again"] = far(model(*arguments))
        found["fused again"] = _fused(model.language_model)
        found["plain"] = type(model._compiled_call_impl).__name__
    return found


# -- meshes ------------------------------------------------------------------------------------------------------------


class _Mlp(nn.Module):
    """What ``parallelize_module`` shards: norm, column-parallel, row-parallel, residual add."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, 64), nn.Linear(64, hidden)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class _Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _stack(mesh: DeviceMesh, layers: slice) -> tuple[_Layers, _Layers]:
    """(some layers of a stack, sharded over the mesh; all of them, whole)"""
    torch.manual_seed(11)
    whole = _Layers([*(_Mlp(H) for _ in range(LAYERS)), nn.RMSNorm(H, eps=1e-5)])
    part = _Layers(list(copy.deepcopy(whole).layers)[layers])
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    return parallelize_module(part, mesh, plan), whole


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, target)"""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, H, generator=generator), torch.randn(6, H, generator=generator)


def _loss(got: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((got - target) ** 2).mean()


def _gradient_error(model: _Layers, whole: list[nn.Module]) -> float:
    """The largest relative error of a gradient."""
    errors = []
    for layer, right in zip(model.layers, whole, strict=True):
        for name, parameter in layer.named_parameters():
            gradient, expected = parameter.grad, right.get_parameter(name).grad
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            errors.append(((gradient - expected).norm() / expected.norm()).item())
    return max(errors)


def _finds_only(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether what is found on the model is the mesh's group, by its ranks: torch takes equal meshes for one."""
    return [dist.get_process_group_ranks(group) for group in find_groups(model)] == [mesh.mesh.tolist()]


def _data_parallel(rank: int) -> dict[str, object]:
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other: two steps, averaged over replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, object] = {}
    for how in ("apply last", "apply first", "layers sharded"):
        model, whole = _stack(mesh["tp"], slice(None))
        if how == "apply first":
            tpfuse.apply(model)
        if how == "layers sharded":
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        if how != "apply first":
            tpfuse.apply(model)
        errors = []
        for step in range(2):
            _loss_of = lambda m, number: _loss(m(_batch(number)[0]), _batch(number)[1])  # noqa: E731
            _loss_of(model, 10 * step + mesh["dp"].get_local_rank()).backward()
            for replica in range(2):
                (_loss_of(whole, 10 * step + replica) / 2).backward()
            errors.append(_gradient_error(model, whole.layers))
            _descend(model, whole)
        found[how] = max(errors), _fused(model), _finds_only(model, mesh["tp"])
    return found


def _descend(*models: nn.Module) -> None:
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def _pipeline(rank: int) -> dict[str, object]:
    """Two stages of two ranks, several microbatches: inference, then two training steps. Each stage is applied."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = mesh["pp"].get_local_rank()
    layers = slice(0, 2) if stage == 0 else slice(2, None)
    model, whole = _stack(mesh["tp"], layers)
    tpfuse.apply(model)
    found: dict[str, object] = {"groups": _finds_only(model, mesh["tp"])}
    x, target = (torch.cat(each) for each in zip(*map(_batch, range(MICROBATCHES)), strict=True))
    given = (x,) if stage == 0 else ()

    def piped() -> PipelineStage:
        return PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())

    with torch.no_grad():
        got = ScheduleGPipe(piped(), MICROBATCHES).step(*given)
        found["error"] = (got - whole(x)).abs().max().item() if stage else 0.0
    found["fused"] = _fused(model)
    schedule, errors = ScheduleGPipe(piped(), MICROBATCHES, loss_fn=_loss), []
    for _ in range(2):
        schedule.step(*given, **({"target": target} if stage else {}))
        _loss(whole(x), target).backward()
        errors.append(_gradient_error(model, list(whole.layers)[layers]))
        _descend(model, whole)
    found["gradients"] = max(errors)
    return found


# -- all of them -------------------------------------------------------------------------------------------------------

SCENARIOS = {
    "pairs": _pairs,
    "in another order": _in_another_order,
    "overlapping": _overlapping,
    "draft and target": _draft_and_target,
    "submodule": _submodule,
    "data parallel": _data_parallel,
    "pipeline": _pipeline,
}


def _four_ranks(rank: int, names: tuple[str, ...]) -> dict[str, dict[str, object]]:
    found = {}
    with interpret_graphs():
        for name in names:
            start = time.monotonic()
            found[name] = SCENARIOS[name](rank)
            if rank == 0:
                print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    return found


@pytest.fixture(scope="module")
def four_ranks():
    return spawn(_four_ranks, 4, tuple(SCENARIOS), timeout_s=240)


@pytest.mark.parametrize("name", ["pairs", "in another order", "overlapping", "draft and target"])
def test_groups(four_ranks, name):
    """Numbers of the unsharded model, and nothing of one group in another's fusions."""
    for found in (each[name] for each in four_ranks):
        assert found.pop("error") < FP32
        assert found.pop("draft", 0.0) < BF16
        assert found in (
            {"fused": 2, "groups": True},
            {"fused": {1}},
            {"fused": (1, 1)},
            {"in layers": True, "merged": 0, "left": True},
        ), found


def test_a_submodule_only(four_ranks):
    for found in (each["submodule"] for each in four_ranks):
        assert max(found[call] for call in ("inner", "outer", "again")) < FP32
        assert found["fused"] == found["fused again"] == 1 and found["told"]
        assert found["plain"] == "NoneType", "the outer model was applied too"


def test_fsdp_beside_tensor_parallelism(four_ranks):
    """Where layers are sharded one by one, FSDP's hooks end a graph at each, and no norm follows a sum within one."""
    for found in (each["data parallel"] for each in four_ranks):
        for how, (error, fused, groups) in found.items():
            assert error < GRADIENTS and groups, (how, found)
            assert fused == (0 if how == "layers sharded" else LAYERS), (how, found)


def test_stages_of_a_pipeline(four_ranks):
    """A stage's last sum goes to the next stage: no norm follows it here."""
    for found in (each["pipeline"] for each in four_ranks):
        assert found["error"] < FP32 and found["gradients"] < GRADIENTS
        assert found["fused"] == 1 and found["groups"]


if __name__ == "__main__":
    for each in spawn(_four_ranks, 4, tuple(sys.argv[1:]) or tuple(SCENARIOS), timeout_s=240):
        print(each)
