"""What tpfuse tells by the ``logging`` tree."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpfuse
from tpfuse.testing import fake_world, interpret_graphs


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm, self.tp_group = nn.RMSNorm(16, eps=1e-5), group

    def forward(self, x):
        dist.all_reduce(x)
        return self.norm(x)


@pytest.fixture
def records(caplog):
    """(logger, level, message) of what an applied model tells in two calls, on rank 1."""
    caplog.set_level(logging.DEBUG, logger="tpfuse")
    with fake_world(2, rank=1) as group, interpret_graphs(), torch.no_grad():
        model = tpfuse.apply(Block(group))
        for rows in (3, 3):
            model(torch.ones(rows, 16))
        recorder = model._compiled_call_impl.recorder
        for _ in range(2):
            recorder.warn("slow here")
    return [(r.name, r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("tpfuse")]


def test_what_is_told_at_which_level(records):
    told = {level: [(name, text) for name, is_, text in records if is_ == level] for level in ("INFO", "WARNING", "DEBUG")}
    (applied, graph), (warning,), debug = told["INFO"], told["WARNING"], told["DEBUG"]
    assert (
        applied[0] == "tpfuse.api"
        and "applied to Block: on: fuse_allreduce_rms" in applied[1]
        and "process groups: ['0']" in applied[1]
    )
    assert graph[0] == "tpfuse.graph.backend" and "graph 1 (rows: all): 1 all_reduce fused" in graph[1]
    assert warning == ("tpfuse.report", "[rank 1] slow here")
    assert any("all_reduce at test_logging.py:" in text and "fused: reference" in text for _, text in debug)
    assert all(text.startswith("[rank 1] ") for _, _, text in records)


def test_nothing_is_printed_unless_asked_for():
    """Warnings included, which Python prints of loggers that nobody set up."""
    script = "import tpfuse, tpfuse.logs as l; l.logger('tpfuse.x').warning('w'); l.logger('tpfuse.x').info('i')"
    quiet = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "w" not in quiet.stderr.split() and not quiet.stdout
