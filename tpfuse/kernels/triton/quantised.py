"""What the kernels over rows make of normed vectors: FP8 values and scales, by the device functions of quantize.py.

A thread has the eight elements of each of its vectors, so that only the greatest magnitude moves between threads.
"""

import triton
import triton.language as tl

from tpfuse.kernels.triton.quantize import ROW, STATIC, _divide, _magnitude, _scale_of
from tpfuse.kernels.triton.row import normalize, store_normed
from tpfuse.kernels.triton.vectors import BF16, highs, joins, lows

E4M3, E5M2 = tl.constexpr(1), tl.constexpr(2)  # FP8: 0 where nothing is quantised
PER_VECTOR = tl.constexpr(8)  # elements of 16 bits


@triton.jit
def greatest_of(words, KIND: tl.constexpr):
    """Greatest magnitude of each vector's elements, as the bits of an fp32: so a NaN is above all."""
    a, b = lows(words, KIND), highs(words, KIND)
    first = tl.maximum(_greater_bits(a[0], b[0]), _greater_bits(a[1], b[1]))
    return tl.maximum(first, tl.maximum(_greater_bits(a[2], b[2]), _greater_bits(a[3], b[3])))


@triton.jit
def _greater_bits(a, b):
    return tl.maximum(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def finish(
    h, root, factors, most, normed, at, values, scales, given, row, part, k, mask, vectors, count, floor,
    BLOCK: tl.constexpr, KIND: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
    NORMED: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, NARROW: tl.constexpr,
    FLOOR: tl.constexpr, ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Normalise vectors of a row, and store them, or what they are quantised to, or both.

    h, factors  (lows, highs) of the sum and of the weight    most  ``greatest_of`` other vectors of the row, else zero
    at  byte offsets in a matrix like the input    the others  as ``quantize_vectors`` has them
    """
    h = normalize(h, root, factors, KIND, WEIGHT, ROUND)
    if NORMED:
        store_normed(h, normed, at, mask, KIND, WIDE_OUT)
    if FP8:
        words = joins(h[0], h[1], KIND)
        most = tl.maximum(most, greatest_of(words, KIND))
        quantize_vectors(
            words, most, given, scales, values, row, part, k, mask, vectors, count, floor,
            BLOCK, KIND, FP8, GROUP, MOST, NARROW, FLOOR, ZERO_TO_ONE, RECIPROCAL, POWER,
        )  # fmt: skip


@triton.jit
def quantize_vectors(
    words, most, given, scales, values, row, part, k, mask, vectors, count, floor,
    BLOCK: tl.constexpr, KIND: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
    NARROW: tl.constexpr, FLOOR: tl.constexpr, ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Store BLOCK normed vectors of a row as FP8, with their scales.

    most     ``greatest_of`` these, or, where the row has one scale, of all of its vectors in any arrangement
    part     of the row, in vectors, where these begin, and ``count``, how many are in it; ``vectors`` are in the row
    k, mask  the vectors' numbers in the row
    """
    places = scales.to(tl.pointer_type(tl.float32))
    DTYPE: tl.constexpr = tl.bfloat16 if KIND == BF16 else tl.float16
    if GROUP == STATIC:
        scale = tl.load(given.to(tl.pointer_type(tl.float32)) + tl.arange(0, 1))
    elif GROUP == ROW:
        most = _magnitude(most.to(tl.float32, bitcast=True), 0)
        scale = _scale_of(most, floor, MOST, NARROW, FLOOR, ZERO_TO_ONE, POWER, DTYPE)
        tl.store(places + row + tl.arange(0, 1), scale)
    else:
        PER_GROUP: tl.constexpr = GROUP // PER_VECTOR
        GROUPS: tl.constexpr = BLOCK // PER_GROUP
        most = tl.where(mask == 1, most, 0x3F800000)  # one where there are no elements
        most = _magnitude(tl.reshape(most.to(tl.float32, bitcast=True), (GROUPS, PER_GROUP)), 1)
        group = _scale_of(most, floor, MOST, NARROW, FLOOR, ZERO_TO_ONE, POWER, DTYPE)
        number = tl.arange(0, GROUPS)[:, None]
        tl.store(
            places + (row * (vectors // PER_GROUP) + part // PER_GROUP + number), group, mask=number < count // PER_GROUP
        )
        scale = tl.reshape(tl.broadcast_to(group, (GROUPS, PER_GROUP)), (BLOCK,))
    lower, upper = lows(words, KIND), highs(words, KIND)
    first = _word(lower[0], upper[0], lower[1], upper[1], scale, FP8, GROUP, RECIPROCAL)
    second = _word(lower[2], upper[2], lower[3], upper[3], scale, FP8, GROUP, RECIPROCAL)
    _store8(values + (row * vectors + k) * PER_VECTOR, mask, first, second)


@triton.jit
def _word(a, b, c, d, scale, FP8: tl.constexpr, GROUP: tl.constexpr, RECIPROCAL: tl.constexpr):
    """Four elements by their scale, as FP8 (saturated), in a word. Not joined: that would move them between threads."""
    GIVEN: tl.constexpr = GROUP == STATIC
    BY: tl.constexpr = RECIPROCAL and not GIVEN
    a, b = _divide(a, scale, BY, GIVEN), _divide(b, scale, BY, GIVEN)
    c, d = _divide(c, scale, BY, GIVEN), _divide(d, scale, BY, GIVEN)
    FORMAT: tl.constexpr = "e4m3x2" if FP8 == E4M3 else "e5m2x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite."
        + FORMAT
        + ".f32 a, $2, $1; cvt.rn.satfinite."
        + FORMAT
        + ".f32 b, $4, $3; mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _store8(address, mask, lower, upper):
    tl.inline_asm_elementwise(
        "{ .reg .pred q; setp.eq.b32 q, $2, 1; @q st.global.v2.b32 [$1], {$3, $4}; mov.b32 $0, 0; }",
        "=r,l,r,r,r",
        [address, mask, lower, upper],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
