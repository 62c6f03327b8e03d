"""Every spelling of RMSNorm that models use, as eager functions ``norm(x, w, eps)``, and surroundings to put them in."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def mean_square(h: torch.Tensor) -> torch.Tensor:
    return h.pow(2).mean(-1, keepdim=True)


def llama(x, w, eps):
    h = x.to(torch.float32)
    return w * (h * torch.rsqrt(mean_square(h) + eps)).to(x.dtype)


def _weight_last(x, w, eps):
    h = x.float()
    return (h * torch.rsqrt(mean_square(h) + eps)).to(x.dtype) * w


def _weight_in_fp32(x, w, eps):
    h = x.float()
    return (w * (h * torch.rsqrt(mean_square(h) + eps))).to(x.dtype)


def _widened_weight(x, w, eps):
    h = x.float()
    return ((h * torch.rsqrt(mean_square(h) + eps)) * w.float()).to(x.dtype)


def gemma(x, w, eps):
    h = x.float()
    return (h * torch.rsqrt(mean_square(h) + eps) * (1.0 + w.float())).type_as(x)


def _gemma_integer_one(x, w, eps):
    h = x.float()
    return ((w.float() + 1) * (torch.rsqrt(mean_square(h) + eps) * h)).type_as(x)


def _half_plus_weight(x, w, eps):
    h = x.float()
    return (h * torch.rsqrt(mean_square(h) + eps) * (w.float() + 0.5)).type_as(x)


def _gemma_after_cast(x, w, eps):
    h = x.float()
    return (h * torch.rsqrt(mean_square(h) + eps)).type_as(x) * (1.0 + w.float())


def _gemma_in_narrow_dtype(x, w, eps):
    return llama(x, 1 + w, eps)  # rounds 1 + w: another function than Gemma's, to be kept as it is


def _f_rms_norm(x, w, eps):
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def _f_rms_norm_without_weight(x, w, eps):
    return F.rms_norm(x, (x.shape[-1],), None, eps)


def without_weight(x, w, eps):
    h = x.float()
    return (h * torch.rsqrt(mean_square(h) + eps)).to(x.dtype)


def _result_in_fp32(x, w, eps):
    h = x.float()
    return h * torch.rsqrt(mean_square(h) + eps) * w


def _x_times_x(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _square(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(torch.square(h).mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def _power_operator(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(torch.mean(h**2, dim=-1, keepdim=True) + eps)).to(x.dtype)


def _positive_dimension(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(x.dim() - 1, keepdim=True) + eps)).to(x.dtype)


def _tuple_of_dimensions(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean((-1,), keepdim=True) + eps)).to(x.dtype)


def _epsilon_first(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(eps + mean_square(h))).to(x.dtype)


def _add_scalar(x, w, eps):
    h = x.float()
    return w * (h * torch.rsqrt(torch.ops.aten.add.Scalar(mean_square(h), eps))).to(x.dtype)


def _root_first(x, w, eps):
    h = x.float()
    return w * (torch.rsqrt(mean_square(h) + eps) * h).to(x.dtype)


def _two_casts(x, w, eps):
    return w * (x.float() * torch.rsqrt(mean_square(x.float()) + eps)).to(x.dtype)


def _cast_of_cast(x, w, eps):
    h = x.float()
    return (h * torch.rsqrt(mean_square(h) + eps)).to(x.dtype).mul(w).to(x.dtype)


def _power_minus_half(x, w, eps):
    h = x.float()
    return w * (h * torch.pow(mean_square(h) + eps, -0.5)).to(x.dtype)


def _one_over_root(x, w, eps):
    h = x.float()
    return w * (h * (1.0 / torch.sqrt(mean_square(h) + eps))).to(x.dtype)


def _integer_one_over_root(x, w, eps):
    h = x.float()
    return w * (h * (1 / torch.sqrt(mean_square(h) + eps))).to(x.dtype)


def _reciprocal_of_root(x, w, eps):
    h = x.float()
    return w * (h * torch.sqrt(mean_square(h) + eps).reciprocal()).to(x.dtype)


def _over_root(x, w, eps):
    h = x.float()
    return w * (h / torch.sqrt(mean_square(h) + eps)).to(x.dtype)


def _over_power_half(x, w, eps):
    h = x.float()
    return w * (h / (mean_square(h) + eps) ** 0.5).to(x.dtype)


#: Bit for bit what the canonical form computes.
EXACT: dict[str, Norm] = {
    "llama": llama,
    "weight last": _weight_last,
    "weight in fp32": _weight_in_fp32,
    "widened weight": _widened_weight,
    "gemma": gemma,
    "gemma, integer 1": _gemma_integer_one,
    "gemma, offset 0.5": _half_plus_weight,
    "gemma after cast": _gemma_after_cast,
    "1 + w in w's dtype": _gemma_in_narrow_dtype,
    "F.rms_norm": _f_rms_norm,
    "F.rms_norm without weight": _f_rms_norm_without_weight,
    "without weight": without_weight,
    "result in fp32": _result_in_fp32,
    "x * x": _x_times_x,
    "square": _square,
    "x ** 2": _power_operator,
    "dim = rank - 1": _positive_dimension,
    "dim = (-1,)": _tuple_of_dimensions,
    "eps + mean": _epsilon_first,
    "add.Scalar": _add_scalar,
    "rsqrt * x": _root_first,
    "two casts": _two_casts,
    "cast of cast": _cast_of_cast,
}

#: The same function, but the inverse root is rounded in another way.
NEAR: dict[str, Norm] = {
    "pow(-0.5)": _power_minus_half,
    "1.0 / sqrt": _one_over_root,
    "1 / sqrt": _integer_one_over_root,
    "sqrt().reciprocal()": _reciprocal_of_root,
    "x / sqrt": _over_root,
    "x / (...) ** 0.5": _over_power_half,
}

SPELLINGS = {**EXACT, **NEAR}
