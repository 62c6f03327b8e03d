"""GEMMs with collectives in the tuner: what is measured, when it is right, what becomes of it. Nothing is timed here."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from tpfuse import tables
from tpfuse.errors import BuildError, PeerTimeoutError
from tpfuse.kernels import matmul_candidates
from tpfuse.kernels.cuda import all_gather_matmul as gather
from tpfuse.kernels.cuda import matmul_reduce_scatter as scatter
from tpfuse.kernels.cuda.gemm import MOST_SHARED_BYTES, Tiling
from tpfuse.kernels.matmul_candidates import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MATMULS,
    OWN,
    SYMM_MEM,
    Candidate,
)
from tpfuse.tables import Choice, Machine, Table
from tpfuse.testing import fake_world
from tpfuse.tuner import arguments, bench_matmul, job, measure, proposals
from tpfuse.tuner.bench_matmul import MatmulBench
from tpfuse.tuner.proposals import MatmulSize

BF16 = torch.bfloat16
MACHINE = Machine("NVIDIA H200", "nvlink", 2)
NCCL, COMPOSED = Choice("nccl"), Choice("tpfuse_all_reduce")


class StandIn:
    """What the tuner reads of an arena."""

    rank, device, bytes = 0, torch.device("cpu"), 64 << 20

    def __init__(self, world=2, workspace="there"):
        self.world, self.workspace = world, object() if workspace == "there" else workspace

    def check(self):
        pass


# -- command line ------------------------------------------------------------------------------------------------------


def test_gemms_instead_of_all_reduces():
    args = arguments.parse(["--gemm", "4096x7168", "8192x14336", "4096x7168", "--verbose"])
    assert args.gemm == ((4096, 7168), (8192, 14336)) and args.ops == tuple(MATMULS) and args.verbose
    assert args.matmul_rows == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def test_both_kinds():
    args = arguments.parse(
        ["--gemm", "8x16", "--ops", f"{MATMUL_REDUCE_SCATTER},all_reduce", "--rows", "9", "--hidden", "64"]
    )
    sizes = job._sizes(args, 2)
    assert [str(size) for size in sizes] == ["all_reduce of 9 x 64", f"{MATMUL_REDUCE_SCATTER} of 9 x 8 x 16"]
    args = arguments.parse(["--gemm", "8x16", "--ops", f"{ALL_GATHER_MATMUL},all_reduce", "--hidden", "64"])
    assert (len(args.rows), len(args.matmul_rows)) == (14, 9)


# -- what there is to measure ------------------------------------------------------------------------------------------


def test_sizes_are_coarse_first():
    sizes = proposals.matmul_sizes((MATMUL_REDUCE_SCATTER, ALL_GATHER_MATMUL), ((8, 16), (8, 32)), (64, 128, 256), 2)
    assert [size.rows for size in sizes] == [64] * 4 + [256] * 4 + [128] * 4
    assert sizes[1].key == (MATMUL_REDUCE_SCATTER, (8, 32), 64) and len({size.key for size in sizes}) == 12


@pytest.mark.parametrize("world", [2, 3])
def test_the_table_finds_what_was_measured(world):
    """A size's key is where a call's problem looks."""
    for size in proposals.matmul_sizes(tuple(MATMULS), ((4096, 7168), (64, 72)), (64, 1000), world):
        op, shape, rows = size.key
        table, problem = Table(MACHINE, {op: {shape: ((1, NCCL), (rows, COMPOSED))}}, {}), size.problem
        name = matmul_candidates.table_name(problem.op, problem.dtype)
        assert table.choose_matmul(name, problem.rows, problem.columns, problem.inner) == COMPOSED
        assert table.choose_matmul(name, problem.rows - 1, problem.columns, problem.inner) == NCCL
        assert problem.share == (rows if size.op == MATMUL_ALL_REDUCE else -(-rows // world))


@pytest.mark.parametrize("op", [MATMUL_REDUCE_SCATTER, ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE])
@pytest.mark.parametrize(("rows", "columns"), [(64, {128}), (256, {128}), (512, {128, 192, 256}), (4096, {256})])
def test_tilings(op, rows, columns):
    """Of each width that suits the rows, with as many stages as fit."""
    listed = proposals.tilings(MatmulSize(op, rows, 4096, 7168, 2).problem)
    room = gather.room if op == ALL_GATHER_MATMUL else lambda tiling: scatter.room(tiling, op == MATMUL_ALL_REDUCE)
    assert len(set(listed)) == len(listed) and {tiling.columns for tiling in listed} == columns
    for tiling in listed:
        assert isinstance(tiling, Tiling) and room(tiling) <= MOST_SHARED_BYTES
    for one in {dataclasses.replace(tiling, stages=2) for tiling in listed}:
        stages = sorted(tiling.stages for tiling in listed if dataclasses.replace(tiling, stages=2) == one)
        assert stages == ([3, 4] if op == ALL_GATHER_MATMUL and one.columns == 256 else stages[-1:])
        assert room(dataclasses.replace(one, stages=stages[-1] + 1)) > MOST_SHARED_BYTES
    assert {tiling.cluster for tiling in listed} == {1, 2}


def test_choices_hold_whole_tilings(monkeypatch):
    monkeypatch.setattr(matmul_candidates, "_most_rows", lambda *a: 128)
    size = MatmulSize(MATMUL_REDUCE_SCATTER, 1024, 4096, 7168, 2)
    listed = proposals.choices(StandIn(), size.problem)
    ours = [choice for choice in listed if choice.candidate == OWN]
    assert listed[0] == NCCL and SYMM_MEM not in {choice.candidate for choice in listed}  # not prepared
    assert [Tiling(**dict(choice.options)) for choice in ours] == proposals.tilings(size.problem)
    assert all(len(choice.options) == len(dataclasses.fields(Tiling)) for choice in ours)
    table = Table(
        MACHINE, {MATMUL_REDUCE_SCATTER: {(4096, 7168): tuple((n + 1, choice) for n, choice in enumerate(ours))}}, {}
    )
    assert tables.parse(table.to_json(), "here") == table


def test_only_what_can(monkeypatch):
    monkeypatch.setattr(matmul_candidates, "_most_rows", lambda *a: 0)
    for op in (MATMUL_REDUCE_SCATTER, ALL_GATHER_MATMUL):
        for columns, arena in ((4096, StandIn()), (4096, StandIn(workspace=None)), (4100, StandIn())):
            assert proposals.choices(arena, MatmulSize(op, 64, columns, 7168, 2).problem) == [NCCL]
    assert proposals.choices(StandIn(), MatmulSize(MATMUL_ALL_REDUCE, 64, 4096, 7168, 2).problem) == [NCCL, COMPOSED]


# -- right or wrong ----------------------------------------------------------------------------------------------------


def right(bench, weight):
    """A right answer where the fake group's sum is this rank's own part, and each rank's rows are this one's."""
    size = bench.size
    if size.op == ALL_GATHER_MATMUL:
        return [(torch.cat([bench.input] * 2)[: size.rows].float() @ weight.float()).to(BF16)]
    product = (bench.input.float() @ weight.float()).to(BF16)
    if size.op == MATMUL_ALL_REDUCE:
        return product
    return torch.cat((product, product[:1].new_zeros(1, size.columns)))[: size.share]


def spoil(change):
    def run(bench, weight):
        result = right(bench, weight)
        (output,) = result if isinstance(result, list) else (result,)
        output = change(output)
        return [output] if isinstance(result, list) else output

    return run


def nan(output):
    output[-1, -1] = torch.nan
    return output


def one_row_wrong(output):
    output[0] = output[1]
    return output


def broken(bench, weight):
    raise BuildError("no compiler")


def gone(bench, weight):
    raise PeerTimeoutError("rank 1 is gone")


@pytest.fixture
def refusal(monkeypatch):
    """refusal(op, run): what is said of our candidate, which computes that, at an odd number of rows."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(MatmulBench, "reference", right)
    monkeypatch.setattr(bench_matmul, "gather_rows", lambda shard, rows, group: torch.cat([shard] * 2)[:rows])
    with fake_world(2) as group:

        def refusal(op, run, other=lambda mine: mine):
            monkeypatch.setattr(measure.agreement, "exchange", lambda group, subject, mine: [mine, other(mine)])
            bench = MatmulBench(MatmulSize(op, 7, 24, 64, 2), StandIn(), group)
            own = Candidate(OWN, lambda *a: "", lambda arena, choice, x, weight, *rest: run(bench, _one(weight)))
            monkeypatch.setattr(bench_matmul, "MATMULS", {op: {"nccl": MATMULS[op]["nccl"], OWN: own}})
            return bench.refusal(Choice(OWN), bench.expect())

        yield refusal


def _one(weight):
    return weight[0] if isinstance(weight, list) else weight


@pytest.mark.parametrize("op", MATMULS)
def test_right_and_wrong(refusal, op):
    assert refusal(op, right) == ""
    for change in (nan, one_row_wrong, lambda output: output * 1.02, torch.zeros_like):
        assert "its result is off by" in refusal(op, spoil(change)), change
    assert "its result is torch.float32 [" in refusal(op, spoil(torch.Tensor.float))
    assert "its result is torch.bfloat16 [" in refusal(op, spoil(lambda output: output[1:]))
    other_bits = refusal(op, right, lambda mine: {**mine, "b": mine["b"] and "others"})
    assert other_bits == (
        "the ranks got different bits" if op == MATMUL_ALL_REDUCE else ""
    )  # the others' ranks have other rows
    assert refusal(op, right, lambda mine: {**mine, "w": "off"}) == "rank 1: off"


def test_what_is_left_out_and_what_ends_it_all(refusal):
    assert refusal(MATMUL_REDUCE_SCATTER, broken) == "rank 0: BuildError: no compiler; rank 1: BuildError: no compiler"
    with pytest.raises(PeerTimeoutError):
        refusal(MATMUL_REDUCE_SCATTER, gone)


def test_only_all_reduces_have_the_same_bits_everywhere():
    with fake_world(2) as group:
        benches = {op: MatmulBench(MatmulSize(op, 8, 24, 64, 2), StandIn(), group) for op in MATMULS}
    assert [op for op, bench in benches.items() if bench.replicated] == [MATMUL_ALL_REDUCE]
    assert benches[ALL_GATHER_MATMUL].input.shape == (4, 64) and benches[MATMUL_REDUCE_SCATTER].input.shape == (8, 64)


# -- how long ----------------------------------------------------------------------------------------------------------


def test_times_are_medians_of_graphs_of_several_calls():
    with fake_world(2) as group:
        bench = MatmulBench(MatmulSize(MATMUL_REDUCE_SCATTER, 8, 24, 64, 2), StandIn(), group)
    assert bench.calls == 10 and len(bench.weights) == 10
    assert bench.net_us({NCCL: [50.0, 40.0, 990.0], COMPOSED: [20.0] * 3}) == {NCCL: 5.0, COMPOSED: 2.0}


def test_large_sizes_are_called_less_often(monkeypatch):
    monkeypatch.setattr(MatmulBench, "normal", lambda self, shape: torch.empty(1, 1))
    with fake_world(2) as group:
        bench = MatmulBench(MatmulSize(MATMUL_REDUCE_SCATTER, 16384, 8192, 14336, 2), StandIn(), group)
    assert bench.calls == 2 and len(bench.weights) == 1  # which is larger than any cache


def fake_bench(cost):
    """A bench for which calls take what ``cost(size, choice)`` says, and everything is right."""

    class Fake(measure.Bench):
        once = wrong = chain = net_us = None  # nobody asks

        def __init__(self, size, arena, group):
            self.size, self.captured = size, []

        def expect(self):
            pass

        def refusal(self, choice, expected):
            return "wrong" if choice.get("pace") == 0.5 else ""

        def capture(self, choice):
            self.captured.append(choice)

        def time_us(self, choices, rounds):
            assert set(choices) <= set(self.captured)
            return {choice: cost(self.size, choice) for choice in choices}

    return Fake


def test_what_is_measured_is_what_a_call_gets(monkeypatch):
    """NCCL for few rows, ours from 512 on, with lead 2 from 4096 on; a wrong one never, though it is the fastest."""

    def cost(size, choice):
        if choice.candidate != OWN:
            return 10.0
        if choice.get("pace") == 0.5:
            return 1.0
        return 20.0 if size.rows < 512 else 8.0 if (choice.get("lead") == 2) == (size.rows >= 4096) else 9.0

    monkeypatch.setattr(proposals, "TILINGS", {MATMUL_REDUCE_SCATTER: {"lead": (None, 2), "pace": (0.5, 0.8)}})
    monkeypatch.setattr(proposals, "ONLY_WIDE_ROWS", 8192)
    monkeypatch.setattr(matmul_candidates, "_most_rows", lambda *a: 128)
    monkeypatch.setattr(job, "MatmulBench", fake_bench(cost))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    args = arguments.parse(["--gemm", "4096x7168", "8192x14336", "--ops", MATMUL_REDUCE_SCATTER])
    said, shown = [], []
    talk = types.SimpleNamespace(say=said.append, show=lambda name, done, total: shown.append((name, total)))
    with fake_world(2) as group:
        measured = job._measure(args, StandIn(), group, talk)
    assert len(measured) == 18 and shown[0] == (f"{MATMUL_REDUCE_SCATTER} of 64 x 4096 x 7168", 18)
    assert all("left out tpfuse" in line and line.endswith(": wrong") for line in said)
    chosen = job.choose(measured)
    table = tables.parse(Table(MACHINE, chosen, {}).to_json(), "here")
    for rows, lead in ((64, ""), (511, ""), (512, None), (4095, None), (4096, 2), (1 << 20, 2)):
        choice = table.choose_matmul(MATMUL_REDUCE_SCATTER, rows, 4096, 7168)
        assert (
            choice == NCCL if lead == "" else (choice.candidate, choice.get("lead"), choice.get("pace")) == (OWN, lead, 0.8)
        )
    lines = job.selection.told(chosen, measured, "nccl").splitlines()
    assert lines[2].split()[:5] == [MATMUL_REDUCE_SCATTER, "4096x7168", "1-511", "nccl", "-"]
    assert lines[4].split()[1:4] == ["4096x7168", "4096-8191", OWN] and "columns=128," in lines[4] and "lead=2," in lines[4]
    assert lines[5].split()[1:4] == ["4096x7168", "8192-", OWN] and "columns=256," in lines[5]  # narrow ones are not tried


def test_memory_is_made_for_all_sizes(monkeypatch):
    """Ours always, torch's only where libraries are asked for. Which size needs the most differs by operation."""
    asked = []

    def stub(candidate):
        return dataclasses.replace(candidate, prepare=lambda a, p: asked.append((p.op, candidate.name, p.rows)) or "")

    known = {op: {name: stub(each) for name, each in candidates.items()} for op, candidates in MATMULS.items()}
    monkeypatch.setattr(proposals, "KNOWN", known)
    sizes = proposals.matmul_sizes((MATMUL_REDUCE_SCATTER,), ((4096, 7168),), (64, 8192), 2)
    talk = types.SimpleNamespace(say=None)
    job._prepare(StandIn(), sizes, job.LIBRARIES, talk)
    assert asked == [(MATMUL_REDUCE_SCATTER, name, rows) for name in ("nccl", OWN) for rows in (8192, 64)]
    job._prepare(StandIn(), sizes, (), talk)
    assert (MATMUL_REDUCE_SCATTER, SYMM_MEM, 8192) in asked


def test_fp8():
    """Measured with scales, under a name of its own; all-reduces have none."""
    args = arguments.parse(["--gemm", "4096x7168", "--dtype", "fp8"])
    sizes = job._sizes(args, 2)
    assert {size.dtype for size in sizes} == {torch.float8_e4m3fn} and {size.key[0] for size in sizes} == {
        f"{op}_fp8" for op in arguments.MATMUL_OPS
    }
    assert {size.problem.out_dtype for size in sizes} == {torch.bfloat16}
    for wrong in (["--dtype", "fp8"], ["--dtype", "fp16", "--gemm", "4096x7168"]):
        with pytest.raises(SystemExit):
            arguments.parse(wrong)
