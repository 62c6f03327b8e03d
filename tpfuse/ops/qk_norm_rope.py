"""``tpfuse::qk_norm_rope``: RMSNorm of every head of q and k, and rotary embedding, on one GPU, as one operation.

B  batch     T  tokens of a sequence     H, K  heads of q and k     D  head size     R  elements of a head that are rotated
"""

from __future__ import annotations

import torch

from tpfuse.kernels import rotary as kernels
from tpfuse.ops import library
from tpfuse.ops.arguments import check_floating, check_number, check_tensors, check_whole
from tpfuse.ops.rms_norm import normalize

NAME = "qk_norm_rope"


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int, interleaved: bool, wide: bool = False
) -> torch.Tensor:
    """Rotary embedding of the first ``rotary`` elements of each head; see ``qk_norm_rope``."""
    if cos.shape[-1] < rotary:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    cos, sin, turning = cos.unsqueeze(-2), sin.unsqueeze(-2), x[..., :rotary].float() if wide else x[..., :rotary]
    if interleaved:
        turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-turning[..., rotary // 2 :], turning[..., : rotary // 2]), -1)
    rotated = (turning * cos + turned * sin).to(x.dtype)
    return torch.cat((rotated, x[..., rotary:]), -1)


def kernel_cannot(q, k, cos, sin, q_weight, k_weight, eps, weight_offset, normed_dtype) -> str:
    """Why the kernel cannot take these; "" if it can."""
    weights = [weight.dtype for weight in (q_weight, k_weight) if weight is not None]
    return kernels.cannot(q, k, (cos.dtype, sin.dtype), weights, normed_dtype)


def _run(q, k, cos, sin, rotary, interleaved, wide, heads_first, norm, *how):
    if q.numel() and k.numel() and not kernel_cannot(q, k, cos, sin, *how):
        return kernels.qk_norm_rope(q, k, cos, sin, rotary, interleaved, wide, heads_first, norm, *how)
    if norm:
        q_weight, k_weight, *rest = how
        q, k = normalize(q, q_weight, *rest), normalize(k, k_weight, *rest)
    made = kernels.empty(q, heads_first), kernels.empty(k, heads_first)
    for x, y in zip((q, k), made, strict=True):
        y.copy_(rotate(x, cos, sin, rotary, interleaved, wide))
    return made


def _fake(q, k, cos, sin, rotary, interleaved, wide, heads_first, *rest, **named):
    return kernels.empty(q, heads_first), kernels.empty(k, heads_first)


OP = library.define(
    f"{NAME}(Tensor q, Tensor k, Tensor cos, Tensor sin, int rotary, bool interleaved, bool wide, bool heads_first, "
    "bool norm, Tensor? q_weight, Tensor? k_weight, float eps, float weight_offset, ScalarType? normed_dtype) "
    "-> (Tensor, Tensor)",
    _run,
    _fake,
    collective=False,
)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    rotary: int | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of every head of q and k, and rotary embedding: what attention reads.

        q, k = rms_norm(q) * (weight_offset + q_weight), rms_norm(k) * (weight_offset + k_weight)    # with eps
        turned = cat(-q[..., R // 2 : R], q[..., : R // 2])         # or -q[..., 1:R:2], q[..., 0:R:2] in turns
        return cat(q[..., :R] * cos + turned * sin, q[..., R:]), the same of k

    q, k        [B, T, H, D] and [B, T, K, D], or [T, H, D] and [T, K, D]; any strides, such as slices of one projection
    cos, sin    [B or 1, T, R], or [T, R], of q's dtype (products are rounded to it) or fp32; [..., R / 2] where both
                elements that are rotated against each other share a number
    eps         of the norm; None: no norm
    q_weight, k_weight  [D], both or neither
    weight_offset, normed_dtype  as in ``tpfuse.ops.all_reduce_rms_norm``
    rotary      R; None: D
    interleaved rotate neighbours rather than halves
    returns     q and k, contiguous, of their dtypes; never aliases

    The norm is computed in fp32 and rounded to q's dtype. On CUDA (bf16 and fp16, D up to 256) one Triton kernel, else
    these operations. No gradients. Source: Su et al. 2021, arXiv:2104.09864.
    Raises ValueError: a shape or dtype other than the above.
    """
    check_tensors(NAME, {"q": q, "k": k, "cos": cos, "sin": sin}, {"q_weight": q_weight, "k_weight": k_weight})
    size = q.shape[-1] if q.dim() else 0
    turning = size if rotary is None else rotary
    check_whole(NAME, "rotary", turning)
    check_number(NAME, "weight_offset", weight_offset)
    check_floating(NAME, "normed_dtype", normed_dtype)
    if eps is not None:
        check_number(NAME, "eps", eps, least=0)
    check_rotation(NAME, q, k, cos, sin, turning, eps, q_weight, k_weight)
    if library.needs_gradients(q, k, q_weight, k_weight):
        raise ValueError(f"{NAME}: it has no gradients; call it under torch.no_grad()")
    how = (eps is not None, q_weight, k_weight, float(eps or 0), weight_offset, normed_dtype)
    return OP(q, k, cos, sin, turning, interleaved, False, False, *how)


def check_rotation(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> None:
    """Raises ValueError: heads, tables and weights do not belong to each other."""
    told = f"q {list(q.shape)} and k {list(k.shape)}"
    if q.dim() not in (3, 4) or (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
        raise ValueError(f"{op}: q and k must be [B, T, heads, D] or [T, heads, D], alike but in heads, got {told}")
    if q.dtype is not k.dtype or not q.is_floating_point():
        raise ValueError(f"{op}: q and k must have one floating dtype, got {q.dtype} and {k.dtype}")
    if rotary % 2 or not 0 < rotary <= q.shape[-1]:
        raise ValueError(f"{op}: rotary must be even, from 2 to the head size, got {rotary} of {q.shape[-1]}")
    fits = cos.dim() in (2, q.dim() - 1) and cos.shape[-1] in (rotary, rotary // 2) and cos.shape[-2] == q.shape[-3]
    if cos.shape != sin.shape or not fits or (cos.dim() == 3 and cos.shape[0] not in (1, q.shape[0])):
        raise ValueError(
            f"{op}: cos and sin must be [B or 1, T, R or R / 2] or [T, R or R / 2] for {told}, "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.dtype is not sin.dtype or not cos.is_floating_point():
        raise ValueError(f"{op}: cos and sin must have one floating dtype, got {cos.dtype} and {sin.dtype}")
    if (q_weight is None) != (k_weight is None) or (eps is None and q_weight is not None):
        raise ValueError(f"{op}: q_weight and k_weight must be given together, and with eps")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.shape != q.shape[-1:] or not weight.is_floating_point()):
            raise ValueError(f"{op}: {name} must be floating [{q.shape[-1]}], got {weight.dtype} {list(weight.shape)}")
