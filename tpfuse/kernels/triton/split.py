"""All-reduce [+ bias] [* scale] [+ residual] -> RMSNorm [-> FP8] with a row over four blocks: for a few rows.

Each block pushes its part of the row and reads all of it (the norm needs it), so that blocks exchange nothing. It clears
the slot of the call before, which all four have read by then. Source: measured here; the protocol is TensorRT-LLM's
Lamport all-reduce.
"""

import triton
import triton.language as tl

from tpfuse.kernels.triton.lamport import clear, load16, load_word, sendable, store16, store_word, take_parts
from tpfuse.kernels.triton.quantised import finish, greatest_of
from tpfuse.kernels.triton.quantize import ROW
from tpfuse.kernels.triton.row import (
    NO_WEIGHT,
    RUN_TIME,
    SLOTS,
    load_weight,
    modify,
    named,
    normalize,
    push_to_all,
    squares_of,
    sum_over_ranks,
    widen,
    widen_weight,
)
from tpfuse.kernels.triton.vectors import add4, hoist4, joins, sum_once


@triton.jit
def _parts(p, per, j, vectors):
    """Of the parts ``p`` of a row: the number of each vector in the row, and whether it is there."""
    k = p[0] * per + j, p[1] * per + j, p[2] * per + j, p[3] * per + j
    inside = j < per
    return k, (
        (inside & (k[0] < vectors)).to(tl.int32),
        (inside & (k[1] < vectors)).to(tl.int32),
        (inside & (k[2] < vectors)).to(tl.int32),
        (inside & (k[3] < vectors)).to(tl.int32),
    )


@triton.jit
def _other_parts(matrix, at, m):
    """The words of the three parts that are not the block's own."""
    return load16(matrix + at[1], m[1]), load16(matrix + at[2], m[2]), load16(matrix + at[3], m[3])


@triton.jit
def _widen_early(words, KIND: tl.constexpr):
    """(lows, highs), before the wait for the peers and not after it."""
    lower, upper = widen(words, KIND)
    return hoist4(lower), hoist4(upper)


@triton.jit
def _add(own, words, KIND: tl.constexpr):
    lower, upper = widen(words, KIND)
    return add4(own[0], lower), add4(own[1], upper)


@triton.jit
def _sum_parts(
    x, slots, masks, control, tag, epoch, rank,
    WORLD: tl.constexpr, SLOT_BYTES: tl.constexpr, PACK: tl.constexpr, KEEP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """``sum_over_ranks`` of the four parts of a row; with two ranks they wait together."""
    ONE: tl.constexpr = 1 if PACK > 0 else 0
    if WORLD == 2:
        x0, x1 = _widen_early(x[0], KIND), _widen_early(x[1], KIND)
        x2, x3 = _widen_early(x[2], KIND), _widen_early(x[3], KIND)
        v = take_parts(slots, masks, control, tag, epoch, PACK > 0, KEEP)
        return _add(x0, v[0], KIND), _add(x1, v[1], KIND), _add(x2, v[2], KIND), _add(x3, v[3], KIND)
    else:
        return (
            sum_over_ranks(x[0], slots[0], masks[0], control, tag, epoch, rank, WORLD, SLOT_BYTES, ONE, KEEP, KIND)[0],
            sum_over_ranks(x[1], slots[1], masks[1], control, tag, epoch, rank, WORLD, SLOT_BYTES, ONE, KEEP, KIND)[0],
            sum_over_ranks(x[2], slots[2], masks[2], control, tag, epoch, rank, WORLD, SLOT_BYTES, ONE, KEEP, KIND)[0],
            sum_over_ranks(x[3], slots[3], masks[3], control, tag, epoch, rank, WORLD, SLOT_BYTES, ONE, KEEP, KIND)[0],
        )


@triton.jit
def _modify_parts(
    y, r, bias, factor, scale, k, m,
    KIND: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    return (
        modify(y[0], r[0], bias, factor, scale, k[0], m[0], KIND, BIAS, SCALE, FACTOR, RESIDUAL),
        modify(y[1], r[1], bias, factor, scale, k[1], m[1], KIND, BIAS, SCALE, FACTOR, RESIDUAL),
        modify(y[2], r[2], bias, factor, scale, k[2], m[2], KIND, BIAS, SCALE, FACTOR, RESIDUAL),
        modify(y[3], r[3], bias, factor, scale, k[3], m[3], KIND, BIAS, SCALE, FACTOR, RESIDUAL),
    )


@triton.jit
def _greatest_of_others(
    y, root, weight, k, m, offset,
    KIND: tl.constexpr, WEIGHT: tl.constexpr, ROUND: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``greatest_of`` what the three other parts are once they are normalised, where the row has one scale; else zero."""
    most = m[0] & 0
    if FP8 and GROUP == ROW:
        most = tl.maximum(most, _greatest(y[1], root, weight, k[1], m[1], offset, KIND, WEIGHT, ROUND))
        most = tl.maximum(most, _greatest(y[2], root, weight, k[2], m[2], offset, KIND, WEIGHT, ROUND))
        most = tl.maximum(most, _greatest(y[3], root, weight, k[3], m[3], offset, KIND, WEIGHT, ROUND))
    return most


@triton.jit
def _greatest(values, root, weight, k, m, offset, KIND: tl.constexpr, WEIGHT: tl.constexpr, ROUND: tl.constexpr):
    factors = widen_weight(load_weight(weight, k, m, WEIGHT), offset, KIND, WEIGHT)
    normed = normalize(values, root, factors, KIND, WEIGHT, ROUND)
    return greatest_of(joins(normed[0], normed[1], KIND), KIND)


@triton.jit(do_not_specialize=RUN_TIME, repr=named("split"))
def split(
    input, residual, bias, weight, factor, normed, total, values, scales, given, base, next_base, peers, region, state,
    control, rank, rows, vectors, inverse, all_vectors, tag, eps, scale, offset, floor,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr, SLOT_BYTES: tl.constexpr, KEEP: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr, NORMED: tl.constexpr,
    FP8: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, NARROW: tl.constexpr, FLOOR: tl.constexpr,
    ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Four blocks per row, BLOCK vectors per part. A block's state: {calls it took part in, vectors per part in the last}.

    A block's own part comes first everywhere: it is pushed before anything else is loaded, and it alone is written. Where
    a row has one scale, all of it is normalised for that.
    """
    pid = tl.program_id(0)
    tag += pid * 65536
    row, piece = pid >> 2, pid & 3
    j = tl.arange(0, BLOCK)
    per = (vectors + 3) >> 2
    p = piece, (piece + 1) & 3, (piece + 2) & 3, (piece + 3) & 3
    k, m = _parts(p, per, j, vectors)
    start = row * vectors
    at = (start + k[0]) * 16, (start + k[1]) * 16, (start + k[2]) * 16, (start + k[3]) * 16
    SOURCES: tl.constexpr = WORLD - 1
    PART: tl.constexpr = SLOT_BYTES // 4
    slots = base + region + row.to(tl.int64) * (SLOTS * SOURCES * SLOT_BYTES) + j * 16
    state += pid * 8
    dead, epoch, before = load_word(control), load_word(state), load_word(state + 4)
    x0 = sendable(load16(input + at[0], m[0]))
    index = row * SLOTS + (epoch & (SLOTS - 1))
    push_to_all(piece * PART + j * 16, m[0] * (1 - dead), x0, next_base, peers, rank, region, index, WORLD, SLOT_BYTES)
    others = _other_parts(input, at, m)
    x = x0, sendable(others[0]), sendable(others[1]), sendable(others[2])
    r = x
    if RESIDUAL:
        others = _other_parts(residual, at, m)
        r = load16(residual + at[0], m[0]), others[0], others[1], others[2]
    w = load_weight(weight, k[0], m[0], WEIGHT)
    old = slots + ((epoch + SLOTS - 1) & (SLOTS - 1)) * (SOURCES * SLOT_BYTES) + piece * PART
    for done in range(0, before, BLOCK):
        for source in tl.static_range(SOURCES):
            clear(old + source * SLOT_BYTES + done * 16, (done + j < before).to(tl.int32), KEEP)
    r = _widen_early(r[0], KIND), _widen_early(r[1], KIND), _widen_early(r[2], KIND), _widen_early(r[3], KIND)
    factors = r[0]
    if WEIGHT != NO_WEIGHT:
        lower, upper = widen_weight(w, offset, KIND, WEIGHT)
        factors = hoist4(lower), hoist4(upper)
    now = slots + (epoch & (SLOTS - 1)) * (SOURCES * SLOT_BYTES)
    places = now + p[0] * PART, now + p[1] * PART, now + p[2] * PART, now + p[3] * PART
    masks = m[0] * (1 + dead), m[1] * (1 + dead), m[2] * (1 + dead), m[3] * (1 + dead)
    y = _sum_parts(x, places, masks, control, tag, epoch, rank, WORLD, SLOT_BYTES, PACK, KEEP, KIND)
    y = _modify_parts(y, r, bias, factor, scale, k, m, KIND, BIAS, SCALE, FACTOR, RESIDUAL)
    # So paired, the sum is the same bits whichever part is the block's own. No thread stores the epoch before all have
    # loaded it: the sum is a barrier.
    squares = sum_once((squares_of(y[0]) + squares_of(y[2])) + (squares_of(y[1]) + squares_of(y[3])), BLOCK)
    store16(total + at[0], m[0], joins(y[0][0], y[0][1], KIND), KEEP)
    root = tl.rsqrt(squares * inverse + eps)
    others = _greatest_of_others(y, root, weight, k, m, offset, KIND, WEIGHT, ROUND, FP8, GROUP)
    finish(
        y[0], root, factors, others, normed, at[0], values, scales, given, row.to(tl.int64), piece * per, k[0], m[0],
        vectors, tl.maximum(tl.minimum(per, vectors - piece * per), 0), floor, BLOCK, KIND, WEIGHT, WIDE_OUT, ROUND, NORMED,
        FP8, GROUP, MOST, NARROW, FLOOR, ZERO_TO_ONE, RECIPROCAL, POWER,
    )  # fmt: skip
    store_word(state, epoch + 1)
    store_word(state + 4, per)
