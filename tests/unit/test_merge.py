"""AR(a) + AR(b) becomes AR(a + b), where that is the same sum and nothing else looks at the parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.unit import norms
from tests.unit.graphs import (
    ALL_REDUCE,
    FUSED,
    all_reduce,
    all_reduce_in_place,
    check,
    compile_plainly,
    compile_with_tpfuse,
    values,
    world,
)

T, D = 6, 16


@pytest.fixture(autouse=True)
def four_ranks():
    with world(4) as group:
        yield group


def whole(*shape, seed=0, dtype=torch.float32):
    """Small whole numbers: sums of them are exact in any order, so that re-association hides no mistake."""
    return values(*shape, seed=seed, dtype=torch.float32).mul(4).round().to(dtype)


A, B, C, R = (whole(T, D, seed=i) for i in range(4))
W = values(D, dtype=torch.float32, seed=9)


# -- two ---------------------------------------------------------------------------------------------------------------


def test_two():
    """Alone, without residual or norm: one all-reduce is left, which is an output of the graph."""
    run = check(lambda a, b: all_reduce(a) + all_reduce(b), A, B, fused=0, merged=1, skipped=1)
    (merged,) = [s for s in run.report.sites if s.outcome == "merged"]
    (left,) = [s for s in run.report.sites if s.outcome == "skipped"]
    assert left.where in merged.reason and merged.where != left.where
    assert merged.group == left.group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_is_all_that_changes(dtype):
    """Any numbers: two units in the last place of the sum."""
    a, b = values(64, 64, dtype=dtype), values(64, 64, dtype=dtype, seed=1)
    run = compile_with_tpfuse(lambda a, b: all_reduce(a) + all_reduce(b), a, b)
    exact = 4 * (a.double() + b.double())
    bound = torch.finfo(dtype).eps * 4 * (a.double().abs() + b.double().abs())
    assert ((run.outputs.double() - exact).abs() <= bound).all()
    assert len(run.calls(ALL_REDUCE)) == 1


ASSOCIATIONS = {
    "(r + a) + b": lambda r, a, b: (r + a) + b,
    "(r + b) + a": lambda r, a, b: (r + b) + a,
    "r + (a + b)": lambda r, a, b: r + (a + b),
    "r + (b + a)": lambda r, a, b: r + (b + a),
    "(a + b) + r": lambda r, a, b: (a + b) + r,
    "(a + r) + b": lambda r, a, b: (a + r) + b,
    "a + (b + r)": lambda r, a, b: a + (b + r),
    "b + (r + a)": lambda r, a, b: b + (r + a),
}


@pytest.mark.parametrize("last", ["a", "b"], ids=["a reduced last", "b reduced last"])
@pytest.mark.parametrize("association", ASSOCIATIONS)
def test_parallel_block(association, last):
    """Cohere: residual + attention + MLP, in every association and order, then the norm: one fused site."""

    def function(r, a, b, w):
        if last == "b":
            x = all_reduce(a)
            y = all_reduce(b)
        else:
            y = all_reduce(b)
            x = all_reduce(a)
        total = ASSOCIATIONS[association](r, x, y)
        return norms.llama(total, w, 1e-5), total

    run = check(function, R, A, B, W, fused=1, merged=1)
    (fused,) = run.calls(FUSED)
    assert fused.args[4] is not None, "the residual add must be part of the fused operation"


@pytest.mark.parametrize("association", ASSOCIATIONS)
def test_parallel_block_before_layer_norm(association):
    """Cohere itself: a LayerNorm follows, so the merged all-reduce stays, with its reason."""

    def function(r, a, b, w):
        total = ASSOCIATIONS[association](r, all_reduce(a), all_reduce(b))
        return torch.nn.functional.layer_norm(total, (D,), w), total

    run = check(function, R, A, B, W, fused=0, merged=1, skipped=1, exact=False)
    assert torch.equal(run.outputs[1], R + 4 * A + 4 * B)
    assert "LayerNorm" in run.skipped[0]


def test_deepseek_shared_expert():
    """Experts reduce flattened tokens, the shared expert [B, S, D]; both are added, then the residual, then a norm."""

    def function(routed, shared, r, w):
        experts = all_reduce(routed.view(-1, D)).view(2, 3, D)
        y = experts + all_reduce_in_place(shared * 1)
        y = r + y
        return norms.llama(y, w, 1e-6), y

    check(function, A.view(2, 3, D), B.view(2, 3, D), R.view(2, 3, D), W, fused=1, merged=1)


@pytest.mark.parametrize("flat", ["first", "second", "both", "sum"])
@pytest.mark.parametrize("order", ["a + b", "b + a"])
def test_views(flat, order):
    """2-D and 3-D in any mixture."""

    def function(a, b, r, w):
        x = all_reduce(a.view(-1, D)).view(2, 3, D) if flat in ("first", "both") else all_reduce(a)
        y = all_reduce(b.view(-1, D)).view(2, 3, D) if flat in ("second", "both") else all_reduce(b)
        if flat == "sum":
            x, y, r = x.view(-1, D), y.view(-1, D), r.view(-1, D)
        total = r + (x + y if order == "a + b" else y + x)
        return norms.llama(total, w, 1e-6), total

    check(function, A.view(2, 3, D), B.view(2, 3, D), R.view(2, 3, D), W, fused=1, merged=1)


def test_views_in_two_steps():
    def function(a, b):
        return all_reduce(a.view(-1)).view(T, D).view(2, 3, D) + all_reduce(b.view(3, 2, D)).view(2, 3, D)

    check(function, A, B, fused=0, merged=1, skipped=1)


# -- three and more ----------------------------------------------------------------------------------------------------

THREE = {
    "(a + b) + c": lambda a, b, c: (a + b) + c,
    "a + (b + c)": lambda a, b, c: a + (b + c),
    "(a + c) + b": lambda a, b, c: (a + c) + b,
    "c + (b + a)": lambda a, b, c: c + (b + a),
}


@pytest.mark.parametrize("association", THREE)
@pytest.mark.parametrize("residual", ["none", "last"])
def test_three(association, residual):
    def function(a, b, c, r, w):
        y = THREE[association](all_reduce(a), all_reduce(b), all_reduce(c))
        y = y + r if residual == "last" else y
        return norms.llama(y, w, 1e-5), y

    check(function, A, B, C, R, W, fused=1, merged=2)


def test_four_in_two_pairs():
    def function(a, b, c, r):
        return (all_reduce(a) + all_reduce(b)) + (all_reduce(c) + all_reduce(r))

    check(function, A, B, C, R, fused=0, merged=3, skipped=1)


def test_residual_between_the_terms():
    def function(a, b, c, r, w):
        y = ((all_reduce(a) + r) + (all_reduce(b) + w)) + all_reduce(c)
        return norms.llama(y, w, 1e-5), y

    run = compile_with_tpfuse(function, A, B, C, R, W)
    expected = function(A, B, C, R, W)
    torch.testing.assert_close(run.outputs, expected, rtol=1e-5, atol=1e-5)
    assert run.report.count("fuse_allreduce_rms", "merged") >= 1


def test_two_sums_in_one_graph():
    """Two layers: each sum merges within itself only."""

    def function(a, b, c, r, w):
        first = r + (all_reduce(a) + all_reduce(b))
        n = norms.llama(first, w, 1e-5)
        second = first + (all_reduce(n) + all_reduce(c))
        return norms.llama(second, w, 1e-5), first

    run = check(function, A, B, C, R, W, fused=2, merged=2, exact=False)
    assert torch.equal(run.outputs[1], R + 4 * (A + B))


def test_second_depends_on_the_first():
    """Sequential, not parallel: AR(b) is computed from AR(a). Not one sum."""

    def function(a, m):
        x = all_reduce(a)
        return x + all_reduce(x @ m)

    check(function, A, whole(D, D), fused=0, merged=0, skipped=2)


def test_input_of_the_second_comes_after_the_sum_began():
    """(r + AR(a)) is computed before b even exists."""

    def function(r, a, m):
        first = r + all_reduce(a)
        return first + all_reduce(torch.relu(r @ m))

    check(function, R, A, whole(D, D), fused=0, merged=1, skipped=1)


# -- what must not merge -----------------------------------------------------------------------------------------------


def test_not_across_groups(four_ranks):
    """A sum over two ranks and one over four: 2 a + 4 b."""
    pair = dist.new_group([0, 1])

    def function(r, a, b, w):
        y = r + (all_reduce(a, group=pair) + all_reduce(b))
        return norms.llama(y, w, 1e-5), y

    run = compile_with_tpfuse(function, R, A, B, W)
    assert run.report.count("fuse_allreduce_rms", "merged") == 0
    assert torch.equal(run.outputs[1], R + 2 * A + 4 * B)
    left = {str(n.args[2]) for n in run.calls(ALL_REDUCE)} | {str(n.args[2]) for n in run.calls(FUSED)}
    assert left == {pair.group_name, four_ranks.group_name}


def test_two_groups_merge_each_within_itself(four_ranks):
    pair = dist.new_group([0, 1])

    def function(a, b, c, r):
        x = all_reduce(a, group=pair) + all_reduce(b)
        return x + (all_reduce(c, group=pair) + all_reduce(r))

    run = check(function, A, B, C, R, fused=0, merged=2, skipped=2)
    assert sorted(n.args[2] for n in run.calls(ALL_REDUCE)) == sorted([pair.group_name, four_ranks.group_name])


@pytest.mark.parametrize("used", ["a", "b", "a + b"])
def test_not_with_another_user(used):
    def function(r, a, b, w):
        x, y = all_reduce(a), all_reduce(b)
        both = x + y
        total = r + both
        return norms.llama(total, w, 1e-5), total, {"a": x, "b": y, "a + b": both}[used] * 2

    run = compile_with_tpfuse(function, R, A, B, W)
    for found, expected in zip(run.outputs, function(R, A, B, W), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert run.report.count("fuse_allreduce_rms", "merged") == (1 if used == "a + b" else 0)


def test_not_if_the_view_has_another_user():
    def function(a, b):
        x = all_reduce(a).view(2, 3, D)
        return x + all_reduce(b).view(2, 3, D), x * 2

    check(function, A, B, fused=0, merged=0, skipped=2)


@pytest.mark.parametrize("kinds", [("max", "max"), ("sum", "max"), ("max", "sum"), ("min", "min"), ("product", "product")])
def test_not_other_reductions(kinds):
    """max(a) + max(b) is not max(a + b)."""

    def function(r, a, b):
        return r + (all_reduce(a, kinds[0]) + all_reduce(b, kinds[1]))

    run = check(function, R, A, B, fused=0, merged=0, skipped=2)
    assert run.graph.code == compile_plainly(function, R, A, B)[1].graphs[0].code


@pytest.mark.parametrize("between", ["relu", "scale one", "bias", "subtract", "multiply", "alpha", "broadcast"])
def test_not_through_other_operations(between):
    def function(a, b, w):
        x, y = all_reduce(a), all_reduce(b)
        return {
            "relu": lambda: torch.relu(x) + y,
            "scale one": lambda: x * 0.5 + y,
            "bias": lambda: torch.exp(x + w) + y,
            "subtract": lambda: x - y,
            "multiply": lambda: x * y,
            "alpha": lambda: torch.add(x, y, alpha=3),
            "broadcast": lambda: x + y[:1],
        }[between]()

    check(function, A, B, W, fused=0, merged=0, skipped=2)


def test_not_of_two_dtypes():
    """bf16 + fp32 is added in fp32, after each was summed in its own dtype."""

    def function(a, b):
        return all_reduce(a) + all_reduce(b)

    check(function, A.bfloat16(), B, fused=0, merged=0, skipped=2)


def test_not_integers_to_floats():
    def function(a, b):
        return all_reduce(a) + all_reduce(b)

    check(function, A.int(), B, fused=0, merged=0, skipped=2)


def test_one_all_reduce_added_twice():
    """x + x, and (x + y) + (x + y): one site each, never merged with itself."""

    def twice(a):
        x = all_reduce(a)
        return x + x

    check(twice, A, fused=0, merged=0, skipped=1)

    def sum_twice(a, b):
        z = all_reduce(a) + all_reduce(b)
        return z + z

    check(sum_twice, A, B, fused=0, merged=1, skipped=1)


def test_inner_sum_in_bf16_under_an_fp32_one():
    """AR(a) + AR(b) in bf16, then added to an fp32 stream: the inner sum merges on its own."""

    def function(r, a, b):
        return r + (all_reduce(a) + all_reduce(b))

    check(
        function,
        R,
        whole(T, D, dtype=torch.bfloat16),
        whole(T, D, seed=1, dtype=torch.bfloat16),
        fused=0,
        merged=1,
        skipped=1,
    )


@pytest.mark.parametrize("config", [{"fuse_allreduce_rms": False}, {"optimization_level": 0}], ids=str)
def test_nothing_merges_when_off(config):
    """Off is off: the graph is what torch.compile alone would have made."""

    def function(r, a, b, w):
        y = r + (all_reduce(a) + all_reduce(b))
        return norms.llama(y, w, 1e-5), y

    run = check(function, R, A, B, W, fused=0, merged=0, skipped=2, config=config)
    assert run.graph.code == compile_plainly(function, R, A, B, W)[1].graphs[0].code
    assert all("off" in reason for reason in run.skipped)


def test_merge_under_dynamic_shapes():
    def function(a, b, r, w):
        y = r + (all_reduce(a.reshape(-1, D)).view(a.shape) + all_reduce(b))
        return norms.llama(y, w, 1e-6), y

    shaped = [t.view(2, 3, D) for t in (A, B, R)]
    check(function, *shaped, W, fused=1, merged=1, dynamic=True)
