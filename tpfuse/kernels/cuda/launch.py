"""Launching a kernel that takes one structure by value, and the tensor maps in it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tpfuse.kernels.cuda.build import done, driver

_DATA_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32", torch.uint8: "UINT8"}


class TensorMap(ctypes.Structure):
    """CUtensorMap: what the tensor memory accelerator has to know of a matrix, or of planes of matrices."""

    _fields_ = (("opaque", ctypes.c_uint8 * 128),)


def tensor_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    pitches: tuple[int, ...],
    box: tuple[int, ...],
) -> TensorMap:
    """Boxes of a tensor in memory, to or from shared memory in rows of 128 bytes, swizzled. Outside it reads as zero.

    sizes    elements per dimension, the contiguous one first
    pitches  bytes between neighbours in every further dimension, multiples of 16
    box      elements per dimension
    """
    cuda = driver()
    made = done(
        cuda.cuTensorMapEncodeTiled(
            getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DATA_TYPES[dtype]}"),
            len(sizes),
            address,
            [cuda.cuuint64_t(size) for size in sizes],
            [cuda.cuuint64_t(pitch) for pitch in pitches],
            [cuda.cuuint32_t(size) for size in box],
            [cuda.cuuint32_t(1)] * len(sizes),
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(made.getPtr(), 128))


class Parameters:
    """A structure as a kernel's only parameter, on a 64-byte boundary, as tensor maps have to be."""

    def __init__(self, kind: type[ctypes.Structure]) -> None:
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(kind) + 128)  # C pads it at its end
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self.fields: Any = kind.from_address(self.address)
        self._pointers = (ctypes.c_void_p * 1)(self.address)

    def launch(self, kernel: int, blocks: int, threads: int, shared_bytes: int, stream: int) -> None:
        """The driver copies the structure: it may be changed when this returns."""
        pointers = ctypes.addressof(self._pointers)
        done(driver().cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, 0))
