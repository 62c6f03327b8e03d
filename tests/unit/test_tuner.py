"""What the tuner measures, how it chooses, and what becomes of the table. Nothing is timed here."""

from __future__ import annotations

import argparse
import contextlib
import json
import types

import pytest
import torch

from tpfuse import tables
from tpfuse.comm.arena import Region
from tpfuse.errors import AgreementError, PeerTimeoutError
from tpfuse.kernels.candidates import ALL_REDUCE, ALL_REDUCE_RMS_NORM, Candidate
from tpfuse.tables import PLAIN_ROW_BYTES, Choice, Machine, Table
from tpfuse.testing import fake_world
from tpfuse.tuner import arguments, bench_all_reduce, job, measure, proposals, selection, timing
from tpfuse.tuner.bench_all_reduce import AllReduceBench
from tpfuse.tuner.proposals import Size

BF16 = torch.bfloat16
SPLIT_8, RING, WIDE, NCCL = (
    Choice("tpfuse_split", warps=8),
    Choice("tpfuse_ring", warps=8, blocks=264),
    Choice("tpfuse_ring", warps=16, blocks=132),
    Choice("nccl"),
)
MACHINE = Machine("NVIDIA H200", "nvlink", 2)


class StandIn:
    """What the tuner reads of an arena."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, world=2, ring=512, split=32):
        self.world, self.split, self.ring = world, Region(0, split, 0), Region(0, ring, 0)
        self.multiprocessors = 132

    def check(self):
        pass


BAD_SHAPES = ("4096x", "x4096", "4096", "0x8", "8x08", "8 x8", "4096X8", "8x8,8x8", "1e3x8", "")


# -- command line ------------------------------------------------------------------------------------------------------


def test_defaults():
    args = arguments.parse([])
    assert args.hidden == (4096, 8192) and args.dtype == "bf16" and args.ops == ("all_reduce_rms_norm", "all_reduce")
    assert args.rows == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert not args.fresh and args.out is None and args.gemm == ()


def test_lists_ascend_and_hold_each_once():
    args = arguments.parse(["--hidden", "8192,64,8192", "--rows", "7", "--ops", "all_reduce,all_reduce"])
    assert args.hidden == (64, 8192) and args.rows == (7,) and args.ops == ("all_reduce",)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 2880},
        {"text_config": {"hidden_size": 2880}},
        {"hidden_size": None, "text_config": {"hidden_size": 2880}},
    ],
)
def test_hidden_size_of_a_model(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert arguments.parse(["--model", str(tmp_path)]).hidden == (2880,)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--hidden", "0"], "must be a number above 0, got '0'"),
        (["--hidden", "4096,"], "must be a number above 0, got ''"),
        (["--rows", "1,x"], "must be a number above 0, got 'x'"),
        (["--seconds", "nan"], "must be a number above 0"),
        (["--ops", "all_gather"], "no operation 'all_gather'; there are all_reduce_rms_norm, all_reduce, matmul_reduce_"),
        *((["--gemm", bad], f"must be NxK, two numbers above 0, got '{bad}'") for bad in BAD_SHAPES),
        (["--gemm", "8x8", "8x8x"], "got '8x8x'"),
        (["--gemm"], "expected at least one argument"),
        (["--ops", "matmul_all_reduce"], "--ops matmul_all_reduce: --gemm says for which sizes"),
        (["--gemm", "8x8", "--ops", "all_reduce"], "--gemm: --ops names none of matmul_reduce_scatter, all_gather_matmul"),
        (["--gemm", "8x8", "--dtype", "fp16"], "--dtype fp16: GEMMs are measured in bf16"),
        (["--dtype", "int8"], "invalid choice"),
        (["--sequence-parallel", "8x8", "--hidden", "8"], "not allowed with argument"),
        (["--sequence-parallel", "8x8", "--gemm", "8x8"], "--gemm: not with --sequence-parallel"),
        (["--sequence-parallel", "8x8", "--ops", "all_reduce"], "--ops: not with --sequence-parallel"),
        (["--sequence-parallel", "8x8", "--dtype", "fp8"], "--dtype fp8: blocks are measured in bf16,fp16,fp32"),
        (["--sequence-parallel", "8x8", "8x16"], "one intermediate size for each hidden size, got 8,8"),
        (["--model", "/nowhere"], "/nowhere/config.json: No such file or directory"),
        (["--model", "x", "--hidden", "8"], "not allowed with"),
        (["--row", "8"], "unrecognized arguments: --row"),
    ],
)
def test_bad_arguments(capsys, given, told):
    with pytest.raises(SystemExit) as caught:
        arguments.parse(given)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"hidden_size": "big"}', '{"hidden_size": true}'])
def test_a_model_without_hidden_size(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit):
        arguments.parse(["--model", str(tmp_path)])
    assert f"--model: {tmp_path}/config.json" in capsys.readouterr().err


# -- what there is to measure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 20))
def test_coarse_to_fine(count):
    values = [1 << n for n in range(count)]
    order = list(proposals.coarse_to_fine(values))
    assert sorted(order) == values
    assert order[:2] == [values[0], values[-1]][:count]
    if count == 14:
        assert order[2] == 64


def test_sizes_are_each_there_once():
    """A plain all-reduce of 2 x 4096 and of 1 x 8192 are the same message."""
    listed = proposals.sizes((ALL_REDUCE_RMS_NORM, ALL_REDUCE), (4096, 8192), (1, 2, 4), BF16)
    keys = [size.key for size in listed]
    assert len(keys) == len(set(keys)) == 6 + 4
    assert keys[0] == (ALL_REDUCE_RMS_NORM, 8192, 1)
    assert {key for key in keys if key[0] == ALL_REDUCE} == {(ALL_REDUCE, PLAIN_ROW_BYTES, n << 13) for n in (1, 2, 4, 8)}


def test_the_table_finds_what_was_measured():
    """A size's key is where the dispatcher looks for its problem."""
    for size in proposals.sizes((ALL_REDUCE_RMS_NORM, ALL_REDUCE), (2880, 8192), (1, 7, 64), BF16):
        op, row_bytes, rows = size.key
        other = ((1, NCCL), (rows, RING)) if rows > 1 else ((1, RING),)
        table = Table(MACHINE, {op: {row_bytes: other}}, {})
        assert table.choose(op, size.problem.rows, size.problem.row_bytes) == RING


def of(size, name, **where):
    return [choice for choice in proposals.choices(StandIn(**where), size.problem) if choice.candidate == name]


def norm(rows, hidden):
    return Size(ALL_REDUCE_RMS_NORM, rows, hidden, BF16)


def test_layouts_of_a_large_ring():
    rings = of(norm(1024, 8192), "tpfuse_ring")
    assert len(set(rings)) == len(rings) == 6
    assert {choice.get("warps") for choice in rings} == {16, 32}
    assert {choice.get("blocks") for choice in rings} == {132, 264}
    assert {choice.get("registers") for choice in rings if choice.get("warps") < 32} == {None, 64}
    assert {choice.get("registers") for choice in rings if choice.get("warps") == 32} == {None}  # 64 each is all there are


def test_layouts_that_are_the_same_launch_are_one():
    assert {choice.get("warps") for choice in of(norm(1024, 4096), "tpfuse_ring")} == {8, 16}  # 512 vectors
    assert {choice.get("blocks") for choice in of(norm(64, 4096), "tpfuse_ring")} == {264}  # 64 blocks
    assert {choice.get("blocks") for choice in of(norm(1024, 4096), "tpfuse_ring", ring=55)} == {264}
    assert of(norm(1, 64), "tpfuse_ring") == [Choice("tpfuse_ring", warps=1, blocks=264)]
    assert {choice.get("warps") for choice in of(norm(1, 8192), "tpfuse_split")} == {8, 4}
    assert {choice.get("warps") for choice in of(norm(1, 4096), "tpfuse_split")} == {4, 2}
    assert of(norm(1, 64), "tpfuse_split") == [Choice("tpfuse_split", warps=1)]


def test_only_what_can():
    assert of(norm(33, 4096), "tpfuse_split") == [] and of(norm(17, 4096), "tpfuse_split", split=16) == []
    assert of(norm(1, 32768), "tpfuse_ring") == []
    assert of(norm(1, 4096), "nccl") == of(Size(ALL_REDUCE, 1, 4096, BF16), "nccl") == [NCCL]
    assert of(norm(1, 4096), "flashinfer") == []  # not prepared
    assert of(Size(ALL_REDUCE, 1, 4096, BF16), "tpfuse_split") == []


def test_a_plain_message_is_cut_as_the_kernel_cuts_it():
    assert {choice.get("warps") for choice in of(Size(ALL_REDUCE, 8192, 8192, BF16), "tpfuse_ring")} == {8, 16}
    assert {choice.get("blocks") for choice in of(Size(ALL_REDUCE, 132, 4096, BF16), "tpfuse_ring")} == {264}
    assert {choice.get("blocks") for choice in of(Size(ALL_REDUCE, 133, 4096, BF16), "tpfuse_ring")} == {132, 264}


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_finalists():
    times = {NCCL: 20.0, WIDE: 10.3, RING: 10.0, SPLIT_8: 10.31}
    assert selection.finalists(times, NCCL) == [RING, WIDE, NCCL]
    assert selection.finalists({NCCL: 1.0, RING: 1.0}, NCCL) == [NCCL, RING]
    assert selection.finalists({RING: 1.0}, NCCL) == [RING]
    many = {Choice("tpfuse_ring", warps=warps): 1.0 for warps in range(1, 50)}
    assert len(selection.finalists(many, NCCL)) == selection.MOST_FINALISTS


def test_entries_start_at_one_and_merge():
    times = {4: {RING: 1.0, NCCL: 2.0}, 8: {RING: 1.0, NCCL: 2.0}, 64: {RING: 3.0, NCCL: 2.0}, 128: {NCCL: 1.0}}
    assert selection.entries(times) == ((1, RING), (64, NCCL))
    assert selection.entries({8: {NCCL: 1.0}}) == ((1, NCCL),)


def test_the_order_of_measuring_does_not_matter():
    times = {1: {RING: 1.0, NCCL: 2.0}, 8192: {RING: 3.0, NCCL: 2.0}, 64: {RING: 1.0, NCCL: 2.0}}
    assert selection.entries(times) == selection.entries(dict(sorted(times.items()))) == ((1, RING), (8192, NCCL))


def test_hysteresis():
    """What is chosen for fewer rows stays within one percent of the best, and does not drift further."""
    assert selection.entries({1: {RING: 1.0, WIDE: 2.0}, 2: {RING: 1.0099, WIDE: 1.0}}) == ((1, RING),)
    assert selection.entries({1: {RING: 1.0, WIDE: 2.0}, 2: {RING: 1.02, WIDE: 1.0}}) == ((1, RING), (2, WIDE))
    assert selection.entries({1: {RING: 1.0}, 2: {WIDE: 1.0}}) == ((1, RING), (2, WIDE))
    drifting = {n + 1: {RING: 0.999 + 0.004 * n, WIDE: 1.0} for n in range(10)}
    assert selection.entries(drifting) == ((1, RING), (4, WIDE))


SHARDED, WHOLE = Choice("sharded"), Choice("whole")


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({16: 1.2, 64: 1.1, 256: 0.9, 1024: 0.8}, ((1, WHOLE), (256, SHARDED))),
        ({16: 0.9, 64: 1.1, 256: 0.9, 1024: 0.8}, ((1, WHOLE), (256, SHARDED))),
        ({16: 0.9, 64: 0.9, 256: 0.9, 1024: 1.0}, ((1, WHOLE),)),
        ({16: 0.9, 64: 0.9}, ((1, WHOLE), (16, SHARDED))),
        ({1: 0.9, 64: 0.9}, ((1, SHARDED),)),
        ({64: 0.9, 1: 0.9, 16: None}, ((1, WHOLE), (64, SHARDED))),
    ],
    ids=range(6),
)
def test_sharded_from_where_it_is_faster_at_all_larger_sizes(ratios, expected):
    """None: its numbers were wrong there."""
    times = {rows: {WHOLE: 10.0, **({SHARDED: 10 * each} if each else {})} for rows, each in ratios.items()}
    assert selection.sharding(times) == expected


def test_sizes_of_blocks():
    args = arguments.parse(["--sequence-parallel", "4096x14336", "8192x28672"])
    assert args.sequence_parallel == ((4096, 14336), (8192, 28672)) and args.dtype == "bf16"
    assert (args.rows[0], args.rows[-1]) == (16, 16384)
    assert arguments.uneven(args, 2) == arguments.uneven(arguments.parse([]), 7) == ""
    assert "4096x14336: sizes that 3 ranks can split evenly" in arguments.uneven(args, 3)


def test_choose_by_operation_and_row_size():
    measured = {
        (ALL_REDUCE_RMS_NORM, 8192, 64): {RING: 1.0, NCCL: 3.0},
        (ALL_REDUCE_RMS_NORM, 8192, 1): {SPLIT_8: 1.0, RING: 2.0},
        (ALL_REDUCE_RMS_NORM, 16384, 1): {WIDE: 1.0, NCCL: 3.0},
        (ALL_REDUCE, PLAIN_ROW_BYTES, 8192): {RING: 1.0},
        (ALL_REDUCE, PLAIN_ROW_BYTES, 1 << 20): {NCCL: 1.0, RING: 2.0},
    }
    chosen = job.choose(measured)
    assert chosen == {
        ALL_REDUCE: {PLAIN_ROW_BYTES: ((1, RING), (1 << 20, NCCL))},
        ALL_REDUCE_RMS_NORM: {8192: ((1, SPLIT_8), (64, RING)), 16384: ((1, WIDE),)},
    }
    text = selection.told(chosen, measured, "nccl")
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][-2:] == ["nccl", "us"]
    assert [ALL_REDUCE_RMS_NORM, "8192", "1-63", "tpfuse_split", "warps=8", "1.00", "-"] in lines
    assert [ALL_REDUCE_RMS_NORM, "8192", "64-", "tpfuse_ring", "blocks=264,warps=8", "1.00", "3.00"] in lines
    table = Table(MACHINE, chosen, {})
    assert tables.parse(table.to_json(), "here") == table


# -- right or wrong ----------------------------------------------------------------------------------------------------


def by_torch(arena, choice, x, weight, eps, residual, *rest):
    """A right answer where the fake group's sum is this rank's own part."""
    total = (x.float() + residual.float()).to(x.dtype)
    wide = x.float() + residual.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return normed, total


def one_wrong(*arguments):
    normed, total = by_torch(*arguments)
    normed[0, 3] += 1
    return normed, total


def nan(*arguments):
    normed, total = by_torch(*arguments)
    total[-1, -1] = torch.nan
    return normed, total


def no_residual(arena, choice, x, weight, eps, residual, *rest):
    return by_torch(arena, choice, x, weight, eps, torch.zeros_like(residual))


def two_dtypes(*arguments):
    return tuple(output.double() for output in by_torch(*arguments))


def broken(*arguments):
    raise NotImplementedError("no such instruction\nmore about it")


def gone(*arguments):
    raise PeerTimeoutError("rank 1 is gone")


@pytest.fixture
def refusal(monkeypatch):
    """refusal(run, dtype, other): what is said of a candidate; ``other`` turns this rank's story into the other's."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    with fake_world(2) as group:

        def refusal(run, dtype=BF16, other=lambda mine: mine):
            monkeypatch.setattr(
                bench_all_reduce, "CANDIDATES", {ALL_REDUCE_RMS_NORM: {"nccl": Candidate("nccl", lambda *a: "", run)}}
            )
            monkeypatch.setattr(measure.agreement, "exchange", lambda group, subject, mine: [mine, other(mine)])
            bench = AllReduceBench(Size(ALL_REDUCE_RMS_NORM, 5, 256, dtype), StandIn(), group)
            return bench.refusal(NCCL, bench.expect())

        yield refusal


@pytest.mark.parametrize("dtype", arguments.DTYPES.values())
def test_right_and_wrong(refusal, dtype):
    assert refusal(by_torch, dtype) == ""
    for run in (one_wrong, nan, no_residual):
        assert "its result is off by" in refusal(run, dtype), run
    assert "its result is torch.float64" in refusal(two_dtypes, dtype)


def test_a_candidate_that_fails_everywhere_is_left_out(refusal):
    told = "NotImplementedError: no such instruction"
    assert refusal(broken) == f"rank 0: {told}; rank 1: {told}"


def test_a_candidate_that_fails_on_one_rank_ends_it_all(refusal):
    """The other may wait in it for ever."""
    with pytest.raises(AgreementError, match="failed on some ranks only: rank 0: NotImplementedError"):
        refusal(broken, other=lambda mine: {**mine, "f": ""})
    with pytest.raises(PeerTimeoutError):
        refusal(gone)


def test_what_is_wrong_on_any_rank_is_left_out_on_all(refusal):
    assert refusal(by_torch, other=lambda mine: {**mine, "w": "off"}) == "rank 1: off"
    assert refusal(by_torch, other=lambda mine: {**mine, "b": "1 2"}) == "the ranks got different bits"


# -- how long ----------------------------------------------------------------------------------------------------------


def test_times_are_medians_of_turns_without_the_gemm(monkeypatch):
    """By a clock of our own: each graph takes what its captured calls took."""
    clock, replayed = [0.0], []
    cost_ms = {NCCL: 5.0, RING: 2.0, "gemm": 1.0}
    captured = []

    class Graph:
        def replay(self):
            replayed.append(self.calls[0])
            clock[0] += sum(cost_ms[call] for call in self.calls) + cost_ms["gemm"] * self.gemms
            clock[0] += 1000.0 * (len(replayed) in (2, 3))  # a hiccup, once per candidate

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, end):
            return end.at - self.at

    @contextlib.contextmanager
    def graph(graph, pool):
        assert pool == "pool"
        captured.clear()
        yield
        graph.calls, graph.gemms = captured[:] or [None], bench.calls

    for name, stand_in in {"CUDAGraph": Graph, "Event": Event, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    cost_ms[None] = 0.0

    def run(arena, choice, *arguments):
        captured.append(choice)
        return by_torch(arena, choice, *arguments)

    ops = {ALL_REDUCE_RMS_NORM: {name: Candidate(name, lambda *a: "", run) for name in ("nccl", "tpfuse_ring")}}
    monkeypatch.setattr(bench_all_reduce, "CANDIDATES", ops)
    monkeypatch.setattr(measure.agreement, "exchange", lambda group, subject, mine: [mine, mine])
    narrowed = []

    def narrow(times):
        narrowed.append(times)
        return [RING]

    with fake_world(2) as group:
        bench = AllReduceBench(Size(ALL_REDUCE_RMS_NORM, 5, 256, BF16), StandIn(), group)
        first, second = measure.measure(bench, [RING, NCCL], narrow, lambda text: None)
    assert first == pytest.approx({RING: 2000.0, NCCL: 5000.0}) and narrowed == [first]
    assert second == pytest.approx({RING: 2000.0})
    rounds = [replayed[3 * n : 3 * n + 3] for n in range(measure.FIRST_ROUNDS)]
    assert all(set(each) == {RING, NCCL, None} for each in rounds) and len(set(map(tuple, rounds))) > 1
    assert len(replayed) == 3 * measure.FIRST_ROUNDS + 2 * measure.SECOND_ROUNDS


def test_what_a_call_adds():
    """To the same GEMMs in the same round: a slow round is slow for all."""
    times = {RING: [120.0, 220.0, 121.0], NCCL: [200.0, 300.0, 200.0]}
    assert timing.added_us(times, [100.0, 200.0, 100.0], 10) == {RING: 2.0, NCCL: 10.0}
    order = timing.turns("abc", 20)
    assert order == timing.turns("abc", 20) and len({tuple(order[3 * n : 3 * n + 3]) for n in range(20)}) > 3


def test_nothing_right_is_nothing_measured(monkeypatch):
    monkeypatch.setattr(measure.Bench, "refusal", lambda *a: "wrong")
    said = []
    with fake_world(2) as group:
        bench = AllReduceBench(Size(ALL_REDUCE, 5, 256, BF16), StandIn(), group)
        assert measure.measure(bench, [NCCL], lambda times: [], said.append) == ({}, {})
    assert len(said) == 1 and said[0].startswith("all_reduce of 5 x 256: left out nccl: wrong")


# -- saving ------------------------------------------------------------------------------------------------------------

CHOSEN = {ALL_REDUCE_RMS_NORM: {8192: ((1, RING),)}}


@pytest.fixture
def target(monkeypatch, tmp_path):
    """target(...): where rank 0 would write; its story reaches everybody, as the store would take it there."""
    monkeypatch.setenv("TPFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(job, "versions", lambda: {"torch": "now"})
    monkeypatch.setattr(job.tables, "shipped", lambda machine: None)
    monkeypatch.setattr(job.agreement, "exchange", lambda group, subject, mine: [mine])
    group = types.SimpleNamespace(rank=lambda: 0)
    return lambda out=None, fresh=False: job._Target(out, fresh, MACHINE, group)


def test_saved_where_it_is_found(target):
    here = target()
    assert here.probe() == here.save(CHOSEN) == ""
    table, source = tables.find(MACHINE)
    assert table.ops == CHOSEN and table.versions == {"torch": "now"} and source == f"tuned: {here.path}"


@pytest.mark.parametrize("fresh", [False, True])
def test_an_earlier_table_is_extended(target, fresh):
    old = {ALL_REDUCE_RMS_NORM: {8192: ((1, NCCL),), 16384: ((1, WIDE),)}, ALL_REDUCE: {1: ((1, NCCL),)}}
    tables.save(Table(MACHINE, old, {"torch": "then"}))
    here = target(fresh=fresh)
    assert here.probe() == here.save(CHOSEN) == ""
    table = tables.find(MACHINE)[0]
    kept = {} if fresh else {16384: ((1, WIDE),)}
    assert table.ops[ALL_REDUCE_RMS_NORM] == {8192: ((1, RING),), **kept}
    assert (ALL_REDUCE in table.ops) is not fresh


@pytest.mark.parametrize("fresh", [False, True])
def test_the_first_table_extends_the_one_that_ships(target, monkeypatch, fresh):
    """It is the only one that counts from then on."""
    monkeypatch.setattr(job.tables, "shipped", lambda machine: Table(machine, {ALL_REDUCE: {1: ((1, RING),)}}, {}))
    here = target(fresh=fresh)
    assert here.probe() == here.save(CHOSEN) == ""
    kept = {} if fresh else {ALL_REDUCE: {1: ((1, RING),)}}
    assert tables.load(here.path, MACHINE).ops == {**CHOSEN, **kept}


def test_an_unusable_table_is_written_anew_and_told(target, capsys):
    tables.save(Table(MACHINE, {}, {})).write_text("{}")
    here = target()
    assert here.probe() == here.save(CHOSEN) == ""
    assert tables.find(MACHINE)[0].ops == CHOSEN
    assert f"written anew: {here.path} is not a table" in capsys.readouterr().err


def test_out(target, tmp_path):
    for out, path in (
        (tmp_path / "new" / "t.json", tmp_path / "new" / "t.json"),
        (tmp_path, tmp_path / "NVIDIA_H200-nvlink-x2.json"),
    ):
        here = target(out)
        assert here.probe() == here.save(CHOSEN) == ""
        assert here.path == path and tables.load(path, MACHINE).ops == CHOSEN


def test_where_nothing_can_be_written(target, monkeypatch):
    """Told before minutes of measuring."""
    monkeypatch.setenv("TPFUSE_CACHE_DIR", "/dev/null/folder")
    told = target().probe()
    assert told.startswith("cannot write the table to /dev/null/folder/NVIDIA_H200-nvlink-x2.json: ")


def test_a_full_disk_is_told_on_every_rank(target, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    here = target()
    assert here.probe() == ""
    monkeypatch.setattr(tables.os, "fsync", full)
    told = here.save(CHOSEN)
    assert told == f"cannot write the table to {here.path}: [Errno 28] No space left on device"
    assert not here.path.exists() and tables.find(MACHINE)[0] is None
    monkeypatch.setattr(job.agreement, "exchange", lambda group, subject, mine: [{"failure": told}, mine])
    here.group = types.SimpleNamespace(rank=lambda: 1)
    assert here.save(CHOSEN) == told


@pytest.mark.parametrize(("saved", "status"), [("", 0), ("cannot write", 1)])
def test_the_exit_status_is_every_ranks(monkeypatch, capsys, saved, status):
    measured = {(ALL_REDUCE_RMS_NORM, 8192, 1): {RING: 1.0, NCCL: 2.0}}
    monkeypatch.setattr(job.arena, "of", lambda name: StandIn())
    monkeypatch.setattr(job.dispatch, "link", lambda: "nvlink")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(job, "_measure", lambda *a: measured)
    monkeypatch.setattr(job._Target, "probe", lambda self: "")
    monkeypatch.setattr(job._Target, "save", lambda self, chosen: saved)
    with fake_world(2):
        for rank in (0, 1):
            assert job._run(argparse.Namespace(out=None, fresh=False, sequence_parallel=()), rank) == status
            told = capsys.readouterr()
            assert saved in told.err and ("tpfuse_ring" in told.out) is (rank == 0 and not saved)


def test_no_arena(monkeypatch, capsys):
    monkeypatch.setattr(job.arena, "of", lambda name: "rank 1: compute capability 9.0 is needed")
    with fake_world(2):
        assert [job._run(argparse.Namespace(sequence_parallel=()), rank) for rank in (0, 1)] == [2, 2]
    assert capsys.readouterr().err == "tpfuse tune: rank 1: compute capability 9.0 is needed\n"


def stand_in_measure(monkeypatch, seconds, clock):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(job, "_bench", lambda size, *a: size)
    monkeypatch.setattr(measure, "measure", lambda size, choices, *a: ({}, dict.fromkeys(choices, 1.0)))
    monkeypatch.setattr(job.time, "monotonic", lambda: next(clock))
    args = arguments.parse(["--seconds", str(seconds), "--hidden", "4096", "--ops", ALL_REDUCE_RMS_NORM])
    said = []
    talk = types.SimpleNamespace(say=said.append, show=lambda *a: None)
    with fake_world(2) as group:
        return job._measure(args, StandIn(), group, talk), said


def test_the_budget_ends_it_between_sizes(monkeypatch):
    measured, said = stand_in_measure(monkeypatch, 2.5, iter(range(100)))
    assert [rows for _, _, rows in measured] == [1, 8192]
    assert said == ["2.5 s are spent: 2 of 14 sizes were measured"]


def test_all_sizes_within_the_budget(monkeypatch):
    measured, said = stand_in_measure(monkeypatch, 600, iter(range(100)))
    assert len(measured) == 14 and said == []


def test_libraries_are_prepared_for_the_largest_size_they_can(monkeypatch):
    asked = []

    def prepare(arena, problem):
        asked.append(problem.rows)
        return "too large" if problem.rows > 64 else ""

    fails = Candidate("never", lambda *a: "", lambda *a: None, lambda arena, problem: "not installed")
    able = Candidate("library", lambda *a: "", lambda *a: None, prepare)
    monkeypatch.setattr(proposals, "KNOWN", {ALL_REDUCE_RMS_NORM: {"library": able, "never": fails}})
    said = []
    sizes = proposals.sizes((ALL_REDUCE_RMS_NORM,), (4096,), (1, 64, 512, 8192), BF16)
    job._prepare(StandIn(), sizes, (), types.SimpleNamespace(say=said.append))
    assert asked == [8192, 512, 64]
    assert said == [f"{ALL_REDUCE_RMS_NORM}: never left out: not installed"]
    job._prepare(StandIn(), sizes, ("library", "never"), types.SimpleNamespace(say=said.append))
    assert len(asked) == 3 and len(said) == 1
