"""Tensors as kernels read them: in vectors of 16 bytes."""

from __future__ import annotations

from typing import TypeVar

import torch

from tpfuse.comm.arena import VECTOR_BYTES

_Tensor = TypeVar("_Tensor", torch.Tensor, torch.Tensor | None)


def aligned(tensor: _Tensor) -> _Tensor:
    """Contiguous and on a 16-byte boundary; a copy where it is not. None stays None."""
    if tensor is None or (tensor.is_contiguous() and not tensor.data_ptr() % VECTOR_BYTES):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
