"""What kernels over rows, that also exchange them, are told of a quantisation to FP8, and what they cannot quantise.

D  hidden size     G  elements that share a scale
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tpfuse.kernels.quantize import DTYPES, LONGEST_ROW, Recipe

_VECTOR = 8  # elements of 16 bits that a thread has side by side


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """What becomes of a row: values of the FP8 ``dtype``, by a given scale (static), or by scales of the recipe."""

    dtype: torch.dtype
    static: bool
    recipe: Recipe

    def group(self, hidden: int) -> int | None:
        """Elements that share a scale in a row of ``hidden``; None: the row has one, or it is given."""
        size = self.recipe[0]
        return None if self.static or size == hidden else size

    def cannot(self, hidden: int, dtype: torch.dtype, parts: int = 1) -> str:
        """Why the kernels cannot make it of rows of ``hidden`` elements of ``dtype``; "" if they can.

        parts  in which a row is computed
        """
        size, scale_dtype = self.recipe[:2]
        inverse, least, layout = self.recipe[6:]
        if inverse:
            return "values are multiplied by inverse scales"
        if not self.static and (least or layout != "row"):
            return "scales are applied, or laid out, in a way of their own"
        if dtype not in DTYPES:
            return f"dtype {dtype}"
        if hidden > LONGEST_ROW:
            return f"a row of {hidden} elements is longer than {LONGEST_ROW}"
        if self.static:
            return ""
        if size is None:
            return "one scale for the whole tensor is known only after a pass over it"
        if scale_dtype not in (torch.float32, dtype):
            return f"scales of {dtype} values are computed in {scale_dtype}"
        if size != hidden and (size & (size - 1) or size < _VECTOR or hidden % size):
            return f"groups of {size} in rows of {hidden}"
        if size != hidden and hidden % (parts * size):
            return f"groups of {size} in rows of {hidden}, in {parts} parts"
        return ""

    def switches(self, hidden: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """Constants of kernels from GROUP on, for such rows."""
        _, scale_dtype, floor, *rest = self.recipe[:6]
        group = 0 if self.static else self.group(hidden) or -1
        return group, float(torch.finfo(self.dtype).max), scale_dtype == dtype, floor > 0, *rest

    def scales(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Room for the scales of values of that shape [..., D]: [..., D / G], fp32; none where the scale is given."""
        size = self.recipe[0]
        sizes = [0] if self.static or size is None else [*shape[:-1], shape[-1] // size]
        return torch.empty(sizes, dtype=torch.float32, device=device)


@dataclasses.dataclass(frozen=True)
class Fp8:
    """What a call of an operation quantises its rows to.

    scale  the given one, fp32 of one element     keep  the rows before that are wanted, too
    """

    how: Quantisation
    scale: torch.Tensor | None
    keep: bool
