"""GEMMs and the collectives next to them: which become one operation, which do not, and the same numbers on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.unit import ranks
from tests.unit.graphs import Backend, all_reduce, world
from tests.unit.test_sequence_parallel import D, H, fp32, inputs, llama, norm, partial, weights

OFF = {"fuse_allreduce_rms": False}
GEMMS = {**OFF, "fuse_gemm_comms": True}
BOTH = {**GEMMS, "enable_sp": True}


def join(function, make, counts, size=2, config=GEMMS, dynamic=None, left=(0, 0, 0)):
    """Compile with and without on every rank: the same outputs, these numbers of operations (GEMM + reduce-scatter,
    all-gather + GEMM, GEMM + all-reduce), and these of (reduce-scatters, all-gathers, all-reduces) left."""
    plain = ranks.run(function, make, size, OFF, dynamic, alike=True)
    ours = ranks.run(function, make, size, config, dynamic)
    for found, expected in zip(ours.outputs, plain.outputs, strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert a.stride() == b.stride()
    assert ours.joined == counts and ours.counts == left, f"{ours.graphs[0].code}\n{ours.report}"
    assert (ours.report.count("fuse_gemm_comms") > 0) == (sum(counts) > 0), ours.report
    return ours


def why(run):
    return [s.reason for s in run.report.sites if s.fusion == "fuse_gemm_comms" and s.outcome == "skipped"]


def scatter(x, dim=0):
    return funcol.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD)


def gather(x, dim=0):
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def rows(count, *, size=2, of=D, seed=1):
    """This rank's rows of a sequence-parallel model, then a pair of sharded weights."""
    return lambda rank: (fp32(count, of, seed=100 * seed + rank), *weights(rank, 1))


# -- with sharded rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size"), [((8, D), 2), ((5, D), 2), ((1, D), 2), ((7, D), 3), ((2, 3, D), 2), ((3, 7, D), 4)], ids=str
)
def test_blocks(shape, size):
    """Every GEMM but the first, of what is not sharded; padding is the operations' own matter."""
    run = join(llama, inputs(5, *shape), (4, 4, 0), size, BOTH)
    targets = [n.target for n in run.nodes]
    aten = torch.ops.aten
    assert targets.count(aten.mm.default) == 1 and targets.count(aten.constant_pad_nd.default) <= 1, (
        "at most that of the residual"
    )


def test_a_varying_number_of_rows():
    run = join(llama, inputs(5, 7, D), (4, 4, 0), 2, BOTH, dynamic=0)
    assert any(isinstance(n.meta["val"].shape[0], torch.SymInt) for n in run.nodes if n.target is ranks.SCATTERED)


def test_one_gather_for_several_gemms():
    """Queries, keys and values; a router that reads the rows too; the order of results is that of the GEMMs."""

    def function(h, w, a, b, c, d, router):
        h = h + all_reduce(partial(h, a, b))
        x = norm(h, w)
        return x @ a, (x @ c).view(-1, 2, H // 2), x @ b.t(), torch.softmax(x @ router, -1), x.sum(0)

    make = lambda rank: (*inputs(2, 6, D)(rank), fp32(D, 4, seed=3))  # noqa: E731
    run = join(function, make, (1, 1, 0), 2, BOTH)
    (gathered,) = (n for n in run.nodes if n.target is ranks.GATHERED)
    assert len(gathered.args[1]) == 4 and gathered.args[8], "the sum over rows reads them all"


@pytest.mark.parametrize(("shape", "size"), [((8, D), 2), ((2, 3, D), 2), ((7, D), 3)], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_of_gemms(shape, size, count):
    """The gradient of what several column-parallel layers read: one operation for all of them."""

    def total(h, m):
        parts = [partial(h, m[i], m[i + 1]) for i in range(0, 2 * count, 2)]
        return sum(parts[1:], parts[0])

    def sharded(h, w, *m):
        return norm(h + all_reduce(total(h, m)), w) @ m[0]

    def whole(h, w, *m):
        return all_reduce(total(h, m))

    for function, counts, config in ((sharded, (1, 1, 0), BOTH), (whole, (0, 0, 1), GEMMS)):
        run = join(function, inputs(count, *shape), counts, size, config)
        (joined,) = (n for n in run.nodes if n.target in (ranks.SCATTERED, ranks.REDUCED))
        assert len(joined.kwargs["more_inputs"]) == len(joined.kwargs["more_weights"]) == count - 1
        assert torch.ops.aten.add.Tensor not in {n.target for n in run.nodes[: run.nodes.index(joined)]}


def test_sums_that_are_no_sum_of_gemms():
    """Of a GEMM and something else, of one GEMM and itself, of one that something else reads."""

    def with_other(h, w, a, b):
        return all_reduce(partial(h, a, b) + torch.relu(h))

    def with_itself(h, w, a, b):
        y = partial(h, a, b)
        return all_reduce(y + y)

    def read_elsewhere(h, w, a, b, c, d):
        y = partial(h, a, b)
        return all_reduce(y + partial(h, c, d)), y.sum()

    for function, make, reason in (
        (with_other, inputs(1, 6, D), "comes from relu"),
        (with_itself, inputs(1, 6, D), "comes from add"),
        (read_elsewhere, inputs(2, 6, D), "comes from add"),
    ):
        run = join(function, make, (0, 0, 0), left=(0, 0, 1))
        assert any(reason in told for told in why(run)), why(run)


def test_without_sharding_only_all_reduces():
    def function(h, w, a, b):
        return all_reduce(partial(h, a, b)), norm(h, w)

    join(function, inputs(1, 5, D), (0, 0, 1))
    run = ranks.run(function, inputs(1, 5, D), 2, {**OFF, "fuse_gemm_comms": False})
    assert run.joined == (0, 0, 0) and run.counts == (0, 0, 1)


def test_a_norm_comes_first():
    """What the other fusion takes is not taken from it."""

    def function(h, w, a, b):
        h = h + all_reduce(partial(h, a, b))
        return norm(h, w)

    with world():
        backend = Backend({"fuse_gemm_comms": True})
        torch.compile(function, backend=backend)(*inputs(1, 5, D)(0))
    report = backend.recorder.report()
    assert report.count("fuse_allreduce_rms") == 1 and report.count("fuse_gemm_comms") == 0


# -- models that are sequence-parallel already -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, D), (1, 8, D), (4, 2, D)], ids=str)
def test_their_own_collectives(shape):
    def function(x, up, down):
        return scatter(partial(gather(x), up, down))

    make = lambda rank: (fp32(*shape, seed=rank), *weights(rank, 1))  # noqa: E731
    join(function, make, (1, 1, 0), 2)


@pytest.mark.parametrize("shape", [(1, 8, D), (3, 4, D)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_along_the_sequence(shape, size):
    """Dimension 1, as torch spells it: cut in parts, which are put together along another dimension."""

    def function(x, up, down):
        whole = gather(x, 1)
        return scatter(partial(whole, up, down), 1) + x, whole.sum((1, 2))

    make = lambda rank: (fp32(*shape, seed=rank), *weights(rank, 1))  # noqa: E731
    run = join(function, make, (1, 1, 0), size)
    assert torch.ops.aten.cat.default not in [n.target for n in run.nodes]


def test_the_same_gather_twice():
    """Be it of two views."""

    def function(x, up, down):
        return gather(x.view(3, D)) @ up, gather(x.view(-1, D)) @ down.t()

    run = join(function, rows(3), (0, 1, 0))
    (gathered,) = (n for n in run.nodes if n.target is ranks.GATHERED)
    assert len(gathered.args[1]) == 2 and not gathered.args[8]


def test_biases_of_columns():
    def function(x, up, down, bias):
        whole = gather(x)
        return torch.addmm(bias, whole, up), whole @ down.t()

    join(function, lambda rank: (*rows(3)(rank), fp32(H, seed=50 + rank)), (0, 1, 0))


def test_a_bias_of_each_rank_is_no_bias_of_the_sum():
    def function(x, up, down, bias):
        return scatter(torch.addmm(bias, torch.relu(x @ up), down))

    make = lambda rank: (fp32(4, D, seed=1), *weights(rank, 1), fp32(D, seed=50 + rank))  # noqa: E731
    run = join(function, make, (0, 0, 0), left=(1, 0, 0))
    assert "adds a bias on each rank" in why(run)[0]


@pytest.mark.parametrize("each", [False, True])
def test_fp8(each):
    """Scales of one number each, or of each row and column."""

    def function(x, w, row_scale, column_scale):
        return scatter(torch._scaled_mm(x, w.t(), row_scale, column_scale, out_dtype=torch.bfloat16))

    def make(rank):
        x, w = (fp32(*shape, seed=rank).to(torch.float8_e4m3fn) for shape in ((4, 32), (16, 32)))
        scales = (fp32(4, 1, seed=7), fp32(1, 16, seed=8)) if each else (torch.tensor(2.0), torch.tensor(0.5))
        return x, w, *(scale.abs() + 0.5 for scale in scales)

    run = ranks.run(function, make, 2, GEMMS)
    assert run.joined == (1, 0, 0)
    total = sum((x.float() * a) @ (w.float().t() * b) for x, w, a, b in (make(0), make(1)))
    got = torch.cat([outputs[0] for outputs in run.outputs])
    assert got.dtype is torch.bfloat16 and ((got.float() - total).norm() / total.norm()) < 1e-2


def test_a_weight_made_between_is_moved_up():
    """Its transpose stands behind the gather, and behind what reads the gathered rows otherwise."""

    def function(x, up, down):
        whole = gather(x)
        total = whole.sum()
        return whole @ (down * 2).t(), total

    run = join(function, rows(3), (0, 1, 0))
    (gathered,) = (n for n in run.nodes if n.target is ranks.GATHERED)
    assert gathered.args[8]


# -- what is left ------------------------------------------------------------------------------------------------------


def untouched(function, make, reason, left, size=2):
    run = join(function, make, (0, 0, 0), size, left=left)
    assert any(reason in each for each in why(run)), why(run)


def test_a_weight_of_what_is_gathered():
    def square(x, *weights):
        whole = gather(x)
        return whole @ whole.t()

    untouched(square, rows(3), "computed from what is gathered", (0, 1, 0))


def test_a_result_with_other_users():
    def function(x, up, down):
        y = torch.relu(x @ up) @ down
        return scatter(y), y

    untouched(function, rows(4), "other users", (1, 0, 0))


def test_no_gemm():
    untouched(lambda x, *w: scatter(torch.relu(x)), rows(4), "not from a GEMM", (1, 0, 0))
    untouched(lambda x, *w: torch.relu(gather(x)), rows(4), "no GEMM reads", (0, 1, 0))


def test_other_dimensions():
    """Columns are not rows."""
    columns = lambda x, up, down: scatter(x @ up, dim=1)  # noqa: E731
    untouched(columns, rows(4), "not from a GEMM", (1, 0, 0))
    wide = lambda x, up, down: gather(x, 1).reshape(4, -1) @ torch.cat([up, up])  # noqa: E731
    untouched(wide, rows(4), "no GEMM reads", (0, 1, 0))


def test_another_reduction():
    with world():
        backend = Backend(GEMMS)
        average = lambda x, up, down: funcol.reduce_scatter_tensor(x @ up, "avg", 0, dist.group.WORLD)  # noqa: E731
        torch.compile(average, backend=backend)(*rows(4)(0))
    assert "only a sum" in str(backend.recorder.report())


# -- what went wrong once ----------------------------------------------------------------------------------------------


def test_weights_and_biases_of_gathered_rows():
    """Nothing may be computed from rows that the operation has yet to gather."""

    def largest(x, up, down):
        whole = gather(x)
        return whole @ up, whole @ (up * whole.amax())

    def bias(x, up, down):
        whole = gather(x)
        return torch.addmm(whole[0].sum() * torch.ones(H), whole, up)

    for function in (largest, bias):
        untouched(function, rows(4), "computed from what is gathered", (0, 1, 0))


@pytest.mark.parametrize("config", [GEMMS, BOTH])
def test_views_of_a_varying_number_of_rows(config):
    join(lambda x, up, down: gather(x).view(-1, 4, D) @ up, rows(8), (0, 0, 0), config=config, dynamic=0, left=(0, 1, 0))


def test_gathers_that_stay_apart():
    """Outputs are tensors of their own; and a wait that comes too late cannot stand for another."""
    ops, name = torch.ops._c10d_functional, "0"

    def crossed(x, up, down):
        first, second = (ops.all_gather_into_tensor(x, 2, name) for _ in range(2))
        late = ops.wait_tensor(second) @ up
        return late, ops.wait_tensor(first) @ down.t()

    join(lambda x, *w: (gather(x), gather(x)), rows(4), (0, 0, 0), left=(0, 2, 0))
    join(crossed, rows(4), (0, 2, 0))


def test_what_a_user_pads_or_cuts_is_no_padding_of_ours():
    """Its numbers may be others on another rank."""
    pad = torch.nn.functional.pad
    untouched(lambda x, up, down: scatter(pad(x @ up, (0, 0, 0, -2))), rows(4), "not from a GEMM", (1, 0, 0))
    untouched(lambda x, up, down: gather(x)[:5] @ up, rows(4), "no GEMM reads", (0, 1, 0))


def test_no_rows():
    empty = lambda rank: (fp32(0, 4, D, seed=1), *weights(rank, 1))  # noqa: E731
    untouched(lambda x, up, down: scatter(x @ up, 1), empty, "it is empty", (1, 0, 0))


def test_random_numbers_stay_in_their_order():
    def function(x, up, down):
        whole = gather(x)
        return torch.rand(2), whole.sum(), whole @ torch.rand(D, 3)

    with world(), torch._inductor.config.patch(fallback_random=True):
        backend = Backend(GEMMS)
        torch.compile(function, backend=backend)(*rows(4)(0))
    assert backend.recorder.report().count("fuse_gemm_comms") == 0
