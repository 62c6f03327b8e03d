"""RMSNorm of heads and rotary embedding on one GPU, by our Triton kernel: what it cannot do, and its launch.

B  batch     T  tokens of a sequence     H  heads     D  head size     R  elements of a head that are rotated
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.launch import begins_early, launch, power_of_two
from tpfuse.kernels.quantize import norm_cannot

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
_FEW_TOKENS = 128


def cannot(
    q: torch.Tensor,
    k: torch.Tensor,
    tables: Sequence[torch.dtype | None],
    weights: Sequence[torch.dtype | None] = (),
    normed_dtype: torch.dtype | None = None,
) -> str:
    """Why the kernel cannot take these, with tables and weights of those dtypes; "" if it can."""
    if q.device.type != "cuda":
        return f"no kernel for {q.device.type}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "compute capability 8.0 is needed"
    if q.dtype not in DTYPES or k.dtype is not q.dtype:
        return f"dtype {q.dtype if q.dtype not in DTYPES else k.dtype}"
    if tables[0] not in (q.dtype, torch.float32) or tables[1] is not tables[0]:
        return f"tables of {tables[0]} and {tables[1]} for heads of {q.dtype}"
    if q.shape[-1] > LARGEST_HEAD:
        return f"heads of {q.shape[-1]} elements"
    return next(filter(None, (norm_cannot(q.dtype, weight, normed_dtype) for weight in (None, *weights))), "")


def why_not_faster(stored: bool) -> str:
    """Why Inductor's kernels are taken where both can run; "" where ours was measured to be faster (H200, any rows).

    stored  what is read lies in memory anyway, rather than being computed for it
    """
    return "" if stored else "Inductor computes what it reads in the same kernel"


def empty(x: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """What a result for x [..., T, H, D] is written to: as contiguous [..., H, T, D] where heads are first in memory."""
    if not heads_first:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = (*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1])
    return torch.empty(shape, dtype=x.dtype, device=x.device).transpose(-3, -2)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary: int,
    interleaved: bool,
    wide: bool,
    heads_first: bool,
    norm: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    normed_dtype: torch.dtype | None,
    layout: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.qk_norm_rope`` (see there), where ``cannot`` finds nothing.

    layout  (heads, warps) of a program; None: as measured
    """
    from tpfuse.kernels.triton.rotary import tpfuse_qk_norm_rope as kernel

    made = empty(q, heads_first), empty(k, heads_first)
    tokens = q.shape[:-2].numel()
    tile, warps = layout or _layout(q.shape[-1], tokens, max(q.shape[-2], k.shape[-2]))
    blocks = [-(-x.shape[-2] // tile) for x in (q, k)]
    q, k = _in_rows(q), _in_rows(k)
    cos, sin = _alike(cos, sin)
    arguments = (
        *(q, k, *made, aligned(q_weight), aligned(k_weight), cos, sin),
        *(q.shape[-3], q.shape[-2], k.shape[-2], blocks[0], sum(blocks)),
        *(*_steps(q), *_steps(k), *_table_steps(cos), *_table_steps(sin)),
        *(cos.stride(-1), float(eps), float(weight_offset)),
    )
    normed = (norm, q_weight is not None, bool(weight_offset), normed_dtype == q.dtype)
    constants = (tile, *_constants(q, cos, rotary, interleaved, wide, heads_first, normed))
    _start(kernel, tokens * sum(blocks), arguments, constants, q, warps)
    return made


def rope_kvcache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    heads_dim: int,
    own_page: bool,
    rotary: int,
    interleaved: bool,
    wide: bool,
    heads_first: bool,
    norm: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    normed_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The operation of ``tpfuse.ops.rope_kvcache`` (see there), where ``cannot`` finds nothing."""
    from tpfuse.kernels.triton.rotary import tpfuse_rope_kvcache as kernel

    made, tokens = empty(q, heads_first), q.shape[:-2].numel()
    tile, warps = _layout(q.shape[-1], tokens, max(q.shape[-2], k.shape[-2]))
    blocks = [-(-x.shape[-2] // tile) for x in (q, k)]
    q, k, v = _in_rows(q), _in_rows(k), _in_rows(v)
    cos, sin = _alike(cos, sin)
    places = 3 - heads_dim
    caches = [(c.stride(0), c.stride(places), c.stride(heads_dim)) for c in (k_cache, v_cache)]
    programs = (blocks[0], blocks[1], blocks[0] + 2 * blocks[1])
    slot_end = k_cache.shape[places] * (1 if own_page else k_cache.shape[0])
    arguments = (
        *(q, k, v, made, k_cache, v_cache, slots, k_scale, v_scale, aligned(q_weight), aligned(k_weight), cos, sin),
        *(q.shape[-3], q.shape[-2], k.shape[-2], *programs, *_steps(q), *_steps(k), *_steps(v)),
        *(*_table_steps(cos), *_table_steps(sin), cos.stride(-1), float(eps), float(weight_offset)),
        *(
            slots.stride(0) if slots.dim() == 2 else 0,
            slots.stride(-1),
            slot_end,
            k_cache.shape[places],
            *caches[0],
            *caches[1],
        ),
    )
    normed = (norm, q_weight is not None, bool(weight_offset), normed_dtype == q.dtype)
    constants = (tile, *_constants(q, cos, rotary, interleaved, wide, heads_first, normed))
    _start(kernel, tokens * programs[-1], arguments, constants, q, warps, own_page, k_scale is not None)
    return made


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _alike(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (cos, sin) if cos.stride(-1) == sin.stride(-1) else (cos.contiguous(), sin.contiguous())


def _constants(q: torch.Tensor, cos: torch.Tensor, rotary: int, interleaved: bool, wide: bool, first: bool, norm: tuple):
    """Of the kernels, from HEADS_FIRST on."""
    size = q.shape[-1]
    half, tail = power_of_two(rotary // 2), power_of_two(size - rotary) if rotary < size else 0
    narrow, shared = cos.dtype == q.dtype and not wide, cos.shape[-1] < rotary
    return first, size, rotary, interleaved, shared, narrow, *norm, half, tail, power_of_two(size)


def _start(kernel: Any, programs: int, arguments: tuple, constants: tuple, q: torch.Tensor, warps: int, *more: Any) -> None:
    early = begins_early(q.device)
    # Fused multiply-adds would leave roundings out that models have.
    options = {"num_warps": warps, "launch_pdl": early, "enable_fp_fusion": False}
    launch(kernel, (programs, 1, 1), arguments, (*constants, early, *more), **options)


def _steps(x: torch.Tensor) -> tuple[int, int, int]:
    """From sequence to sequence, token to token, head to head."""
    return x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2)


def _layout(size: int, tokens: int, heads: int) -> tuple[int, int]:
    """(heads, warps) of a program. Measured on an H200: few tokens want many programs, many want more work for each.

    A thread has the same elements of a head either way, so that sums do not depend on the number of tokens.
    """
    width = power_of_two(size)
    tile = max(1, min((512 if tokens <= _FEW_TOKENS else 2048) // width, power_of_two(heads)))
    return tile, max(1, tile * width // 512)


def _table_steps(table: torch.Tensor) -> tuple[int, int]:
    """From sequence to sequence, and from token to token; 0 where all read the same."""
    batch = table.stride(0) if table.dim() == 3 and table.shape[0] > 1 else 0
    return batch, table.stride(-2) if table.shape[-2] > 1 else 0
