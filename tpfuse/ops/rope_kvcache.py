"""``tpfuse::rope_kvcache``: [norms of heads,] rotary embedding of q and k, and k and v into the caches, as one operation.

B  batch     T  tokens of a sequence     H, K  heads of q and k     D  head size     N  pages of a cache     P  places each
"""

from __future__ import annotations

import torch

from tpfuse.kernels import rotary as kernels
from tpfuse.ops import library
from tpfuse.ops.arguments import check_floating, check_number, check_tensors, check_whole
from tpfuse.ops.qk_norm_rope import check_rotation, kernel_cannot, rotate
from tpfuse.ops.rms_norm import normalize

NAME = "rope_kvcache"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _run(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, heads_dim, own_page, *how):
    if q.numel() and k.numel() and not kernel_cannot(q, k, cos, sin, *how[5:]):
        return kernels.rope_kvcache(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, heads_dim, own_page, *how)
    rotary, interleaved, wide, heads_first, norm, q_weight, k_weight, *rest = how
    if norm:
        q, k = normalize(q, q_weight, *rest), normalize(k, k_weight, *rest)
    made = kernels.empty(q, heads_first).copy_(rotate(q, cos, sin, rotary, interleaved, wide))
    for x, cache, scale in ((rotate(k, cos, sin, rotary, interleaved, wide), k_cache, k_scale), (v, v_cache, v_scale)):
        write(x, cache, slots, scale, heads_dim, own_page)
    return made


def write(
    x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None, heads_dim: int, own_page: bool
) -> None:
    """Heads x [..., T, K, D] into a cache, in place."""
    if scale is not None:
        most = torch.finfo(cache.dtype).max
        x = (x.float() / scale).clamp(-most, most).to(cache.dtype)
    by_place = cache if heads_dim == 2 else cache.transpose(1, 2)
    slots = slots.expand(x.shape[:-2])
    there = slots >= 0
    if own_page:
        pages, places = torch.arange(x.shape[0], device=x.device)[:, None].expand_as(slots), slots
    else:
        pages, places = slots // by_place.shape[1], slots % by_place.shape[1]
    width = torch.uint8 if cache.dtype in FP8 else cache.dtype  # indexing does not know FP8 everywhere
    by_place.view(width)[pages[there], places[there]] = x[there].view(width)


def _fake(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, heads_dim, own_page, *how, **named):
    return kernels.empty(q, how[3] if len(how) > 3 else named["heads_first"])


OP = library.define(
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "Tensor? k_scale, Tensor? v_scale, int heads_dim, bool own_page, int rotary, bool interleaved, bool wide, "
    "bool heads_first, bool norm, Tensor? q_weight, Tensor? k_weight, float eps, float weight_offset, "
    "ScalarType? normed_dtype) -> Tensor",
    _run,
    _fake,
    collective=False,
)


def rope_kvcache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    heads_dim: int = 2,
    own_page: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    rotary: int | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """[RMSNorm of every head and] rotary embedding of q and k; k and v are written into the caches, in place.

        q, k = qk_norm_rope(q, k, cos, sin, ...)
        k_cache[slot // P, slot % P], v_cache[...] = k, v        # of each token whose slot is not below 0
        return q

    q, k, v, cos, sin, and all from eps on  as in ``tpfuse.ops.qk_norm_rope``; v as k
    k_cache, v_cache  [N, P, K, D] (heads_dim 2), or [N, K, P, D] (heads_dim 1); any strides but that of D, which is 1; of
                      q's dtype, or FP8 with scales
    slots       int32 or int64 [T], or [B, T]; distinct where they are not below 0; less than N P, or P with own_page
    own_page    sequence b has page b, in which slots count (N is B), as a static cache
    k_scale, v_scale  fp32 [1], what values are divided by for an FP8 cache
    returns     q, contiguous

    A token with a slot below 0 is written nowhere; nor, by the kernel, one with a slot past the last (else an IndexError).
    On CUDA (bf16 and fp16, tables of that dtype or fp32, D up to 256) one Triton kernel, which is safe in CUDA graphs, else
    these operations, which are not. No gradients. Raises ValueError: a shape or dtype other than the above.
    """
    check_tensors(
        NAME,
        {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache, "slots": slots},
        {"q_weight": q_weight, "k_weight": k_weight, "k_scale": k_scale, "v_scale": v_scale},
    )
    check_number(NAME, "weight_offset", weight_offset)
    check_floating(NAME, "normed_dtype", normed_dtype)
    turning = (q.shape[-1] if q.dim() else 0) if rotary is None else rotary
    check_whole(NAME, "rotary", turning)
    if eps is not None:
        check_number(NAME, "eps", eps, least=0)
    check_rotation(NAME, q, k, cos, sin, turning, eps, q_weight, k_weight)
    if v.shape != k.shape or v.dtype is not k.dtype:
        raise ValueError(f"{NAME}: v must be {k.dtype} {list(k.shape)}, as k, got {v.dtype} {list(v.shape)}")
    _check_caches(q, k, k_cache, v_cache, slots, heads_dim, own_page)
    scaled = k_cache.dtype in FP8
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        fits = scale is None if not scaled else scale is not None and scale.dtype is torch.float32 and scale.numel() == 1
        if not fits:
            raise ValueError(f"{NAME}: {name} must be {'fp32 [1]' if scaled else 'None'} for a cache of {k_cache.dtype}")
    if library.needs_gradients(q, k, v, q_weight, k_weight):
        raise ValueError(f"{NAME}: it has no gradients; call it under torch.no_grad()")
    how = (turning, interleaved, False, False, eps is not None, q_weight, k_weight, float(eps or 0), weight_offset)
    return OP(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, heads_dim, own_page, *how, normed_dtype)


def _check_caches(q, k, k_cache, v_cache, slots, heads_dim, own_page) -> None:
    if heads_dim not in (1, 2):
        raise ValueError(f"{NAME}: heads_dim must be 1 or 2, got {heads_dim}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        right = (
            cache.dim() == 4 and (cache.shape[heads_dim], cache.shape[-1]) == tuple(k.shape[-2:]) and cache.stride(-1) == 1
        )
        if (
            not right
            or cache.shape != k_cache.shape
            or cache.dtype is not k_cache.dtype
            or cache.dtype not in (q.dtype, *FP8)
        ):
            shape = f"[N, P, {k.shape[-2]}, {k.shape[-1]}]" if heads_dim == 2 else f"[N, {k.shape[-2]}, P, {k.shape[-1]}]"
            raise ValueError(
                f"{NAME}: caches must be {shape} of {q.dtype} or FP8, got {name} {cache.dtype} {list(cache.shape)}"
            )
    shapes = {tuple(q.shape[:-2]), tuple(q.shape[-3:-2])}
    if tuple(slots.shape) not in shapes or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{NAME}: slots must be int32 or int64 [T] or [B, T] for q {list(q.shape)}, got "
                         f"{slots.dtype} {list(slots.shape)}")  # fmt: skip
    if own_page and (q.dim() != 4 or k_cache.shape[0] != q.shape[0]):
        raise ValueError(f"{NAME}: with own_page, a cache must have {q.shape[0]} pages, got {k_cache.shape[0]}")
