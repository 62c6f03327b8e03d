"""Inductor's caches, warm and cold: the passes run and report in every process, and options are always obeyed.

Each step is a new set of processes on one cache folder, with the real Inductor.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import Stack, largest_difference
from tpfuse.testing import spawn

pytestmark = pytest.mark.slow


def _run(rank: int, folders: list[str], config: dict | None) -> dict[str, object]:
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[rank]
    model = Stack(dist.group.WORLD, layers=1)
    if config is not None:
        tpfuse.apply(model, config, fullgraph=True)
        report = tpfuse.explain(model)
    error = largest_difference(model, 5)
    if config is None:
        return {"error": error}
    report = tpfuse.explain(model)
    return {
        "error": error,
        "report": report.to_dict()["sites"],
        "fused": report.count("fuse_allreduce_rms"),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "group": dist.group.WORLD.group_name,
    }


def _step(folders: list[str], config: dict | None, world_size: int = 2) -> list[dict]:
    found = spawn(_run, world_size, folders, config, timeout_s=240)
    assert all(f["error"] < 1e-5 for f in found)
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache, and what the processes saw that filled it."""
    folder = str(tmp_path_factory.mktemp("inductor"))
    return folder, _step([folder] * 2, {})


def test_second_process_reports_and_fuses_the_same(filled):
    cache, cold = filled
    assert all(f["fused"] == 1 for f in cold) and sum(f["misses"] for f in cold) >= 1  # the second may find the first's
    warm = _step([cache] * 2, {})
    assert all(f["hits"] == 1 and f["misses"] == 0 for f in warm), warm
    assert [f["report"] for f in warm] == [f["report"] for f in cold]


def test_one_warm_rank_beside_a_cold_one(filled, tmp_path):
    cache, _ = filled
    warm, cold = _step([cache, str(tmp_path)], {})
    assert warm["hits"] == 1 and cold["hits"] == 0
    assert warm["report"] == cold["report"] and warm["fused"] == 1


def test_options_are_obeyed_on_one_cache(filled):
    cache, _ = filled
    _step([cache] * 2, None)
    off = _step([cache] * 2, {"fuse_allreduce_rms": False})
    assert all(f["fused"] == 0 and f["report"][0]["reason"] == "off: fuse_allreduce_rms=False" for f in off)
    assert all(f["fused"] == 0 for f in _step([cache] * 2, {"optimization_level": 0}))
    assert all(f["fused"] == 1 for f in _step([cache] * 2, {"optimization_level": 1}))
    assert all(f["fused"] == 1 for f in _step([cache] * 4, {}, world_size=4))


def _custom_pass(rank: int, folder: str) -> tuple[int, int, float]:
    """A user's own Inductor pass still runs, and sees the fused graph."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"  # a hit on the other rank's graph would not run the pass
    seen = []

    class Spy(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(sum("all_reduce_rms_norm" in str(node.target) for node in graph.nodes))

        def uuid(self) -> str:
            return "spy"

    model = Stack(dist.group.WORLD, layers=1)
    with config.patch(post_grad_custom_post_pass=Spy()):
        error = largest_difference(tpfuse.apply(model, fullgraph=True), 5)
    return len(seen), sum(seen), error


def test_users_own_post_grad_pass_still_runs(tmp_path):
    for runs, fused, error in spawn(_custom_pass, 2, str(tmp_path), timeout_s=240):
        assert runs == 1 and fused == 1 and error < 1e-5
