"""Two norms at once, and a norm with padding: found where they are, bit for bit; near-misses are not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.unit.graphs import assert_same, compile_with_tpfuse, values, world
from tests.unit.test_qk_norm_rope import norm, norm_offset
from tpfuse.models.families import build, family_config
from tpfuse.ops import dual_rms_norm, rms_norm_pad
from tpfuse.ops.dual_rms_norm import OP as DUAL
from tpfuse.ops.rms_norm_pad import OP as PAD

T, D, P = 6, 90, 96
BF16 = torch.bfloat16
ON = {"fuse_mla_dual_rms_norm": True, "fuse_act_padding": True}
X, R, W = values(T, D), values(T, D, seed=1), values(D, seed=2)


@pytest.fixture(autouse=True)
def one_process():
    with world(2):
        yield


def compiled(model, *inputs, op, count=1, config=ON):
    expected = model(*inputs)
    run = compile_with_tpfuse(model, *inputs, config=config)
    assert_same(run.outputs, expected)
    field = "fuse_mla_dual_rms_norm" if op is DUAL else "fuse_act_padding"
    assert len(run.calls(op)) == run.report.count(field) == count, f"{run.report}\n{run.graph.code}"
    return run


def reasons(run, field):
    return [site.reason for site in run.report.sites if site.fusion == field and site.outcome == "skipped"]


# -- two norms -----------------------------------------------------------------------------------------------------------

HIDDEN, PROJECTION, WA, WB = values(T, 32), values(32, 96, seed=1), values(48, seed=2), values(32, seed=3)


def slices(x, projection, wa, wb):
    a, b, rope = (x @ projection).split([48, 32, 16], -1)
    return norm(a, wa), norm(b, wb), rope


def projections(x, projection, wa, wb):
    """As Hugging Face's DeepSeek: the query goes on before keys are projected."""
    a = norm(x @ projection[:, :48], wa)
    query = a @ projection[:, 48:].t().reshape(48, 32)
    b, rope = (x @ projection[:, 48:]).split([32, 16], -1)
    return query, norm(b, wb), rope


@pytest.mark.parametrize("model", [slices, projections], ids=lambda f: f.__name__)
def test_two_norms(model):
    (node,) = compiled(model, HIDDEN, PROJECTION, WA, WB, op=DUAL).calls(DUAL)
    assert [argument.meta["val"].shape[-1] for argument in node.args[:2]] == [48, 32]


def test_a_norm_that_needs_the_other_is_not_beside_it():
    def model(x, projection, wa, wb):
        a = norm(x @ projection[:, :48], wa)
        return norm((x * a[:, :32]) @ projection[:, :32], wb)

    compiled(model, HIDDEN, PROJECTION, WA, WB, op=DUAL, count=0)


def test_what_cannot_be_computed_before_stays():
    def model(x, projection, wa, wb):
        a = norm(x @ projection[:, :48], wa)
        b = x @ (projection[:, :32] * a.sum())
        return a, norm(b, wb)

    run = compiled(model, HIDDEN, PROJECTION, WA, WB, op=DUAL, count=0)
    assert reasons(run, "fuse_mla_dual_rms_norm") == ["one of the two is used before the other can be computed"]


def test_norms_of_another_spelling_stay():
    def model(x, projection, wa, wb):
        a, b, _ = (x @ projection).split([48, 32, 16], -1)
        return norm(a, wa), norm_offset(b, wb)

    run = compiled(model, HIDDEN, PROJECTION, WA, WB, op=DUAL, count=0)
    assert reasons(run, "fuse_mla_dual_rms_norm") == ["its two norms are spelled in different ways"]


def test_norms_of_other_inputs_are_no_pair():
    def model(x, projection, wa, wb):
        return norm(x @ projection[:, :48], wa), norm((x + 1) @ projection[:, 48:80], wb)

    run = compiled(model, HIDDEN, PROJECTION, WA, WB, op=DUAL, count=0)
    assert not reasons(run, "fuse_mla_dual_rms_norm")


def test_deepseek():
    model, ids = build(family_config("deepseek_v3"), "cpu", BF16), torch.arange(3, 35).view(2, 16)
    run = compiled(lambda i: model(i, use_cache=False).logits, ids, op=DUAL, count=2)
    assert all("self_attn" in s.where for s in run.report.sites if s.fusion == "fuse_mla_dual_rms_norm")


# -- a norm and padding --------------------------------------------------------------------------------------------------


def padded(y, size=P):
    return functional.pad(y, (0, size - y.shape[-1]))


def test_norm_and_padding():
    def model(x, r, w):
        total = x + r
        return padded(norm(total, w)), total

    (node,) = compiled(model, X, R, W, op=PAD).calls(PAD)
    assert node.args[1] is not None and node.args[6] is False and node.args[7] == P


def test_the_norm_is_needed_too_and_views_stand_between():
    """A router reads what is not padded; experts read rows."""

    def model(x, w):
        y = norm(x.view(2, 3, D), w)
        return padded(y.view(-1, D)), y * 2

    (node,) = compiled(model, X, W, op=PAD).calls(PAD)
    assert node.args[1] is None and node.args[6] is True


def test_padding_of_any_number_of_rows():
    x, r = X.clone(), R.clone()
    for tensor in (x, r):
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled(lambda x, r, w: padded(norm_offset(x + r, w).view(1, -1, D)), x, r, W, op=PAD)


PADDINGS = {
    "in front": lambda y: functional.pad(y, (P - D, 0)),
    "of rows": lambda y: functional.pad(y, (0, P - D, 0, 1)),
    "not zero": lambda y: functional.pad(y, (0, P - D), value=1.0),
    "cut": lambda y: functional.pad(y, (0, -2)),
    "of another value": lambda y: padded(y + 1),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_other_paddings(name):
    run = compiled(lambda x, w: PADDINGS[name](norm(x, w)), X, W, op=PAD, count=0)
    assert not reasons(run, "fuse_act_padding")


def test_a_cpu_leaves_both_to_inductor():
    run = compiled(slices, HIDDEN, PROJECTION, WA, WB, op=DUAL, count=0, config={})
    told = "Inductor's kernel on a CPU, unless asked for by name"
    assert reasons(run, "fuse_mla_dual_rms_norm") == [told]
    assert reasons(compiled(lambda x, w: padded(norm(x, w)), X, W, op=PAD, count=0, config={}), "fuse_act_padding") == [
        told
    ]


# -- called eagerly ------------------------------------------------------------------------------------------------------


def test_eager_calls():
    found = dual_rms_norm(X, R[:, :32], W, W[:32], a_eps=1e-6, normed_dtype=BF16)
    assert torch.equal(found[0], norm(X, W)) and torch.equal(found[1], norm(R[:, :32], W[:32]))
    got, total = rms_norm_pad(X, W, P, eps=1e-6, residual=R, normed_dtype=BF16)
    assert torch.equal(got, padded(norm(X + R, W))) and torch.equal(total, X + R)
    assert rms_norm_pad(X[:0], W, P, eps=1e-6)[0].shape == (0, P)
    with pytest.raises(ValueError, match="the same rows"):
        dual_rms_norm(X, R[:3], W, W, a_eps=1e-6)
    with pytest.raises(ValueError, match="a_weight must be"):
        dual_rms_norm(X, R, W[:3], W, a_eps=1e-6)
    with pytest.raises(ValueError, match="size must be at least 90"):
        rms_norm_pad(X, W, 80, eps=1e-6)
    with pytest.raises(ValueError, match="residual must be"):
        rms_norm_pad(X, W, P, eps=1e-6, residual=R[:2])
