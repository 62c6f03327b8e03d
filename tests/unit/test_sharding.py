"""From how many rows on they are sharded: as configured, by the machine's table, else by rule; a model's bytes of a row."""

from __future__ import annotations

import types

import pytest
import torch

from tpfuse import sharding, tables, tokens
from tpfuse.config import FusionConfig
from tpfuse.graph import pipeline
from tpfuse.kernels import dispatch
from tpfuse.models.families import family_config
from tpfuse.models.row_bytes import row_bytes
from tpfuse.tables import Choice, Machine, Table
from tpfuse.testing import fake_world

OP, WITH_GEMMS = tables.SEQUENCE_PARALLEL.values()
WHOLE, SHARDED = Choice(tables.WHOLE), Choice(tables.SHARDED)
ROW_BYTES = 256  # of a Llama of the families: 64 in fp32


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPFUSE_CACHE_DIR", str(tmp_path))


def keep(world=2, **ops) -> None:
    """A tuned table of this machine."""
    machine = dispatch.machine_of(torch.device("cpu"), world)
    tables.save(Table(machine, {op: {ROW_BYTES: entries} for op, entries in ops.items()}, {}))


def model(device: str = "cpu") -> types.SimpleNamespace:
    """What is read of one."""
    weight = types.SimpleNamespace(
        is_floating_point=lambda: True, dtype=torch.float32, numel=lambda: 1, device=torch.device(device)
    )
    config = types.SimpleNamespace(hidden_size=ROW_BYTES // 4)
    return types.SimpleNamespace(parameters=lambda: [weight], buffers=lambda: [], config=config)


def threshold(found=None, device="cpu", world=2, **fields) -> sharding.Threshold:
    config = FusionConfig(**{"enable_sp": True, **fields})
    with fake_world(world) as group:
        groups = [group] if found is None else found
        return sharding.threshold(config, pipeline.resolve(config), model(device), groups)


def test_by_the_table():
    keep(**{OP: ((1, WHOLE), (128, SHARDED)), WITH_GEMMS: ((1, WHOLE), (32, SHARDED))})
    found = threshold()
    assert found.rows == 128 and found.source.startswith("rows are sharded from 128 on, measured: tuned: ")
    assert "for 256 bytes a row (here 256)" in found.source
    assert threshold(fuse_gemm_comms=True).rows == 32


def test_what_is_configured_wins():
    keep(**{OP: ((1, WHOLE), (128, SHARDED))})
    assert threshold(sp_min_token_num=7) == sharding.Threshold(7, "rows are sharded from 7 on, as configured")
    assert threshold(sp_min_token_num=0).rows == 0
    assert threshold(enable_sp=False) == threshold(enable_sp=None) == sharding.Threshold(None)


def test_where_sharding_never_was_faster():
    keep(**{OP: ((1, WHOLE),)})
    found = threshold()
    assert found.rows == tokens.MOST_ROWS and found.source.startswith("rows are not sharded, measured: tuned: ")


def test_without_a_measurement(monkeypatch):
    """Any number on CPU ranks; on GPUs a rule that says so."""
    assert threshold().rows is None and "no table for 2 x" in threshold().source
    keep(all_reduce=((1, WHOLE),))
    assert threshold().rows is None and "run tpfuse tune --sequence-parallel" in threshold().source
    keep(world=4, **{OP: ((1, WHOLE), (128, SHARDED))})
    assert threshold().rows is None and threshold(world=4).rows == 128
    monkeypatch.setattr(dispatch, "machine_of", lambda device, world: Machine("GPU", "nvlink", world))
    found = threshold(device="cuda")
    assert (
        found.rows == sharding.RULE_ROWS and "rows are sharded from 512 on, by rule: no table for 2 x GPU" in found.source
    )
    assert threshold(device="cuda", found=[]).rows == sharding.RULE_ROWS


def test_groups_that_tell_no_table():
    keep(**{OP: ((1, WHOLE), (128, SHARDED))})
    assert threshold(found=[]).rows is None and "known from its graph only" in threshold(found=[]).source
    assert threshold(world=1) == sharding.Threshold(None), "one rank shards nothing"


def test_a_rows_bytes():
    """By Hugging Face's configuration, else by the norms' weights: the same on every rank."""
    norms = {f"layers.{n}.{name}_norm.weight": torch.zeros(size) for n in (0, 1) for name, size in (("in", 48), ("q", 8))}
    plain = torch.nn.Module()
    for index, (name, value) in enumerate({**norms, "norm.weight": torch.zeros(48), "q.bias": torch.zeros(9)}.items()):
        part = torch.nn.Module()
        part.weight = torch.nn.Parameter(value.bfloat16())
        plain.add_module(f"{index}_{name.replace('.', '_')}", part)
    assert row_bytes(plain) == 96
    plain.config = types.SimpleNamespace(hidden_size=None, text_config=types.SimpleNamespace(hidden_size=40))
    assert row_bytes(plain) == 80
    plain.config = family_config("llama")
    assert row_bytes(plain) == 128
    assert row_bytes(torch.nn.Linear(4, 4)) is None
