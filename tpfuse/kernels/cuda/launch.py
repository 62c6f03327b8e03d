"""Launching a kernel that takes one structure by value, and the tensor maps in it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from tpfuse.errors import BuildError, LaunchError
from tpfuse.kernels.cuda.build import done, driver

_DATA_TYPES = {
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}  # CUtensorMapDataType
_NO_INTERLEAVE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_OUTSIDE = 0, 3, 3, 0
_ALIGNMENT = 128  # of a tensor map, in memory and in a structure


class TensorMap(ctypes.Structure):
    """CUtensorMap: what the tensor memory accelerator has to know of a matrix, or of planes of matrices."""

    _fields_ = (("opaque", ctypes.c_uint8 * 128),)


@functools.lru_cache(maxsize=4096)  # a model's calls come again with the same addresses
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
    memory = ctypes.create_string_buffer(2 * _ALIGNMENT)
    there = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    rank = len(sizes)
    # Not by cuda.bindings: there a tensor map lies wherever Python puts it.
    status = _libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(there),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*pitches),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    if status:
        raise LaunchError(f"the driver: cuTensorMapEncodeTiled: {status}, for {sizes} at {address:#x}, {pitches}, {box}")
    return TensorMap.from_buffer_copy(ctypes.string_at(there, _ALIGNMENT))


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Parameters:
    """A structure as a kernel's only parameter, on a boundary as tensor maps have to be."""

    def __init__(self, kind: type[ctypes.Structure]) -> None:
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(kind) + 2 * _ALIGNMENT)  # C pads it at its end
        self.address = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        self.fields: Any = kind.from_address(self.address)
        self._pointers = (ctypes.c_void_p * 1)(self.address)

    def launch(self, kernel: int, blocks: int, threads: int, shared_bytes: int, stream: int) -> None:
        """The driver copies the structure: it may be changed when this returns."""
        pointers = ctypes.addressof(self._pointers)
        try:
            done(driver().cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, 0))
        except BuildError as error:
            raise LaunchError(str(error)) from error
