"""Launching our Triton kernels that stand on one GPU, where the host's time counts."""

from __future__ import annotations

import functools
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple, constants: tuple, **options: Any) -> None:
    """Like ``kernel[grid](...)``, in a third of the host's time: what is compiled is found by what it is compiled for.

    options  Triton's, such as ``num_warps``
    """
    tensors = next(a for a in arguments if isinstance(a, torch.Tensor))
    key = (kernel, tensors.device, constants, *options.items(), *map(_kind, arguments))
    found = _compiled.get(key)
    with torch.cuda.device(tensors.device):
        if found is None:
            names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
            found = kernel.warmup(*arguments, **dict(zip(names, constants, strict=True)), grid=(1,), **options)
            found._init_handles()
            _compiled[key] = found
        found[grid](*arguments, *constants, stream=torch.cuda.current_stream().cuda_stream)


@functools.cache
def begins_early(device: torch.device) -> bool:
    """Whether kernels may be launched while the one before still runs, for whose end they then wait."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


_compiled: dict[tuple, Any] = {}


def _kind(argument: Any) -> Any:
    """What of an argument Triton compiles a kernel for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return (argument == 1, argument % 16 == 0, argument >= 1 << 31) if isinstance(argument, int) else type(argument)


def power_of_two(size: int) -> int:
    """The least one that is no smaller."""
    return 1 << (size - 1).bit_length()
