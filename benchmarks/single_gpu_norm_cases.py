"""More of what benchmarks/single_gpu.py compares: norms of heads with rotary embedding, two norms, norm and padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from single_gpu_cases import BF16, EPS, Case, random
from torch.nn import functional

from tpfuse.ops import dual_rms_norm, qk_norm_rope, rms_norm_pad, rope_kvcache

Q_HEADS, K_HEADS = 32, 8
PADDED = {2880: 3072}
NARROWER = {1536: (512, 64)}  # what stands behind the compressed query: compressed keys and values, and what is rotated


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(BF16)


def heads(size: int, variant: str) -> Case:
    """q and k of one projection, whose v is left; variant "norm" or "rope" (alone)."""
    weights = (random(size), random(size))

    def inputs(rows):
        angles = torch.randn(1, rows, size, device="cuda")
        return random(1, rows, (Q_HEADS + 2 * K_HEADS) * size), angles.cos().to(BF16), angles.sin().to(BF16)

    def split(packed):
        parts = packed.split((Q_HEADS * size, K_HEADS * size, K_HEADS * size), -1)
        return (part.unflatten(-1, (-1, size)) for part in parts[:2])

    def plain(packed, cos, sin):
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        found = []
        for x, weight in zip(split(packed), weights, strict=True):
            y = norm(x, weight) if variant == "norm" else x
            turned = torch.cat((-y[..., size // 2 :], y[..., : size // 2]), -1)
            found.append(y * cos + turned * sin)
        return found

    def ours(packed, cos, sin):
        q, k = split(packed)
        if variant != "norm":
            return qk_norm_rope(q, k, cos, sin)
        return qk_norm_rope(q, k, cos, sin, eps=EPS, q_weight=weights[0], k_weight=weights[1], normed_dtype=BF16)

    return Case(inputs, plain, ours, 2 * size * (2 * (Q_HEADS + K_HEADS) + 2))


def two_norms(size: int, variant: str) -> Case:
    """Two parts of one projection, whose third is left."""
    sizes = (size, *NARROWER[size])
    weights = (random(sizes[0]), random(sizes[1]))

    def plain(packed):
        a, b, _ = packed.split(sizes, -1)
        return norm(a, weights[0]), norm(b, weights[1])

    def ours(packed):
        a, b, _ = packed.split(sizes, -1)
        return dual_rms_norm(a, b, *weights, a_eps=EPS, normed_dtype=BF16)

    return Case(lambda rows: (random(rows, sum(sizes)),), plain, ours, 4 * (sizes[0] + sizes[1]))


def norm_pad(size: int, variant: str) -> Case:
    """Residual add, RMSNorm and zeros behind each row; the stream goes on."""
    weight, wanted = random(size), PADDED[size]

    def plain(x, residual):
        total = x + residual
        return functional.pad(norm(total, weight), (0, wanted - size)), total

    def ours(x, residual):
        return rms_norm_pad(x, weight, wanted, eps=EPS, residual=residual, normed_dtype=BF16)

    return Case(lambda rows: (random(rows, size), random(rows, size)), plain, ours, 6 * size + 2 * wanted)


def heads_and_cache(size: int, variant: str) -> Case:
    """A decode step: q and k of one projection are normalised ("norm") and rotated, k and v written into a static cache."""
    weights, places = (random(size), random(size)), 64

    def inputs(rows):
        angles, shape = torch.randn(1, 1, size, device="cuda"), (rows, K_HEADS, places, size)
        caches = (torch.zeros(shape, device="cuda", dtype=BF16) for _ in range(2))
        position = torch.randint(places, (1,), device="cuda")
        return (
            random(rows, 1, (Q_HEADS + 2 * K_HEADS) * size),
            angles.cos().to(BF16),
            angles.sin().to(BF16),
            *caches,
            position,
        )

    def split(packed):
        parts = packed.split((Q_HEADS * size, K_HEADS * size, K_HEADS * size), -1)
        return (part.unflatten(-1, (-1, size)) for part in parts)

    def plain(packed, cos, sin, k_cache, v_cache, position):
        q, k, v = (x.transpose(1, 2) for x in split(packed))
        if variant == "norm":
            q, k = norm(q, weights[0]), norm(k, weights[1])
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (y * cos + torch.cat((-y[..., size // 2 :], y[..., : size // 2]), -1) * sin for y in (q, k))
        k_cache.index_copy_(2, position, k)
        v_cache.index_copy_(2, position, v)
        return (q,)

    def ours(packed, cos, sin, k_cache, v_cache, position):
        q, k, v = split(packed)
        how = (
            {"eps": EPS, "q_weight": weights[0], "k_weight": weights[1], "normed_dtype": BF16} if variant == "norm" else {}
        )
        q = rope_kvcache(q, k, v, cos, sin, k_cache, v_cache, position, heads_dim=1, own_page=True, **how)
        return (q.transpose(1, 2),)

    return Case(inputs, plain, ours, 2 * size * 2 * (Q_HEADS + 2 * K_HEADS))


CASES: dict[str, tuple[Callable[[int, str], Case], tuple[int, ...], tuple[str, ...]]] = {
    "qk_norm_rope": (heads, (64, 128, 256), ("norm", "rope")),
    "rope_kvcache": (heads_and_cache, (128,), ("norm", "rope")),
    "dual_rms_norm": (two_norms, tuple(NARROWER), ("bf16",)),
    "rms_norm_pad": (norm_pad, tuple(PADDED), ("bf16",)),
}
