"""A launch of ``split`` or ``ring``: which variant is compiled, and a path of a few microseconds.

A launch is planned once per kind of call (shape, dtypes, options, group) and then only filled with addresses.

T  rows (tokens)     D  hidden size     vector  16 bytes
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from tpfuse.comm.arena import SLOT_BYTES, SPLIT, STATE_BYTES, VECTOR_BYTES, Alone, Arena
from tpfuse.kernels.layout import layout
from tpfuse.kernels.triton.quantised import E4M3, E5M2
from tpfuse.kernels.triton.ring import ring
from tpfuse.kernels.triton.split import split
from tpfuse.kernels.triton.vectors import BF16, FP16, FP32
from tpfuse.tables import Choice

_KINDS = {torch.bfloat16: BF16.value, torch.float16: FP16.value, torch.float32: FP32.value}
_FP8 = {None: 0, torch.float8_e4m3fn: E4M3.value, torch.float8_e5m2: E5M2.value}
_NO_SWITCHES = (0, 0.0, False, False, False, False, False)
_KERNELS = {"split": split, "ring": ring}
_KEPT_BYTES = 4 << 20  # of a message; of more, keeping it in the cache was seen to win nothing (H200)
_ADDRESS = 1 << 40  # any number that is typed as 64 bits


@dataclasses.dataclass(frozen=True)
class Options:
    """What of the operation a kernel is compiled for."""

    dtype: torch.dtype
    norm: bool
    weight: int = 0
    wide_out: bool = False
    round: bool = False
    bias: bool = False
    scale: bool = False
    factor: bool = False
    residual: bool = False
    normed: bool = True  # whether it is stored
    fp8: torch.dtype | None = None
    switches: tuple = _NO_SWITCHES  # Quantisation.switches


@dataclasses.dataclass(frozen=True)
class Plan:
    """A compiled kernel on its grid. ``launch(*arguments, stream=)`` takes all the kernel's parameters in order."""

    launch: Callable[..., None]
    constants: tuple[Any, ...]
    region: int
    state: int
    rows: int
    vectors: int


@functools.cache
def _compile(
    kernel: JITFunction, device: int, warps: int, registers: int | None, constants: tuple[tuple[str, Any], ...]
) -> Any:
    run_time = [p.name for p in kernel.params if not p.is_constexpr]
    numbers = {"rank", "rows", "vectors", "tag"}
    dummies = [
        0.5 if n in ("inverse", "eps", "scale", "offset", "floor") else 2 if n in numbers else _ADDRESS for n in run_time
    ]
    with torch.cuda.device(device):
        compiled = kernel.warmup(
            *dummies,
            **dict(constants),
            grid=(1,),
            num_warps=warps,
            maxnreg=registers,
        )
        compiled._init_handles()
    return compiled


def plan(
    name: str,
    arena: Arena | Alone,
    rows: int,
    vectors: int,
    options: Options,
    choice: Choice | None = None,
    wait: bool = True,
) -> Plan:
    """The launch of the kernel ``name`` ("split" or "ring") for ``rows`` rows of ``vectors`` vectors.

    choice  how it is laid out; None: by rule of thumb
    wait    False: do not wait for peers' data (only for a test that has to see that go wrong)
    """
    kernel, region = _KERNELS[name], getattr(arena, name)
    parts = SPLIT if name == "split" else 1
    laid = layout(rows, vectors, parts, region.size, arena.multiprocessors, choice or Choice(name))
    assert parts == 1 or rows <= region.size
    constants = (
        ("WORLD", arena.world),
        ("BLOCK", laid.vectors),
        ("PACK", min(4, laid.vectors_per_thread) if wait else 0),
        ("SLOT_BYTES", SLOT_BYTES),
        ("KEEP", rows * vectors * VECTOR_BYTES <= _KEPT_BYTES),
        ("KIND", _KINDS[options.dtype]),
        ("NORM", options.norm),
        ("WEIGHT", options.weight),
        ("WIDE_OUT", options.wide_out),
        ("ROUND", options.round),
        ("BIAS", options.bias),
        ("SCALE", options.scale),
        ("FACTOR", options.factor),
        ("RESIDUAL", options.residual),
        ("NORMED", options.normed),
        ("FP8", _FP8[options.fp8]),
        *zip(("GROUP", "MOST", "NARROW", "FLOOR", "ZERO_TO_ONE", "RECIPROCAL", "POWER"), options.switches, strict=True),
    )
    compiled = _compile(kernel, arena.device.index, laid.warps, laid.registers, constants)
    values = tuple(value for _, value in constants)
    return Plan(compiled[(laid.blocks, 1, 1)], values, region.offset, arena.base + region.state, rows, vectors)


assert STATE_BYTES == 8 and SPLIT == 4  # as the kernels have them
