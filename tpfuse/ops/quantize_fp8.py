"""``tpfuse::quantize_fp8``: the one form of the ways in which models quantise activations to FP8.

It says which dtype scales are computed in and how they are applied, since either changes bytes: quantisers that differ in
one bit are different recipes, not one. In graphs it exists at compile time only, as ``tpfuse::rms_norm`` does: what no
fusion takes is lowered back to the operations it came from. ``quantize_fp8_static``, ``_per_token`` and ``_per_group`` are
its public forms.

T  tokens (all leading dimensions together)     D  hidden size     G  group size
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tpfuse.kernels import quantize
from tpfuse.ops import library
from tpfuse.ops.arguments import check_floating, check_tensors, told
from tpfuse.ops.library import needs_gradients
from tpfuse.ops.matmul import FP8

NAME = "quantize_fp8"
#: Schema of a recipe, in the order of Recipe's fields.
SCHEMA = (
    "int? group=None, ScalarType scale_dtype=float, float floor=0.0, bool zero_to_one=False, bool by_reciprocal=False, "
    "bool power_of_two=False, bool inverse=False, float least=0.0, str scale_layout='row'"
)
LAYOUTS = ("row", "column")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a dynamic scale is computed and applied.

    group          elements of the last dimension that share a scale; None: the whole tensor has one
    scale_dtype    dtype in which the greatest magnitude is divided by the format's; the scale is fp32 afterwards
    floor          the least that the greatest magnitude is taken for
    zero_to_one    a greatest magnitude of zero is taken for one (compressed-tensors)
    by_reciprocal  x * (1 / scale) rather than x / scale
    power_of_two   the scale is rounded up to a power of two (UE8M0)
    inverse        values are multiplied by the scale, which is the format's greatest magnitude divided by theirs (torchao's
                   training); a power of two is rounded down
    least          the least that values are divided by; the scale that is returned may be less (Hugging Face's kernels)
    scale_layout   of scales in memory: "row", or "column", where those of a group, of all tokens, lie side by side: strides
                   (1, T rounded up to a multiple of 4), as ``torch._scaled_mm`` takes those of blocks
    """

    group: int | None = None
    scale_dtype: torch.dtype = torch.float32
    floor: float = 0.0
    zero_to_one: bool = False
    by_reciprocal: bool = False
    power_of_two: bool = False
    inverse: bool = False
    least: float = 0.0
    scale_layout: str = "row"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As operations take them, in the order of SCHEMA."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def check(self, size: int) -> None:
        """Raises ValueError: rows of ``size`` elements cannot be quantised so."""
        if self.group is not None and (not isinstance(self.group, int) or self.group < 1 or size % self.group):
            raise ValueError(f"a recipe's group must divide the row of {size} elements, got {self.group}")
        check_floating("recipe", "scale_dtype", self.scale_dtype)
        if self.scale_layout not in LAYOUTS or (self.scale_layout == "column" and self.group is None):
            layouts = f"{' or '.join(LAYOUTS)}, with a group"
            raise ValueError(f"a recipe's scale_layout must be {layouts}, got {self.scale_layout!r}, group {self.group}")


def scale_shape(shape: torch.Size | tuple[int, ...], group: int | None) -> list[int]:
    """[..., D / group], or ones where there is one scale."""
    return [1] * len(shape) if group is None else [*shape[:-1], shape[-1] // group]


def dynamic_scale(x: torch.Tensor, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    """The fp32 scales of x [..., D] for values of the FP8 ``dtype``: [..., D / group], or [1, ..., 1]."""
    magnitudes = x.abs()
    if not x.numel():
        most = magnitudes.new_zeros(scale_shape(x.shape, recipe.group))
    elif recipe.group is None:
        most = magnitudes.amax(dim=list(range(x.dim())), keepdim=True)
    else:
        most = magnitudes.unflatten(-1, (-1, recipe.group)).amax(-1)
    most = most.to(recipe.scale_dtype)
    if recipe.floor:
        most = most.clamp(min=recipe.floor)
    if recipe.zero_to_one:
        most = torch.where(most > 0, most, 1.0)
    greatest = torch.finfo(dtype).max
    scale = (most.reciprocal() * greatest if recipe.inverse else most / greatest).float()
    if not recipe.power_of_two:
        return scale
    exponent = torch.log2(scale)
    return torch.exp2(torch.floor(exponent) if recipe.inverse else torch.ceil(exponent))


def apply_scale(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, recipe: Recipe | None = None) -> torch.Tensor:
    """x [..., D] / scale [..., D / group], saturated, as ``dtype``; otherwise applied where a recipe says so."""
    groups = scale.shape[-1] if scale.dim() else 1
    wide, how = x.float(), recipe or Recipe()
    parts = wide.unflatten(-1, (groups, -1)) if groups > 1 else wide
    factor = scale.unsqueeze(-1) if groups > 1 else scale
    if how.least:
        factor = factor.clamp(min=how.least)
    if how.by_reciprocal:
        factor = 1.0 / factor
    scaled = parts * factor if how.inverse or how.by_reciprocal else parts / factor
    most = torch.finfo(dtype).max
    return scaled.view(x.shape).clamp(-most, most).to(dtype)


def check_fp8(
    op: str,
    needed: Mapping[str, Any],
    optional: Mapping[str, Any],
    dtype: Any,
    scale: Any,
    recipe: Any,
) -> None:
    """What every operation that quantises asks of its arguments; the first needed one is quantised. Raises ValueError."""
    check_tensors(op, needed, {**optional, "scale": scale})
    name, x = next(iter(needed.items()))
    if dtype not in FP8:
        raise ValueError(f"{op}: dtype must be float8_e4m3fn or float8_e5m2, got {told(dtype)}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ValueError(f"{op}: recipe must be a tpfuse.ops.Recipe or None, got {told(recipe)}")
    if x.dim() < 1 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{op}: {name} must be bf16, fp16 or fp32 [..., D], got {told(x)}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"{op}: scale must be fp32 [1], got {told(scale)}")
    tensors = [each for each in (*needed.values(), *optional.values(), scale) if each is not None]
    if any(each.device != x.device for each in tensors):
        raise ValueError(f"{op}: all tensors must be on {x.device}")
    if needs_gradients(*tensors):
        raise ValueError(f"{op} has no gradients: call it under torch.no_grad()")


def quantized(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operation means, in eager code: each step rounds where the quantiser that it stands for rounds.

    scale    the given one, None: by the recipe
    returns  (values, scales); no scales where one was given
    """
    if scale is not None:
        return apply_scale(x, scale, dtype), x.new_empty(0, dtype=torch.float32)
    scales = dynamic_scale(x, recipe, dtype)
    values = apply_scale(x, scales, dtype, recipe)
    if recipe.scale_layout == "row":
        return values, scales
    return values, quantize.empty_scales(x, scales.shape, recipe.scale_layout).copy_(scales)


def empty_results(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, recipe: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) without what is in them. recipe: as operations get it, defaults at its end left out."""
    how = Recipe(*recipe)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    if scale is not None:
        return values, x.new_empty(0, dtype=torch.float32)
    return values, quantize.empty_scales(x, scale_shape(x.shape, how.group), how.scale_layout)


def _run(x, dtype, scale=None, *recipe):
    how = Recipe(*recipe)
    if x.numel() and not quantize.cannot(x, how.arguments, scale is not None, False):
        return quantize.quantize_fp8(x, dtype, scale, how.arguments)
    return quantized(x, dtype, scale, how)


def _fake(x, dtype, scale=None, *recipe):
    return empty_results(x, dtype, scale, recipe)


OP = library.define(
    f"{NAME}(Tensor x, ScalarType dtype, Tensor? scale=None, {SCHEMA}) -> (Tensor, Tensor)", _run, _fake, collective=False
)


def quantize_fp8_static(x: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """x / scale, saturated, in FP8.

    x        [..., D]  bf16, fp16 or fp32
    scale    [1] fp32
    dtype    torch.float8_e4m3fn or torch.float8_e5m2
    returns  [..., D] of ``dtype``

    On CUDA (compute capability 8.9 or more; bf16 and fp16) one Triton kernel, else eager operations, to the same bytes.
    Safe in CUDA graphs. No gradients. Raises ValueError: a shape or dtype other than the above.
    """
    op = f"{NAME}_static"
    check_fp8(op, {"x": x, "scale": scale}, {}, dtype, scale, None)  # needed here
    return OP(x, dtype, scale, *Recipe().arguments)[0]


def quantize_fp8_per_token(
    x: torch.Tensor, *, recipe: Recipe | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in FP8, with a scale for each token: what ``torch._scaled_mm`` with scales of rows reads.

        scale = x.abs().amax(-1, keepdim=True).float() / 448
        return (x.float() / scale).clamp(-448, 448).to(dtype), scale

    x        [..., D]  bf16, fp16 or fp32
    recipe   another way to compute scales (``tpfuse.ops.Recipe``; its group is not used): in x's dtype, powers of two, ...
    dtype    torch.float8_e4m3fn or torch.float8_e5m2
    returns  values [..., D] of ``dtype``, and scales, fp32 [..., 1]

    A row of zeros becomes NaN, as torchao's does, unless the recipe has ``zero_to_one`` or a ``floor``. On CUDA (compute
    capability 8.9 or more; bf16 and fp16, D up to 16384) one Triton kernel, else eager operations, to the same bytes. Safe
    in CUDA graphs. No gradients. Raises ValueError: a shape or dtype other than the above.
    """
    return _dynamic(f"{NAME}_per_token", x, None, recipe, dtype)


def quantize_fp8_per_group(
    x: torch.Tensor, *, group: int = 128, recipe: Recipe | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in FP8, with a scale for each ``group`` elements of a row: blocks of 1 x 128 and 1 x 64.

    x        [..., D]  bf16, fp16 or fp32; D a multiple of ``group``
    recipe   another way to compute scales (``tpfuse.ops.Recipe``; its group is not used). ``Recipe(scale_layout="column")``
             gives scales as ``torch._scaled_mm`` takes those of blocks of 1 x 128, if T is a multiple of 4
    dtype    torch.float8_e4m3fn or torch.float8_e5m2
    returns  values [..., D] of ``dtype``, and scales, fp32 [..., D / group]

    Zeros, kernels, CUDA graphs, gradients and errors as in ``quantize_fp8_per_token``; any D, groups of powers of two.
    """
    return _dynamic(f"{NAME}_per_group", x, group, recipe, dtype)


def _dynamic(op, x, group, recipe, dtype):
    check_fp8(op, {"x": x}, {}, dtype, None, recipe)
    how = dataclasses.replace(recipe or Recipe(), group=x.shape[-1] if group is None else group)
    how.check(x.shape[-1])
    return OP(x, dtype, None, *how.arguments)
