"""CUDA graphs of both variants of one model: calls of few rows and of many take turns, each replays graphs of its own; and
how it is measured where the one takes over from the other.

All collectives are our kernels' (what gloo does cannot be captured): below 64 rows norms in their all-reduces, from there
on sharded rows and joined GEMMs.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.multigpu.test_sequence_parallel import (
    CONFIG,
    FUSIONS,
    HIDDEN,
    LIMIT,
    VOCABULARY,
    choose_ours,
    error,
    sharded_llama,
)
from tpfuse.tables import Choice
from tpfuse.testing import spawn
from tpfuse.tuner.sequence_parallel import Contest, Shape

#: Of one round; every one but the first two is a change of variants.
ROWS = (1, 16, 256, 16, 512, 1)
ROUNDS = 30
RECORDED_AFTER = 4  # rounds: graphs of one size and of any, warmed up and recorded


class _Scored(torch.nn.Module):
    """A Llama whose head is replicated: of a sharded one the logits would be gathered, which is no kernel of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = sharded_llama().model
        generator = torch.Generator().manual_seed(2)
        self.head = torch.nn.Parameter((torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5).cuda().bfloat16())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.stack(ids, use_cache=False).last_hidden_state, self.head)


def _scores(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).float()  # a copy: the next call overwrites what a graph wrote


def _graphs(rank: int) -> dict[str, object]:
    choose_ours()
    model = _Scored()
    generator = torch.Generator().manual_seed(1)
    inputs = {rows: torch.randint(3, VOCABULARY, (1, rows), generator=generator).cuda() for rows in ROWS}
    expected = {rows: _scores(model, ids) for rows, ids in inputs.items()}
    tpfuse.apply(model, CONFIG, strict=True, mode="reduce-overhead", fullgraph=True)
    _scores(model, inputs[max(ROWS)])  # which strict looks at
    counters = torch._dynamo.utils.counters
    counters.clear()
    replay, replays = torch.cuda.CUDAGraph.replay, [0]

    def counted(graph) -> None:
        replays[0] += 1
        replay(graph)

    errors, compiled = [], 0
    with mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
        for number in range(ROUNDS):
            if number == RECORDED_AFTER:
                compiled, replays[0] = counters["stats"]["unique_graphs"], 0
            errors += [error(_scores(model, inputs[rows]), expected[rows]) for rows in ROWS]
    tpfuse.check()
    report = tpfuse.explain(model)
    fused = [site for site in report.sites if site.outcome == "fused"]
    return {
        "error": max(errors, key=lambda each: (each != each, each)),  # NaN is the largest
        "replays": replays[0],
        "skips": counters["inductor"]["cudagraph_skips"],
        "compiled later": counters["stats"]["unique_graphs"] - compiled,
        "many": {site.fusion for site in fused if site.variant == "rows>=64"},
        "few": {site.fusion for site in fused if site.variant == "rows<64"},
        "seconds": sorted(report.compile_seconds),
        "table": str(report),
    }


def _measured(rank: int) -> dict[int, tuple[dict, dict, str]]:
    choose_ours()
    device = torch.device("cuda", torch.cuda.current_device())
    contest = Contest(Shape(HIDDEN, 2 * HIDDEN, True, torch.bfloat16), dist.group.WORLD, device)
    with torch.no_grad():
        found = {rows: contest.measure(rows) for rows in (8, 64)}
    contest.end()
    return found


@pytest.mark.gpu
def test_a_measurement(tmp_path):
    """Both variants are right, captured, and timed alike on all ranks."""
    ranks = spawn(_measured, 2, backend="cuda", timeout_s=280, env={"TPFUSE_CACHE_DIR": str(tmp_path)})
    assert ranks[0] == ranks[1]
    for first, again, why in ranks[0].values():
        assert not why and {*first} == {*again} == {Choice("whole"), Choice("sharded")}
        assert first != again and all(us > 0 for us in (*first.values(), *again.values()))


@pytest.mark.gpu
def test_each_variant_has_its_cuda_graphs(tmp_path):
    for found in spawn(_graphs, 2, backend="cuda", timeout_s=280, env={"TPFUSE_CACHE_DIR": str(tmp_path)}):
        assert found["error"] <= LIMIT, found
        assert found["replays"] == (ROUNDS - RECORDED_AFTER) * len(ROWS) and not found["skips"], found
        assert not found["compiled later"], found
        assert found["few"] == {"fuse_allreduce_rms"} and {*FUSIONS[:2]} <= found["many"], found["table"]
        assert found["seconds"] == ["rows<64", "rows>=64"], found["table"]
