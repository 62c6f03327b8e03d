"""Rotary embedding with the writes into the caches: found in graphs, right in the caches; near-misses are not."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from tests.unit.graphs import assert_same, compile_with_tpfuse, values, world
from tests.unit.test_qk_norm_rope import COS, PACKED, SIN, WK, WQ, B, D, H, K, T, hugging_face, norm
from tpfuse.models.families import build, family_config
from tpfuse.ops import qk_norm_rope, rope_kvcache
from tpfuse.ops.qk_norm_rope import OP as WITHOUT_CACHE
from tpfuse.ops.rope_kvcache import OP

ON = {"fuse_rope_kvcache": True}
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
S = 12
WRITES = torch.ops.aten.index_put.default
FUNCTIONAL = torch.ops.higher_order.auto_functionalized


@pytest.fixture(autouse=True)
def one_process():
    with world(2):
        yield


def caches(seed=9):
    return values(B, K, S, D, seed=seed), values(B, K, S, D, seed=seed + 1)


def layer(packed, wq, wk, cos, sin, k_cache, v_cache, positions):
    """As Hugging Face with a StaticCache."""
    q, k, v = (x.view(B, T, -1, D).transpose(1, 2) for x in packed.split((H * D, K * D, K * D), -1))
    q, k = hugging_face(norm(q, wq), cos, sin), hugging_face(norm(k, wk), cos, sin)
    k_cache[:, :, positions], v_cache[:, :, positions] = k, v  # which is what Hugging Face's index_copy_ becomes
    return q, k_cache.sum(2), v_cache * 2


def run_and_hold(model, *inputs, positions, config=ON, make=caches):
    """Results and caches are those of the model."""
    expected_caches, found_caches = make(), make()
    expected = model(*inputs, *expected_caches, positions)
    run = compile_with_tpfuse(model, *inputs, *found_caches, positions, config=config)
    assert_same(run.outputs, expected)
    assert_same(found_caches, expected_caches)
    return run


@pytest.mark.parametrize("first", [4, -T])
def test_static_cache(first):
    """Negative positions count from the end, as they do without."""
    positions = torch.arange(first, first + T)
    run = run_and_hold(layer, PACKED, WQ, WK, COS, SIN, positions=positions)
    assert len(run.calls(FUNCTIONAL)) == run.report.count("fuse_rope_kvcache") == 1, run.graph.code
    assert not run.calls(WRITES) and not run.calls(WITHOUT_CACHE)


def test_slots_of_one_sequence_after_another():
    def model(q, k, v, cos, sin, k_cache, v_cache, slots):
        q, k = (x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin for x in (q, k))
        k_cache[slots], v_cache[slots] = k, v
        return q

    make = lambda: (values(S, K, D, seed=9), values(S, K, D, seed=8))  # noqa: E731
    inputs = values(T, H, D), values(T, K, D), values(T, K, D, seed=1), COS[0][:, None], SIN[0][:, None]
    run = run_and_hold(model, *inputs, positions=torch.tensor([7, 0, 3, 11, 4]), make=make)
    assert len(run.calls(FUNCTIONAL)) == run.report.count("fuse_rope_kvcache") == 1, f"{run.report}\n{run.graph.code}"


def test_more_rows_than_asked_for():
    config = {**ON, "rope_kvcache_fusion_max_token_num": B * T - 1, "enable_qk_norm_rope_fusion": True}
    run = run_and_hold(layer, PACKED, WQ, WK, COS, SIN, positions=torch.arange(T), config=config)
    assert not run.calls(FUNCTIONAL) and len(run.calls(WRITES)) == 2 and len(run.calls(WITHOUT_CACHE)) == 1
    told = [site.reason for site in run.report.sites if site.fusion == "fuse_rope_kvcache"]
    assert told == [f"at most {B * T} rows, more than rope_kvcache_fusion_max_token_num={B * T - 1}"]


def k_is_needed_too(packed, wq, wk, cos, sin, k_cache, v_cache, positions):
    q, k, v = (x.view(B, T, -1, D).transpose(1, 2) for x in packed.split((H * D, K * D, K * D), -1))
    q, k = hugging_face(q, cos, sin), hugging_face(k, cos, sin)
    k_cache.index_copy_(2, positions, k)
    v_cache.index_copy_(2, positions, v)
    return q, k


def other_positions(packed, wq, wk, cos, sin, k_cache, v_cache, positions):
    q, k, v = (x.view(B, T, -1, D).transpose(1, 2) for x in packed.split((H * D, K * D, K * D), -1))
    q, k = hugging_face(q, cos, sin), hugging_face(k, cos, sin)
    k_cache.index_copy_(2, positions, k)
    v_cache.index_copy_(2, positions + 1, v)
    return q


def added(packed, wq, wk, cos, sin, k_cache, v_cache, positions):
    q, k, v = (x.view(B, T, -1, D).transpose(1, 2) for x in packed.split((H * D, K * D, K * D), -1))
    q, k = hugging_face(q, cos, sin), hugging_face(k, cos, sin)
    k_cache.index_add_(2, positions, k)
    v_cache.index_add_(2, positions, v)
    return q


@pytest.mark.parametrize("model", [k_is_needed_too, other_positions, added], ids=lambda f: f.__name__)
def test_near_misses(model):
    run = run_and_hold(model, PACKED, WQ, WK, COS, SIN, positions=torch.arange(T))
    assert not run.calls(FUNCTIONAL) and not run.report.count("fuse_rope_kvcache")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decode_of_hugging_face(family):
    model, ids = build(family_config(family), "cpu", BF16), torch.arange(3, 35).view(2, 16)

    def prefilled():
        cache = StaticCache(config=model.config, max_cache_len=32)
        model(ids, past_key_values=cache)
        return cache

    found, expected = prefilled(), prefilled()
    token = ids[:, :1].contiguous()
    right = model(token, past_key_values=expected).logits
    run = compile_with_tpfuse(lambda i: model(i, past_key_values=found).logits, token, config=ON)
    assert len(run.calls(FUNCTIONAL)) == run.report.count("fuse_rope_kvcache") == 2, str(run.report)
    assert torch.equal(run.outputs, right)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


# -- called eagerly ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_pages(heads_dim, dtype):
    """Slots count through pages; a slot of -1 is none."""
    q, k, v = values(T, H, D), values(T, K, D, seed=1), values(T, K, D, seed=2) * 200
    shape = (4, K, 3, D) if heads_dim == 1 else (4, 3, K, D)
    k_cache, v_cache = (values(*shape, seed=seed).to(dtype) for seed in (3, 4))
    before = k_cache.float().clone()
    slots, scale = torch.tensor([7, -1, 0, 11, 4]), torch.tensor([0.5]) if dtype is E4M3 else None
    got = rope_kvcache(q, k, v, COS[0], SIN[0], k_cache, v_cache, slots, heads_dim=heads_dim, k_scale=scale, v_scale=scale)
    right, rotated = qk_norm_rope(q, k, COS[0], SIN[0])
    assert torch.equal(got, right)
    kept = lambda x: x if scale is None else (x.float() / scale).clamp(-448, 448).to(E4M3)  # noqa: E731
    written = set()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        written.add(slot)
        for cache, x in ((k_cache, rotated), (v_cache, v)):
            page = cache[slot // 3]
            place = page[:, slot % 3] if heads_dim == 1 else page[slot % 3]
            assert torch.equal(place.float(), kept(x[token]).float())
    by_place = lambda cache: (cache.transpose(1, 2) if heads_dim == 1 else cache).reshape(12, K, D).float()  # noqa: E731
    for slot in set(range(12)) - written:
        assert torch.equal(by_place(k_cache)[slot], by_place(before)[slot])


def test_bad_arguments():
    q, k, cache = values(T, H, D), values(T, K, D), values(4, 3, K, D)
    slots, tables = torch.arange(T), (COS[0], SIN[0])
    for message, arguments, options in (
        ("v must be", (q, k, k[:2], *tables, cache, cache, slots), {}),
        ("caches must be", (q, k, k, *tables, cache[0], cache[0], slots), {}),
        ("caches must be", (q, k, k, *tables, cache, cache.float(), slots), {}),
        ("slots must be", (q, k, k, *tables, cache, cache, slots[:2]), {}),
        ("k_scale must be", (q, k, k, *tables, cache.to(E4M3), cache.to(E4M3), slots), {}),
        ("heads_dim must be", (q, k, k, *tables, cache, cache, slots), {"heads_dim": 3}),
        ("with own_page", (q, k, k, *tables, cache, cache, slots), {"own_page": True}),
        ("rotary must be even", (q, k, k, *tables, cache, cache, slots), {"rotary": 3}),
    ):
        with pytest.raises(ValueError, match=message):
            rope_kvcache(*arguments, **options)
    assert OP._schema.is_mutable
