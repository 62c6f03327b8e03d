"""An applied model in CUDA graphs: warmed up, moved there, with other weights, in profiles.

Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`, with TPFUSE_NVTX=1.
"""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # torchrun puts this file's folder there

import tpfuse
from tests.gloo.use import Model, fill, ids
from tpfuse.testing import spawn, under_torchrun

COUNTS = [1, 4, 7]
ERROR = 1e-4


def _call(model, count: int) -> torch.Tensor:
    with torch.no_grad():
        return model(ids(count).cuda()).clone()


def _error(model) -> float:
    """Of the applied model, from what it was before."""
    with tpfuse.disabled():
        plain = {count: _call(model, count) for count in COUNTS}
    return max((_call(model, count) - plain[count]).abs().max().item() for count in COUNTS * 2)


def _in_graphs(rank: int) -> dict[str, bool]:
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = tpfuse.apply(Model(), {"fuse_allreduce_rms": True}, mode="reduce-overhead", fullgraph=True)
    model.cuda()
    state = torch.cuda.get_rng_state()
    report = tpfuse.warmup(model, COUNTS, progress=False)
    graphs = counters["stats"]["unique_graphs"]
    found = {
        "told": any(note.startswith("warmed up at 1, 4, 7 tokens") for note in report.notes),
        "random state": torch.equal(torch.cuda.get_rng_state(), state),
        "right": _error(model) < ERROR,
        "fused": report.count("fuse_allreduce_rms") == 2,
    }
    before = torch.cuda.memory_allocated()
    fill(model, 2)
    found["copy_"] = _error(model) < ERROR
    other = Model()
    fill(other, 3)
    model.load_state_dict(other.state_dict())
    found["load_state_dict"] = _error(model) < ERROR
    found["allocated nothing"] = torch.cuda.memory_allocated() == before
    model.layers[1].down.weight = torch.nn.Parameter(model.layers[1].down.weight.detach() * -1)
    found["another Parameter"] = _error(model) < ERROR
    model.layers[0].norm.weight.data = model.layers[0].norm.weight.data * 3
    found["other data"] = _error(model) < ERROR
    found["compiled nothing"] = counters["stats"]["unique_graphs"] == graphs
    found["captured"] = counters["inductor"]["cudagraph_skips"] == 0
    names = _profiled(lambda: _call(model, 4))
    found["kernels in replays"] = any(name.startswith("tpfuse_all_reduce_rms_norm_") for name in names)
    tpfuse.remove(model)
    return found


def _profiled(call) -> set[str]:
    """Names of all that ran, kernels and ranges."""
    with torch.profiler.profile() as profile:
        call()
        torch.cuda.synchronize()
    return {event.name for event in profile.events()}


def _names(rank: int) -> dict[str, bool]:
    model = tpfuse.apply(Model().cuda(), {"fuse_allreduce_rms": True}, fullgraph=True)
    tpfuse.warmup(model, [4], progress=False)
    names = _profiled(lambda: _call(model, 4))
    tpfuse.remove(model)
    return {
        "kernels": any(name.startswith("tpfuse_all_reduce_rms_norm_") for name in names),
        "ranges": {f"tpfuse all_reduce_rms_norm layers.{n}.down" for n in range(2)} <= names,
    }


def _run(rank: int) -> dict[str, bool]:
    return {**_in_graphs(rank), **_names(rank)}


def _check(found: dict[str, bool]) -> None:
    assert found == dict.fromkeys(found, True)


@pytest.mark.gpu
def test_use():
    for found in spawn(_run, 2, backend="cuda", timeout_s=280, env={"TPFUSE_NVTX": "1"}):
        _check(found)


if __name__ == "__main__":
    under_torchrun(lambda rank: _check(_run(rank)))
