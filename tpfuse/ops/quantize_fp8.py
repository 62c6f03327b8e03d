"""``tpfuse::quantize_fp8``: the one form of the ways in which models quantise activations to FP8.

It says which dtype scales are computed in and how they are applied, since either changes bytes: quantisers that differ in
one bit are different recipes, not one. In graphs it exists at compile time only, as ``tpfuse::rms_norm`` does: what no
fusion takes is lowered back to the operations it came from.

T  tokens (all leading dimensions together)     D  hidden size     G  group size
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tpfuse.ops import library
from tpfuse.ops.arguments import check_floating, check_tensors, told
from tpfuse.ops.library import needs_gradients
from tpfuse.ops.matmul import FP8

NAME = "quantize_fp8"
#: Schema of a recipe, in the order of Recipe's fields.
SCHEMA = (
    "int? group=None, ScalarType scale_dtype=float, float floor=0.0, bool zero_to_one=False, bool by_reciprocal=False, "
    "bool power_of_two=False"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a dynamic scale is computed and applied.

    group          elements of the last dimension that share a scale; None: the whole tensor has one
    scale_dtype    dtype in which the greatest magnitude is divided by the format's; the scale is fp32 afterwards
    floor          the least that the greatest magnitude is taken for
    zero_to_one    a greatest magnitude of zero is taken for one (compressed-tensors)
    by_reciprocal  x * (1 / scale) rather than x / scale
    power_of_two   the scale is rounded up to a power of two (UE8M0)
    """

    group: int | None = None
    scale_dtype: torch.dtype = torch.float32
    floor: float = 0.0
    zero_to_one: bool = False
    by_reciprocal: bool = False
    power_of_two: bool = False

    @property
    def arguments(self) -> tuple[int | None, torch.dtype, float, bool, bool, bool]:
        """As operations take them, in the order of SCHEMA."""
        return self.group, self.scale_dtype, self.floor, self.zero_to_one, self.by_reciprocal, self.power_of_two

    def check(self, size: int) -> None:
        """Raises ValueError: rows of ``size`` elements cannot be quantised so."""
        if self.group is not None and (not isinstance(self.group, int) or self.group < 1 or size % self.group):
            raise ValueError(f"a recipe's group must divide the row of {size} elements, got {self.group}")
        check_floating("recipe", "scale_dtype", self.scale_dtype)


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
    scale = (most / torch.finfo(dtype).max).float()
    return torch.exp2(torch.ceil(torch.log2(scale))) if recipe.power_of_two else scale


def apply_scale(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, by_reciprocal: bool = False) -> torch.Tensor:
    """x [..., D] / scale [..., D / group], saturated, as ``dtype``."""
    groups = scale.shape[-1] if scale.dim() else 1
    wide = x.float()
    parts = wide.unflatten(-1, (groups, -1)) if groups > 1 else wide
    factor = scale.unsqueeze(-1) if groups > 1 else scale
    scaled = parts * (1.0 / factor) if by_reciprocal else parts / factor
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
    return apply_scale(x, scales, dtype, recipe.by_reciprocal), scales


def _run(x, dtype, scale=None, *recipe):
    return quantized(x, dtype, scale, Recipe(*recipe))


def _fake(x, dtype, scale=None, group=None, *rest):
    shape = [0] if scale is not None else scale_shape(x.shape, group)
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(shape, dtype=torch.float32, device=x.device)


OP = library.define(
    f"{NAME}(Tensor x, ScalarType dtype, Tensor? scale=None, {SCHEMA}) -> (Tensor, Tensor)", _run, _fake, collective=False
)
