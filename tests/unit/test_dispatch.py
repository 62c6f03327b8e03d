"""Which candidate a call gets: by table, by rule, by name, and what follows where the first cannot."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from tpfuse.comm.arena import MAX_SPLIT_ROWS, SLOT_BYTES, Region
from tpfuse.errors import ConfigError
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import ALL_REDUCE, ALL_REDUCE_RMS_NORM, ANY, CANDIDATES, Problem, Wish
from tpfuse.kernels.dispatch import Dispatcher
from tpfuse.tables import PLAIN_ROW_BYTES, Choice, Machine, Table

BF16 = torch.bfloat16
RING, NCCL = Choice("tpfuse_ring", warps=16, blocks=132, registers=64), Choice("nccl")


class StandIn:
    """What ``choose`` reads of an arena. No memory, no group."""

    def __init__(self, world=2, split_rows=MAX_SPLIT_ROWS):
        self.world, self.rank = world, 0
        self.split, self.ring = Region(0, split_rows, 0), Region(0, 512, 0)


def norm(rows, hidden=4096, **facts):
    return Problem(ALL_REDUCE_RMS_NORM, rows, hidden, **{"dtype": BF16, "weight_dtype": BF16, **facts})


def plain(elements, dtype=BF16):
    return Problem(ALL_REDUCE, elements, 1, dtype)


def by_table(*entries, op=ALL_REDUCE_RMS_NORM, row_bytes=8192, **arena):
    return Dispatcher(StandIn(**arena), Table(Machine("GPU", "nvlink", 2), {op: {row_bytes: entries}}, {}), "here")


def chosen(dispatcher, problem, wish=ANY):
    candidate, choice = dispatcher.choose(problem, wish)
    assert candidate is CANDIDATES[problem.op][choice.candidate]
    return choice


def test_by_table_with_its_layout():
    dispatcher = by_table((1, Choice("tpfuse_split", warps=4)), (8, RING), (64, NCCL))
    assert chosen(dispatcher, norm(7)) == Choice("tpfuse_split", warps=4)
    assert chosen(dispatcher, norm(8)) == RING
    assert chosen(dispatcher, norm(64)) == NCCL


def test_plain_by_table():
    dispatcher = by_table((1, RING), (1 << 20, NCCL), op=ALL_REDUCE, row_bytes=PLAIN_ROW_BYTES)
    assert chosen(dispatcher, plain((1 << 19) - 1)) == RING
    assert chosen(dispatcher, plain(1 << 19)) == NCCL


def test_the_table_does_not_know_the_operation():
    dispatcher = by_table((1, NCCL))
    assert chosen(dispatcher, plain(64)) == NCCL


@pytest.mark.parametrize("world", [2, 4, 8])
def test_by_rule(world):
    """Without a table: what is sent decides; a plain all-reduce is NCCL's."""
    dispatcher = Dispatcher(StandIn(world=world), None, "none")
    assert chosen(dispatcher, norm(1, 1024)) == Choice("tpfuse_split")
    assert chosen(dispatcher, norm(8, 1024)) == Choice("tpfuse_ring")
    assert chosen(dispatcher, plain(4096)) == NCCL
    assert chosen(dispatcher, norm(1 << 16, 1024)) == NCCL
    assert chosen(dispatcher, plain(1 << 26)) == NCCL


@pytest.mark.parametrize("gone", ["fastest_of_all", "tpfuse_split_v0", ""])
def test_a_table_may_name_what_is_no_more(gone):
    assert chosen(by_table((1, Choice(gone, warps=8))), norm(1)) == Choice("tpfuse_split")
    assert chosen(by_table((1, Choice(gone, warps=8))), norm(1, SLOT_BYTES)) == NCCL  # twice as many bytes: no ring either


def test_falls_through_to_what_can():
    splits = by_table((1, Choice("tpfuse_split", warps=8)), split_rows=16)
    assert chosen(splits, norm(16)) == Choice("tpfuse_split", warps=8)
    assert chosen(splits, norm(17)) == Choice("tpfuse_ring")
    assert chosen(splits, norm(17, SLOT_BYTES)) == NCCL


@pytest.mark.parametrize("library", ["flashinfer", "torch_symm_mem"])
def test_a_library_that_was_not_prepared_is_passed_over(library):
    assert chosen(by_table((1, Choice(library))), norm(1)) == Choice("tpfuse_split")
    assert chosen(by_table((1, Choice(library))), norm(8)) == Choice("tpfuse_ring")
    assert chosen(by_table((1, Choice(library))), norm(8192)) == NCCL


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": torch.float64, "weight_dtype": torch.float64},
        {"weight_dtype": torch.float64},
        {"normed_dtype": torch.float16},
    ],
)
def test_none_where_only_the_reference_can(facts):
    assert by_table((1, RING)).choose(norm(1, **facts)) is None


def test_a_plain_sum_of_any_dtype():
    assert chosen(by_table((1, RING)), plain(64, torch.int64)) == NCCL


def test_pinned():
    dispatcher = by_table((1, RING))
    for name in ("tpfuse_split", "tpfuse_ring", "nccl"):
        assert chosen(dispatcher, norm(4), Wish(name)) == Choice(name)


def test_pinned_and_unknown():
    with pytest.raises(ConfigError, match=r"^kernel 'magic' cannot run all_reduce_rms_norm: the kernels are tpfuse_split"):
        by_table((1, RING)).choose(norm(1), Wish("magic"))
    with pytest.raises(ConfigError, match=r"^kernel 'tpfuse_split' cannot run all_reduce: the kernels are "):
        by_table((1, RING)).choose(plain(64), Wish("tpfuse_split"))


@pytest.mark.parametrize(
    ("name", "problem", "why"),
    [
        ("tpfuse_split", norm(33), "more than 32 rows"),
        ("tpfuse_ring", norm(1, SLOT_BYTES), "a row of 65536 bytes is longer than a slot of 32768"),
        ("tpfuse_ring", norm(1, dtype=torch.float64), "dtype torch.float64"),
        ("nccl", norm(1, weight_dtype=torch.float64), "a float64 weight"),
    ],
)
def test_pinned_and_unable(name, problem, why):
    with pytest.raises(ConfigError) as caught:
        by_table((1, RING)).choose(problem, Wish(name))
    assert str(caught.value) == f"kernel {name!r} cannot run {problem.op}: {why}"


def test_a_choice_is_made_once_per_kind_of_call(monkeypatch):
    """By shape, dtypes and options; arguments that no choice depends on do not count."""
    dispatcher = by_table((1, RING), (8, NCCL))
    calls = []
    problems = []
    run = lambda arena, choice, *arguments: calls.append(choice)  # noqa: E731

    def choose(problem, wish):
        problems.append((problem, wish))
        return types.SimpleNamespace(run=run), dispatcher.table.choose(problem.op, problem.rows, problem.row_bytes)

    monkeypatch.setattr(dispatcher, "choose", choose)
    weight = torch.ones(4096, dtype=BF16)

    def call(rows, eps=1e-5, kernel=None, residual=True):
        x = torch.ones(2, rows // 2, 4096, dtype=BF16)
        dispatcher.all_reduce_rms_norm(
            Wish(kernel), x, weight, eps, x if residual else None, None, None, None, 0.0, BF16, BF16
        )

    for _ in range(3):
        call(4)
    call(4, eps=1e-6)
    assert len(problems) == 1 and len(calls) == 4
    assert problems[0][0] == norm(4, normed_dtype=BF16, out_dtype=BF16)
    call(8)
    call(4, residual=False)
    call(4, kernel="nccl")
    assert [problem.rows for problem, _ in problems] == [4, 8, 4]
    assert problems[2][1] == Wish("nccl")
    assert calls[4] == NCCL


@pytest.fixture
def may_run(monkeypatch):
    """``dispatch.may_run`` of a group whose table gives 64 rows and more to NCCL."""
    dispatcher = by_table((1, Choice("tpfuse_split")), (8, RING), (64, NCCL))
    monkeypatch.setattr(dispatch, "of", lambda group_name: dispatcher)
    return lambda low, high, **facts: dispatch.may_run("0", "cuda", norm(low, **facts), high)


def test_what_may_run_over_a_range_of_rows(may_run):
    assert may_run(1, 1) == ["tpfuse_split"]
    assert may_run(1, 1 << 20) == ["tpfuse_split", "tpfuse_ring", "nccl"]
    assert may_run(8, 63) == ["tpfuse_ring"]
    assert may_run(3, 70) == ["tpfuse_split", "tpfuse_ring", "nccl"]
    assert may_run(64, 64) == may_run(64, 1 << 20) == ["nccl"]
    assert may_run(4, 4, normed_dtype=torch.float16) == ["reference"]
    assert dispatch.may_run("0", "cpu", norm(1), 9) == ["reference"]
    assert dispatch.may_run("0", "cuda", norm(1), 9, Wish("flashinfer")) == ["flashinfer"]


@pytest.fixture
def flashinfer(monkeypatch):
    """FlashInfer as if it were there; the rows of the calls that it was prepared for."""
    prepared = []
    known = CANDIDATES[ALL_REDUCE_RMS_NORM]
    able = dataclasses.replace(
        known["flashinfer"], prepare=lambda arena, p: prepared.append(p.rows) or "", cannot=lambda arena, p: ""
    )
    monkeypatch.setitem(known, "flashinfer", able)
    return prepared


def test_memory_of_a_library_is_made_for_the_largest_call_it_gets(may_run, flashinfer, monkeypatch):
    dispatcher = by_table((1, RING), (16, Choice("flashinfer")), (1 << 16, RING))
    monkeypatch.setattr(dispatch, "of", lambda group_name: dispatcher)
    assert may_run(1, 64) == ["tpfuse_ring", "flashinfer"] and flashinfer == [64]
    assert may_run(1, 1 << 20) == ["tpfuse_ring", "flashinfer"] and flashinfer[1:] == [8192]


def test_flashinfer_up_to_a_size(flashinfer, monkeypatch):
    """By table or by name: larger messages go to what else can."""
    dispatcher = by_table((1, Choice("flashinfer")), (1 << 16, NCCL))
    monkeypatch.setattr(dispatch, "of", lambda group_name: dispatcher)
    for wish in (Wish(None, 8 * 8192), Wish("flashinfer", 8 * 8192)):
        assert chosen(dispatcher, norm(8), wish) == Choice("flashinfer")
        assert chosen(dispatcher, norm(9), wish) == Choice("tpfuse_ring")
        assert chosen(dispatcher, norm(1 << 16), wish) == NCCL
        assert dispatch.may_run("0", "cuda", norm(4), 32, wish) == ["flashinfer", "tpfuse_ring"]
        assert dispatch.may_run("0", "cuda", norm(16), 32, wish) == ["tpfuse_ring"]
    assert flashinfer[0] == 8 and max(flashinfer) == 8
    assert chosen(dispatcher, norm(9), Wish(None, 0)) == Choice("tpfuse_ring")


def test_why_not_the_others(may_run):
    kernels = may_run(4, 8)
    told = dispatch.told("0", norm(4), kernels)
    assert told == (
        "all_reduce_rms_norm of [T, 4096] torch.bfloat16 over '0': tpfuse_split, tpfuse_ring; "
        "not flashinfer, torch_symm_mem, nccl (the table chose others)"
    )
    assert dispatch.told("0", norm(4), ["nccl"], Wish("nccl")).endswith("torch_symm_mem (nccl was asked for)")
    told = dispatch.told("0", norm(1, SLOT_BYTES), ["nccl"])
    assert "tpfuse_split, tpfuse_ring (a row of 65536 bytes is longer than a slot of 32768)" in told
    capped = dispatch.told("0", norm(4), ["tpfuse_ring"], Wish(None, 100))
    assert "flashinfer (for messages of at most 100 bytes)" in capped


def test_a_cap_that_is_no_power_of_two(flashinfer, monkeypatch):
    dispatcher = by_table((1, Choice("flashinfer")))
    monkeypatch.setattr(dispatch, "of", lambda group_name: dispatcher)
    assert dispatch.may_run("0", "cuda", norm(1), 8192, Wish(None, 1000 * 8192)) == ["flashinfer", "nccl"]
    assert max(flashinfer) == 1000
