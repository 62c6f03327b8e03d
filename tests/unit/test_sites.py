"""``apply`` on hand-written models: every all-reduce of the model is in the report once, by its place in the model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import tpfuse
from tests.unit import norms
from tests.unit.graphs import (
    FUSED,
    all_reduce,
    all_reduce_in_place,
    assert_same,
    check,
    compile_with_tpfuse,
    values,
    world,
)
from tpfuse.testing import fake_world, interpret_graphs

FUSION = "fuse_allreduce_rms"


class Norm(torch.nn.Module):
    def __init__(self, hidden, eps, dtype, seed):
        super().__init__()
        self.weight = torch.nn.Parameter(values(hidden, dtype=dtype, seed=seed))
        self.eps = eps

    def forward(self, x):
        return norms.llama(x, self.weight, self.eps)


class RowParallel(torch.nn.Module):
    def __init__(self, hidden, dtype, seed, group=None):
        super().__init__()
        self.weight = torch.nn.Parameter(values(hidden, hidden, dtype=dtype, seed=seed) / hidden)
        self.group = group

    def forward(self, x):
        return all_reduce(x @ self.weight, group=self.group)


class Layer(torch.nn.Module):
    def __init__(self, hidden, eps, dtype, seed, group):
        super().__init__()
        self.attention, self.mlp = (RowParallel(hidden, dtype, seed + i, group) for i in (0, 1))
        self.norm1, self.norm2 = (Norm(hidden, eps, dtype, seed + i) for i in (2, 3))

    def forward(self, x, n, stop):
        x = x + self.attention(n)
        n = self.norm1(x)
        if stop:
            torch._dynamo.graph_break()
        x = x + self.mlp(n)
        return x, self.norm2(x)


class Model(torch.nn.Module):
    """``breaks`` puts graph breaks between or inside its layers, as printing or data-dependent code does."""

    def __init__(self, hidden=16, layers=3, eps=1e-5, dtype=torch.float32, breaks="", group=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(hidden, eps, dtype, 10 * i, group) for i in range(layers))
        self.breaks = breaks

    def forward(self, x):
        n = x
        for layer in self.layers:
            x, n = layer(x, n, self.breaks == "inside")
            if self.breaks == "between":
                torch._dynamo.graph_break()
        return x, n


def fused_places(model):
    return {s.where for s in tpfuse.explain(model).sites if s.outcome == "fused"}


def all_places(layers=3):
    return {f"layers.{i}.{name}" for i in range(layers) for name in ("attention", "mlp")}


@pytest.fixture(autouse=True)
def four_ranks():
    with world(4) as group:
        yield group


# -- places ------------------------------------------------------------------------------------------------------------


def test_module_paths():
    model, x = Model(), values(5, 16, dtype=torch.float32)
    expected = model(x)
    tpfuse.apply(model, fullgraph=True)
    assert_same(model(x), expected)
    assert fused_places(model) == all_places()
    assert tpfuse.explain(model).count(FUSION) == 6


@pytest.mark.parametrize("breaks", ["between", "inside"])
def test_graph_breaks(breaks):
    """The layers are compiled one by one then, and share a graph; the model still has six places."""
    model, x = Model(breaks=breaks), values(5, 16, dtype=torch.float32)
    expected = model(x)
    tpfuse.apply(model)
    assert_same(model(x), expected)
    report = tpfuse.explain(model)
    assert report.count(FUSION) == 6, report
    assert {s.where.partition("#")[0] for s in report.sites} <= set(dict(model.named_modules()))


def test_recompilation_adds_no_place():
    model = tpfuse.apply(Model())
    for rows in (4, 5, 1, 9, 1):
        model(values(rows, 16, dtype=torch.float32))
    report = tpfuse.explain(model)
    assert report.graphs >= 2
    assert report.count(FUSION) == 6 and len(report.sites) == 6


def test_variants_add_sites_but_no_place():
    model = tpfuse.apply(Model(), {"token_boundaries": (4, 8)})
    for rows in (2, 5, 9, 8):
        x = values(rows, 16, dtype=torch.float32)
        assert_same(model(x), Model()(x))
    report = tpfuse.explain(model)
    assert report.count(FUSION) == 6 and len(report.sites) == 18
    assert {s.variant for s in report.sites} == {"rows<4", "4<=rows<8", "rows>=8"}


def test_module_called_twice():
    """Shared layers: one module, two places."""

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = RowParallel(16, torch.float32, 0), Norm(16, 1e-5, torch.float32, 1)

        def forward(self, x):
            for _ in range(3):
                x = x + self.linear(self.norm(x))
            return self.norm(x)

    model, x = Shared(), values(5, 16, dtype=torch.float32)
    expected = model(x)
    tpfuse.apply(model, fullgraph=True)
    assert_same(model(x), expected)
    assert fused_places(model) == {"linear", "linear#2", "linear#3"}


def test_place_without_a_module():
    """A function's all-reduce stands at a line of a file."""

    def function(x, w):
        return norms.llama(all_reduce_in_place(x * 1), w, 1e-5)

    (site,) = check(function, values(5, 16), values(16)).report.sites
    name, _, line = site.where.partition(":")
    assert name in ("graphs.py", "test_sites.py") and line.isdigit()


def test_order_of_the_report_is_that_of_the_model():
    model = tpfuse.apply(Model())
    model(values(5, 16, dtype=torch.float32))
    places = [s.where for s in tpfuse.explain(model).sites]
    assert places == [f"layers.{i}.{name}" for i in range(3) for name in ("attention", "mlp")]


@pytest.mark.parametrize("spelling", ["functional", "in place", "coalesced", "view", "op"])
def test_every_spelling_of_an_all_reduce_is_listed(spelling):
    """Fused or left with a reason, but never forgotten."""

    def reduce(x):
        if spelling == "functional":
            return all_reduce(x)
        if spelling == "coalesced":
            return funcol.all_reduce_coalesced([x, x * 2], "sum", dist.group.WORLD)[0]
        if spelling == "op":
            return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))
        y = x * 1
        dist.all_reduce(y.view(-1) if spelling == "view" else y, op=dist.ReduceOp.SUM)
        return y

    def function(x, w):
        return norms.llama(reduce(x), w, 1e-5)

    report = compile_with_tpfuse(function, values(5, 16), values(16)).report
    listed = [s for s in report.sites if s.op == "all_reduce"]
    assert listed, report
    assert all(s.outcome == "fused" or s.reason for s in listed)


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (0, 2), (0, 1, 2, 3)], ids=str)
def test_group_of_the_model(ranks):
    """cases.md 1: never WORLD by assumption; also in another order of ranks."""
    group = dist.new_group(list(ranks))
    model, x = Model(group=group), values(5, 16, dtype=torch.float32)
    expected = model(x)
    tpfuse.apply(model, fullgraph=True)
    assert_same(model(x), expected)
    assert {s.group for s in tpfuse.explain(model).sites} == {group.group_name}


def test_two_groups_in_one_model():
    pair = dist.new_group([0, 1])

    def function(x, r, w):
        y = r + all_reduce(x, group=pair)
        n = norms.llama(y, w, 1e-5)
        y = y + all_reduce(n)
        return norms.llama(y, w, 1e-5), y

    run = check(function, values(5, 16), values(5, 16, seed=1), values(16, seed=2), fused=2)
    assert [n.args[2] for n in run.calls(FUSED)] == [pair.group_name, dist.group.WORLD.group_name]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_compiles_the_same(size):
    """A constant that differs by rank would let one rank load another's code from a shared cache."""

    def function(x, r, w):
        y = r + (all_reduce(x) + all_reduce(x * 2))
        return norms.gemma(y, w, 1e-5), y

    dist.destroy_process_group()
    codes = set()
    try:
        for rank in range(size):
            with fake_world(size, rank), interpret_graphs(), torch.no_grad():
                run = compile_with_tpfuse(function, values(5, 16), values(5, 16, seed=1), values(16, seed=2))
                assert run.report.count(FUSION) == 1
                codes.add(run.graph.code)
    finally:
        dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())  # for the fixture to destroy
    assert len(codes) == 1


def test_group_made_anew():
    """cases.md 27: the same model code over another world after the first is gone."""

    def function(x, r, w):
        y = r + all_reduce(x)
        return norms.llama(y, w, 1e-5), y

    inputs = values(5, 16), values(5, 16, seed=1), values(16, seed=2)
    check(function, *inputs)
    dist.destroy_process_group()
    try:
        for size in (2, 8, 1, 2):
            with fake_world(size):
                check(function, *inputs, fused=int(size > 1), skipped=int(size == 1))
    finally:
        dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())


# -- several models, gradients -----------------------------------------------------------------------------------------


def test_two_models_in_one_process():
    """cases.md 22: other widths, dtypes and eps, interleaved; then one of them goes."""
    a = Model(hidden=96, eps=1e-5)
    b = Model(hidden=160, eps=1e-6, dtype=torch.bfloat16, layers=2)
    expected = [(rows, a(values(rows, 96, dtype=torch.float32)), b(values(rows, 160))) for rows in (4, 5, 2, 9)]
    tpfuse.apply(a)
    tpfuse.apply(b)
    for rows, of_a, of_b in expected:
        assert_same(a(values(rows, 96, dtype=torch.float32)), of_a)
        assert_same(b(values(rows, 160)), of_b)
    assert (fused_places(a), fused_places(b)) == (all_places(3), all_places(2))
    del a
    rows, _, of_b = expected[0]
    assert_same(b(values(rows, 160)), of_b)
    assert fused_places(b) == all_places(2)


def test_three_models_with_other_eps():
    """cases.md 21: Dynamo must not take the second model's eps for a variable of the first one's."""
    for eps in (1e-5, 1e-6, 3e-6):
        model, x = Model(eps=eps), values(5, 16, dtype=torch.float32)
        expected = model(x)
        tpfuse.apply(model, fullgraph=True)
        assert_same(model(x), expected)
        assert fused_places(model) == all_places(), tpfuse.explain(model)


def test_a_model_does_not_make_the_next_one_dynamic():
    """What Dynamo learnt about one model's inputs (their width!) says nothing about another's."""
    for hidden in (16, 24):
        model = tpfuse.apply(Model(hidden=hidden), fullgraph=True)
        with interpret_graphs() as graphs:
            model(values(5, hidden, dtype=torch.float32))
        (graph,) = graphs
        for node in graph.graph.find_nodes(op="placeholder"):
            assert all(isinstance(size, int) for size in getattr(node.meta["val"], "shape", [None])), node.meta["val"]


def test_gradients_on_and_off():
    """cases.md 29: fused whether gradients are on or off, with all of them: a graph of its own for training."""
    model, plain, x = Model(), Model(), values(5, 16, dtype=torch.float32)
    tpfuse.apply(model)
    for _ in range(2):
        with torch.enable_grad():
            for each in (model, plain):
                each.zero_grad()
                sum(t.square().sum() for t in each(x)).backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad, msg=name)
        assert_same(model(x), plain(x))
    fused = [s.variant for s in tpfuse.explain(model).sites if (s.fusion, s.outcome) == (FUSION, "fused")]
    assert fused.count("all") == fused.count("all, training") == 6
    with torch.inference_mode():
        assert_same(model(x), plain(x))


def test_remove():
    model, x = Model(), values(5, 16, dtype=torch.float32)
    keys, expected = list(model.state_dict()), model(x)
    assert tpfuse.apply(model) is model and tpfuse.apply(model) is model
    model(x)
    assert list(model.state_dict()) == keys and type(model) is Model
    tpfuse.remove(model)
    assert_same(model(x), expected)
    with pytest.raises(tpfuse.NotAppliedError):
        tpfuse.explain(model)
    tpfuse.remove(model)


def test_few_and_many_rows():
    """From sp_min_token_num rows on they are sharded, below an all-reduce and its norm are one kernel: by the call."""
    model = Model(layers=2).eval()
    tpfuse.apply(model, {"enable_sp": True, "sp_min_token_num": 6, "token_boundaries": (32,)})
    for rows in (8, 3, 8, 3):
        model(values(rows, 16, dtype=torch.float32))
    report = tpfuse.explain(model)
    fused = {(site.variant, site.fusion) for site in report.sites if site.outcome == "fused"}
    assert fused == {("rows<6", "fuse_allreduce_rms"), ("6<=rows<32", "enable_sp")} and report.graphs == 2
    assert all(
        "fewer than sp_min_token_num=6" in s.reason for s in report.sites if s.fusion == "enable_sp" and s.variant == "1-5"
    )


def test_strict_and_explicit():
    """Asked for by name and nothing there: an error, not a silent nothing."""

    class NoNorm(torch.nn.Module):
        def forward(self, x):
            return all_reduce(x) * 2

    x = values(5, 16)
    for config in (None, {"fuse_allreduce_rms": True}):
        with pytest.raises(tpfuse.StrictError, match="no site"):
            tpfuse.apply(NoNorm(), config, strict=True)(x)
    tpfuse.apply(NoNorm())(x)
    strict = tpfuse.apply(Model(), strict=True)
    strict(values(5, 16, dtype=torch.float32))
    with pytest.raises(tpfuse.ConfigError, match="fuse_attn_quant=True"):
        tpfuse.apply(Model(), {"fuse_attn_quant": True})


def test_strict_waits_for_rows_that_may_be_sharded():
    config = {"enable_sp": True, "sp_min_token_num": 6}
    strict = tpfuse.apply(Model(layers=2).eval(), config, strict=True)
    for rows in (3, 8):
        strict(values(rows, 16, dtype=torch.float32))
    assert tpfuse.explain(strict).count("enable_sp")

    class NoNorm(torch.nn.Module):
        def forward(self, x):
            return all_reduce(x) * 2

    strict = tpfuse.apply(NoNorm(), config, strict=True)
    strict(values(3, 16))
    with pytest.raises(tpfuse.StrictError, match="fused by enable_sp"):
        strict(values(8, 16))
