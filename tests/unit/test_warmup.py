"""Warm-up: everything is compiled before traffic, nothing else changes. A fake group, graphs by an interpreter."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpfuse
from tpfuse.testing import fake_world, interpret_graphs

COUNTS = [1, 4, 7, 16]


class Block(nn.Module):
    """Takes ids, counts its calls in a buffer, draws random numbers."""

    def __init__(self, group=None):
        super().__init__()
        self.tp_group = group
        self.embed, self.norm = nn.Embedding(8, 16), nn.RMSNorm(16, eps=1e-5)
        self.register_buffer("calls", torch.zeros(()))
        self.config = type("Config", (), {"vocab_size": 8})()

    def forward(self, input_ids, scale=None):
        h = self.embed(input_ids)
        y = h * 2 + torch.rand_like(h)
        dist.all_reduce(y)
        self.calls += 1
        return self.norm(h + y)


class Needy(Block):
    def forward(self, hidden_states, mask):
        y = hidden_states * mask
        dist.all_reduce(y)
        return self.norm(y)


@pytest.fixture
def world():
    with fake_world(2) as group, interpret_graphs() as graphs:
        yield group, graphs


def ids(count):
    return torch.arange(count).view(1, -1) % 8


def compiled(model, counts, graphs):
    """Graphs that calls at these counts compile."""
    before, frames = len(graphs), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for count in counts:
            model(ids(count))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - frames == len(graphs) - before
    return len(graphs) - before


def test_later_calls_compile_nothing(world):
    group, graphs = world
    model = tpfuse.apply(Block(group), {"token_boundaries": [8]}, fullgraph=True)
    report = tpfuse.warmup(model, COUNTS)
    assert len(graphs) > 1 and compiled(model, [*COUNTS, *reversed(COUNTS)], graphs) == 0
    assert {site.variant for site in report.sites} == {"rows<8", "rows>=8"}
    assert "warmed up at 1, 4, 7, 16 tokens: such calls compile nothing more" in report.notes
    assert not any("had no call" in note for note in report.notes)
    assert compiled(tpfuse.apply(Block(group)), COUNTS, graphs) > 1  # as it would have been without


def test_ranges_without_a_call_are_told(world):
    group, graphs = world
    model = tpfuse.apply(Block(group), {"token_boundaries": [8]})
    assert "warm-up had no call with rows>=8: the first one compiles" in tpfuse.warmup(model, [2]).notes
    assert compiled(model, [9], graphs) == 1


def test_what_still_compiles_in_the_last_pass_is_told(world):
    group, _ = world
    model, calls = tpfuse.apply(Block(group), dynamic=False), iter(range(2, 100))
    report = tpfuse.warmup(model, [1], call=lambda count: model(ids(next(calls))))
    assert any("1 graph(s) were still compiled in its last pass" in note for note in report.notes)


def test_nothing_else_changes(world):
    group, _ = world
    model = tpfuse.apply(Block(group))
    with torch.no_grad():
        model.calls += 5
    address, state, mode = model.calls.data_ptr(), torch.get_rng_state(), model.training
    tpfuse.warmup(model, COUNTS)
    assert model.calls.item() == 5 and model.calls.data_ptr() == address and model.training is mode
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    with torch.no_grad():
        model(ids(4))
    assert model.calls.item() == 6


def test_inputs_and_calls_of_ones_own(world):
    group, graphs = world
    model, seen = tpfuse.apply(Needy(group)), []

    def inputs(count):
        seen.append(count)
        return (torch.ones(count, 16),), {"mask": torch.ones(count, 1)}

    tpfuse.warmup(model, [3, 5], inputs=inputs)
    before = len(graphs)
    with torch.no_grad():
        model(torch.ones(5, 16), mask=torch.ones(5, 1))
    assert set(seen) == {3, 5} and len(graphs) == before > 0
    tpfuse.warmup(model, [3], call=lambda count: model(torch.ones(count, 16), torch.ones(count, 1)).sum().backward())
    assert any(site.variant == "all, training" for site in tpfuse.explain(model).sites)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_counts": []}, "positive whole numbers"),
        ({"token_counts": 4}, "positive whole numbers"),
        ({"token_counts": [0]}, "positive whole numbers"),
        ({"token_counts": [True]}, "positive whole numbers"),
        ({"token_counts": [2]}, "Needy.forward are: hidden_states, mask; give inputs="),
        ({"token_counts": [2], "inputs": lambda count: None}, r"inputs\(2\) must return \(args, kwargs\): TypeError"),
        ({"token_counts": [2], "inputs": lambda count: 1 / 0}, "ZeroDivisionError"),
        ({"token_counts": [2], "inputs": print, "call": print}, "not both"),
    ],
)
def test_what_it_refuses(world, arguments, message):
    model = tpfuse.apply(Needy(world[0]))
    with pytest.raises(tpfuse.ConfigError, match=message):
        tpfuse.warmup(model, **arguments)


def test_only_an_applied_model(world, monkeypatch):
    with pytest.raises(tpfuse.NotAppliedError):
        tpfuse.warmup(Block(), [1])
    model = tpfuse.apply(Block(world[0]))
    with pytest.raises(tpfuse.ConfigError, match=r"inside tpfuse\.disabled"), tpfuse.disabled():
        tpfuse.warmup(model, [1])
    monkeypatch.setenv("TPFUSE_DISABLE", "1")
    assert not tpfuse.warmup(tpfuse.apply(Block(world[0])), [1]).sites


def test_progress(world, capsys, monkeypatch):
    model = tpfuse.apply(Block(world[0]))
    tpfuse.warmup(model, [2, 3])
    assert "tpfuse warm-up: 100%" in capsys.readouterr().err
    tpfuse.warmup(model, [2], progress=False)
    importing = builtins.__import__
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)

    def without(name, *rest):
        if name == "tqdm":
            raise ImportError(name)
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    tpfuse.warmup(model, [2])
    assert capsys.readouterr().err == ""


def test_no_bar_on_other_ranks(capsys):
    with fake_world(2, rank=1) as group, interpret_graphs():
        tpfuse.warmup(tpfuse.apply(Block(group)), [2])
    assert capsys.readouterr().err == ""
