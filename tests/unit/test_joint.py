"""Joint graphs: where the passes run, what is kept from the forward, and what is left in each half."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

import tpfuse
from tests.unit import norms
from tests.unit.graphs import FUSED, all_reduce, values
from tpfuse.graph import joint
from tpfuse.graph.backend import TpfuseBackend
from tpfuse.graph.nodes import BACKWARD, TAG
from tpfuse.testing import fake_world, interpret_graphs

D, T = 16, 6
aten = torch.ops.aten


class Block(torch.nn.Module):
    """hidden -> all-reduce -> add -> norm -> GEMM"""

    def __init__(self):
        super().__init__()
        self.down, self.up = (torch.nn.Parameter(values(D, D, dtype=torch.float32, seed=s) / 4) for s in (1, 2))
        self.weight = torch.nn.Parameter(1 + values(D, dtype=torch.float32, seed=3) / 8)

    def forward(self, x):
        y = x + all_reduce(x @ self.down)
        return norms.llama(y, self.weight, 1e-5) @ self.up, y


def _step(config=None, **options):
    with fake_world(2), interpret_graphs() as graphs:
        model = tpfuse.apply(Block(), config, fullgraph=True, **options)
        x = values(T, D, dtype=torch.float32).requires_grad_()
        sum(out.square().sum() for out in model(x)).backward()
        return graphs, tpfuse.explain(model)


def _targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_what_follows_from_the_sum_is_computed_again():
    """Of the norm, the backward is given the sum alone; the operation itself is in the forward only."""
    (forward, backward), report = _step()
    assert report.count("fuse_allreduce_rms") == 1 and {s.variant for s in report.sites} == {"all, training"}
    assert report.compile_seconds.keys() == {"all, training"}
    assert _targets(forward).count(FUSED) == 1 and FUSED not in _targets(backward)
    assert aten.rsqrt.default not in _targets(forward) and aten.rsqrt.default in _targets(backward)


def test_without_fusions_the_graphs_are_those_of_torch():
    (forward, backward), report = _step({"optimization_level": 0})
    assert FUSED not in {*_targets(forward), *_targets(backward)} and not report.count("fuse_allreduce_rms")
    assert aten.rsqrt.default in _targets(forward)


def _fail(module, example_inputs, **kwargs):
    raise RuntimeError("no such backward")


def test_a_step_that_torch_cannot_compile(monkeypatch):
    """The model runs as it was, and the report says so; not where that was not wanted."""
    with fake_world(2):
        monkeypatch.setattr(TpfuseBackend, "codegen", staticmethod(_fail))
        model = tpfuse.apply(Block())
        for _ in range(2):
            model.zero_grad()
            model(values(T, D, dtype=torch.float32))[0].sum().backward()
            assert all(parameter.grad.abs().sum() for parameter in model.parameters())
        report = tpfuse.explain(model)
        assert not report.sites and any("as it was" in n and "RuntimeError: no such backward" in n for n in report.notes)
        with pytest.raises(Exception, match="no such backward"), torch.no_grad():
            model(values(T, D, dtype=torch.float32))
        for options in ({"strict": True}, {"fullgraph": True}):
            with pytest.raises(Exception, match="no such backward"):
                tpfuse.apply(Block(), **options)(values(T, D, dtype=torch.float32))
        torch._dynamo.reset()


class _Count(CustomGraphPass):
    def __init__(self):
        self.reduces = []

    def __call__(self, graph):
        self.reduces.append(sum("all_reduce" in str(node.target) for node in graph.nodes))

    def uuid(self):
        return "count"


def test_a_users_pass_comes_first():
    users = _Count()  # finds the all-reduce, and that of its gradient
    _, report = _step(options={"joint_custom_pre_pass": users})
    assert users.reduces == [2] and report.count("fuse_allreduce_rms") == 1
    with torch._inductor.config.patch(joint_custom_pre_pass=users):
        _step()
    assert users.reduces == [2, 2]


def _graph(*tags):
    """An operation of ours with two results for each tag, nothing of which is used."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for tag in tags:
        fused = graph.call_function(FUSED, (x, None, "0", 1e-5))
        fused.meta[TAG] = tag
        graph.call_function(operator.getitem, (fused, 0))
    graph.output((x,))
    return graph


def test_copies_of_the_forward_are_dropped():
    """And not what the backward itself calls for the sake of other ranks, nor what is used."""
    graph = _graph("is_forward", BACKWARD)
    joint.drop_copies(graph)
    assert [node.meta[TAG] for node in graph.nodes if node.target is FUSED] == [BACKWARD]
    used = _graph("is_forward")
    (result,) = (node for node in used.nodes if node.target is operator.getitem)
    next(node for node in used.nodes if node.op == "output").args = ((result,),)
    joint.drop_copies(used)
    assert sum(node.target is FUSED for node in used.nodes) == 1


def test_a_gradient_is_as_its_output():
    """Which output it is of, torch tells; where it does not, nothing is known."""

    class Told:
        def __init__(self, output):
            self.output = output

    graph, first, second = torch.fx.Graph(), object(), object()
    x, unknown, told = graph.placeholder("primals_1"), graph.placeholder("tangents_1"), graph.placeholder("tangents_2")
    told.meta["desc"] = Told(second)
    y = graph.call_function(aten.relu.default, (x,))
    output = graph.output((x, y, told))
    output.meta["desc"] = [first, second, object()]
    assert joint.is_joint(graph) and joint.outputs_of_tangents(graph) == {unknown: None, told: y}
    joint.tell_backward(graph)
    assert TAG not in y.meta
