"""``tpfuse tune --sequence-parallel`` on CPU ranks, from measuring to a model that goes by what was measured.

Graphs are run by an interpreter: times are real, but what wins is not the subject.
"""

from __future__ import annotations

import os
import pathlib

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tpfuse import tables, tokens
from tpfuse.kernels import dispatch
from tpfuse.tables import SEQUENCE_PARALLEL, SHARDED, WHOLE, Choice, Table
from tpfuse.testing import interpret_graphs, spawn
from tpfuse.tuner import arguments, job, sequence_parallel
from tpfuse.tuner.block_stack import Stack

CPU, FP32 = torch.device("cpu"), torch.float32
pytestmark = pytest.mark.slow
HIDDEN, ROWS = 64, (4, 32)


def _stack() -> Stack:
    return Stack(HIDDEN, 128, 1, dist.group.WORLD, FP32, CPU)


def _told(config: dict) -> str:
    """What apply raises, or the notes of its report."""
    try:
        return "; ".join(tpfuse.explain(tpfuse.apply(_stack(), config)).notes)
    except tpfuse.TpfuseError as error:
        return f"{type(error).__name__}: {error}"


def _keep(fewest: int) -> None:
    """A table of this rank's, by which rows are sharded from so many on."""
    entries = (1, Choice(WHOLE)), (fewest, Choice(SHARDED))
    machine = dispatch.machine_of(CPU, dist.get_world_size())
    tables.save(Table(machine, {op: {4 * HIDDEN: entries} for op in SEQUENCE_PARALLEL.values()}, {}))


def _variants() -> dict[str, object]:
    """Calls of few rows and of many, of a model that goes by the table."""
    model = _stack()
    inputs = [torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)) for rows in (3, 9)]
    expected = [model(x) for x in inputs]
    tpfuse.apply(model, {"enable_sp": True}, strict=True, fullgraph=True)
    errors = [(model(x) - y).abs().max().item() for x, y in zip(inputs, expected, strict=True)]
    report = tpfuse.explain(model)
    fused = {(site.variant, site.fusion) for site in report.sites if site.outcome == "fused"}
    return {"error": max(errors), "fused": fused, "seconds": sorted(report.compile_seconds), "note": report.notes[0]}


def _scenarios(rank: int, folder: str) -> dict[str, object]:
    found: dict[str, object] = {}
    sequence_parallel.LAYERS, sequence_parallel.MOST_CALLS, sequence_parallel.ROUNDS = 1, 1, 3
    asked = ["--sequence-parallel", f"{HIDDEN}x128", "--dtype", "fp32", "--rows", ",".join(map(str, ROWS))]
    with interpret_graphs(), torch.no_grad():
        found["status"] = job._run(arguments.parse(asked), rank)
        table, found["source"] = tables.find(dispatch.machine_of(CPU, 2))
        found["measured"] = [table.sharded_from(op, 4 * HIDDEN) for op in SEQUENCE_PARALLEL.values()]
        found["boundaries"] = [
            tpfuse.apply(_stack(), {"enable_sp": True, "fuse_gemm_comms": on})._compiled_call_impl._boundaries
            for on in SEQUENCE_PARALLEL
        ]
        dist.barrier()  # nobody looks any more
        if rank == 0:
            _keep(6)
        dist.barrier()
        found["variants"] = _variants()
        os.environ["TPFUSE_CACHE_DIR"] = f"{folder}/{rank}"
        _keep(8 + rank)
        found["ranks differ"] = _told({"enable_sp": True})
        found["overridden"] = _told({"enable_sp": True, "sp_min_token_num": 5})
        found["off"] = _told({})
    return found


def test_from_measuring_to_variants(tmp_path):
    for found in spawn(_scenarios, 2, str(tmp_path), timeout_s=240, env={"TPFUSE_CACHE_DIR": str(tmp_path)}):
        assert found["status"] == 0 and found["source"].startswith(f"tuned: {tmp_path}")
        assert all(rows in (*ROWS, float("inf")) and at == 4 * HIDDEN for rows, at in found["measured"])
        assert found["boundaries"] == [(int(min(rows, tokens.MOST_ROWS)),) for rows, _ in found["measured"]]
        variants = found["variants"]
        assert variants["error"] < 1e-5 and variants["seconds"] == ["rows<6", "rows>=6"]
        assert variants["fused"] == {("rows<6", "fuse_allreduce_rms"), ("rows>=6", "enable_sp")}
        assert variants["note"].startswith("rows are sharded from 6 on, measured: tuned: ")
        assert found["ranks differ"].startswith("AgreementError: ") and "rank 0: 8, rank 1: 9" in found["ranks differ"]
        assert found["overridden"] == "rows are sharded from 5 on, as configured"
        assert not found["off"]
    assert len(list(pathlib.Path(tmp_path).glob("*.json"))) == 1
