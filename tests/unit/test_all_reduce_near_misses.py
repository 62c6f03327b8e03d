"""All-reduces before an RMSNorm that must not be fused with it: untouched, computed as before, with a true reason."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.unit import norms
from tests.unit.graphs import FUSED, all_reduce, check, compile_plainly, compile_with_tpfuse, values, world

all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor  # renamed in torch 2.13

T, D = 6, 16


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


def _skipped_for(function, *inputs, reason, skipped=1, **kwargs):
    run = check(function, *inputs, fused=0, skipped=skipped, **kwargs)
    for told in run.skipped:
        assert re.search(reason, told), told
    return run


@pytest.mark.parametrize("kind", ["max", "min", "product"])
def test_other_reduction(kind):
    def function(x, r, w):
        y = all_reduce(x, kind) + r
        return norms.llama(y, w, 1e-5), y

    _skipped_for(function, values(T, D), values(T, D, seed=1), values(D, seed=2), reason=kind)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers(dtype):
    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y.float(), w, 1e-5), y

    x = torch.arange(T * D).view(T, D).to(dtype)
    _skipped_for(function, x, x + 1, values(D, dtype=torch.float32), reason=str(dtype))


def test_fp64():
    """Neither narrowed to fp32 nor fused: an fp64 model keeps its digits."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return w * (y * torch.rsqrt(norms.mean_square(y) + 1e-5)), y

    inputs = (values(T, D, dtype=torch.float64, seed=i) for i in range(2))
    _skipped_for(function, *inputs, values(D, dtype=torch.float64), reason="float64")


def test_fp64_narrowed_by_the_norm():
    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    inputs = (values(T, D, dtype=torch.float64, seed=i) for i in range(2))
    _skipped_for(function, *inputs, values(D, dtype=torch.float32), reason="float64")


def test_reduced_value_used_elsewhere():
    """The fused operation does not return the sum over ranks alone."""

    def function(x, r, w):
        reduced = all_reduce(x)
        y = reduced + r
        return norms.llama(y, w, 1e-5), y, reduced * 2

    _skipped_for(function, values(T, D), values(T, D, seed=1), values(D, seed=2), reason="something else uses")


def test_reduced_and_biased_value_used_elsewhere():
    def function(x, r, w, b):
        biased = all_reduce(x) + b
        y = biased + r
        return norms.llama(y, w, 1e-5), y, biased.tanh()

    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3)
    _skipped_for(function, *inputs, reason="something else uses")


def test_reduced_value_is_its_own_residual():
    """y + y: whatever becomes of it, there is one all-reduce, which is not merged with itself."""

    def function(x, w):
        reduced = all_reduce(x)
        y = reduced + reduced
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), values(D, seed=1)
    fused = compile_with_tpfuse(function, *inputs).report.count("fuse_allreduce_rms")
    check(function, *inputs, fused=fused, skipped=1 - fused)


@pytest.mark.parametrize("shape", [(1, D), (T, 1), (1, 1), (1,)], ids=str)
def test_broadcast_residual(shape):
    """The residual must have the value's own shape. [T, 1] would be a bias of rows."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    run = _skipped_for(function, values(T, D), values(*shape, seed=1), values(D, seed=2), reason=".")
    assert "no norm follows" not in run.skipped[0], "a norm does follow"


def test_broadcast_reduced_value():
    """One row is reduced and added to many."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    _skipped_for(function, values(1, D), values(T, D, seed=1), values(D, seed=2), reason=".")


def test_residual_of_another_dtype():
    """An fp32 residual stream under bf16 activations: the sum is fp32, the message bf16."""

    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    x, r, w = values(T, D), values(T, D, seed=1, dtype=torch.float32), values(D, seed=2)
    run = _skipped_for(function, x, r, w, reason=".")
    assert "no norm follows" not in run.skipped[0], "a norm does follow"


def test_scaled_residual_add():
    """torch.add(..., alpha=2) is no plain sum."""

    def function(x, r, w):
        y = torch.add(r, all_reduce(x), alpha=2)
        return norms.llama(y, w, 1e-5), y

    run = _skipped_for(function, values(T, D), values(T, D, seed=1), values(D, seed=2), reason=".")
    assert "no norm follows" not in run.skipped[0], "a norm does follow"


def test_subtracted_residual():
    def function(x, r, w):
        y = all_reduce(x) - r
        return norms.llama(y, w, 1e-5), y

    _skipped_for(function, values(T, D), values(T, D, seed=1), values(D, seed=2), reason="sub")


def test_scale_of_another_dtype():
    """bf16 * fp32 scalar tensor is computed in fp32 and rounded once: another function than bf16 * bf16(scalar)."""

    def function(x, r, w, s):
        y = all_reduce(x) * s + r
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2), torch.tensor(1 / 3)
    fused = compile_with_tpfuse(function, *inputs).report.count("fuse_allreduce_rms")
    check(function, *inputs, fused=fused, skipped=1 - fused)


@pytest.mark.parametrize("shape", [(D,), (T, 1), (T, D)], ids=str)
def test_scale_of_more_elements(shape):
    """Layer scale and gates are no scale of one element."""

    def function(x, r, w, s):
        y = all_reduce(x) * s + r
        return norms.llama(y, w, 1e-5), y

    _skipped_for(function, values(T, D), values(T, D, seed=1), values(D, seed=2), values(*shape, seed=3), reason=".")


def test_nonlinearity_between():
    def function(x, r, w):
        y = torch.relu(all_reduce(x)) + r
        return norms.llama(y, w, 1e-5), y

    _skipped_for(function, values(T, D), values(T, D, seed=1), values(D, seed=2), reason="relu")


def test_weight_computed_after_the_sum_is_used():
    """The fused operation gives the sum and the norm at once, but the weight depends on the sum."""

    def function(x, r, w):
        y = all_reduce(x) + r
        weight = w * y.mean().to(w.dtype)
        return norms.llama(y, weight, 1e-5), y

    _skipped_for(function, values(T, D), values(T, D, seed=1), values(D, seed=2), reason="after the sum is used")


def test_weight_computed_after_the_norm_began():
    """Still before its product with the norm, and independent of it: fused or not, it must compile and be right."""

    def function(x, r, w):
        y = all_reduce(x) + r
        n = norms.without_weight(y, w, 1e-5)
        return n * torch.exp(w), y

    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2)
    fused = compile_with_tpfuse(function, *inputs).report.count("fuse_allreduce_rms")
    check(function, *inputs, fused=fused, skipped=1 - fused)


def test_residual_depends_on_the_reduced_value():
    def function(x, w):
        reduced = all_reduce(x)
        y = torch.tanh(reduced) + reduced
        return norms.llama(y, w, 1e-5), y

    _skipped_for(function, values(T, D), values(D, seed=1), reason="something else uses")


def test_world_of_one():
    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2)
    run = _skipped_for(function, *inputs, reason="world size 1")
    assert run.graph.code == compile_plainly(function, *inputs)[1].graphs[0].code


def test_no_norm_follows():
    def function(x, w):
        return all_reduce(x) @ w

    _skipped_for(function, values(T, D), values(D, D, seed=1), reason="no norm follows: it goes to mm")


def test_output_of_the_graph():
    def function(x, r):
        return all_reduce(x) + r

    _skipped_for(function, values(T, D), values(T, D, seed=1), reason="output of the graph")


def test_norm_without_all_reduce():
    """It is left to Inductor and named; there is no all-reduce to count."""

    def function(x, r, w):
        return norms.llama(x + r, w, 1e-5)

    run = check(function, values(T, D), values(T, D, seed=1), values(D, seed=2), fused=0)
    (site,) = run.report.sites
    assert (site.op, site.outcome, site.group) == ("rms_norm", "skipped", "") and "no all-reduce" in site.reason


def test_q_norm_over_a_sharded_dimension():
    """OLMo2's full-width q norm reads gathered columns: no all-reduce of a sum reaches it."""

    def function(x, w):
        gathered = all_gather(x, 0, dist.group.WORLD)
        q = torch.cat(gathered.chunk(2), 1)
        return norms.llama(q, w, 1e-5)

    check(function, values(T, D), values(2 * D, seed=1), fused=0)


def test_every_skipped_reason_is_about_a_norm_that_exists():
    """Where a norm is reached but cannot be fused, the reason must not be that no norm follows."""

    def function(x, r, w, b):
        y = all_reduce(x) * 2.0 + b + r  # scale, then bias: not the order of the fused operation
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2), values(D, seed=3)
    run = compile_with_tpfuse(function, *inputs)
    fused = run.report.count("fuse_allreduce_rms")
    check(function, *inputs, fused=fused, skipped=1 - fused)
    for reason in [s.reason for s in run.report.sites if s.outcome == "skipped"]:
        assert "no norm follows" not in reason and "no all-reduce reaches" not in reason


def test_off_by_the_user():
    def function(x, r, w):
        y = all_reduce(x) + r
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), values(T, D, seed=1), values(D, seed=2)
    _skipped_for(function, *inputs, config={"fuse_allreduce_rms": False}, reason="off: fuse_allreduce_rms=False")
    _skipped_for(function, *inputs, config={"optimization_level": 0}, reason="off: optimization_level=0")


def test_an_all_reduce_does_not_overtake_another():
    """Ranks pair collectives up by order: a rank where the first one is not fused must still run it first."""

    def function(x, z, r, w):
        first, second = all_reduce(x), all_reduce(z)
        late = r * second  # the first one's residual needs the second one's result
        y = first + late
        return norms.llama(y, w, 1e-5), y

    inputs = values(T, D), values(T, D, seed=1), values(T, D, seed=2), values(D, seed=3)
    run = check(function, *inputs, fused=0, skipped=2)
    assert any("another collective" in reason for reason in run.skipped)


def test_order_of_collectives_is_kept():
    def function(x, z, r, w):
        first, second = all_reduce(x), all_reduce(z)
        b = norms.llama(r + second, w, 1e-5)
        return norms.llama(r + first, w, 1e-5), b

    run = check(function, values(T, D), values(T, D, seed=1), values(T, D, seed=2), values(D, seed=3), fused=2)
    first, second = run.calls(FUSED)
    x, z = list(run.graph.graph.find_nodes(op="placeholder"))[:2]
    assert (first.args[0], second.args[0]) == (x, z)
