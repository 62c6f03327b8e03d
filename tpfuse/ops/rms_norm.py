"""``tpfuse::rms_norm``: the one form that every spelling of RMSNorm is raised to before fusions look at a graph.

It exists at compile time only: what no fusion takes is lowered back to the operations it came from.

D  hidden size
"""

from __future__ import annotations

import torch

from tpfuse.ops import library


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dimension, with each rounding step of the model's own spelling.

        y = x.float() * rsqrt(mean(x.float() ** 2, -1) + eps)
        y = y.to(normed_dtype)                       # only where the model casts before the weight (Llama)
        y = y * weight                               # or y * (weight.float() + weight_offset) (Gemma)
        return y.to(out_dtype)

    x             [..., D]  bf16, fp16 or fp32
    weight        [D] or None, any floating dtype; dtype promotion is torch's
    eps           added to the mean square, inside the root
    normed_dtype  dtype the normalised value is rounded to before the weight (None: it stays fp32)
    out_dtype     dtype of the result (None: x's)
    Accumulates in fp32. Never aliases x. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    h = x.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if normed_dtype is not None:
        y = y.to(normed_dtype)
    if weight is not None:
        y = y * (weight.float() + weight_offset if weight_offset else weight)
    return y.to(out_dtype or x.dtype)


def _fake(x, weight, eps, weight_offset=0.0, normed_dtype=None, out_dtype=None):
    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)


OP = library.define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, ScalarType? normed_dtype=None, "
    "ScalarType? out_dtype=None) -> Tensor",
    normalize,
    _fake,
    collective=False,
)
