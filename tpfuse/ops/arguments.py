"""Checks of what callers give to the operations: a ValueError says what is required and what was given.

They are some comparisons each, for an operation is called hundreds of times in a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def check_tensors(op: str, needed: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError: one is no tensor of plain strided memory on this rank. Optional ones may be None."""
    for name, given in needed.items():
        if type(given) is not torch.Tensor and type(given) is not torch.nn.Parameter:  # what most are, quickly told
            if not isinstance(given, torch.Tensor):
                raise ValueError(f"{op}: {name} must be a tensor, got {told(given)}")
            if isinstance(given, DTensor):
                raise ValueError(f"{op}: {name} must be this rank's own tensor, got a DTensor: give {name}.to_local()")
        if given.layout is not torch.strided:
            raise ValueError(f"{op}: {name} must be strided (dense), got {given.layout}")
    if optional:
        check_tensors(op, {name: given for name, given in optional.items() if given is not None})


def check_number(op: str, name: str, given: Any, least: float = -math.inf) -> None:
    """Raises ValueError: it is no finite number, or a smaller one."""
    if isinstance(given, bool) or not isinstance(given, _NUMBERS) or not least <= given < math.inf:
        what = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
        raise ValueError(f"{op}: {name} must be {what}, got {told(given)}")


def check_whole(op: str, name: str, given: Any) -> None:
    """Raises ValueError: it is no whole number."""
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        raise ValueError(f"{op}: {name} must be a whole number, got {told(given)}")


def check_floating(op: str, name: str, given: Any) -> None:
    """Raises ValueError: it is neither None nor a floating dtype."""
    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise ValueError(f"{op}: {name} must be a floating torch.dtype or None, got {told(given)}")


def told(given: object) -> str:
    """A value for a message: a tensor by dtype and shape."""
    if isinstance(given, torch.Tensor):
        return f"{given.dtype} {list(given.shape)}"
    if given is None or isinstance(given, torch.dtype):
        return str(given)
    text = repr(given)
    return f"{type(given).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
