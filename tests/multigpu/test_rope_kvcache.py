"""Rotary embedding with the writes into the caches by our Triton kernel on one GPU: what the operations one by one give."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

import tpfuse
from tests.multigpu.test_qk_norm_rope import draw
from tpfuse.models.families import build, family_config
from tpfuse.ops.qk_norm_rope import rotate
from tpfuse.ops.rms_norm import normalize
from tpfuse.ops.rope_kvcache import OP, write

pytestmark = [pytest.mark.gpu]
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    "heads, rotary, interleaved", [(128, 128, False), (64, 16, True), (80, 80, False), (256, 64, False)]
)
@pytest.mark.parametrize("cache_dtype", [BF16, E4M3, E5M2])
@pytest.mark.parametrize("heads_dim, own_page", [(1, True), (1, False), (2, False)])
def test_caches(heads_dim, own_page, cache_dtype, heads, rotary, interleaved):
    for batch, tokens, q_heads, k_heads, norm in ((3, 5, 8, 2, True), (1, 300, 5, 1, False)):
        q, k, v = (draw(batch, tokens, count, heads, seed=i) * 3 for i, count in enumerate((q_heads, k_heads, k_heads)))
        angles = draw(1, tokens, rotary, dtype=torch.float32)
        cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
        pages, places = (batch, tokens + 9) if own_page else (batch * tokens // 4 + 7, 8)
        shape = (pages, k_heads, places, heads) if heads_dim == 1 else (pages, places, k_heads, heads)
        found = [draw(*shape, seed=seed).to(cache_dtype) for seed in (5, 6)]
        expected = [cache.clone() for cache in found]
        if own_page:
            slots = torch.arange(4, 4 + tokens, device="cuda")
        else:
            slots = torch.randperm(pages * places, device="cuda")[: batch * tokens].view(batch, tokens).to(torch.int32)
            slots[0, ::3], slots[0, 1::7] = -1, pages * places + 3
        scales = [None, None] if cache_dtype is BF16 else [torch.full((1,), s, device="cuda") for s in (0.03, 0.01)]
        weights = (draw(heads, seed=8), draw(heads, seed=9)) if norm else (None, None)
        how = (rotary, interleaved, False, True, norm, *weights, 1e-6, 0.0, BF16)
        got = OP(q, k, v, cos, sin, *found, slots, *scales, heads_dim, own_page, *how)
        if norm:
            q, k = (normalize(x, w, 1e-6, 0.0, BF16) for x, w in ((q, weights[0]), (k, weights[1])))
        eps = torch.finfo(BF16).eps
        torch.testing.assert_close(got, rotate(q, cos, sin, rotary, interleaved), rtol=2 * eps, atol=16 * eps)
        for x, cache, scale in zip((rotate(k, cos, sin, rotary, interleaved), v), expected, scales, strict=True):
            there = torch.where(slots < (places if own_page else pages * places), slots, -1)
            write(x, cache, there, scale, heads_dim, own_page)
        different = (found[0].float() != expected[0].float()).float().mean()
        assert different < (0.01 if norm else 1e-6)
        assert torch.equal(found[1].view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decode(family, mode):
    config = family_config(family, hidden_size=512, num_attention_heads=4, head_dim=128, num_key_value_heads=2)
    model, ids = build(config, "cuda", BF16), torch.randint(3, 100, (2, 16), device="cuda")

    def steps(cache):
        found = [model(ids, past_key_values=cache).logits[:, -1:].clone()]
        for _ in range(5):
            found.append(model(found[-1].argmax(-1), past_key_values=cache).logits.clone())
        return torch.cat(found, 1)

    with torch.no_grad():
        caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
        for cache in caches:  # in a compiled prefill it would be made within the memory of that CUDA graph
            cache.early_initialization(2, 2, 128, BF16, torch.device("cuda"))
        expected = steps(caches[0])
        tpfuse.apply(model, mode=mode)
        got = steps(caches[1])
    assert (got - expected).float().norm() < 0.05 * expected.float().norm()
    for a, b in zip(*(cache.layers for cache in caches), strict=True):
        assert (a.keys - b.keys).float().norm() < 0.05 * b.keys.float().norm()
        assert (a.values - b.values).float().norm() < 0.05 * b.values.float().norm()
    assert tpfuse.explain(model).count("fuse_rope_kvcache") == 2, str(tpfuse.explain(model))
