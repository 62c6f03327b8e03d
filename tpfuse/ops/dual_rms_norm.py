"""``tpfuse::dual_rms_norm``: two RMSNorms over rows of different length, on one GPU, as one operation.

T  tokens (all leading dimensions together)     A, B  row lengths
"""

from __future__ import annotations

import torch

from tpfuse.kernels import norms
from tpfuse.ops import library
from tpfuse.ops.arguments import check_floating, check_number, check_tensors
from tpfuse.ops.rms_norm import normalize

NAME = "dual_rms_norm"


def _run(a, b, a_weight, b_weight, a_eps, b_eps, weight_offset, normed_dtype):
    pairs = ((a, a_weight, a_eps), (b, b_weight, b_eps))
    cannot = any(norms.cannot(x, x.shape[-1], None if w is None else w.dtype, normed_dtype) for x, w, _ in pairs)
    if a.numel() and b.numel() and not cannot:
        return norms.dual_rms_norm(a, b, a_weight, b_weight, a_eps, b_eps, weight_offset, normed_dtype)
    return tuple(normalize(x.contiguous(), w, eps, weight_offset, normed_dtype) for x, w, eps in pairs)


def _fake(a, b, *rest):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, b))


OP = library.define(
    f"{NAME}(Tensor a, Tensor b, Tensor? a_weight, Tensor? b_weight, float a_eps, float b_eps, float weight_offset, "
    "ScalarType? normed_dtype) -> (Tensor, Tensor)",
    _run,
    _fake,
    collective=False,
)


def dual_rms_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_weight: torch.Tensor | None,
    b_weight: torch.Tensor | None,
    *,
    a_eps: float,
    b_eps: float | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two RMSNorms of the same tokens, as DeepSeek's attention has them: of the compressed query, of the compressed keys
    and values.

        return rms_norm(a) * (weight_offset + a_weight), rms_norm(b) * (weight_offset + b_weight)

    a, b       [..., A] and [..., B], one floating dtype, the same leading dimensions; slices of one projection are not
               copied
    a_weight, b_weight  [A] and [B], or None
    a_eps, b_eps        added to the mean squares; b_eps None: a_eps
    weight_offset, normed_dtype  of both, as in ``tpfuse.ops.all_reduce_rms_norm``
    returns    [..., A] and [..., B], contiguous; never aliases

    Computed in fp32. On CUDA (bf16 and fp16, rows of up to 16384) one Triton kernel, else these operations. No gradients.
    Raises ValueError: a shape or dtype other than the above.
    """
    check_tensors(NAME, {"a": a, "b": b}, {"a_weight": a_weight, "b_weight": b_weight})
    for name, eps in (("a_eps", a_eps), ("b_eps", a_eps if b_eps is None else b_eps), ("weight_offset", weight_offset)):
        check_number(NAME, name, eps, **({} if name == "weight_offset" else {"least": 0}))
    check_floating(NAME, "normed_dtype", normed_dtype)
    if not a.dim() or a.shape[:-1] != b.shape[:-1] or not a.is_floating_point() or a.dtype is not b.dtype:
        told = f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        raise ValueError(f"{NAME}: a and b must have one floating dtype and the same rows, got {told}")
    for name, x, weight in (("a_weight", a, a_weight), ("b_weight", b, b_weight)):
        if weight is not None and (weight.shape != x.shape[-1:] or not weight.is_floating_point()):
            told = f"{weight.dtype} {list(weight.shape)}"
            raise ValueError(f"{NAME}: {name} must be floating [{x.shape[-1]}], got {told}")
    if library.needs_gradients(a, b, a_weight, b_weight):
        raise ValueError(f"{NAME}: it has no gradients; call it under torch.no_grad()")
    other_eps = float(a_eps if b_eps is None else b_eps)
    return OP(a, b, a_weight, b_weight, float(a_eps), other_eps, weight_offset, normed_dtype)
