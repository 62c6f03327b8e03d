"""All-reduce [+ bias] [* scale] [+ residual] -> RMSNorm in one kernel, and the same without the norm.

Every rank pushes its part of a row to every other rank and sums all parts in rank order, in fp32: one trip over the wire,
and the same bits on all ranks. Two ways to lay rows over blocks:

split  a row over four blocks, for a few rows. Each block pushes its piece and reads the whole row (the norm needs it), so
       that no exchange between blocks is needed; it clears the slot of the call before, which all blocks have read.
ring   a row per block and a ring of SLOTS slots per block, for many rows. A block pushes the next row while it waits for
       this one, and clears a slot once it has read it.

Why a slot is empty when a peer writes it: with SLOTS = 4 it was used four items ago. A peer that pushes item t has taken
our item t - 2 (split: t - 1), which we pushed after clearing item t - 4 (split: in the call after it).

Shapes: row = ``vectors`` vectors of 16 bytes, ``hidden`` elements of which count in the mean. Source of the split and
ring forms: measured here; of the sentinel protocol: TensorRT-LLM's Lamport all-reduce.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpfuse.kernels.triton.lamport import (
    BF16,
    FP16,
    FP32,
    add4,
    clear,
    highs,
    joins,
    load16,
    load_address,
    load_word,
    lows,
    mul4,
    push,
    scale4,
    select4,
    sendable,
    shift4,
    store16,
    take,
    take_parts,
)

SLOTS = tl.constexpr(4)  # per ring; a power of two, so that counters may wrap
NO_WEIGHT, SAME_WEIGHT, WIDE_WEIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_RUN_TIME = (
    *("input", "residual", "bias", "weight", "factor", "normed", "total", "peers", "region", "state", "control"),
    *("rank", "rows", "vectors", "hidden", "all_vectors", "tag", "eps", "scale", "offset"),
)


@triton.jit
def _push_to_all(place, mask, words, peers, first, rank, region, index, WORLD: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """Into slot ``index`` of every peer. Source s has the (s - owner - 1) mod WORLD-th part of each slot of an owner.

    first: base address of the next rank's arena, loaded early
    """
    offset = region + index.to(tl.int64) * ((WORLD - 1) * SLOT_BYTES)
    if WORLD > 1:
        push(first + offset + (WORLD - 2) * SLOT_BYTES + place, mask, words)
    for i in tl.static_range(1, WORLD - 1):
        base = load_address(peers + ((rank + 1 + i) % WORLD) * 8)
        push(base + offset + (WORLD - 2 - i) * SLOT_BYTES + place, mask, words)


@triton.jit
def _sum(
    own, slot, mask, control, tag, epoch, rank,
    WORLD: tl.constexpr, SLOT_BYTES: tl.constexpr, PACK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sum over ranks, in rank order, of this rank's words and those that arrive in its slot: (lows, highs)."""
    lower, upper = lows(own, KIND), highs(own, KIND)
    if WORLD == 2:  # one addition: its order does not matter
        words = take(slot, mask, control, tag, epoch, PACK)
        lower, upper = add4(lower, lows(words, KIND)), add4(upper, highs(words, KIND))
    elif WORLD > 2:
        for source in tl.static_range(WORLD):
            mine = rank == source
            place = (source - rank - 1 + WORLD) % WORLD
            others = mask * tl.where(mine, 0, 1)
            words = take(slot + tl.where(mine, 0, place) * SLOT_BYTES, others, control, tag + 256 * source, epoch, PACK)
            words = select4(mine, own, words)
            if source == 0:
                lower, upper = lows(words, KIND), highs(words, KIND)
            else:
                lower, upper = add4(lower, lows(words, KIND)), add4(upper, highs(words, KIND))
    return lower, upper


@triton.jit
def _load_weight(weight, k, mask, WEIGHT: tl.constexpr):
    """The words of the weight: one vector per vector of the row, or two where it is fp32 and the row is not."""
    if WEIGHT == WIDE_WEIGHT:
        return load16(weight + k * 32, mask), load16(weight + k * 32 + 16, mask)
    else:
        words = load16(weight + k * 16, mask)
        return words, words


@triton.jit
def _widen_weight(words, offset, KIND: tl.constexpr, WEIGHT: tl.constexpr):
    """(lows, highs) of weight + offset, as fp32."""
    if WEIGHT == WIDE_WEIGHT:
        a, b = lows(words[0], FP32), lows(words[1], FP32)
        lower, upper = (a[0], a[2], b[0], b[2]), (a[1], a[3], b[1], b[3])
    else:
        lower, upper = lows(words[0], KIND), highs(words[0], KIND)
    return shift4(lower, offset), shift4(upper, offset)


@triton.jit
def _load_element(address, KIND: tl.constexpr):
    """One element, as fp32."""
    if KIND == BF16:
        return tl.load(address.to(tl.pointer_type(tl.bfloat16)), volatile=True).to(tl.float32)
    elif KIND == FP16:
        return tl.load(address.to(tl.pointer_type(tl.float16)), volatile=True).to(tl.float32)
    else:
        return tl.load(address.to(tl.pointer_type(tl.float32)), volatile=True)


@triton.jit
def _modify(
    values, residual, bias, factor, scale, k, mask,
    KIND: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """(lows, highs) of the reduced vectors -> the same after bias, scale and residual. k: their numbers in the row."""
    lower, upper = values
    if BIAS:
        words = load16(bias + k * 16, mask)
        lower, upper = add4(lower, lows(words, KIND)), add4(upper, highs(words, KIND))
    if SCALE:
        lower, upper = scale4(lower, scale), scale4(upper, scale)
    if FACTOR:
        element = _load_element(factor, KIND)
        lower, upper = scale4(lower, element), scale4(upper, element)
    if RESIDUAL:
        lower, upper = add4(lower, lows(residual, KIND)), add4(upper, highs(residual, KIND))
    return lower, upper


@triton.jit
def _squares(values):
    """Sum of the squares of a vector's elements, per vector."""
    a, b = mul4(values[0], values[0]), mul4(values[1], values[1])
    return (a[0] + b[0]) + (a[1] + b[1]) + (a[2] + b[2]) + (a[3] + b[3])


@triton.jit
def _normalize(
    values, root, weight, offset, normed, at, mask,
    KIND: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Store values * root * (weight + offset). weight: its words; at: byte offsets in a matrix like the input."""
    lower, upper = scale4(values[0], root), scale4(values[1], root)
    if ROUND:
        words = joins(lower, upper, KIND)
        lower, upper = lows(words, KIND), highs(words, KIND)
    if WEIGHT != NO_WEIGHT:
        weight_lower, weight_upper = _widen_weight(weight, offset, KIND, WEIGHT)
        lower, upper = mul4(lower, weight_lower), mul4(upper, weight_upper)
    if WIDE_OUT:
        store16(normed + at * 2, mask, joins((lower[0], upper[0], lower[1], upper[1]), lower, FP32))
        store16(normed + at * 2 + 16, mask, joins((lower[2], upper[2], lower[3], upper[3]), lower, FP32))
    else:
        store16(normed + at, mask, joins(lower, upper, KIND))


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
def _sum_parts(
    x, slots, masks, control, tag, epoch, rank,
    WORLD: tl.constexpr, SLOT_BYTES: tl.constexpr, PACK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """``_sum`` of the four parts of a row, which wait together."""
    WAIT: tl.constexpr = PACK > 0
    if WORLD == 2:
        v = take_parts(slots, masks, control, tag, epoch, WAIT)
        return (
            (add4(lows(x[0], KIND), lows(v[0], KIND)), add4(highs(x[0], KIND), highs(v[0], KIND))),
            (add4(lows(x[1], KIND), lows(v[1], KIND)), add4(highs(x[1], KIND), highs(v[1], KIND))),
            (add4(lows(x[2], KIND), lows(v[2], KIND)), add4(highs(x[2], KIND), highs(v[2], KIND))),
            (add4(lows(x[3], KIND), lows(v[3], KIND)), add4(highs(x[3], KIND), highs(v[3], KIND))),
        )
    else:
        return (
            _sum(x[0], slots[0], masks[0], control, tag, epoch, rank, WORLD, SLOT_BYTES, 1, KIND),
            _sum(x[1], slots[1], masks[1], control, tag, epoch, rank, WORLD, SLOT_BYTES, 1, KIND),
            _sum(x[2], slots[2], masks[2], control, tag, epoch, rank, WORLD, SLOT_BYTES, 1, KIND),
            _sum(x[3], slots[3], masks[3], control, tag, epoch, rank, WORLD, SLOT_BYTES, 1, KIND),
        )


@triton.jit(do_not_specialize=_RUN_TIME)
def split(
    input, residual, bias, weight, factor, normed, total, peers, region, state, control,
    rank, rows, vectors, hidden, all_vectors, tag, eps, scale, offset,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr, SLOT_BYTES: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Four blocks per row, BLOCK vectors per part. A block's state: {calls it took part in, vectors per part in the last}.

    A block's own part comes first everywhere: it is pushed before anything else is loaded, and it alone is written.
    """
    pid = tl.program_id(0)
    tag += pid * 65536
    row, piece = pid // 4, pid % 4
    j = tl.arange(0, BLOCK)
    per = (vectors + 3) // 4
    p = piece, (piece + 1) % 4, (piece + 2) % 4, (piece + 3) % 4
    k, m = _parts(p, per, j, vectors)
    start = row.to(tl.int64) * vectors
    at = (start + k[0]) * 16, (start + k[1]) * 16, (start + k[2]) * 16, (start + k[3]) * 16
    SOURCES: tl.constexpr = WORLD - 1
    PART: tl.constexpr = SLOT_BYTES // 4
    first = load_address(peers + (rank + 1) % WORLD * 8)
    slots = load_address(peers + rank * 8) + region + row.to(tl.int64) * (SLOTS * SOURCES * SLOT_BYTES) + j * 16
    state += pid.to(tl.int64) * 8
    gdc_wait()
    gdc_launch_dependents()
    dead = load_word(control)
    epoch, before = load_word(state), load_word(state + 4)
    x0 = sendable(load16(input + at[0], m[0]))
    index = row * SLOTS + (epoch & (SLOTS - 1))
    _push_to_all(piece * PART + j * 16, m[0] * (1 - dead), x0, peers, first, rank, region, index, WORLD, SLOT_BYTES)
    others = _other_parts(input, at, m)
    x = x0, sendable(others[0]), sendable(others[1]), sendable(others[2])
    r = x
    if RESIDUAL:
        others = _other_parts(residual, at, m)
        r = load16(residual + at[0], m[0]), others[0], others[1], others[2]
    if WEIGHT != NO_WEIGHT:
        w = _load_weight(weight, k[0], m[0], WEIGHT)
    else:
        w = x0, x0
    old = slots + ((epoch + SLOTS - 1) & (SLOTS - 1)) * (SOURCES * SLOT_BYTES) + piece * PART
    for done in range(0, before, BLOCK):
        for source in tl.static_range(SOURCES):
            clear(old + source * SLOT_BYTES + done * 16, (done + j < before).to(tl.int32))
    now = slots + (epoch & (SLOTS - 1)) * (SOURCES * SLOT_BYTES)
    places = now + p[0] * PART, now + p[1] * PART, now + p[2] * PART, now + p[3] * PART
    masks = m[0] * (1 + dead), m[1] * (1 + dead), m[2] * (1 + dead), m[3] * (1 + dead)
    y = _sum_parts(x, places, masks, control, tag, epoch, rank, WORLD, SLOT_BYTES, PACK, KIND)
    y0 = _modify(y[0], r[0], bias, factor, scale, k[0], m[0], KIND, BIAS, SCALE, FACTOR, RESIDUAL)
    y1 = _modify(y[1], r[1], bias, factor, scale, k[1], m[1], KIND, BIAS, SCALE, FACTOR, RESIDUAL)
    y2 = _modify(y[2], r[2], bias, factor, scale, k[2], m[2], KIND, BIAS, SCALE, FACTOR, RESIDUAL)
    y3 = _modify(y[3], r[3], bias, factor, scale, k[3], m[3], KIND, BIAS, SCALE, FACTOR, RESIDUAL)
    store16(total + at[0], m[0], joins(y0[0], y0[1], KIND))
    # So paired, the sum is the same bits whichever part is the block's own.
    squares = tl.sum((_squares(y0) + _squares(y2)) + (_squares(y1) + _squares(y3)))
    root = tl.rsqrt(squares / hidden + eps)
    _normalize(y0, root, w, offset, normed, at[0], m[0], KIND, WEIGHT, WIDE_OUT, ROUND)
    tl.store(state.to(tl.pointer_type(tl.int32)), epoch + 1)
    tl.store((state + 4).to(tl.pointer_type(tl.int32)), per)


@triton.jit(do_not_specialize=_RUN_TIME)
def ring(
    input, residual, bias, weight, factor, normed, total, peers, region, state, control, rank, rows, vectors, hidden,
    all_vectors, tag, eps, scale, offset,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr, SLOT_BYTES: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + blocks, ... of each block; never more blocks than rows. A block's state: {rows it has reduced}.

    Without a norm a "row" is any run of vectors and the last may be shorter: all_vectors counts those of all rows.
    With WORLD = 1 nothing is exchanged and no arena needed: it is the norm behind another library's all-reduce.
    """
    pid, blocks = tl.program_id(0), tl.num_programs(0)
    tag += pid * 65536
    items = (rows - pid + blocks - 1) // blocks
    k = tl.arange(0, BLOCK)
    whole = (k < vectors).to(tl.int32)
    SOURCES: tl.constexpr = WORLD - 1
    state += pid.to(tl.int64) * 8
    if WORLD > 1:
        first = load_address(peers + (rank + 1) % WORLD * 8)
        mine = load_address(peers + rank * 8) + region + pid.to(tl.int64) * (SLOTS * SOURCES * SLOT_BYTES) + k * 16
        gdc_wait()
        gdc_launch_dependents()
        dead = load_word(control)
        epoch = load_word(state)
    else:
        first, mine, dead, epoch = peers, peers + k * 16, rank, rank
        gdc_wait()
        gdc_launch_dependents()
    start = pid.to(tl.int64) * vectors
    inside = whole * (start + k < all_vectors).to(tl.int32)
    x = sendable(load16(input + (start + k) * 16, inside))
    slot = epoch & (SLOTS - 1)
    _push_to_all(k * 16, inside * (1 - dead), x, peers, first, rank, region, pid * SLOTS + slot, WORLD, SLOT_BYTES)
    if WEIGHT != NO_WEIGHT:
        w = _load_weight(weight, k, whole, WEIGHT)
    else:
        w = x, x
    for i in range(items):
        at = (start + k) * 16
        if RESIDUAL:
            r = load16(residual + at, inside)
        else:
            r = x
        start += blocks.to(tl.int64) * vectors
        more = (i + 1 < items).to(tl.int32)
        after = whole * (start + k < all_vectors).to(tl.int32) * more
        y = sendable(load16(input + (start + k) * 16, after))
        slot = (epoch + 1) & (SLOTS - 1)
        _push_to_all(k * 16, after * (1 - dead), y, peers, first, rank, region, pid * SLOTS + slot, WORLD, SLOT_BYTES)
        arrived = mine + (epoch & (SLOTS - 1)) * (SOURCES * SLOT_BYTES)
        values = _sum(x, arrived, inside * (1 + dead), control, tag, epoch, rank, WORLD, SLOT_BYTES, PACK, KIND)
        for source in tl.static_range(SOURCES):
            clear(arrived + source * SLOT_BYTES, inside * (1 - dead))
        values = _modify(values, r, bias, factor, scale, k, inside, KIND, BIAS, SCALE, FACTOR, RESIDUAL)
        store16(total + at, inside, joins(values[0], values[1], KIND))
        if NORM:
            root = tl.rsqrt(tl.sum(_squares(values)) / hidden + eps)
            _normalize(values, root, w, offset, normed, at, inside, KIND, WEIGHT, WIDE_OUT, ROUND)
        x, inside, epoch = y, after, epoch + 1
    if not NORM:
        tl.debug_barrier()
    if WORLD > 1:
        tl.store(state.to(tl.pointer_type(tl.int32)), epoch)
