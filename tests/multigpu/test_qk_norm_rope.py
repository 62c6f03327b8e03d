"""Norms of heads and rotary embedding by our Triton kernel on one GPU: what the operations one by one give."""

from __future__ import annotations

import itertools

import pytest
import torch

import tpfuse
from tpfuse.models.families import build, family_config
from tpfuse.ops.qk_norm_rope import OP, rotate
from tpfuse.ops.rms_norm import normalize

pytestmark = [pytest.mark.gpu]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: (head size, rotated), and (sequences, tokens, heads of q, of k)
HEADS = [(64, 64), (64, 16), (80, 80), (96, 96), (128, 128), (128, 64), (256, 256), (256, 64)]
CALLS = [(1, 1, 4, 2), (2, 5, 5, 1), (1, 512, 32, 8), (3, 700, 7, 7)]


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def run_and_hold(call, heads, *, interleaved=False, shared=False, wide=False, heads_first=False, norm=True, offset=0.0,
                 normed_dtype=None, dtype=BF16, tables=None):  # fmt: skip
    """The kernel on slices of one projection, whose v must stay as it is."""
    (batch, tokens, q_heads, k_heads), (size, rotary) = call, heads
    packed = draw(batch, tokens, (q_heads + 2 * k_heads) * size, dtype=dtype)
    before = packed.clone()
    q, k, _ = packed.split((q_heads * size, k_heads * size, k_heads * size), -1)
    q, k = q.unflatten(-1, (q_heads, size)), k.unflatten(-1, (k_heads, size))
    angles = draw(batch, tokens, rotary // 2 if shared else rotary, dtype=FP32) * 1000
    cos, sin = angles.cos().to(tables or dtype), angles.sin().to(tables or dtype)
    weights = [draw(size, dtype=dtype, seed=seed) for seed in (1, 2)] if norm else [None, None]
    options = (1e-6, offset, normed_dtype)
    found = OP(q, k, cos, sin, rotary, interleaved, wide, heads_first, norm, *weights, *options)
    assert torch.equal(packed, before)
    for x, weight, got in zip((q, k), weights, found, strict=True):
        y = normalize(x, weight, *options) if norm else x
        expected = rotate(y, cos, sin, rotary, interleaved, wide)
        assert got.transpose(1, 2).is_contiguous() if heads_first else got.is_contiguous()
        if norm:  # the last bit of the sum may move one of the normed values by one unit in the last place
            torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
            assert (got != expected).float().mean() < 0.01
        elif wide or cos.dtype is FP32:  # so may that of the fp32 products
            assert (got != expected).float().mean() < 0.001
        else:
            assert torch.equal(got, expected)
        if rotary < size and not norm:
            assert torch.equal(got[..., rotary:], x[..., rotary:])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads(heads, interleaved):
    """Every kind of head by every kind of arithmetic, each with another call: a kernel is compiled for each."""
    calls = itertools.islice(itertools.cycle(CALLS), HEADS.index(heads), None)
    run_and_hold(next(calls), heads, interleaved=interleaved, normed_dtype=BF16)
    run_and_hold(next(calls), heads, interleaved=interleaved, norm=False, heads_first=True)
    run_and_hold(next(calls), heads, interleaved=interleaved, shared=True, offset=1.0, heads_first=True)
    run_and_hold(next(calls), heads, interleaved=interleaved, shared=True, wide=True, dtype=FP16, normed_dtype=FP16)
    run_and_hold(next(calls), heads, interleaved=interleaved, norm=False, tables=FP32)


def test_nan_stays_in_its_head():
    q, k = draw(3, 4, 128), draw(3, 2, 128)
    q[1, 2, 5] = torch.nan
    angles = draw(3, 128, dtype=FP32)
    found = OP(
        q, k, angles.cos().to(BF16), angles.sin().to(BF16), 128, False, False, False, True, None, None, 1e-6, 0.0, None
    )
    assert found[0].isnan().any(-1).nonzero().tolist() == [[1, 2]] and not found[1].isnan().any()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama"])
def test_models(family):
    config = family_config(family, hidden_size=512, num_attention_heads=4, head_dim=128, num_key_value_heads=2)
    model = build(config, "cuda", BF16)
    with torch.no_grad():
        inputs = [torch.randint(3, 100, (2, length), device="cuda") for length in (1, 7, 64)]
        expected = [model(ids, use_cache=False).logits for ids in inputs]
        tpfuse.apply(model)
        for ids, right in zip(inputs, expected, strict=True):
            got = model(ids, use_cache=False).logits
            assert (got - right).float().norm() < 0.02 * right.float().norm()
    assert tpfuse.explain(model).count("enable_qk_norm_rope_fusion") == 2, str(tpfuse.explain(model))
