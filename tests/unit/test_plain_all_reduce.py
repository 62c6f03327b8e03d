"""All-reduces that no norm follows: ``tpfuse::all_reduce`` where a table says so, and only where nothing overlaps them."""

from __future__ import annotations

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import ALL_REDUCE, all_reduce, compile_with_tpfuse, values, world
from tpfuse.graph import all_reduce as all_reduces
from tpfuse.kernels import dispatch
from tpfuse.ops.all_reduce import OP

T, D = 6, 16
FUSION = "fuse_allreduce_rms"


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


@pytest.fixture
def pays(monkeypatch):
    """As on a machine whose table has a faster kernel for every size; the sizes asked for are kept."""
    asked = []

    def may_run(group, device, problem, most_rows):
        asked.append((problem.rows * problem.row_bytes, most_rows * problem.row_bytes))
        return ["fast", "nccl"]

    monkeypatch.setattr(all_reduces, "ON", "cpu")
    monkeypatch.setattr(dispatch, "obstacle", lambda group, device: "")
    real = dispatch.may_run
    monkeypatch.setattr(dispatch, "may_run", lambda *args: may_run(*args) if args[2].op == "all_reduce" else real(*args))
    return asked


def _count(run, target):
    return sum(node.target is target for graph in run.graphs for node in graph.graph.nodes)


def test_left_to_nccl_on_the_cpu():
    run = compile_with_tpfuse(lambda x: torch.relu(all_reduce(x)), values(T, D))
    assert _count(run, OP) == 0 and _count(run, ALL_REDUCE) == 1


def test_replaced_where_it_pays(pays):
    x = values(T, D)
    run = compile_with_tpfuse(lambda x: torch.relu(all_reduce(x)), x)
    assert _count(run, OP) == 1 and _count(run, ALL_REDUCE) == 0
    assert pays == [(x.nbytes, x.nbytes)]
    (site,) = run.report.sites
    assert site.outcome == "skipped" and site.kernel == "fast" and "no norm follows" in site.reason
    assert "; by fast" in str(run.report)
    assert run.report.count(FUSION) == 0


def test_a_fused_site_is_not_plain(pays):
    def function(x, r, w):
        return norms.llama(r + all_reduce(x), w, 1e-5), all_reduce(x * 2)

    run = compile_with_tpfuse(function, values(T, D), values(T, D), values(D))
    assert _count(run, OP) == 1 and run.report.count(FUSION) == 1


def test_work_between_the_all_reduce_and_its_wait_keeps_it(pays, two_ranks):
    """NCCL runs beside that work on a stream of its own; our kernels would not."""

    def function(x, y):
        started = torch.ops._c10d_functional.all_reduce(x, "sum", two_ranks.group_name)
        busy = y @ y.T
        return torch.ops._c10d_functional.wait_tensor(started), busy

    run = compile_with_tpfuse(function, values(T, D), values(T, D))
    assert _count(run, OP) == 0 and _count(run, ALL_REDUCE) == 1


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_only_sums(pays, two_ranks, kind):
    def function(x):
        reduced = torch.ops._c10d_functional.all_reduce(x, kind, two_ranks.group_name)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    assert _count(compile_with_tpfuse(function, values(T, D)), OP) == 0


def test_integers_are_left(pays):
    assert _count(compile_with_tpfuse(lambda x: all_reduce(x), torch.ones(T, D, dtype=torch.int64)), OP) == 0
