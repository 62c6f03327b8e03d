"""All-reduce [+ bias] [* scale] [+ residual] -> RMSNorm in one kernel, and the same without the norm.

Every rank pushes its part of a row to every other rank and sums all parts in rank order, in fp32: one trip over the wire,
and the same bits on all ranks. Two ways to lay rows over blocks:

split  a row over SPLIT blocks, for a few rows. Each block pushes its piece and reads the whole row (the norm needs it), so
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
def _finish(
    lower, upper, residual, weight, at, whole, own, k, bias, factor, normed, total, hidden, eps, scale, offset,
    KIND: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """From the reduced row to its two outputs, which are written where ``own`` says.

    residual, weight: words of this row; at: byte offset of each vector in the matrices; k: its number in the row.
    """
    if BIAS:
        words = load16(bias + k * 16, whole)
        lower, upper = add4(lower, lows(words, KIND)), add4(upper, highs(words, KIND))
    if SCALE:
        lower, upper = scale4(lower, scale), scale4(upper, scale)
    if FACTOR:
        element = _load_element(factor, KIND)
        lower, upper = scale4(lower, element), scale4(upper, element)
    if RESIDUAL:
        lower, upper = add4(lower, lows(residual, KIND)), add4(upper, highs(residual, KIND))
    store16(total + at, own, joins(lower, upper, KIND))
    if NORM:
        a, b = mul4(lower, lower), mul4(upper, upper)
        mean = tl.sum((a[0] + b[0]) + (a[1] + b[1]) + (a[2] + b[2]) + (a[3] + b[3])) / hidden
        root = tl.rsqrt(mean + eps)
        lower, upper = scale4(lower, root), scale4(upper, root)
        if ROUND:
            words = joins(lower, upper, KIND)
            lower, upper = lows(words, KIND), highs(words, KIND)
        if WEIGHT != NO_WEIGHT:
            weight_lower, weight_upper = _widen_weight(weight, offset, KIND, WEIGHT)
            lower, upper = mul4(lower, weight_lower), mul4(upper, weight_upper)
        if WIDE_OUT:
            store16(normed + at * 2, own, joins((lower[0], upper[0], lower[1], upper[1]), lower, FP32))
            store16(normed + at * 2 + 16, own, joins((lower[2], upper[2], lower[3], upper[3]), lower, FP32))
        else:
            store16(normed + at, own, joins(lower, upper, KIND))


@triton.jit(do_not_specialize=_RUN_TIME)
def split(
    input, residual, bias, weight, factor, normed, total, peers, region, state, control, rank, rows, vectors, hidden,
    all_vectors, tag, eps, scale, offset,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr, SLOT_BYTES: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """SPLIT blocks per row. A block's state: {calls it took part in, vectors per piece in the last of them}."""
    pid = tl.program_id(0)
    tag += pid * 65536
    row, piece = pid // SPLIT, pid % SPLIT
    k = tl.arange(0, BLOCK)
    per = (vectors + SPLIT - 1) // SPLIT
    part = k * 0
    for i in tl.static_range(1, SPLIT):
        part += (k >= i * per).to(tl.int32)
    place = (part * (SLOT_BYTES // 16 // SPLIT) + k - part * per) * 16
    whole = (k < vectors).to(tl.int32)
    own = whole * (part == piece).to(tl.int32)
    at = (row.to(tl.int64) * vectors + k) * 16
    SOURCES: tl.constexpr = WORLD - 1
    first = load_address(peers + (rank + 1) % WORLD * 8)
    row_slots = load_address(peers + rank * 8) + region + row.to(tl.int64) * (SLOTS * SOURCES * SLOT_BYTES)
    state += pid.to(tl.int64) * 8
    gdc_wait()
    gdc_launch_dependents()
    dead = load_word(control)
    epoch, before = load_word(state), load_word(state + 4)
    x = sendable(load16(input + at, whole))
    slot = epoch & (SLOTS - 1)
    _push_to_all(place, own * (1 - dead), x, peers, first, rank, region, row * SLOTS + slot, WORLD, SLOT_BYTES)
    if RESIDUAL:
        r = load16(residual + at, whole)
    else:
        r = x
    if WEIGHT != NO_WEIGHT:
        w = _load_weight(weight, k, own, WEIGHT)
    else:
        w = x, x
    old = row_slots + ((epoch + SLOTS - 1) & (SLOTS - 1)) * (SOURCES * SLOT_BYTES) + piece * (SLOT_BYTES // SPLIT)
    for done in range(0, before, BLOCK):
        for source in tl.static_range(SOURCES):
            clear(old + source * SLOT_BYTES + (done + k) * 16, (done + k < before).to(tl.int32))
    mine = row_slots + slot * (SOURCES * SLOT_BYTES) + place
    lower, upper = _sum(x, mine, whole * (1 + dead), control, tag, epoch, rank, WORLD, SLOT_BYTES, PACK, KIND)
    _finish(
        lower, upper, r, w, at, whole, own, k, bias, factor, normed, total, hidden, eps, scale, offset,
        KIND, NORM, WEIGHT, WIDE_OUT, ROUND, BIAS, SCALE, FACTOR, RESIDUAL,
    )  # fmt: skip
    if not NORM:
        tl.debug_barrier()  # every warp has read the state; the norm's sum has seen to it otherwise
    tl.store(state.to(tl.pointer_type(tl.int32)), epoch + 1)
    tl.store((state + 4).to(tl.pointer_type(tl.int32)), per)


@triton.jit(do_not_specialize=_RUN_TIME)
def ring(
    input, residual, bias, weight, factor, normed, total, peers, region, state, control, rank, rows, vectors, hidden,
    all_vectors, tag, eps, scale, offset,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr, SLOT_BYTES: tl.constexpr,
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
        lower, upper = _sum(x, arrived, inside * (1 + dead), control, tag, epoch, rank, WORLD, SLOT_BYTES, PACK, KIND)
        for source in tl.static_range(SOURCES):
            clear(arrived + source * SLOT_BYTES, inside * (1 - dead))
        _finish(
            lower, upper, r, w, at, inside, inside, k, bias, factor, normed, total, hidden, eps, scale, offset,
            KIND, NORM, WEIGHT, WIDE_OUT, ROUND, BIAS, SCALE, FACTOR, RESIDUAL,
        )  # fmt: skip
        x, inside, epoch = y, after, epoch + 1
    if not NORM:
        tl.debug_barrier()
    if WORLD > 1:
        tl.store(state.to(tl.pointer_type(tl.int32)), epoch)
