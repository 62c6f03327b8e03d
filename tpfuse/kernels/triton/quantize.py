"""Rows to FP8 on one GPU: RMSNorm and then quantisation, activation and then quantisation, each in one pass over memory.

A program has one row, or a piece of one where scales do not span rows; it stays in registers from the load to the last
store. Every step rounds where the model's own operations round: bytes are those of the unfused computation, but for the
last bit of a norm's sum or of an exponential.

D  row length     GROUP  elements that share a scale
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

STATIC, ROW = tl.constexpr(0), tl.constexpr(-1)  # GROUP: one scale is given; one is computed for each row
SILU, GELU_TANH = tl.constexpr(0), tl.constexpr(1)
#: Reciprocals and remainders of scales outside may leave the range of normal numbers.
_LEAST, _MOST = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)


@triton.jit
def _begin(EARLY: tl.constexpr):
    """EARLY: launched while the kernel before still runs, and waits for its results; so may the next one be."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def _magnitude(y, axis: tl.constexpr):
    """Greatest magnitude along an axis; NaN where there is one (compared as integers, where NaN is above all)."""
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.reduce(bits, axis, _greater, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(
    most, floor, MOST: tl.constexpr, NARROW: tl.constexpr, FLOOR: tl.constexpr, ZERO_TO_ONE: tl.constexpr,
    POWER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The scale for values of the greatest magnitude ``most``, as tpfuse.ops.quantize_fp8.dynamic_scale."""
    if FLOOR:
        most = tl.where(most < floor, floor, most)  # keeps NaN
    if ZERO_TO_ONE:
        most = tl.where(most > 0.0, most, 1.0)
    scale = most * (1.0 / MOST)  # as torch and Inductor divide by a number on CUDA
    if NARROW:
        scale = scale.to(DTYPE).to(tl.float32)
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        exact = (bits & 0x7FFFFF) == 0
        up = tl.where(exact, bits, (bits & 0x7F800000) + 0x800000)
        scale = tl.where(scale < 3e38, up.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def _divide(y, scale, RECIPROCAL: tl.constexpr, GIVEN: tl.constexpr):
    """y / scale, rounded as IEEE does (or y times the rounded reciprocal): from the reciprocal, by one step of Newton.

    Powers of two bring extreme scales to where reciprocals and remainders are normal numbers. What is lost of y is of
    quotients that are zero in FP8.
    """
    if RECIPROCAL:
        scaled = y * tl.math.div_rn(1.0, scale)
    else:
        size = tl.abs(scale)
        factor = tl.where(size < _LEAST, _MOST, tl.where(size > _MOST, _LEAST, 1.0))
        near = scale * factor
        reciprocal = tl.math.div_rn(1.0, near)
        wide = y * factor
        scaled = wide * reciprocal
        if GIVEN:  # infinite values may meet a finite scale: keep the remainder a number
            scaled = tl.clamp(scaled, -3e38, 3e38)
        rest = tl.fma(-scaled, tl.minimum(near, 3e38), wide)  # an infinite scale gives zeros
        corrected = tl.fma(rest, reciprocal, scaled)
        sign = (y.to(tl.int32, bitcast=True) ^ scale.to(tl.int32, bitcast=True)) & -0x80000000  # lost where the rest is 0
        scaled = (corrected.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return scaled


@triton.jit
def _at_least(scale, LEAST: tl.constexpr):
    return tl.where(scale < LEAST, LEAST, scale) if LEAST > 0 else scale  # keeps NaN


@triton.jit
def _quantize(
    y, scale_in, scales, values, at, scale_at, mask, scale_mask, floor,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, NARROW: tl.constexpr, FLOOR: tl.constexpr,
    ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr, LEAST: tl.constexpr = 0.0, scale_step=1,
):  # fmt: skip
    """Store y [BLOCK], of the model's dtype, as FP8 at the places ``at``, and its scales from ``scale_at`` on.

    scale_step  from a group's scale to the next one's
    """
    DTYPE: tl.constexpr = y.dtype
    FP8: tl.constexpr = values.dtype.element_ty
    wide = y.to(tl.float32)
    if GROUP == STATIC:
        scaled = _divide(wide, tl.load(scale_in + tl.arange(0, 1)), False, True)
    elif GROUP == ROW:
        scale = _scale_of(_magnitude(wide, 0), floor, MOST, NARROW, FLOOR, ZERO_TO_ONE, POWER, DTYPE)
        tl.store(scales + scale_at + tl.arange(0, 1), scale)
        scaled = _divide(wide, _at_least(scale, LEAST), RECIPROCAL, False)
    else:
        groups = tl.reshape(wide, (BLOCK // GROUP, GROUP))
        scale = _scale_of(_magnitude(groups, 1), floor, MOST, NARROW, FLOOR, ZERO_TO_ONE, POWER, DTYPE)
        places = scale_at + tl.arange(0, BLOCK // GROUP)[:, None] * scale_step
        tl.store(scales + places, scale, mask=tl.arange(0, BLOCK // GROUP)[:, None] < scale_mask)
        scaled = tl.reshape(_divide(groups, _at_least(scale, LEAST), RECIPROCAL, False), (BLOCK,))
    tl.store(values + at, scaled.to(FP8), mask=mask)  # the conversion saturates


@triton.jit
def _norm_row(
    x, residual, w, normed, total, values, scales, scale_in, row, size, row_stride, scale_row, scale_step,
    eps, offset, floor,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
    KEEP: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, NARROW: tl.constexpr, FLOOR: tl.constexpr,
    ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One row: [+ residual, stored as total] -> RMSNorm [stored as normed] -> FP8."""
    row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    DTYPE: tl.constexpr = x.dtype.element_ty
    h = tl.load(x + row * row_stride + column, mask=mask, other=0.0)
    if RESIDUAL:
        h = (h.to(tl.float32) + tl.load(residual + row * size + column, mask=mask, other=0.0).to(tl.float32)).to(DTYPE)
        tl.store(total + row * size + column, h, mask=mask)
    wide = h.to(tl.float32)
    y = wide * tl.math.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if ROUND:
        y = y.to(DTYPE).to(tl.float32)
    if WEIGHT:
        y *= w.to(tl.float32) + offset if OFFSET else w.to(tl.float32)
    y = y.to(DTYPE)
    if KEEP:
        tl.store(normed + row * size + column, y, mask=mask)
    groups = size // GROUP if GROUP > 0 else 1
    _quantize(
        y, scale_in, scales, values, row * size + column, row * scale_row, mask, groups, floor,
        BLOCK, GROUP, MOST, NARROW, FLOOR, ZERO_TO_ONE, RECIPROCAL, POWER, LEAST, scale_step,
    )  # fmt: skip


@triton.jit
def tpfuse_rms_norm_quantize_fp8(
    x, residual, weight, normed, total, values, scales, scale_in, rows, size, row_stride, scale_row, scale_step,
    eps, offset, floor,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr, ROUND: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
    NARROW: tl.constexpr, FLOOR: tl.constexpr, ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """A row, or with STAGES every so many rows one, of which the next is on its way through shared memory."""
    _begin(EARLY)
    w = 0.0
    if WEIGHT:  # first, for it is on its way while the row is summed
        w = tl.load(weight + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < size, other=0.0)
    if STAGES == 0:
        _norm_row(
            x, residual, w, normed, total, values, scales, scale_in, tl.program_id(0), size, row_stride, scale_row,
            scale_step, eps, offset, floor, BLOCK, RESIDUAL, WEIGHT, OFFSET, ROUND, KEEP, GROUP, MOST, NARROW, FLOOR,
            ZERO_TO_ONE, RECIPROCAL, POWER, LEAST,
        )  # fmt: skip
    else:
        for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
            _norm_row(
                x, residual, w, normed, total, values, scales, scale_in, row, size, row_stride, scale_row,
                scale_step, eps, offset, floor, BLOCK, RESIDUAL, WEIGHT, OFFSET, ROUND, KEEP, GROUP, MOST, NARROW, FLOOR,
                ZERO_TO_ONE, RECIPROCAL, POWER, LEAST,
            )  # fmt: skip


@triton.jit
def _logistic(x):
    """1 / (1 + exp(-x)) to the last bits, zero below 2^-126. In few instructions, which bind rows of many elements."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def tpfuse_act_mul_quantize_fp8(
    gate, up, products, values, scales, scale_in, size, gate_stride, up_stride, scale_row, scale_step, floor,
    BLOCK: tl.constexpr, EARLY: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr,
    MOST: tl.constexpr, NARROW: tl.constexpr, FLOOR: tl.constexpr, ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr,
    POWER: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A row, or BLOCK elements of it: act(gate) * up [stored as products] -> FP8."""
    _begin(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    DTYPE: tl.constexpr = gate.dtype.element_ty
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ACT == SILU:
        a = g * _logistic(g)
    else:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        a = g * (1.0 - _logistic(-2.0 * inner))  # rounded like 1 + tanh(inner)
    y = (a.to(DTYPE).to(tl.float32) * u).to(DTYPE)
    if KEEP:
        tl.store(products + row * size + column, y, mask=mask)
    first = piece * (BLOCK // GROUP) if GROUP > 0 else 0
    groups = size // GROUP - first if GROUP > 0 else 1
    _quantize(
        y, scale_in, scales, values, row * size + column, row * scale_row + first * scale_step, mask, groups, floor,
        BLOCK, GROUP, MOST, NARROW, FLOOR, ZERO_TO_ONE, RECIPROCAL, POWER, LEAST, scale_step,
    )  # fmt: skip


@triton.jit
def tpfuse_quantize_fp8(
    x, values, scales, scale_in, size, row_stride, scale_row, scale_step, floor,
    BLOCK: tl.constexpr, EARLY: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, NARROW: tl.constexpr,
    FLOOR: tl.constexpr, ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A row, or BLOCK elements of it -> FP8."""
    _begin(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    y = tl.load(x + row * row_stride + column, mask=mask, other=0.0)
    first = piece * (BLOCK // GROUP) if GROUP > 0 else 0
    groups = size // GROUP - first if GROUP > 0 else 1
    _quantize(
        y, scale_in, scales, values, row * size + column, row * scale_row + first * scale_step, mask, groups,
        floor, BLOCK, GROUP, MOST, NARROW, FLOOR, ZERO_TO_ONE, RECIPROCAL, POWER, LEAST, scale_step,
    )  # fmt: skip
