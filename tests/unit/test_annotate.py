"""TPFUSE_NVTX=1: profilers show where in the model each of our operations stands."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpfuse
from tpfuse.ops import library
from tpfuse.testing import fake_world, interpret_graphs


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm = Down(), nn.RMSNorm(16, eps=1e-5)

    def forward(self, h):
        return self.norm(h + self.down(h))


class Down(nn.Module):
    def forward(self, h):
        y = h * 2
        dist.all_reduce(y)
        return y


class Model(nn.Module):
    def __init__(self, group, broken=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.tp_group, self.broken = group, broken

    def forward(self, h):
        for layer in self.layers:
            if self.broken:
                torch._dynamo.graph_break()
            h = layer(h)
        return h


NAMES = {f"tpfuse all_reduce_rms_norm layers.{n}.down" for n in range(2)}


@pytest.fixture
def nvtx(monkeypatch):
    monkeypatch.setenv("TPFUSE_NVTX", "1")
    library._annotating.cache_clear()
    yield
    library._annotating.cache_clear()


def ranges(call) -> set[str]:
    """Names of ours in a profile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events() if event.name.startswith("tpfuse ")}


def run(model):
    with torch.no_grad():
        return model(torch.ones(3, 16))


def test_each_site_has_a_range(nvtx):
    with fake_world(2) as group, interpret_graphs():
        model = tpfuse.apply(Model(group))
        run(model)
        assert ranges(lambda: run(model)) == NAMES
        broken = tpfuse.apply(Model(group, broken=True))
        run(broken)
        assert ranges(lambda: run(broken)) == {"tpfuse all_reduce_rms_norm layers.*.down"}  # one code for both


def test_training_has_them_too(nvtx):
    with fake_world(2) as group, interpret_graphs():
        model = tpfuse.apply(Model(group))
        assert ranges(lambda: model(torch.ones(3, 16)).sum().backward()) == NAMES


def test_eager_calls_have_the_operations_name(nvtx):
    with fake_world(2) as group:
        assert ranges(lambda: tpfuse.ops.all_reduce(torch.ones(3), group=group)) == {"tpfuse all_reduce"}


def test_graphs_are_as_ever_without_it():
    with fake_world(2) as group, interpret_graphs() as graphs:
        model = tpfuse.apply(Model(group))
        assert ranges(lambda: run(model)) == set()
        ours = [node for node in graphs[0].graph.nodes if library.has_site(node.target)]
        assert len(ours) == 2 and not any("site" in node.kwargs for node in ours)


def test_inductors_cache_keeps_them(nvtx, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = torch._dynamo.utils.counters
    with fake_world(2) as group:
        for hits in (0, 1):
            counters.clear()
            model = tpfuse.apply(Model(group))
            run(model)
            assert counters["inductor"]["fxgraph_cache_hit"] == hits
            assert counters["inductor"]["fxgraph_cache_miss"] == 1 - hits
            assert ranges(lambda model=model: run(model)) == NAMES
            torch._dynamo.reset()


def test_a_range_ends_with_an_error(nvtx, monkeypatch):
    """NVTX ranges nest by hand: one that stays open would hold all that follows."""
    depth, order = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (depth.append(name), order.append(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", depth.pop)
    with pytest.raises(ZeroDivisionError), library._range("tpfuse x"):
        raise ZeroDivisionError
    assert not depth and order == ["tpfuse x"]
