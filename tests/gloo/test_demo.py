"""The demo on meshes of four CPU ranks: the tokens of the unfused and of the unsharded model, and a report of each stage.

Graphs are run by an interpreter: Inductor is not the subject.
"""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

import pytest
import torch.distributed as dist

from tpfuse.testing import interpret_graphs, spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = ["--hidden", "64", "--new-tokens", "4"]


def _demo(rank: int, port: int, argv: list[str]) -> tuple[int, str]:
    from tpfuse.demo import job

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    once = mock.patch.multiple(job, WARM_UP_RUNS=0, TIMED_RUNS=1)
    with interpret_graphs(), once, contextlib.redirect_stdout(io.StringIO()) as told:
        status = job.main([*SMALL, *argv])
    return status, told.getvalue()


def _run(*argv: str) -> str:
    """What the first rank printed."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    outcomes = spawn(_demo, 4, port, list(argv), backend="", timeout_s=880)
    assert [status for status, _ in outcomes] == [0] * 4, outcomes[0][1]
    assert not any(text for _, text in outcomes[1:])
    return outcomes[0][1]


@pytest.mark.parametrize("mesh", ["tp2xdp2", "tp2xpp2"])
def test_the_same_tokens(mesh):
    told = _run("--mesh", mesh)
    assert "tokens: all 4 equal" in told and "applied and unsharded" in told and told.endswith("OK\n")
    if mesh == "tp2xdp2":
        assert "(dp 2 x tp 2)" in told and "all-reduces: 4 fused, 0 merged, 0 left" in told
    else:
        assert "(pp 2 x tp 2)" in told
        first, second = told.partition("stage 0:")[2].split("stage 1:")
        assert "all-reduces: 1 fused, 0 merged, 1 left" in first, "the last sum of a stage goes to the next stage"
        assert "all-reduces: 2 fused, 0 merged, 0 left" in second
