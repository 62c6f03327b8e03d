"""Rows sharded between all-reduces: where, where not, and the same numbers on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.unit import norms, ranks
from tests.unit.graphs import FUSED, Backend, PlainBackend, all_reduce, values, world
from tests.unit.ranks import ALL_REDUCE
from tpfuse.testing import fake_world

D, H = 16, 24
BOTH = {"enable_sp": True}
ON = {**BOTH, "fuse_allreduce_rms": False}  # the other fusion would take what is left
OFF = {"fuse_allreduce_rms": False}


def fp32(*shape, seed=0):
    return values(*shape, dtype=torch.float32, seed=seed)


def weights(rank, count):
    """(in, out) of ``count`` sharded pairs of GEMMs: others on each rank."""
    pairs = [(fp32(D, H, seed=10 * rank + i), fp32(H, D, seed=10 * rank + i + 5)) for i in range(count)]
    return [weight / 4 for pair in pairs for weight in pair]


def inputs(count, *shape):
    """h and the norm's weight, alike on all ranks; then sharded weights."""
    return lambda rank: (fp32(*shape, seed=1), fp32(D, seed=2), *weights(rank, count))


def partial(x, up, down):
    """A sharded pair of GEMMs: what has yet to be summed over ranks."""
    return torch.relu(x @ up) @ down


def norm(x, w):
    return norms.llama(x, w, 1e-5)


def shard(function, make, size=2, counts=None, left=0, config=ON, dynamic=None):
    """Compile with and without on every rank: the same outputs, nowhere more bytes, and these numbers of
    (reduce-scatters, all-gathers, all-reduces)."""
    plain = ranks.run(function, make, size, OFF, dynamic, alike=True)
    ours = ranks.run(function, make, size, config, dynamic)
    for rank, (found, expected) in enumerate(zip(ours.outputs, plain.outputs, strict=True)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, rank=rank: f"rank {rank}: {text}")
            assert a.stride() == b.stride()
    scattered, gathered, reduced = ours.counts
    _, gathers_before, before = plain.counts
    assert scattered + gathered - gathers_before + 2 * reduced <= 2 * before, "more bytes than before"
    if counts is not None:
        assert ours.counts == counts, f"{ours.counts}\n{ours.graphs[0].code}\n{ours.report}"
    assert ours.report.count("enable_sp") == scattered
    assert len(ours.left) == left, ours.report
    return ours


def untouched(function, make, why, **kwargs):
    """Not rewritten, for a reason with these words."""
    run = shard(function, make, left=kwargs.pop("left", 1), **kwargs)
    assert run.counts[0] == 0
    assert any(why in reason for reason in run.left), run.left
    return run


# -- blocks ------------------------------------------------------------------------------------------------------------


def llama(h, w, *m):
    """Two blocks of two all-reduces each; the last norm goes into a GEMM."""
    for i in range(0, len(m) - 2, 2):
        h = h + all_reduce(partial(norm(h, w), m[i], m[i + 1]))
    return norm(h, w) @ m[-2]


SHAPES = [
    *(((rows, D), size) for rows in (1, 2, 3, 5, 8) for size in (2, 3)),
    ((1, 1, D), 2),
    ((2, 3, D), 2),
    ((5, 1, D), 3),
]


@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_two_blocks(shape, size):
    """First, middle and last: as many gathers as all-reduces before, the residual never among them."""
    run = shard(llama, inputs(5, *shape), size, counts=(4, 4, 0))
    scatters = [n for n in run.nodes if n.target is ranks.REDUCE_SCATTER]
    rows = shape[0] if len(shape) == 2 else shape[0] * shape[1]
    assert all(n.meta["val"].shape == (-(-rows // size), D) for n in scatters)
    if rows % size == 0:
        assert all(n.args[0].target is torch.ops.aten.mm.default for n in scatters), "nothing between GEMM and collective"
        slices = [n for n in run.nodes if n.target in (torch.ops.aten.slice.Tensor, torch.ops.aten.constant_pad_nd.default)]
        assert not slices


def test_bfloat16():
    def function(h, w, a, b):
        h = h + all_reduce(partial(norm(h, w), a, b))
        return norm(h, w) @ a

    make = lambda rank: tuple(t.bfloat16() for t in inputs(1, 5, D)(rank))  # noqa: E731
    run = ranks.run(function, make, 2, ON)
    plain = ranks.run(function, make, 2, OFF)
    assert run.counts == (1, 1, 0)
    (gather,) = (n for n in run.nodes if n.target is ranks.ALL_GATHER)
    assert gather.meta["val"].dtype is torch.bfloat16, "gathered before anything is widened"
    for found, expected in zip(run.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(found[0], expected[0], rtol=2**-7, atol=2**-5)


def test_a_wider_copy_is_gathered_narrow():
    """A router in fp32 reads the norm's output: one gather, in bf16."""

    def function(h, w, a, b, router):
        n = norm(h + all_reduce(partial(h, a, b)), w)
        return n @ a, n.float() @ router

    def make(rank):
        return (*(t.bfloat16() for t in inputs(1, 6, D)(rank)), fp32(D, 4, seed=7))

    run = ranks.run(function, make, 2, ON)
    assert run.counts == (1, 1, 0)


@pytest.mark.parametrize(("shape", "size"), [((8, D), 2), ((5, D), 2), ((1, D), 3), ((2, 3, D), 4)], ids=str)
@pytest.mark.parametrize("gathered", [False, True])
def test_sums_over_rows(shape, size, gathered):
    """As gradients of norms' weights are: each rank sums its own rows, and none of those that only fill up its share.

    What is gathered for others is summed as it is.
    """
    leading = tuple(range(len(shape) - 1))

    def function(h, w, a, b):
        y = torch.exp(all_reduce(partial(h, a, b)))  # not zero where there is no row
        n = norm(y, w)
        return (n if gathered else y * w).sum(leading, keepdim=True), n @ a

    plain, ours = (ranks.run(function, inputs(1, *shape), size, config) for config in (OFF, ON))
    assert ours.counts == (1, 1, 0 if gathered else 1) and not ours.left
    assert all(n.meta["val"].shape == (D,) for n in ours.nodes if n.target is ALL_REDUCE), "of a vector"
    for found, expected in zip(ours.outputs, plain.outputs, strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_post_norm(rows):
    """Gemma: the sum is normalised before it is added."""

    def function(h, w, a, b, c, d):
        for up, down in ((a, b), (c, d)):
            h = h + norm(all_reduce(partial(norm(h, w), up, down)), w)
        return norm(h, w) @ a

    shard(function, inputs(2, rows, D), counts=(2, 2, 0))


@pytest.mark.parametrize("shape", [(5, D), (2, 4, D)], ids=str)
def test_parallel_block(shape):
    """Attention and MLP read one norm, and share one message; LayerNorm is as row-wise as RMSNorm."""

    def function(h, w, a, b, c, d):
        n = F.layer_norm(h, (D,), w)
        h = h + all_reduce(partial(n, a, b)) + all_reduce(partial(n, c, d))
        return F.layer_norm(h, (D,), w) @ a

    run = shard(function, inputs(2, *shape), counts=(1, 1, 0))
    assert run.report.count("fuse_allreduce_rms", "merged") == 1


def test_parallel_block_that_is_one_sum():
    def function(h, w, a, b, c, d):
        n = norm(h, w)
        h = h + all_reduce(partial(n, a, b) + partial(n, c, d))
        return norm(h, w) @ a

    shard(function, inputs(2, 7, D), counts=(1, 1, 0))


def test_bias_scale_and_flat_experts():
    """Views that keep rows, in either direction; bias and scale on the way."""

    def function(h, w, a, b):
        y = all_reduce(partial(h.reshape(-1, D), a, b)).view(h.shape)
        h = h + (y + w) * 0.22
        return norm(h, w).reshape(-1, D) @ a

    for shape in ((2, 3, D), (1, 5, D)):
        shard(function, inputs(1, *shape), counts=(1, 1, 0))


def test_softmax_of_each_row():
    def function(h, w, a, b):
        return torch.softmax(h + all_reduce(partial(h, a, b)), -1) @ a

    shard(function, inputs(1, 5, D), counts=(1, 1, 0))


def test_weight_with_leading_dimensions_of_one():
    def function(h, w, a, b):
        h = h + all_reduce(partial(h, a, b)) * w.view(1, 1, D)
        return norm(h, w) @ a

    shard(function, inputs(1, 2, 3, D), counts=(1, 1, 0))


def test_positions_added():
    """A table of rows that are looked up, alike on all ranks."""

    def function(h, w, a, b, table):
        h = h + F.embedding(torch.arange(h.shape[0]), table)
        return norm(h + all_reduce(partial(h, a, b)), w) @ a

    shard(function, lambda rank: (*inputs(1, 5, D)(rank), fp32(9, D, seed=8)), counts=(1, 1, 0))


# -- who else reads ----------------------------------------------------------------------------------------------------


def test_residual_is_an_output():
    """Gathered once, and the norm is computed of it: not both gathered."""

    def function(h, w, a, b, c, d):
        h = h + all_reduce(partial(norm(h, w), a, b))
        h = h + all_reduce(partial(norm(h, w), c, d))
        return norm(h, w) @ a, h

    for rows in (1, 4, 5):
        shard(function, inputs(2, rows, D), counts=(2, 2, 0))


@pytest.mark.parametrize(("rows", "size"), [(8, 2), (7, 2), (1, 3)])
def test_residuals_leave_in_the_middle_and_at_the_end(rows, size):
    """cases.md 10: full, equal on all ranks, bit for bit."""

    def function(h, w, a, b, c, d, e, f):
        kept = []
        for up, down in ((a, b), (c, d), (e, f)):
            h = h + all_reduce(partial(norm(h, w), up, down))
            kept.append(h)
        return norm(h, w), h, kept[0]

    run = shard(function, inputs(3, rows, D), size)
    assert all(t.shape == (rows, D) for t in run.outputs[0])
    for other in run.outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run.outputs[0], other, strict=True))


def test_one_gather_for_all_readers():
    """cases.md 28: a router and an output beside three GEMMs."""

    def function(h, w, a, b, router):
        h = h + all_reduce(partial(h, a, b))
        n = norm(h, w)
        top = (n @ router).topk(2, -1)
        return n @ a, n @ a * 2, n, n.view(-1), top.values, top.indices

    for rows in (7, 8):
        shard(function, lambda rank, rows=rows: (*inputs(1, rows, D)(rank), fp32(D, 4, seed=7)), counts=(1, 1, 0))


def test_outputs_alias_only_what_they_did():
    def function(h, w, a, b):
        n = norm(h + all_reduce(partial(h, a, b)), w)
        return n, n.clone()

    run = shard(function, inputs(1, 4, D), counts=(1, 1, 0))
    first, second = run.outputs[0]
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_reduced_again():
    """An all-reduce of what is sharded reads all of it."""

    def function(h, w, a, b):
        n = norm(h + all_reduce(partial(h, a, b)), w)
        return norm(all_reduce(n), w) @ a

    for rows in (4, 5):
        shard(function, inputs(1, rows, D), counts=(2, 2, 0))


def test_two_row_counts():
    """Only the last row goes on from the middle: its all-reduce is another region."""

    def function(h, w, a, b, c, d):
        h = norm(h + all_reduce(partial(h, a, b)), w)
        last = h[-1:]
        last = norm(last + all_reduce(partial(last, c, d)), w)
        return last @ a

    shard(function, inputs(2, 6, D), counts=(2, 2, 0))


def test_two_groups_of_which_one_is_another():
    """What is summed over another group is not known to be alike in this one."""

    def function(h, w, a, b, c, d, group):
        other = all_reduce(partial(h, c, d), group=group)
        return norm(h + other + all_reduce(partial(h, a, b)), w) @ a

    with world(4):
        group = torch.distributed.new_group([0, 1])
        backend = Backend(ON)
        torch.compile(lambda *t: function(*t, group), backend=backend, fullgraph=True)(*inputs(2, 6, D)(0))
    targets = [n.target for n in backend.graphs[0].graph.nodes]
    assert targets.count(ALL_REDUCE) == 2
    assert ranks.REDUCE_SCATTER not in targets


# -- near misses -------------------------------------------------------------------------------------------------------


def _mean_over_rows(h):
    return h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + 1e-5)


def _softmax_over_rows(h):
    return torch.softmax(h, 0)


def _slice(h):
    return h[1:].contiguous() * 2


def _norm_over_everything(h):
    return norms.without_weight(h.reshape(1, -1), None, 1e-5)


def _reshape_that_mixes(h):
    y = h.reshape(-1, 2 * D)
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)


def _transposed(h):
    return torch.softmax(h.t(), -1)


def _cumulated(h):
    return h.cumsum(0)


def _flipped(h):
    return torch.softmax(h.flip(0), -1)


NEAR_MISSES = (
    _mean_over_rows,
    _softmax_over_rows,
    _slice,
    _norm_over_everything,
    _reshape_that_mixes,
    _transposed,
    _cumulated,
    _flipped,
)


@pytest.mark.parametrize("miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_mixes_rows(miss):
    """Square, so that sizes tell rows and columns apart by their place only."""
    untouched(lambda h, w, a, b: miss(h + all_reduce(partial(h, a, b))), inputs(1, D, D), "")


@pytest.mark.parametrize("miss", NEAR_MISSES[:5], ids=lambda f: f.__name__)
def test_what_mixes_rows_after_a_norm(miss):
    """There the norm is sharded, and what mixes rows reads the gathered value."""
    function = lambda h, w, a, b: miss(norm(h + all_reduce(partial(h, a, b)), w))  # noqa: E731
    shard(function, inputs(1, D, D), counts=(1, 1, 0))


def test_mean_over_the_sequence():
    def function(h, w, a, b):
        y = h + all_reduce(partial(h, a, b))
        return y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-5)

    run = untouched(function, inputs(1, 2, D, D), "too often")
    assert run.counts == (0, 0, 1)


def test_operand_that_differs_between_ranks():
    """A column-parallel GEMM's result has the right shape, and other values on every rank."""

    def function(h, w, a, b, c, d):
        own = (h @ c)[:, :D].contiguous()
        return norm(own + all_reduce(partial(h, a, b)), w) @ a

    untouched(function, inputs(2, 5, D), "may differ between ranks")


def test_scale_that_differs_between_ranks():
    """An expert's share of each token."""

    def function(h, w, a, b, c, d):
        y = all_reduce(partial(h, a, b)) * torch.sigmoid((h @ c).mean(-1, keepdim=True))
        return norm(y, w) @ a

    untouched(function, inputs(2, 5, D), "may differ between ranks")


def test_random_numbers():
    def function(h, w, a, b):
        return norm(h + torch.rand_like(h) + all_reduce(partial(h, a, b)), w) @ a

    with world(2):
        backend = Backend(ON)
        torch.compile(function, backend=backend, fullgraph=True)(*inputs(1, 5, D)(0))
    assert not backend.recorder.report().count("enable_sp")


def test_operand_of_each_batch():
    """[B, 1, D]: it has rows, but not those of the value."""

    def function(h, w, a, b):
        return norm(all_reduce(partial(h, a, b)) * h[:, :1].abs(), w) @ a

    untouched(function, inputs(1, 2, 3, D), "other operand")


def test_value_that_is_broadcast():
    """One row that is added to eight."""

    def function(h, w, a, b):
        return norm(h + all_reduce(partial(h[:1], a, b)), w) @ a

    untouched(function, inputs(1, 8, D), "broadcast over other rows")


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_other_reductions(kind):
    with world(2):
        backend = Backend(ON)
        function = lambda h, w: norm(h + all_reduce(h * 2, kind), w)  # noqa: E731
        torch.compile(function, backend=backend, fullgraph=True)(fp32(4, D), fp32(D))
    (site,) = (s for s in backend.recorder.report().sites if s.fusion == "enable_sp")
    assert site.outcome == "skipped" and kind in site.reason


def test_needed_whole_at_once():
    untouched(lambda h, w, a, b: all_reduce(partial(h, a, b)) @ a, inputs(1, 6, D), "needed at once by mm")
    untouched(lambda h, w, a, b: all_reduce(partial(h, a, b)), inputs(1, 6, D), "an output of the graph")


def test_no_rows():
    untouched(lambda h, w, a, b: torch.softmax(all_reduce(h[0] * 1), -1), inputs(1, 6, D), "no rows")


def test_what_is_left_may_be_fused_with_its_norm():
    """A post-norm whose sum is read as well: gathered twice it would move more, so the other fusion takes it."""

    def function(h, w, a, b, c, d):
        y = all_reduce(partial(h, a, b))
        own = (h @ c)[:, :D].contiguous()
        return norm(own + y, w)

    with world(2):
        backend = Backend(BOTH)
        torch.compile(function, backend=backend, fullgraph=True)(*inputs(2, 5, D)(0))
    report = backend.recorder.report()
    assert report.count("enable_sp", "skipped") == 1 and report.count("fuse_allreduce_rms") == 1
    assert "1 fused, 0 merged, 0 left" in str(report)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_off_unless_asked_for():
    for config in ({}, {"optimization_level": 3}, {"enable_sp": False}):
        run = ranks.run(llama, inputs(5, 6, D), 2, {**config, **OFF})
        assert run.counts[0] == 0 and not run.left
        assert not run.report.fusions["enable_sp"].on


@pytest.mark.parametrize("rows", [5, 6])
def test_fewest_rows(rows):
    run = shard(llama, inputs(5, rows, D), config={**ON, "sp_min_token_num": 6}, left=4 if rows == 5 else 0)
    assert run.counts[0] == (0 if rows == 5 else 4)
    assert rows == 6 or all("sp_min_token_num=6" in reason for reason in run.left)


@pytest.mark.parametrize("rows", [5, 6])
def test_one_fusion_takes_what_the_other_leaves(rows):
    with world(2):
        backend = Backend({**BOTH, "sp_min_token_num": 6})
        torch.compile(llama, backend=backend, fullgraph=True)(*inputs(5, rows, D)(0))
    report, targets = backend.recorder.report(), [n.target for n in backend.graphs[0].graph.nodes]
    assert report.count("enable_sp") == targets.count(ranks.REDUCE_SCATTER) == (0 if rows == 5 else 4)
    assert report.count("fuse_allreduce_rms") == targets.count(FUSED) == (4 if rows == 5 else 0)
    assert "4 fused, 0 merged, 0 left" in str(report)


def test_fewest_rows_where_they_vary():
    """Told, not guessed: one graph serves few rows and many."""
    run = shard(llama, inputs(5, 6, D), config={**ON, "sp_min_token_num": 64}, dynamic=0, counts=(4, 4, 0))
    assert any("sp_min_token_num=64" in note for note in run.report.notes)


def test_ranks_with_different_graphs():
    with world(2):
        backend = Backend(ON, agree=lambda name, digest, training: False)
        torch.compile(llama, backend=backend, fullgraph=True)(*inputs(5, 6, D)(0))
    assert backend.recorder.report().count("enable_sp") == 0
    assert [n.target for n in backend.graphs[0].graph.nodes].count(ALL_REDUCE) == 4


# -- row counts that vary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size"), [((2, D), 2), ((2, D), 3), ((5, D), 2), ((8, D), 3), ((2, 3, D), 2), ((3, 5, D), 2)], ids=str
)
def test_dynamic(shape, size):
    """Also where the first call has one row a rank."""
    shard(llama, inputs(5, *shape), size, counts=(4, 4, 0), dynamic=len(shape) - 2)


@pytest.mark.parametrize("first", [(2, D), (5, D), (2, 2, D), (2, 5, D)], ids=str)
def test_no_condition_on_the_row_count(first):
    """One graph for all of them, with the same conditions on its symbols as without us."""
    shapes = [first, *((rows, D) if len(first) == 2 else (2, rows, D) for rows in (3, 4, 7, 2, 129))]
    guards = []
    with world(2):
        for backend in (Backend(ON), PlainBackend()):
            torch._dynamo.reset()
            compiled = torch.compile(llama, backend=backend, fullgraph=True)
            for shape in shapes:
                h, *rest = inputs(5, *shape)(0)
                torch._dynamo.mark_dynamic(h, len(shape) - 2)
                compiled(h, *rest)
            assert len(backend.graphs) == 1
            guards.append(backend.guards)
    assert guards[0] == guards[1]


def test_inductor_asks_for_no_condition_either():
    """From one row a rank on: mark_dynamic raises if generating code specialises the row count or shuts any of them out."""

    def function(h, w, a, b):
        return norm(h + all_reduce(partial(h, a, b)), w) @ a

    with fake_world(2), torch.no_grad():
        backend = Backend(ON)
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for rows in (2, 5, 9, 2):
            h, *rest = inputs(1, rows, D)(0)
            torch._dynamo.mark_dynamic(h, 0)
            assert compiled(h, *rest).shape == (rows, H)
    assert len(backend.graphs) == 1 and backend.recorder.report().count("enable_sp") == 1


def test_hidden_size_that_varies():
    with world(2):
        backend = Backend(ON)
        torch.compile(lambda h, w: norm(h + all_reduce(h * 2), w), backend=backend, dynamic=True)(fp32(4, D), fp32(D))
    (site,) = (s for s in backend.recorder.report().sites if s.fusion == "enable_sp")
    assert site.outcome == "skipped" and "last dimension varies" in site.reason


def test_an_even_batch_is_not_padded():
    """Two sequences on two ranks: 2 s rows, whatever s."""
    with world(2):
        backend = Backend(ON)
        h, *rest = inputs(5, 2, 5, D)(0)
        torch._dynamo.mark_dynamic(h, 1)
        torch.compile(llama, backend=backend, fullgraph=True)(h, *rest)
    targets = [n.target for n in backend.graphs[0].graph.nodes]
    assert targets.count(ranks.REDUCE_SCATTER) == 4
    assert torch.ops.aten.constant_pad_nd.default not in targets
