"""RMSNorms on one GPU that Inductor would spend two kernels on: two norms in one launch; a norm and padding of its rows.

A program has one row, in registers. Every step rounds where the model's own operations round.

D  row length
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _normed(
    h, weight, column, mask, size, eps, offset,
    DTYPE: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """h [BLOCK], zero where it is masked."""
    wide = h.to(tl.float32)
    y = wide * tl.math.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if ROUND:
        y = y.to(DTYPE).to(tl.float32)
    if WEIGHT:
        w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        y *= w + offset if OFFSET else w
    return y.to(DTYPE)


@triton.jit
def _row(
    x, y, weight, row, size, stride, eps, offset,
    BLOCK: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    mask = column < size
    h = tl.load(x + row * stride + column, mask=mask, other=0.0)
    tl.store(
        y + row * size + column,
        _normed(h, weight, column, mask, size, eps, offset, DTYPE, WEIGHT, OFFSET, ROUND),
        mask=mask,
    )


@triton.jit
def tpfuse_dual_rms_norm(
    a, b, a_weight, b_weight, a_out, b_out, rows, a_size, b_size, a_stride, b_stride, a_eps, b_eps, offset,
    A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_WEIGHT: tl.constexpr, B_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROUND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row of a, or one of b."""
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if row < rows:
        _row(a, a_out, a_weight, row, a_size, a_stride, a_eps, offset, A_BLOCK, A_WEIGHT, OFFSET, ROUND)
    else:
        _row(b, b_out, b_weight, row - rows, b_size, b_stride, b_eps, offset, B_BLOCK, B_WEIGHT, OFFSET, ROUND)


@triton.jit
def tpfuse_rms_norm_pad(
    x, residual, weight, padded, normed, total, size, padded_size, stride, eps, offset,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
    KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row: [+ residual, stored as total] -> RMSNorm [stored as normed] -> padded with zeros."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    DTYPE: tl.constexpr = x.dtype.element_ty
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    h = tl.load(x + row * stride + column, mask=mask, other=0.0)
    if RESIDUAL:
        h = (h.to(tl.float32) + tl.load(residual + row * size + column, mask=mask, other=0.0).to(tl.float32)).to(DTYPE)
        tl.store(total + row * size + column, h, mask=mask)
    y = _normed(h, weight, column, mask, size, eps, offset, DTYPE, WEIGHT, OFFSET, ROUND)
    if KEEP:
        tl.store(normed + row * size + column, y, mask=mask)
    y = tl.where(mask, y, 0.0).to(DTYPE)  # a row of NaN has no NaN behind it
    tl.store(padded + row * padded_size + column, y, mask=column < padded_size)
