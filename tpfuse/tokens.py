"""How many tokens a call has, and which range of counts it falls into. Decided outside Dynamo, on the real arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_USUAL_NAMES = ("input_ids", "inputs_embeds")


def count_tokens(forward: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None) -> int:
    """Tokens (rows) of a call of ``forward``.

    name  the argument that counts them; None: ``input_ids``, ``inputs_embeds``, else the first tensor given
    All dimensions of an integer tensor are tokens, all but the last of a floating one.
    Raises ValueError: ``name`` was given and is no tensor argument of this call, or there is no tensor at all.
    """
    if name is not None:
        given = {**inspect.signature(forward).bind_partial(*args, **kwargs).arguments, **kwargs}
        if not isinstance(given.get(name), torch.Tensor):
            raise ValueError(f"token_count_from={name!r}: this call has no tensor argument of that name")
        return _rows(given[name])
    named = [kwargs[n] for n in _USUAL_NAMES if isinstance(kwargs.get(n), torch.Tensor)]
    tensors = [a for a in (*named, *args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if not tensors:
        raise ValueError("cannot count the tokens of a call without tensor arguments; set token_count_from")
    return _rows(tensors[0])


def _rows(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1] if tensor.is_floating_point() else tensor.shape)


#: More rows than any call has.
MOST_ROWS = 1 << 20


def row_range(boundaries: Sequence[int], index: int) -> tuple[int, int]:
    """The fewest and the most rows of a call in the index-th range."""
    low = boundaries[index - 1] if index else 1
    return low, boundaries[index] - 1 if index < len(boundaries) else MOST_ROWS


def variant_name(boundaries: Sequence[int], index: int) -> str:
    """Name of the index-th range: "all", "rows<256", "256<=rows<4096", "rows>=4096"."""
    if not boundaries:
        return "all"
    if index == 0:
        return f"rows<{boundaries[0]}"
    if index == len(boundaries):
        return f"rows>={boundaries[-1]}"
    return f"{boundaries[index - 1]}<=rows<{boundaries[index]}"
