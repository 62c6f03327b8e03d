"""Our collectives keep the order of the graph: each takes a result of the one before it."""

from __future__ import annotations

import operator

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import FUSED, all_reduce, compile_with_tpfuse, values, world
from tpfuse.graph import all_reduce as all_reduces
from tpfuse.graph import pipeline
from tpfuse.kernels import dispatch
from tpfuse.ops.all_reduce import OP as PLAIN

T, D = 6, 16
WAIT = torch.ops._c10d_functional.wait_tensor.default


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


def layers(x, r, w):
    r = r + all_reduce(x)
    x = norms.llama(r, w, 1e-5)
    y = torch.relu(all_reduce(x * 2))  # no norm: it stays
    r = r + all_reduce(x + y)
    return norms.llama(r, w, 1e-5), r


def collective(node):
    """The call that a result is of."""
    return node.args[0] if node.target is operator.getitem else node


def test_each_waits_for_the_one_before():
    run = compile_with_tpfuse(layers, values(T, D), values(T, D), values(D))
    first, second = run.calls(FUSED)
    (wait,) = run.calls(WAIT)
    assert "after" not in first.kwargs
    assert second.kwargs["after"] is wait


def test_plain_ones_too(monkeypatch):
    monkeypatch.setattr(all_reduces, "ON", "cpu")
    monkeypatch.setattr(dispatch, "obstacle", lambda group, device: "")
    monkeypatch.setattr(dispatch, "may_run", lambda *args: ["fast"])
    run = compile_with_tpfuse(layers, values(T, D), values(T, D), values(D))
    first, second = run.calls(FUSED)
    (plain,) = run.calls(PLAIN)
    assert collective(plain.kwargs["after"]) is first and second.kwargs["after"] is plain


def test_a_call_whose_results_are_not_used_stays():
    """Other ranks may use theirs."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.call_function(FUSED, (x, w, "0", 1e-5))
    graph.call_function(PLAIN, (x, "0"))
    graph.output(x)
    assert not graph.eliminate_dead_code()
    assert len(graph.nodes) == 5


def test_digest_tells_graphs_of_other_operations_apart():
    def graph_of(function, *inputs):
        return pipeline.digest(torch.fx.symbolic_trace(function).graph)

    assert graph_of(lambda x: x + 1) == graph_of(lambda x: x + 2)
    assert graph_of(lambda x: x + 1) != graph_of(lambda x: x * 1)
    assert graph_of(lambda x: torch.relu(x + 1)) != graph_of(lambda x: x + 1)
    assert graph_of(lambda x: x + 1) != graph_of(lambda x: (x + 1, x))
