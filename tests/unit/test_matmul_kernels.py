"""Which kernel a GEMM with a collective gets: by table, by rule, by name, and what follows where the first cannot."""

from __future__ import annotations

import dataclasses
import inspect
import types

import pytest
import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from tpfuse.comm import workspace
from tpfuse.errors import BuildError, ConfigError
from tpfuse.kernels import dispatch, matmul, matmul_candidates, symm_mem
from tpfuse.kernels.cuda import all_gather_matmul as own_all_gather
from tpfuse.kernels.cuda import matmul_reduce_scatter as own_reduce_scatter
from tpfuse.kernels.cuda.gemm import Tiling
from tpfuse.kernels.dispatch import Dispatcher
from tpfuse.kernels.matmul_candidates import (
    ALL_GATHER_MATMUL,
    COMPOSED,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MATMULS,
    OWN,
    SYMM_MEM,
    MatmulProblem,
)
from tpfuse.tables import Choice, Machine, Table

BF16, FP8, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
NCCL, TILED, TORCH = Choice("nccl"), Choice(OWN, columns=128, stages=6, lead=None, pace=0.5), Choice(SYMM_MEM)
PRODUCT = Choice(COMPOSED)
N, K = 512, 256
MOST_ROWS = matmul_candidates._most_rows  # as it is


class StandIn:
    """What is read of an arena. No memory, no group."""

    rank, bytes, group_name = 0, 64 << 20, "0"

    def __init__(self, world=2, space="there"):
        self.world, self.workspace = world, space if space != "there" else object()

    def enter(self):
        return 0


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Rows that fit into a workspace."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a build for the CPU has none
    found = types.SimpleNamespace(rows=128)
    monkeypatch.setattr(matmul_candidates, "_most_rows", lambda space, problem, cut: found.rows)
    return found


def problem(op=MATMUL_REDUCE_SCATTER, rows=1024, widths=(N,), inner=K, dtype=BF16, **facts):
    share = rows if op == MATMUL_ALL_REDUCE else -(-rows // 2)
    return MatmulProblem(op, rows, widths, inner, (dtype,) * (1 + len(widths)), **{"share": share, **facts})


def by_table(*entries, op=MATMUL_REDUCE_SCATTER, size=(N, K), **arena):
    return Dispatcher(StandIn(**arena), Table(Machine("GPU", "nvlink", 2), {op: {size: entries}}, {}), "here")


def chosen(dispatcher, asked, kernel=None):
    candidate, choice = matmul.choose(dispatcher, asked, kernel)
    assert candidate is MATMULS[asked.op][choice.candidate]
    return choice


def plain(op):
    """What is chosen where nothing else can be."""
    return PRODUCT if op == MATMUL_ALL_REDUCE else NCCL


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_by_rows_with_its_tiling():
    dispatcher = by_table((1, NCCL), (512, TILED), (4096, NCCL))
    assert [chosen(dispatcher, problem(rows=rows)) for rows in (511, 512, 4095, 4096)] == [NCCL, TILED, TILED, NCCL]
    assert matmul_candidates._cut(TILED) == Tiling(columns=128, stages=6, lead=None, pace=0.5)
    assert matmul_candidates._cut(Choice(OWN)) is None  # the kernel's own rule


def test_several_weights_count_together():
    dispatcher = by_table((1, TILED), op=ALL_GATHER_MATMUL, size=(4 * N, K))
    assert chosen(dispatcher, problem(ALL_GATHER_MATMUL, widths=(N // 2, N // 2))) == TILED
    assert chosen(dispatcher, problem(ALL_GATHER_MATMUL, widths=(N // 2,))) == NCCL  # less than a quarter


@pytest.mark.parametrize("op", MATMULS)
def test_by_rule(op):
    """Without a table, or where it does not know the operation or such a matrix: as without tpfuse."""
    for dispatcher in (
        Dispatcher(StandIn(), None, "none"),
        by_table((1, TORCH), op="other"),
        by_table((1, TILED), size=(8, 8)),
    ):
        assert chosen(dispatcher, problem(op)) == plain(op)


def test_dtypes_of_a_table():
    """bf16's stands for fp16; fp32 and FP8 would have tables of their own."""
    dispatcher = by_table((1, TORCH), space=None)
    symm_mem._workspaces[dispatcher.arena] = symm_mem._Workspace(bytes=1 << 40)
    assert chosen(dispatcher, problem(dtype=torch.float16)) == chosen(dispatcher, problem()) == TORCH
    assert chosen(dispatcher, problem(dtype=torch.float32)) == NCCL
    assert chosen(dispatcher, problem(dtype=FP8, out_dtype=BF16)) == NCCL
    names = [matmul_candidates.table_name("op", d) for d in (BF16, torch.float16, torch.float32, FP8, E5M2)]
    assert names == ["op", "op", "op_fp32", "op_fp8", "op_fp8"]


@pytest.mark.parametrize("op", MATMULS)
def test_fp8_has_a_table_of_its_own(op):
    asked = problem(op, dtype=FP8, out_dtype=BF16)
    for choice in (TILED, Choice(OWN), Choice(OWN, columns=256)):
        assert chosen(by_table((1, choice), op=f"{op}_fp8"), asked) == choice
        assert chosen(by_table((1, choice), op=op), asked) == plain(op)  # bf16's
        assert chosen(by_table((1, choice), op=op), problem(op)) == choice


@pytest.mark.parametrize(
    "gone", [Choice("fastest_of_all"), Choice("tpfuse_ring"), Choice(""), Choice(OWN, magic=3), Choice(OWN, columns=64)]
)
def test_a_table_may_name_what_is_no_more(gone):
    assert chosen(by_table((1, gone)), problem()) == NCCL


REFUSALS = [
    (OWN, problem(dtype=E5M2, out_dtype=BF16), f"dtype {E5M2}, {E5M2} -> {BF16}"),
    (OWN, problem(dtype=FP8, out_dtype=torch.float32), f"dtype {FP8}, {FP8} -> torch.float32"),
    (OWN, problem(dtype=FP8, out_dtype=BF16)._replace(dtypes=(FP8, E5M2)), f"dtype {FP8}, {E5M2} -> {BF16}"),
    (
        OWN,
        problem(ALL_GATHER_MATMUL, widths=(N // 2,) * 2, out_dtype=BF16)._replace(dtypes=(FP8, FP8, E5M2)),
        f"dtype {FP8}, {FP8}, {E5M2} -> {BF16}",
    ),
    (OWN, problem(dtype=FP8), f"dtype {FP8}, {FP8}"),
    (OWN, problem()._replace(dtypes=(BF16, torch.float16)), f"dtype {BF16}, torch.float16"),
    (OWN, problem(dtype=FP8, out_dtype=BF16, inner=K + 8), f"K = {K + 8} must be a multiple of 16, N = {N} of 8"),
    (OWN, problem(ALL_GATHER_MATMUL, widths=(128,) * 5), "more than 4 weights"),
    (OWN, problem(inners=(64,) * 5), "a sum of more than 4 products"),
    (OWN, problem(inners=(K - 4, 4)), f"K = {K - 4} must be a multiple of 8, N = {N} of 8"),
    (OWN, problem(dtype=FP8, out_dtype=BF16, inners=(128, 128)), "a sum of products that have scales"),
    (SYMM_MEM, problem(inners=(128, 128)), "a sum of products"),
    (OWN, problem(dtype=torch.float32), "dtype torch.float32, torch.float32"),
    (OWN, problem(ALL_GATHER_MATMUL, widths=(N, N), dtype=torch.float32), f"dtype {', '.join(['torch.float32'] * 3)}"),
    (OWN, problem(widths=(N + 4,)), f"K = {K} must be a multiple of 8, N = {N + 4} of 8"),
    (OWN, problem(ALL_GATHER_MATMUL, widths=(N, N + 4)), f"K = {K} must be a multiple of 8, N = {N + 4} of 8"),
    (OWN, problem(MATMUL_ALL_REDUCE, dtype=torch.float32), "dtype torch.float32, torch.float32"),
    (OWN, problem(MATMUL_ALL_REDUCE, inner=K + 4), f"K = {K + 4} must be a multiple of 8, N = {N} of 8"),
    (SYMM_MEM, problem(dtype=FP8, out_dtype=BF16), "scales"),
    (SYMM_MEM, problem(wire_dtype=torch.float32), "partial sums in torch.float32"),
    (SYMM_MEM, problem(rows=1023), "1023 rows are not a multiple of 2 ranks"),
    (SYMM_MEM, problem(ALL_GATHER_MATMUL, rows=1023), "1023 rows are not a multiple of 2 ranks"),
]


@pytest.mark.parametrize(("name", "asked", "why"), REFUSALS)
def test_what_cannot_is_not_chosen_and_refused_by_name(name, asked, why):
    table = by_table((1, Choice(name)), op=matmul_candidates.table_name(asked.op, asked.dtype))
    assert chosen(table, asked) == plain(asked.op)
    with pytest.raises(ConfigError) as caught:
        matmul.choose(table, asked, name)
    assert str(caught.value) == f"kernel {name!r} cannot run {asked.op}: {why}"


@pytest.mark.parametrize("op", MATMULS)
def test_no_room(room, op):
    room.rows = 0
    dispatcher = by_table((1, TILED), op=op)
    assert chosen(dispatcher, problem(op)) == plain(op)
    with pytest.raises(ConfigError, match=r"its workspace of 64 MiB has no room for a row of tiles \(workspace_mb\)$"):
        matmul.choose(dispatcher, problem(op), OWN)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_room_is_for_what_travels(dtype):
    """Partial sums in the result's dtype, of an all-reduce the results as well; gathered rows in the input's."""
    space = types.SimpleNamespace(bytes=1 << 20, arena=StandIn(world=3))

    def most(op):
        return MOST_ROWS(space, problem(op, dtype=dtype, out_dtype=BF16), Tiling(columns=128))

    assert most(MATMUL_REDUCE_SCATTER) == (1 << 20) // (2 * N * 2) == 2 * most(MATMUL_ALL_REDUCE)
    rows = (1 << 20) // (2 * K * dtype.itemsize)
    assert most(ALL_GATHER_MATMUL) == (rows if dtype == BF16 else rows - 128)  # of FP8 with their scales
    for op, item_bytes in ((MATMUL_REDUCE_SCATTER, 4), (MATMUL_ALL_REDUCE, 4 + 2)):
        wide = problem(op, dtype=dtype, out_dtype=BF16, wire_dtype=torch.float32)
        assert MOST_ROWS(space, wide, Tiling(columns=128)) == (1 << 20) // (2 * N * item_bytes) // 128 * 128
    space.bytes = 2 * N * 2 * 128
    assert most(MATMUL_REDUCE_SCATTER) == 128 and not most(MATMUL_ALL_REDUCE)


def test_by_name():
    dispatcher = by_table((1, TILED))
    assert chosen(dispatcher, problem(), OWN) == Choice(OWN)
    assert chosen(dispatcher, problem(), "nccl") == NCCL
    assert chosen(dispatcher, problem(MATMUL_ALL_REDUCE), "tpfuse_all_reduce") == PRODUCT
    assert chosen(dispatcher, problem(MATMUL_ALL_REDUCE), OWN) == Choice(OWN)
    with pytest.raises(
        ConfigError, match=r"^kernel 'magic' cannot run matmul_reduce_scatter: the kernels are nccl, torch_"
    ):
        matmul.choose(dispatcher, problem(), "magic")
    with pytest.raises(
        ConfigError, match=r"^kernel 'tpfuse_all_reduce' cannot run all_gather_matmul: the kernels are nccl"
    ):
        matmul.choose(dispatcher, problem(ALL_GATHER_MATMUL), "tpfuse_all_reduce")


def test_the_workspace_is_made_for_what_is_chosen(monkeypatch):
    made = []

    def of(arena):
        made.append(arena)
        arena.workspace = object()
        return arena.workspace

    monkeypatch.setattr(workspace, "of", of)
    dispatcher = by_table((1, NCCL), (512, TILED), space=None)
    assert chosen(dispatcher, problem(rows=8)) == NCCL and not made
    assert chosen(dispatcher, problem(widths=(N + 4,))) == NCCL and not made  # cannot be done anyway
    assert chosen(dispatcher, problem()) == TILED and made == [dispatcher.arena]
    assert chosen(dispatcher, problem(), OWN) == Choice(OWN) and len(made) == 1


def test_no_workspace(monkeypatch):
    monkeypatch.setattr(workspace, "of", lambda arena: "rank 1: no memory for GEMMs")
    for space in (None, "rank 1: no memory for GEMMs"):
        dispatcher = by_table((1, TILED), space=space)
        assert chosen(dispatcher, problem()) == NCCL
        with pytest.raises(
            ConfigError, match=r"^kernel 'tpfuse' cannot run matmul_reduce_scatter: rank 1: no memory for G"
        ):
            matmul.choose(dispatcher, problem(), OWN)


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Choices that were run, in place of running them; calls.of: the dispatcher of the group."""
    seen = types.SimpleNamespace(run=[], of=by_table((1, TILED)), fails=False)

    def stub(candidate):
        def run(arena, choice, *arguments):
            seen.run.append(choice)
            if seen.fails and candidate.name == OWN:
                raise BuildError("rank 0: no compiler")
            return candidate.run(arena, choice, *arguments) if candidate.name != OWN else "ours"

        return dataclasses.replace(candidate, run=run)

    stubs = {op: {name: stub(candidate) for name, candidate in known.items()} for op, known in MATMULS.items()}
    for module in (matmul, matmul_candidates):
        monkeypatch.setattr(module, "MATMULS", stubs)
    monkeypatch.setattr(dispatch, "of", lambda group: seen.of)
    return seen


def scatter(rows=1024, kernel=None, dtype=BF16, wire_dtype=None, bias=None, scales=None, out_dtype=None):
    x, w = torch.empty(rows, K, dtype=dtype), torch.empty(K, N, dtype=dtype)
    return matmul.matmul_reduce_scatter(kernel, "0", x, w, bias, scales, out_dtype, wire_dtype, -(-rows // 2))


def gather(rows=1024, kernel=None, widths=(N,), share=None):
    x = torch.empty(share or -(-rows // 2), K, dtype=BF16)
    weights = [torch.empty(K, width, dtype=BF16) for width in widths]
    return matmul.all_gather_matmul(kernel, "0", x, weights, rows, [], None, [], None, False)


def reduce(rows=1024, kernel=None, columns=N, wire_dtype=None):
    x, w = torch.empty(rows, K, dtype=BF16), torch.empty(K, columns, dtype=BF16)
    return matmul.matmul_all_reduce(kernel, "0", x, w, None, None, None, wire_dtype, lambda: "composed")


def test_the_choice_is_run(calls):
    assert scatter() == "ours" and gather() is None
    assert scatter(wire_dtype=BF16) == "ours" and scatter(wire_dtype=torch.float32) == "ours"
    assert scatter(kernel="nccl") is None and scatter(rows=0) is None and gather(widths=(N, 0)) is None
    assert calls.run == [TILED, NCCL, TILED, Choice(OWN)]


def test_partial_sums_in_the_dtype_of_the_result_or_in_fp32(calls):
    """Of FP8 the result's dtype is not the input's. In fp32 they need more room: the tiling is not the table's."""
    calls.of, scales = by_table((1, TILED), op=f"{MATMUL_REDUCE_SCATTER}_fp8"), (torch.ones(1), torch.ones(1))
    for wire in (None, BF16, torch.float32):
        assert scatter(dtype=FP8, scales=scales, out_dtype=BF16, wire_dtype=wire) == "ours"
    assert calls.run == [TILED, TILED, Choice(OWN)]


def test_all_reduces(calls):
    """By the table, else by a product and the fastest all-reduce; None: by the reference."""
    assert reduce() == reduce(kernel=COMPOSED) == "composed" and reduce(kernel=OWN) == "ours"
    assert reduce(kernel="nccl") is reduce(rows=0) is reduce(columns=0) is None
    assert calls.run == [PRODUCT, PRODUCT, Choice(OWN)]
    calls.of = by_table((1, NCCL), (512, TILED), op=MATMUL_ALL_REDUCE)
    assert reduce(511) is None and reduce(511, COMPOSED) == "composed" and reduce(512) == "ours"
    assert reduce(512, wire_dtype=BF16) == "ours" and reduce(512, wire_dtype=torch.float32) == "ours"
    assert reduce(512, COMPOSED, wire_dtype=torch.float32) == "composed"
    assert calls.run[3:] == [NCCL, PRODUCT, TILED, TILED, Choice(OWN), PRODUCT]
    names = "nccl, tpfuse_all_reduce, tpfuse"
    with pytest.raises(
        ConfigError, match=f"^kernel 'torch_symm_mem' cannot run {MATMUL_ALL_REDUCE}: the kernels are {names}$"
    ):
        reduce(kernel=SYMM_MEM)


def test_a_choice_is_made_once_per_kind_of_call(calls, monkeypatch):
    problems, choose = [], matmul.choose
    monkeypatch.setattr(matmul, "choose", lambda d, p, k: problems.append((p, k)) or choose(d, p, k))
    for _ in range(3):
        scatter()
    scatter(bias=torch.empty(N))
    assert problems == [(problem(), None)] and calls.run == [TILED] * 4
    scatter(kernel=OWN)
    scatter(rows=1022)
    scatter(dtype=torch.float16)
    gather()
    gather()
    gather(rows=1023)
    gather(widths=(N, 8))
    reduce()
    reduce()
    for out_dtype in (BF16, torch.float16, BF16):
        scatter(dtype=FP8, scales=(torch.ones(1), torch.ones(1)), out_dtype=out_dtype)
    scatter(dtype=FP8, scales=(torch.ones(1024, 1), torch.ones(1, N)), out_dtype=BF16)
    assert problems[1:] == [
        (problem(), OWN),
        (problem(rows=1022), None),
        (problem(dtype=torch.float16), None),
        (problem(ALL_GATHER_MATMUL), None),
        (problem(ALL_GATHER_MATMUL, rows=1023), None),
        (problem(ALL_GATHER_MATMUL, widths=(N, 8)), None),
        (problem(MATMUL_ALL_REDUCE), None),
        (problem(dtype=FP8, out_dtype=BF16), None),
        (problem(dtype=FP8, out_dtype=torch.float16), None),
    ]


def test_dtypes_of_all_operands_count(calls):
    """A weight may be of FP8's other kind."""
    calls.of = by_table((1, TILED), op=f"{ALL_GATHER_MATMUL}_fp8")
    x, scale = torch.empty(512, K, dtype=FP8), torch.ones(1)

    def call(*dtypes):
        weights = [torch.empty(K, N // 2, dtype=dtype) for dtype in dtypes]
        scales = [scale] * len(dtypes)
        return matmul.all_gather_matmul(None, "0", x, weights, 1024, [], scale, scales, BF16, False)

    assert call(FP8, FP8) == "ours" and call(FP8, E5M2) is call(E5M2, FP8) is None


def test_where_nothing_of_ours_can_run(calls):
    calls.of = "the group has no peers"
    assert scatter() is gather() is reduce() is None
    for op, call in ((MATMUL_REDUCE_SCATTER, scatter), (ALL_GATHER_MATMUL, gather), (MATMUL_ALL_REDUCE, reduce)):
        with pytest.raises(ConfigError, match=f"^kernel 'tpfuse' cannot run {op}: the group has no peers"):
            call(kernel=OWN)


def test_in_a_capture(calls, monkeypatch):
    """What was called before goes on as it was; what was not is NCCL's, there alone."""
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(workspace, "of", lambda arena: "a CUDA graph is being captured: call once before")
    assert scatter() == "ours"
    capturing[0] = True
    assert scatter() == "ours" and scatter(rows=64) is None
    assert reduce(rows=4) == "composed"
    calls.of.arena.workspace = None
    with pytest.raises(ConfigError, match="a CUDA graph is being captured: call once before"):
        scatter(rows=64, kernel=OWN)
    with pytest.raises(ConfigError, match="not prepared, and a CUDA graph is being captured"):
        scatter(rows=64, kernel=SYMM_MEM)
    capturing[0], calls.of.arena.workspace = False, object()
    assert scatter(rows=64) == "ours"
    calls.of = by_table((1, TILED), op=MATMUL_ALL_REDUCE)
    for capturing[0], expected in ((True, "composed"), (False, "ours"), (True, "ours")):
        assert reduce() == expected


def test_what_cannot_be_built(calls):
    """On every rank alike: told once, and NCCL from then on."""
    calls.fails = True
    with pytest.warns(RuntimeWarning, match="the table's choice tpfuse columns=128 .* is not used: rank 0: no compiler"):
        assert scatter() is None
    assert scatter() is None and calls.run == [TILED, NCCL, NCCL]
    with pytest.raises(BuildError):
        scatter(kernel=OWN)
    calls.of = by_table((1, TILED), op=MATMUL_ALL_REDUCE)
    with pytest.warns(
        RuntimeWarning, match=f"^{MATMUL_ALL_REDUCE}: the table's choice tpfuse .* is not used: rank 0: no comp"
    ):
        assert reduce() == "composed"
    assert reduce() == "composed" and calls.run[-3:] == [TILED, PRODUCT, PRODUCT]


# -- ours --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch):
    """Calls of our kernels in place of running them, arguments by their names; own.of: the dispatcher of the group."""
    seen = types.SimpleNamespace(calls=[], of=None)

    def watch(module, name):
        signature = inspect.signature(getattr(module, name))

        def kernel(*arguments, **options):
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            seen.calls.append(bound.arguments)
            return name

        monkeypatch.setattr(module, name, kernel)

    watch(own_reduce_scatter, "matmul_reduce_scatter")
    watch(own_all_gather, "all_gather_matmul")
    monkeypatch.setattr(dispatch, "of", lambda group: seen.of)
    return seen


def same(got, **expected):
    """Whether a call had just these arguments: tensors themselves, not others like them."""

    def alike(a, b):
        if isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(map(alike, a, b))
        return a is b or (not isinstance(b, torch.Tensor) and a == b)

    return got.keys() == expected.keys() and all(alike(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("world", "share"), [(2, 501), (3, 334), (8, 126)])
def test_the_own_all_reduce(own, world, share):
    """By a table's choice, with its tiling: shares of ceil(M / world) rows are summed, and every rank gets all of them."""
    own.of = by_table((1, PRODUCT), (512, TILED), op=MATMUL_ALL_REDUCE, world=world)
    x, w, bias = torch.empty(1001, K, dtype=BF16), torch.empty(K, N, dtype=BF16), torch.empty(N, dtype=BF16)

    def call(kernel=None, x=x):
        return matmul.matmul_all_reduce(kernel, "0", x, w, bias, None, None, None, lambda: "composed")

    assert call(x=x[:511]) == "composed" and not own.calls
    assert call() == call(OWN) == "matmul_reduce_scatter"
    always = {"workspace": own.of.arena.workspace, "input": x, "weight": w, "bias": bias, "share": share, "all_rows": True}
    always |= {"more": matmul.NO_MORE, "wire_dtype": None}
    by_choice, by_name = own.calls
    cut = Tiling(columns=128, stages=6, lead=None, pace=0.5)
    assert same(by_choice, **always, scales=None, out_dtype=None, cut=cut)
    assert same(by_name, **always, scales=None, out_dtype=None, cut=None)  # the kernel's own rule
    assert call(OWN, x[:1]) == "matmul_reduce_scatter" and own.calls[-1]["share"] == 1  # others have only padding


@pytest.mark.parametrize("op", [MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE])
def test_sums_of_products_reach_our_kernels(own, op):
    """Chosen by K of all of them together, and each of them given."""
    own.of = by_table((1, TILED), op=op, size=(N, K + 64))
    x, y, w, v = (torch.empty(shape, dtype=BF16) for shape in ((1024, K), (1024, 64), (K, N), (64, N)))
    if op == MATMUL_REDUCE_SCATTER:
        result = matmul.matmul_reduce_scatter(None, "0", x, w, None, None, None, None, 512, ([y], [v]))
    else:
        result = matmul.matmul_all_reduce(None, "0", x, w, None, None, None, None, lambda: "composed", ([y], [v]))
    (call,) = own.calls
    assert result == "matmul_reduce_scatter" and call["input"] is x and call["weight"] is w and call["share"] == 512
    assert call["more"][0][0] is y and call["more"][1][0] is v


def test_the_dtype_of_partial_sums_reaches_our_kernels(own):
    """fp32; the result's own is no other."""
    for op in (MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE):
        own.of = by_table((1, TILED), op=op)
        call = scatter if op == MATMUL_REDUCE_SCATTER else reduce
        for wire in (None, BF16, torch.float32):
            assert call(wire_dtype=wire) == "matmul_reduce_scatter"
    wires = [(call["wire_dtype"], call["cut"] is None, call["all_rows"]) for call in own.calls]
    fp32 = torch.float32
    assert wires == [(w, w is fp32, every) for every in (False, True) for w in (None, None, fp32)]


@pytest.mark.parametrize("kernel", [None, OWN])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("op", MATMULS)
def test_scales_reach_our_kernels(own, op, by_row, kernel):
    """With the dtype of results."""
    own.of = by_table((1, TILED), op=f"{op}_fp8")
    rows, share = 1001, 501
    x = torch.empty(share if op == ALL_GATHER_MATMUL else rows, K, dtype=FP8)
    ws = [torch.empty(K, N, dtype=FP8) for _ in range(2)]
    biases = [torch.empty(N, dtype=BF16), None]
    x_scale = torch.ones(len(x), 1) if by_row else torch.ones(1)
    w_scales = [torch.ones(1, N) if by_row else torch.ones(1) for _ in ws]
    always = {
        "workspace": own.of.arena.workspace,
        "input": x,
        "out_dtype": BF16,
        "cut": matmul_candidates._cut(Choice(OWN) if kernel else TILED),
    }
    if op == ALL_GATHER_MATMUL:
        result = matmul.all_gather_matmul(kernel, "0", x, ws, rows, biases, x_scale, w_scales, BF16, True)
        always |= {"weights": ws, "rows": rows, "biases": biases, "gathered": True}
        assert same(*own.calls, **always, input_scale=x_scale, weight_scales=w_scales)
    else:
        scales = x_scale, w_scales[0]
        if op == MATMUL_REDUCE_SCATTER:
            result = matmul.matmul_reduce_scatter(kernel, "0", x, ws[0], biases[0], scales, BF16, None, share)
        else:
            result = matmul.matmul_all_reduce(kernel, "0", x, ws[0], biases[0], scales, BF16, None, lambda: "composed")
        always |= {"weight": ws[0], "bias": biases[0], "share": share, "all_rows": op == MATMUL_ALL_REDUCE}
        always |= {"more": matmul.NO_MORE, "wire_dtype": None}
        assert same(*own.calls, **always, scales=scales)
    assert result == (op if op == ALL_GATHER_MATMUL else MATMUL_REDUCE_SCATTER)  # the kernel that an all-reduce shares


def test_our_kernels_without_scales(own):
    """They are told that there are none."""
    own.of = by_table((1, TILED))
    assert scatter() == MATMUL_REDUCE_SCATTER and gather(kernel=OWN) == ALL_GATHER_MATMUL
    scattering, gathering = own.calls
    assert scattering["scales"] is scattering["out_dtype"] is None and not scattering["all_rows"]
    assert gathering["input_scale"] is gathering["out_dtype"] is None and not gathering["weight_scales"]
    assert gathering["gathered"] is False and scattering["cut"].stages == 6 and gathering["cut"] is None


# -- torch's -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch):
    """Sizes of what torch was asked for; memory.reason: what another rank says."""
    seen = types.SimpleNamespace(tried=[], made=[], reason="")
    monkeypatch.setattr(symm_mem.groups, "resolve", lambda name: name)
    monkeypatch.setattr(symm_mem.agreement, "exchange", lambda g, s, mine: [mine, {"reason": seen.reason}])
    monkeypatch.setattr(torch_symm_mem, "empty", lambda size, **kw: seen.tried.append(size) or torch.empty(0))
    monkeypatch.setattr(torch_symm_mem, "get_symm_mem_workspace", lambda name, size: seen.made.append(size) or size)
    return seen


def test_memory_of_torch_is_made_once_for_what_is_chosen(memory):
    dispatcher = by_table((1, TORCH))
    dispatcher.arena.device = torch.device("cpu")
    assert chosen(dispatcher, problem(rows=2048)) == TORCH
    assert memory.tried == memory.made == [2 * 1024 * N * 2]
    assert chosen(dispatcher, problem(rows=1024)) == TORCH and len(memory.made) == 1
    assert chosen(dispatcher, problem(rows=2050)) == TORCH and memory.made[1:] == [4 * 1024 * N * 2]
    assert symm_mem._workspaces[dispatcher.arena].kept == memory.made  # graphs may hold the smaller one
    memory.reason = "out of memory"
    assert chosen(dispatcher, problem(rows=1 << 20)) == NCCL
    assert len(memory.made) == 2 and len(memory.tried) == 3  # no rank goes on without the other
    with pytest.raises(ConfigError, match="cannot run matmul_reduce_scatter: rank 1: out of memory"):
        matmul.choose(dispatcher, problem(rows=1 << 20), SYMM_MEM)


def test_torchs_kernels(monkeypatch):
    """Its arguments, and biases, which it does not know."""
    x, w, bias = torch.ones(4, 3), torch.full((3, 5), 2.0), torch.arange(5.0)

    def scattering(a, b, op, dim, name):
        assert (op, dim, name) == ("sum", 0, "0")
        return (a @ b)[:2]

    def gathering(a, bs, dim, name, *, return_A):
        assert (dim, name) == (0, "0")
        whole = torch.cat((a, a))
        return whole if return_A else None, [whole @ b for b in bs]

    monkeypatch.setattr(torch.ops.symm_mem, "fused_matmul_reduce_scatter", scattering, raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "fused_all_gather_matmul", gathering, raising=False)
    run = {op: MATMULS[op][SYMM_MEM].run for op in (MATMUL_REDUCE_SCATTER, ALL_GATHER_MATMUL)}
    six = torch.full((8, 5), 6.0)
    assert torch.equal(run[MATMUL_REDUCE_SCATTER](StandIn(), TORCH, x, w, None, 2, None, None), six[:2])
    assert torch.equal(run[MATMUL_REDUCE_SCATTER](StandIn(), TORCH, x, w, bias, 2, None, None), six[:2] + bias)
    got = run[ALL_GATHER_MATMUL](StandIn(), TORCH, x, [w, w], 8, [None, bias], True, None, [], None)
    assert [*map(torch.equal, got, (six, six + bias, torch.ones(8, 3)))] == [True] * 3 and len(got) == 3
    (got,) = run[ALL_GATHER_MATMUL](StandIn(), TORCH, x, (w,), 8, [], False, None, [], None)
    assert torch.equal(got, six)


def test_an_all_reduce_without_further_products(own):
    """As the tuner calls its candidates."""
    own.of = by_table((1, PRODUCT), op=MATMUL_ALL_REDUCE)
    x, w = torch.empty(64, K, dtype=BF16), torch.empty(K, N, dtype=BF16)
    arguments = (own.of.arena, Choice(OWN), x, w, None, None, None, lambda: "composed")
    assert MATMULS[MATMUL_ALL_REDUCE][PRODUCT.candidate].run(*arguments) == "composed"
    assert MATMULS[MATMUL_ALL_REDUCE][OWN].run(*arguments) == "matmul_reduce_scatter"
    assert own.calls[-1]["more"] == matmul.NO_MORE
