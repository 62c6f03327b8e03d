"""What nothing fused is compiled exactly as ``torch.compile`` alone would: the same graphs, node for node."""

from __future__ import annotations

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import all_reduce, assert_same, compile_plainly, compile_with_tpfuse, values, world
from tpfuse.kernels import dispatch

T, D = 6, 16
OFF = [{"optimization_level": 0}, {"optimization_level": 3, "fuse_allreduce_rms": False}]


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


def reads(run_or_backend):
    """Everything that code generation sees of the graphs: code, and each node's size, stride and dtype."""
    read = []
    for graph in run_or_backend.graphs:
        read.append(graph.code)
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                read.append(f"{node.name} {value.dtype} {list(value.shape)} {value.stride()}")
    return read


def hold_identical(function, *inputs, config=None, dynamic=None):
    run = compile_with_tpfuse(function, *inputs, config=config, dynamic=dynamic)
    outputs, plain = compile_plainly(function, *inputs, dynamic=dynamic)
    assert reads(run) == reads(plain)
    assert_same(run.outputs, outputs)
    return run


def every_norm(x, r, w):
    """All spellings after an all-reduce, one after the other."""
    y = r
    for norm in norms.SPELLINGS.values():
        y = y + all_reduce(x)
        x = norm(y, w, 1e-5).to(x.dtype)
    return x, y


def every_norm_without_all_reduce(x, r, w):
    return [norm(x + r, w, 1e-5) for norm in norms.SPELLINGS.values()]


INPUTS = values(T, D), values(T, D, seed=1), values(D, seed=2)


def test_every_spelling_when_off():
    run = hold_identical(every_norm, *INPUTS, config=OFF[0])
    assert run.report.count("fuse_allreduce_rms") == 0
    assert len(run.skipped) == len(norms.SPELLINGS)


def two_layers(x, r, w):
    y = r + all_reduce(x.view(2, -1, D)).view(x.shape)
    n = norms.llama(y, w, 1e-5)
    y = y + norms.gemma(all_reduce(n) + w, w, 1e-6)
    return norms.gemma(y, w, 1e-6), y


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("config", OFF, ids=str)
def test_off(config, dynamic):
    run = hold_identical(two_layers, *INPUTS, config=config, dynamic=dynamic)
    assert run.report.count("fuse_allreduce_rms") == 0
    assert len(run.skipped) == 2 and all(reason.startswith("off: ") for reason in run.skipped)


@pytest.mark.parametrize("config", OFF, ids=str)
def test_sums_of_all_reduces_when_off(config):
    def function(a, b, w):
        y = all_reduce(a) + all_reduce(b)
        return norms.llama(y, w, 1e-5), y

    hold_identical(function, *INPUTS, config=config)


def test_no_all_reduce():
    run = hold_identical(every_norm_without_all_reduce, *INPUTS)
    assert {(s.op, s.outcome) for s in run.report.sites} == {("rms_norm", "skipped")}


def test_no_norm_at_all():
    run = hold_identical(lambda x, r, w: torch.softmax(x @ r.t(), -1), *INPUTS)
    assert run.report.sites == () and run.report.graphs == 1


def test_world_of_one():
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=torch.distributed.HashStore())
    run = hold_identical(two_layers, *INPUTS)
    assert set(run.skipped) == {"world size 1"}


def test_nothing_to_run_on_the_device(monkeypatch):
    """As on CUDA where ranks cannot reach each other's memory: every site is lowered and says so."""
    monkeypatch.setattr(dispatch, "obstacle", lambda group, device: "no kernel")

    def function(x, r, w):
        y = r + (all_reduce(x) + w)
        return norms.llama(y, w, 1e-5), norms.gemma(all_reduce(x), w, 1e-5), y

    run = hold_identical(function, *INPUTS)
    assert len(run.skipped) == 2 and all("no kernel" in reason for reason in run.skipped)


def test_shared_sum():
    """A near-miss of fusing: the graph is untouched even though the norm was raised."""

    def function(x, r, w):
        reduced = all_reduce(x)
        y = reduced + r
        return norms.gemma(y, w, 1e-5), norms.llama(torch.relu(reduced), w, 1e-6)

    run = hold_identical(function, *INPUTS)
    assert run.report.count("fuse_allreduce_rms") == 0


def test_views_and_extra_users_of_an_unfused_norm():
    def function(x, r, w):
        y = torch.relu(all_reduce(x)) + r
        n = norms.llama(y.view(2, 3, D), w, 1e-5)
        return n.view(T, D) @ r.t(), n + 1, y

    hold_identical(function, *INPUTS)


def test_a_norm_that_stays_beside_one_that_goes():
    """In a graph with a fusion, an unfused norm has the very operations that it had alone."""

    def unfused(y, w):
        return norms.gemma(torch.sin(y), w, 1e-5)

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), unfused(y, w)

    def operations(graph):
        return [(n.target, n.args[1:]) for n in graph.graph.nodes if n.op == "call_function"]

    run = compile_with_tpfuse(function, *INPUTS)
    assert run.report.count("fuse_allreduce_rms") == 1
    alone = operations(compile_plainly(unfused, values(T, D), values(D))[1].graphs[0])
    found = operations(run.graph)
    start = next(i for i, (target, _) in enumerate(found) if target is torch.ops.aten.sin.default)
    assert [t for t, _ in found[start:]] == [t for t, _ in alone]


def test_dead_nodes_of_fused_norms_are_gone():
    """Nothing of a fused norm's own computation is left for Inductor to compile."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    run = compile_with_tpfuse(function, *INPUTS)
    called = [str(n.target) for n in run.graph.graph.nodes if n.op == "call_function"]
    assert len(called) == 3, called  # the operation and its two outputs
    assert run.graph.graph.output_node().args[0][0].meta["val"].dtype is torch.bfloat16


def test_user_function_is_not_recompiled_for_nothing():
    """No rewrite, no new code object: Inductor gets the very module that AOTAutograd made."""

    def function(x, r, w):
        return norms.llama(x + r, w, 1e-5)

    seen = []
    original = torch.fx.GraphModule.recompile
    try:
        torch.fx.GraphModule.recompile = lambda self: (seen.append(self), original(self))[1]
        run = compile_with_tpfuse(function, *INPUTS)
        with_tpfuse = len([m for m in seen if m is run.graph])
        seen.clear()
        _, plain = compile_plainly(function, *INPUTS)
        assert with_tpfuse == len([m for m in seen if m is plain.graphs[0]])
    finally:
        torch.fx.GraphModule.recompile = original
