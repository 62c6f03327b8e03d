"""All-reduce -> norm -> FP8 becomes one operation, bit for bit; what it cannot take stays behind the one without FP8."""

from __future__ import annotations

import pytest
import torch

from tests.unit.graphs import ALL_REDUCE, FUSED, all_reduce, compile_with_tpfuse
from tests.unit.test_dispatch import BF16, by_table, chosen
from tests.unit.test_quantize_fp8 import (
    E5M2,
    NEAR_MISSES,
    PER_TOKEN,
    SPELLINGS,
    D,
    G,
    R,
    T,
    W,
    X,
    bf16,
    cast,
    compressed_tensors,
    hold_same_bits,
    norm,
    one_process,  # noqa: F401
    torchao_group,
    torchao_row,
    torchao_tensor,
)
from tpfuse.config import FusionConfig
from tpfuse.errors import ConfigError
from tpfuse.graph import annotate
from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM_QUANTIZE_FP8, BATCH_INVARIANT, Problem, Wish
from tpfuse.kernels.fp8 import Quantisation
from tpfuse.ops import Recipe, all_reduce_rms_norm_quantize_fp8
from tpfuse.ops.all_reduce_rms_norm_quantize_fp8 import NAME, OP
from tpfuse.ops.rms_norm_quantize_fp8 import OP as NORM_OP
from tpfuse.tables import Choice

AMAX = torch.ops.aten.amax.default
SCALE = torch.tensor([0.03])
ROWS = {name: each for name, (each, recipe) in SPELLINGS.items() if recipe.group is not None}
ROWS["static"] = lambda y: (cast(y.float() / SCALE.to(y.device)), y)


def arguments(node):
    return dict(zip([argument.name for argument in OP._schema.arguments], node.args, strict=False))


def one(run):
    """The only operation of the graph that has to do with ranks, by its arguments."""
    (node,) = run.calls(OP)
    assert not run.calls(FUSED) and not run.calls(ALL_REDUCE) and not run.calls(NORM_OP) and not run.calls(AMAX)
    (site,) = (site for site in run.report.sites if site.outcome == "fused")
    assert (site.op, site.fusion, site.kernel) == ("all_reduce", "fuse_allreduce_rms", "reference+fp8")
    return arguments(node)


# -- joined ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", [name for name in ROWS if name != "static"])
def test_one_operation(spelling, dynamic):
    def model(x, r, w):
        total = r + all_reduce(x)
        return *ROWS[spelling](norm(total, w)), total

    x, r = X.clone(), R.clone()
    for each in (x, r) if dynamic else ():
        torch._dynamo.mark_dynamic(each, 0)
    run = compile_with_tpfuse(model, x, r, W)
    hold_same_bits(run.outputs, model(X, R, W))
    assert one(run)["keep_normed"] is False


def test_a_given_scale():
    def model(x, r, w, scale):
        return cast(norm(r + all_reduce(x), w).float() / (scale * 2).view(1))  # computed after the all-reduce

    run = compile_with_tpfuse(model, X, R, W, SCALE)
    hold_same_bits([run.outputs], [model(X, R, W, SCALE)])
    assert one(run)["fp8_scale"] is not None


def test_bias_scale_and_no_residual():
    def model(x, w, b):
        return torchao_row(norm((all_reduce(x) + b) * 0.5, w))

    run = compile_with_tpfuse(model, X, W, bf16(D, seed=3))
    hold_same_bits(run.outputs, model(X, W, bf16(D, seed=3)))
    found = one(run)
    assert found["bias"] is not None and found["scale"] == 0.5 and found["residual"] is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_consumers_share_it_in_whatever_shape_they_read_it(dynamic):
    """Three projections, each of which flattens the norm, and one that keeps its shape; the norm goes on, too."""

    def model(x, r, w):
        total = r + all_reduce(x)
        y = norm(total, w)
        flat = [torchao_row(y.view(-1, D)) for _ in range(2)]
        return *flat[0], *flat[1], *torchao_row(y.reshape(3, -1, D)), *torchao_row(y), y * 2, total

    x, r = bf16(3, T, D), bf16(3, T, D, seed=1)
    for each in (x, r) if dynamic else ():
        torch._dynamo.mark_dynamic(each, 1)
    run = compile_with_tpfuse(model, x, r, W)
    hold_same_bits(run.outputs, model(x.clone(), r.clone(), W))
    assert one(run)["keep_normed"] is True


def test_groups_that_consumers_have_as_a_dimension():
    def model(x, r, w):
        y = norm(r + all_reduce(x), w).view(-1, D // G, G)
        scale = (y.abs().amax(-1, keepdim=True) / 448.0).float()
        return cast(y.float() / scale), scale

    run = compile_with_tpfuse(model, X, R, W)
    hold_same_bits(run.outputs, model(X, R, W))
    assert one(run)["group_size"] == G


def test_of_two_recipes_the_one_that_most_read():
    def model(x, r, w):
        y = norm(r + all_reduce(x), w)
        return *compressed_tensors(y), *torchao_row(y), *torchao_row(y.view(2, -1, D))

    run = compile_with_tpfuse(model, X, R, W)
    hold_same_bits(run.outputs, model(X, R, W))
    (node,) = run.calls(OP)
    assert arguments(node)["scale_dtype"] is BF16 and arguments(node)["keep_normed"] is True and len(run.calls(AMAX)) == 1


def test_in_the_order_of_the_graph_and_by_the_kernel_for_any_batch(monkeypatch):
    def model(x, r, w):
        total = r + all_reduce(x)
        values, scale = torchao_row(norm(total, w))
        return torchao_row(norm(total + all_reduce((values.float() * scale).to(BF16)), w))

    monkeypatch.setattr(annotate, "is_annotating", lambda: True)
    run = compile_with_tpfuse(model, X, R, W, config={"batch_invariant": True})
    hold_same_bits(run.outputs, model(X, R, W))
    first, second = run.calls(OP)
    assert arguments(first)["kernel_name"] == arguments(second)["kernel_name"] == BATCH_INVARIANT
    assert second.kwargs["after"].args[0] is first and all(node.kwargs["site"] for node in (first, second))


# -- not joined --------------------------------------------------------------------------------------------------------


def stays(run, reason=None):
    """The operation without FP8 is there, and the quantisation behind it."""
    assert len(run.calls(FUSED)) == 1 and not run.calls(OP)
    told = [site.reason for site in run.report.sites if site.op == NAME]
    assert told == ([reason] if reason else [])


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name):
    model = lambda x, r, w: NEAR_MISSES[name](norm(r + all_reduce(x), w))  # noqa: E731
    run = compile_with_tpfuse(model, X, R, W)
    hold_same_bits([run.outputs], [model(X, R, W)])
    stays(run)


def test_one_scale_for_all_rows():
    model = lambda x, r, w: torchao_tensor(norm(r + all_reduce(x), w))  # noqa: E731
    run = compile_with_tpfuse(model, X, R, W)
    hold_same_bits(run.outputs, model(X, R, W))
    stays(run, "one scale for the whole tensor is known only after a pass over it")


def test_a_scale_that_comes_from_the_sum():
    def model(x, r, w):
        total = r + all_reduce(x)
        return cast(norm(total, w).float() / total.float().abs().amax().view(1))

    run = compile_with_tpfuse(model, X, R, W)
    hold_same_bits([run.outputs], [model(X, R, W)])
    stays(run, "its scale is computed from what is reduced")


def test_a_kernel_that_knows_no_fp8_was_asked_for():
    model = lambda x, r, w: torchao_row(norm(r + all_reduce(x), w))  # noqa: E731
    run = compile_with_tpfuse(model, X, R, W, config={"allreduce_rms_kernel": "flashinfer"})
    hold_same_bits(run.outputs, model(X, R, W))
    stays(run, "flashinfer was asked for, which cannot")


def test_switched_off():
    model = lambda x, r, w: torchao_row(norm(r + all_reduce(x), w))  # noqa: E731
    run = compile_with_tpfuse(model, X, R, W, config=FusionConfig(fuse_allreduce_rms=False))
    hold_same_bits(run.outputs, model(X, R, W))
    assert not run.calls(OP) and not run.calls(FUSED) and len(run.calls(ALL_REDUCE)) == 1


# -- what runs ---------------------------------------------------------------------------------------------------------


def problem(rows, hidden=4096, group=None, **facts):
    how = Quantisation(torch.float8_e4m3fn, False, Recipe(group=group or hidden).arguments)
    return Problem(ALL_REDUCE_RMS_NORM_QUANTIZE_FP8, rows, hidden, **{"dtype": BF16, "fp8": how, **facts})


def test_by_the_table_of_the_operation_without_until_it_is_measured():
    ring, measured = Choice("tpfuse_ring", warps=16), Choice("tpfuse_ring", warps=8)
    dispatcher = by_table(
        (1, Choice("tpfuse_split", warps=4)), (8, ring), (64, Choice("flashinfer")), (128, Choice("nccl"))
    )
    assert chosen(dispatcher, problem(1)) == Choice("tpfuse_split", warps=4)
    assert chosen(dispatcher, problem(8)) == ring
    assert chosen(dispatcher, problem(64)) == Choice("nccl")  # which has no FP8 of ours; the rule says so of 512 KB
    assert chosen(dispatcher, problem(128)) == Choice("nccl")
    assert chosen(by_table((1, measured), op=ALL_REDUCE_RMS_NORM_QUANTIZE_FP8), problem(1)) == measured


def test_what_kernels_cannot():
    dispatcher = by_table((1, Choice("tpfuse_split")))
    assert chosen(dispatcher, problem(1, 4096, 128)) == Choice("tpfuse_split")
    assert chosen(dispatcher, problem(1, 128 * 23, 128)) == Choice("tpfuse_ring")  # 23 groups are in no four parts
    for fits in ({"dtype": torch.float32}, {"out_dtype": torch.float32}, {"group": 4}, {"group": 96, "hidden": 960}):
        assert dispatcher.choose(problem(1, **fits)) is None
    with pytest.raises(ConfigError, match="groups of 128 in rows of 2944, in 4 parts"):
        dispatcher.choose(problem(1, 2944, 128), Wish("tpfuse_split"))


# -- eager -------------------------------------------------------------------------------------------------------------


def test_eager():
    call = lambda *args, **given: all_reduce_rms_norm_quantize_fp8(*args, group="0", eps=1e-5, **given)  # noqa: E731
    given = {"residual": R, "normed_dtype": BF16}
    total = R + all_reduce(X)
    hold_same_bits(call(X, W, recipe=PER_TOKEN, **given), (*torchao_row(norm(total, W)), total))
    recipe = Recipe(group=G, scale_dtype=BF16)
    hold_same_bits(call(X, W, recipe=recipe, **given), (*torchao_group(norm(total, W)), total))
    hold_same_bits(call(X, W, fp8_scale=SCALE, **given), (cast(norm(total, W).float() / SCALE), SCALE, total))
    values, scales, _ = call(X[:0], W, dtype=E5M2)
    assert values.shape == (0, D) and values.dtype == E5M2 and scales.shape == (0, 1)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"input": X.long()}, "input must be bf16, fp16 or fp32"),
        ({"weight": W[1:]}, "weight must be [96], got"),
        ({"residual": R[1:]}, "residual must be "),
        ({"dtype": torch.int8}, "float8_e4m3fn or float8_e5m2, got torch.int8"),
        ({"fp8_scale": torch.ones(2)}, "scale must be fp32 [1]"),
        ({"recipe": Recipe(group=7)}, "divide the row of 96 elements, got 7"),
        ({"kernel": "flashinfer"}, "the kernels are tpfuse_split, tpfuse_ring, torch_symm_mem, nccl"),
        ({"eps": "a"}, "eps must be a finite number"),
    ],
)
def test_bad_arguments(given, told):
    with pytest.raises(ValueError) as error:
        all_reduce_rms_norm_quantize_fp8(**{"input": X, "weight": W, "group": "0", "eps": 1e-5, **given})
    assert told in str(error.value) and str(error.value).startswith((NAME, "kernel", "a recipe"))
