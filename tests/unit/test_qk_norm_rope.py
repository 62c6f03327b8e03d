"""Norms of heads and rotary embedding: every spelling is found bit for bit, and made one operation; near-misses are not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.unit.graphs import assert_same, compile_with_tpfuse, values, world
from tpfuse.models.families import build, build_sharded, family_config
from tpfuse.ops import qk_norm_rope
from tpfuse.ops.qk_norm_rope import OP

B, T, H, K, D = 2, 5, 4, 2, 16
ON = {"enable_qk_norm_rope_fusion": True}
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def one_process():
    with world(2):
        yield


# -- how models spell it -----------------------------------------------------------------------------------------------


def norm(x, weight):
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norm_offset(x, weight):  # Gemma
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).to(x.dtype)


def table(rows, columns, dtype=BF16, batch=1):
    angles = values(batch, rows, columns, dtype=torch.float32, seed=7)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def hugging_face(x, cos, sin):
    """[B, heads, T, D]"""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + rotate_half(x) * sin


def partial(x, cos, sin):
    """Phi3's and StableLM's first elements."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((hugging_face(turning, cos, sin), rest), -1)


def glm4(x, cos, sin):
    cos, sin = (t.unsqueeze(1)[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in (cos, sin))
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    return torch.cat((turning * cos + turned * sin, rest), -1)


def chunks(x, cos, sin):
    """Halves that are joined again; tables have a number for two elements."""
    cos, sin = (t[..., : D // 2].unsqueeze(1) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def strided(x, cos, sin):
    cos, sin = (t[..., : D // 2].unsqueeze(1) for t in (cos, sin))
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def pairs_in_fp32(x, cos, sin):
    """gpt-fast."""
    cos, sin = (t[..., : D // 2].unsqueeze(1) for t in (cos, sin))
    a = x.float().reshape(*x.shape[:-1], -1, 2)
    turned = torch.stack((a[..., 0] * cos - a[..., 1] * sin, a[..., 1] * cos + a[..., 0] * sin), -1)
    return turned.flatten(3).type_as(x)


def as_complex(x, cos, sin):
    """Meta's Llama."""
    turns = torch.complex(cos[..., : D // 2].float(), sin[..., : D // 2].float()).unsqueeze(1)
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turns
    return torch.view_as_real(turned).flatten(3).type_as(x)


SPELLINGS = {f.__name__: f for f in (hugging_face, glm4, chunks, strided, pairs_in_fp32, as_complex)}


def heads_of(packed):
    """q and k [B, heads, T, D], and v, of one projection."""
    q, k, v = packed.split((H * D, K * D, K * D), -1)
    return *(x.view(B, T, -1, D).transpose(1, 2) for x in (q, k)), v


PACKED, WQ, WK = values(B, T, (H + 2 * K) * D), values(D, seed=1), values(D, seed=2)
COS, SIN = table(T, D)


def fused_once(model, *inputs, exact=True, config=ON, dynamic=None):
    expected = model(*inputs)
    run = compile_with_tpfuse(model, *inputs, config=config, dynamic=dynamic)
    assert len(run.calls(OP)) == 1 and run.report.count("enable_qk_norm_rope_fusion") == 1, (
        f"{run.report}\n{run.graph.code}"
    )
    assert not run.calls(torch.ops.aten.neg.default) and not run.calls(torch.ops.aten.sub.Tensor)
    assert_same(run.outputs, expected, exact)
    return run.calls(OP)[0]


# -- recognised, and one -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling, normed):
    rotate = SPELLINGS[spelling]

    def model(packed, wq, wk, cos, sin):
        q, k, v = heads_of(packed)
        if normed:
            q, k = norm(q, wq), norm(k, wk)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    node = fused_once(model, PACKED, WQ, WK, COS, SIN)
    assert node.args[8] is normed


def test_norm_before_the_transpose_and_an_offset():
    def model(packed, wq, wk, cos, sin):
        q, k, v = packed.split((H * D, K * D, K * D), -1)
        q, k = norm_offset(q.view(B, T, H, D), wq), norm_offset(k.view(B, T, K, D), wk)
        return hugging_face(q.transpose(1, 2), cos, sin), hugging_face(k.transpose(1, 2), cos, sin), v

    node = fused_once(model, PACKED, WQ, WK, COS, SIN)
    assert node.args[7] is False and node.args[12] == 1.0  # the transpose of the result is a view, as it was


@pytest.mark.parametrize("rotary", [2, 4, 14])
def test_partial_rotary(rotary):
    def model(packed, wq, wk, cos, sin):
        q, k, v = heads_of(packed)
        return partial(norm(q, wq), cos, sin), partial(norm(k, wk), cos, sin), v

    node = fused_once(model, PACKED, WQ, WK, *table(T, rotary))
    assert node.args[4] == rotary


def test_tokens_of_many_sequences():
    """[T, heads, D], tables [T, D / 2] of each token: as a server has it."""

    def model(q, k, wq, wk, cos, sin):
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        turned = []
        for x, w in ((q, wq), (k, wk)):
            a, b = norm(x.view(-1, D), w).view(x.shape).view(T, -1, D).chunk(2, -1)  # views that flatten heads and back
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        return turned

    cos, sin = (t[0, :, : D // 2].contiguous() for t in (COS, SIN))
    fused_once(model, values(T, H * D), values(T, K * D, seed=3), WQ, WK, cos, sin)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_tables_of_each_sequence_in_fp32(dtype):
    def model(packed, cos, sin):
        q, k, v = heads_of(packed)
        turned = [hugging_face(x.float(), cos.float(), sin.float()).to(x.dtype) for x in (q, k)]
        return *turned, v

    node = fused_once(model, PACKED, *table(T, D, dtype, batch=B))
    assert node.args[6] is True


def test_any_number_of_tokens():
    def model(q, k, wq, wk, cos, sin):
        q, k = (x.view(*x.shape[:2], -1, D).transpose(1, 2) for x in (q, k))
        return hugging_face(norm(q, wq), cos, sin), hugging_face(norm(k, wk), cos, sin)

    q, k, cos, sin = values(B, T, H * D), values(B, T, K * D, seed=3), COS.clone(), SIN.clone()
    for tensor in (q, k, cos, sin):
        torch._dynamo.mark_dynamic(tensor, 1)
    fused_once(model, q, k, WQ, WK, cos, sin)


@pytest.mark.parametrize("family, fused", [("qwen3", 2), ("gemma3", 2), ("glm4", 2)])
def test_hugging_face_models(family, fused):
    model, ids = build(family_config(family), "cpu", BF16), torch.arange(3, 35).view(2, 16)
    expected = model(ids, use_cache=False).logits
    run = compile_with_tpfuse(lambda i: model(i, use_cache=False).logits, ids, config=ON)
    assert len(run.calls(OP)) == run.report.count("enable_qk_norm_rope_fusion") == fused, str(run.report)
    assert torch.equal(run.outputs, expected)


def test_a_sharded_model():
    """Each rank has its own heads."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, ids = build_sharded(family_config("llama"), mesh, BF16), torch.arange(3, 35).view(2, 16)
    run = compile_with_tpfuse(lambda i: model(i, use_cache=False).logits, ids, config=ON)
    assert len(run.calls(OP)) == run.report.count("enable_qk_norm_rope_fusion") == 2
    assert run.report.count("fuse_allreduce_rms") == 4
    assert [argument.meta["val"].shape[-2] for argument in run.calls(OP)[0].args[:2]] == [2, 1]


# -- left ---------------------------------------------------------------------------------------------------------------


def left(model, *inputs, reason, config=ON):
    expected = model(*inputs)
    run = compile_with_tpfuse(model, *inputs, config=config)
    assert not run.calls(OP)
    told = [s.reason for s in run.report.sites if s.fusion == "enable_qk_norm_rope_fusion"]
    assert (reason in told) if reason else not told, told
    assert_same(run.outputs, expected)


def test_something_else_reads_the_norm():
    def model(packed, wq, wk, cos, sin):
        q, k, _ = heads_of(packed)
        q, k = norm(q, wq), norm(k, wk)
        return hugging_face(q, cos, sin), hugging_face(k, cos, sin), q

    left(model, PACKED, WQ, WK, COS, SIN, reason="something else reads what is normalised")


def test_norms_that_differ():
    def model(packed, wq, wk, cos, sin):
        q, k, _ = heads_of(packed)
        return hugging_face(norm(q, wq), cos, sin), hugging_face(norm_offset(k, wk), cos, sin)

    left(model, PACKED, WQ, WK, COS, SIN, reason="q and k have different norms")


def test_a_norm_over_all_heads_is_not_one_of_each():
    """OLMo2: only the rotation is taken."""

    def model(packed, wq, wk, cos, sin):
        q, k, _ = packed.split((H * D, K * D, K * D), -1)
        q, k = norm(q, wq).view(B, T, H, D), norm(k, wk).view(B, T, K, D)
        return hugging_face(q.transpose(1, 2), cos, sin), hugging_face(k.transpose(1, 2), cos, sin)

    node = fused_once(model, PACKED, values(H * D, seed=1), values(K * D, seed=2), COS, SIN)
    assert node.args[8] is False


def test_other_tables():
    def model(packed, cos, sin):
        q, k, _ = heads_of(packed)
        return hugging_face(q, cos, sin), hugging_face(k, sin, cos)

    left(model, PACKED, COS, SIN, reason="no other heads are rotated by the same tables")


def both_added(a, b, c, s):
    return torch.cat((a * c + b * s, b * c + a * s), -1)


NEAR_MISSES = {
    "the wrong half is negated": lambda x, c, s: x * c + torch.cat((x[..., D // 2 :], -x[..., : D // 2]), -1) * s,
    "halves are not exchanged": lambda x, c, s: x * c + torch.cat((-x[..., : D // 2], x[..., D // 2 :]), -1) * s,
    "both are added": lambda x, c, s: both_added(*x.chunk(2, -1), c[..., : D // 2], s[..., : D // 2]),
    "another value is rotated": lambda x, c, s: x * c + rotate_half(x + 1) * s,
    "a difference": lambda x, c, s: x * c - rotate_half(x) * s,
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    def model(packed, cos, sin):
        q, k, _ = heads_of(packed)
        return [NEAR_MISSES[name](x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]

    left(model, PACKED, COS, SIN, reason="")


# -- called eagerly -----------------------------------------------------------------------------------------------------


def test_eager_calls():
    q, k = values(T, H, D), values(T, K, D, seed=1)
    cos, sin = COS[0], SIN[0]
    found = qk_norm_rope(q, k, cos, sin, eps=1e-6, q_weight=WQ, k_weight=WK, normed_dtype=BF16)
    turn = lambda x, w: hugging_face(norm(x, w).transpose(0, 1)[None], COS, SIN)[0].transpose(0, 1)  # noqa: E731
    assert torch.equal(found[0], turn(q, WQ)) and torch.equal(found[1], turn(k, WK))
    assert qk_norm_rope(q[:0], k[:0], cos[:0], sin[:0])[0].shape == (0, H, D)


BAD = {
    "q and k": lambda q, k, c, s: qk_norm_rope(q, k[:2], c, s),
    "one floating dtype": lambda q, k, c, s: qk_norm_rope(q, k.float(), c, s),
    "rotary must be even": lambda q, k, c, s: qk_norm_rope(q, k, c, s, rotary=3),
    "cos and sin must be": lambda q, k, c, s: qk_norm_rope(q, k, c[:2], s[:2]),
    "given together": lambda q, k, c, s: qk_norm_rope(q, k, c, s, eps=1e-6, q_weight=WQ),
    "q_weight must be": lambda q, k, c, s: qk_norm_rope(q, k, c, s, eps=1e-6, q_weight=WQ[:3], k_weight=WK),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        BAD[message](values(T, H, D), values(T, K, D), COS[0], SIN[0])
