"""Groups and models that end and are made anew: right results, nothing of the old ones, and no memory left behind.

Graphs are run by an interpreter, but where Inductor's own caches are the subject. What torch keeps of a compiled function
without tpfuse is measured beside it.
"""

from __future__ import annotations

import collections
import gc
import os
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import Stack, largest_difference
from tpfuse.applied import AppliedModel
from tpfuse.comm import agreement
from tpfuse.graph import replicated
from tpfuse.graph.backend import TpfuseBackend
from tpfuse.testing import fake_world, interpret_graphs, spawn

FUSION = "fuse_allreduce_rms"
FP32 = 1e-5
pytestmark = pytest.mark.slow
CYCLES, SWAPPED = 20, 5
MEBIBYTE = 1 << 20
OURS = (AppliedModel, TpfuseBackend, torch.fx.GraphModule, dist.ProcessGroup, Stack)
SHAPES = ((4,), (9,))  # two graphs: the first of one size, the second of any


def _resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _alive() -> dict[str, int]:
    """Objects of ours, graphs and groups, by class, after a collection."""
    gc.collect()
    return dict(collections.Counter(t.__name__ for o in gc.get_objects() for t in OURS if issubclass(type(o), t)))


def _start(port: int, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.TCPStore("localhost", port, is_master=False), rank=rank, world_size=2)


# -- groups ------------------------------------------------------------------------------------------------------------


def _kept_model(rank: int, ports: list[int]) -> dict[str, object]:
    """One applied model over groups that come and go under one name, its ranks in turned order each time."""
    errors, notes, fused, old = [], "", [], None
    with interpret_graphs() as graphs:
        for cycle, port in enumerate(ports):
            _start(port, rank if cycle % 2 == 0 else 1 - rank)
            fresh = Stack(dist.group.WORLD, layers=1, seed=cycle)
            if old is None:
                old = tpfuse.apply(Stack(dist.group.WORLD, layers=1, seed=cycle), strict=True)
            else:  # the user gives its layers the new group, and this rank's part of the weights
                old.load_state_dict(fresh.state_dict())
                for mine, other in zip(old.layers, fresh.layers, strict=True):
                    mine.tp_group, mine.full_down, mine.full_up = dist.group.WORLD, other.full_down, other.full_up
                old.tp_group = dist.group.WORLD
                if cycle % 2:
                    tpfuse.apply(old, strict=True)  # the same request again: what it has learnt of the old group must go
            errors += [largest_difference(old, t) for t in (4, 9)]
            before = len(graphs)
            errors += [largest_difference(old, t) for t in (4, 9)]
            fused.append((tpfuse.explain(old).count(FUSION), len(graphs) - before))
            notes = str(tpfuse.explain(old))
            dist.destroy_process_group()
    return {"error": max(errors), "fused": set(fused), "told": "was destroyed: the model was compiled anew" in notes}


def _stale_model(rank: int, ports: list[int]) -> list[str]:
    """Layers that still have a destroyed group, though another has its name: an error, not the other group's sums."""
    with interpret_graphs():
        _start(ports[0], rank)
        model = tpfuse.apply(Stack(dist.group.WORLD, layers=1))
        inputs = model.inputs(4)
        largest_difference(model, 4)
        dist.destroy_process_group()
        _start(ports[1], 1 - rank)
        told = []
        for _ in range(2):
            try:
                model(*inputs)
            except tpfuse.TpfuseError as error:
                told.append(str(error))
        dist.destroy_process_group()
    return told


def _many_groups(rank: int, ports: list[int]) -> dict[str, object]:
    """Groups made anew again and again, each with a model that ends with it."""
    made: list[weakref.ref] = []

    def life() -> float:
        cycle = len(made)
        _start(ports[cycle], rank if cycle % 2 == 0 else 1 - rank)
        made.append(weakref.ref(dist.group.WORLD))
        error = _once(SHAPES[:1])
        dist.destroy_process_group()
        return error

    with interpret_graphs() as graphs:
        found = _lives(life, len(ports), graphs)
        found["tables"] = [len(t) for t in (agreement._rounds, replicated._same, replicated._unlike)]
        found["groups"] = sum(group() is not None for group in made)
    return found


def _once(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> float:
    """A model's whole life."""
    model = tpfuse.apply(Stack(dist.group.WORLD, layers=1), strict=True)
    return max(largest_difference(model, *shape) for shape in shapes)


def _groups(rank: int, ports: list[int]) -> dict[str, object]:
    kept, stale, many = ports[:SWAPPED], ports[SWAPPED : SWAPPED + 2], ports[SWAPPED + 2 :]
    return {"kept": _kept_model(rank, kept), "stale": _stale_model(rank, stale), "many": _many_groups(rank, many)}


@pytest.fixture(scope="module")
def groups():
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(SWAPPED + 2 + CYCLES)]
    return spawn(_groups, 2, [store.port for store in stores], backend="", timeout_s=280)


def test_a_model_over_groups_made_anew(groups):
    for found in (each["kept"] for each in groups):
        assert found["error"] < FP32 and found["told"]
        assert found["fused"] == {(1, 0)}, "a steady group must not compile again"


def test_a_model_whose_group_is_gone(groups):
    for each in groups:
        assert each["stale"] == ["the model has a process group that was destroyed: give its layers the new one"] * 2


def test_nothing_is_left_of_groups(groups):
    for found in (each["many"] for each in groups):
        before, after = found["ours"]
        assert found["error"] < FP32 and found["groups"] == 0 and found["tables"] == [0, 0, 0], found
        assert before == after and not {"AppliedModel", "ProcessGroup", "Stack"} & set(after), found
        assert found["bytes"] < MEBIBYTE, found


# -- models ------------------------------------------------------------------------------------------------------------


def _plain_once() -> float:
    """As ``_once``, without tpfuse: a function with a code object of its own for each model."""
    names: dict = {}
    exec("def entry(model):\n    def call(*args):\n        return model(*args)\n    return call", names)
    model = Stack(dist.group.WORLD, layers=1)
    compiled = torch.compile(names["entry"](model), backend="aot_eager")
    with torch.no_grad():
        for shape in SHAPES:
            compiled(*model.inputs(*shape))
    return 0.0


def _lives(life: Callable[[], float], count: int, graphs: list) -> dict[str, object]:
    """What that many lives leave behind, each: bytes and objects, on average after the first half, and of ours."""
    marks, errors = [], []
    for number in range(count):
        errors.append(life())
        graphs.clear()
        gc.collect()
        if number in (count // 2, count - 1):
            marks.append((_resident(), len(gc.get_objects()), _alive()))
    (before, fewer, first), (after, more, last) = marks
    steps = count - 1 - count // 2
    found = {"bytes": (after - before) / steps, "objects": (more - fewer) / steps}
    return {**found, "ours": (first, last), "error": max(errors)}


def _removed() -> float:
    """Ends by ``remove``; the model itself goes on for a moment."""
    model = tpfuse.apply(Stack(dist.group.WORLD, layers=1), strict=True)
    error = largest_difference(model, 4)
    applied = weakref.ref(model._compiled_call_impl)
    tpfuse.remove(model)
    gc.collect()
    return error if applied() is None else float("inf")


def _trained() -> float:
    model = tpfuse.apply(Stack(dist.group.WORLD, layers=1), strict=True)
    model(*model.inputs(4))[0].sum().backward()
    return largest_difference(model, 4)


LIVES = {"deleted": (_once, 6), "removed": (_removed, 4), "trained": (_trained, 4), "plain": (_plain_once, 6)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of one rank by itself: what its peers would add to a sum does not matter here."""
    found = {}
    with fake_world(2), interpret_graphs() as graphs:
        for name, (life, count) in LIVES.items():
            found[name] = _lives(life, count, graphs)
    folder = str(tmp_path_factory.mktemp("inductor"))
    with fake_world(2), mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        found["inductor"] = _lives(_once, 4, [])
    return found


@pytest.mark.parametrize("how", [*(name for name in LIVES if name != "plain"), "inductor"])
def test_nothing_is_left_of_models(models, how):
    """What stays is torch's own: what guards on long-lived objects hold, and what it remembers of operators."""
    found = models[how]
    before, after = found["ours"]
    assert before == after and not {"AppliedModel", "Stack"} & set(after), found
    assert found["error"] < float("inf"), "what was removed is still there"


def test_less_is_left_than_without_tpfuse(models):
    assert models["deleted"]["objects"] < 0.7 * models["plain"]["objects"], models
