"""All-reduce [+ bias] [* scale] [+ residual] [-> RMSNorm [-> FP8]] with a row, and a ring of slots, per block.

For many rows. A block pushes the next row while it waits for this one, and clears a slot once it has read it. Source:
measured here; the protocol is TensorRT-LLM's Lamport all-reduce.
"""

import triton
import triton.language as tl

from tpfuse.kernels.triton.lamport import clear, load16, load_word, sendable, store16, store_word
from tpfuse.kernels.triton.quantised import finish
from tpfuse.kernels.triton.row import (
    RUN_TIME,
    SLOTS,
    load_weight,
    modify,
    named,
    push_to_all,
    squares_of,
    sum_over_ranks,
    widen,
    widen_weight,
)
from tpfuse.kernels.triton.vectors import joins


@triton.jit(do_not_specialize=RUN_TIME, repr=named("ring"))
def ring(
    input, residual, bias, weight, factor, normed, total, values, scales, given, base, next_base, peers, region, state,
    control, rank, rows, vectors, inverse, all_vectors, tag, eps, scale, offset, floor,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr, SLOT_BYTES: tl.constexpr, KEEP: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, WIDE_OUT: tl.constexpr, ROUND: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr, NORMED: tl.constexpr,
    FP8: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, NARROW: tl.constexpr, FLOOR: tl.constexpr,
    ZERO_TO_ONE: tl.constexpr, RECIPROCAL: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + blocks, ... of each block; never more blocks than rows. A block's state: {rows it has reduced}.

    Without a norm a "row" is any run of vectors and the last may be shorter: all_vectors counts those of all rows. What is
    missing of it is exchanged all the same, as zeros: each thread paces itself by what its own peers have sent.
    With WORLD = 1 nothing is exchanged and no arena needed: it is the norm behind another library's all-reduce.
    """
    pid, blocks = tl.program_id(0), tl.num_programs(0)
    tag += pid * 65536
    items = (rows - pid + blocks - 1) // blocks
    k = tl.arange(0, BLOCK)
    whole = (k < vectors).to(tl.int32)
    SOURCES: tl.constexpr = WORLD - 1
    state += pid.to(tl.int64) * 8
    row = pid.to(tl.int64)
    start = row * vectors
    inside = whole * (start + k < all_vectors).to(tl.int32)
    mine, dead, epoch = base + k * 16, whole & 0, pid  # alone: never read, but of these types
    if WORLD > 1:
        mine = base + region + pid.to(tl.int64) * (SLOTS * SOURCES * SLOT_BYTES) + k * 16
        dead, epoch = dead + load_word(control), load_word(state)
    x = sendable(load16(input + (start + k) * 16, inside))
    slot = pid * SLOTS + (epoch & (SLOTS - 1))
    push_to_all(k * 16, whole * (1 - dead), x, next_base, peers, rank, region, slot, WORLD, SLOT_BYTES)
    w = load_weight(weight, k, whole, WEIGHT)
    for i in range(items):
        at = (start + k) * 16
        r = x
        if RESIDUAL:
            r = load16(residual + at, inside)
        start += blocks.to(tl.int64) * vectors
        more = (i + 1 < items).to(tl.int32)
        after = whole * (start + k < all_vectors).to(tl.int32) * more
        y = sendable(load16(input + (start + k) * 16, after))
        slot = pid * SLOTS + ((epoch + 1) & (SLOTS - 1))
        push_to_all(k * 16, whole * more * (1 - dead), y, next_base, peers, rank, region, slot, WORLD, SLOT_BYTES)
        arrived = mine + (epoch & (SLOTS - 1)) * (SOURCES * SLOT_BYTES)
        taking = whole * (1 + dead)
        # Once a peer is given up it gets no more rows: it would find one of them where it looks for this one.
        h, dead = sum_over_ranks(x, arrived, taking, control, tag, epoch, rank, WORLD, SLOT_BYTES, PACK, KEEP, KIND)
        for source in tl.static_range(SOURCES):
            clear(arrived + source * SLOT_BYTES, whole * (1 - dead), KEEP)
        h = modify(h, widen(r, KIND), bias, factor, scale, k, inside, KIND, BIAS, SCALE, FACTOR, RESIDUAL)
        store16(total + at, inside, joins(h[0], h[1], KIND), KEEP)
        if NORM:
            root = tl.rsqrt(tl.sum(squares_of(h)) * inverse + eps)
            finish(
                h, root, widen_weight(w, offset, KIND, WEIGHT), inside & 0, normed, at, values, scales, given, row, 0,
                k, inside, vectors, vectors, floor, BLOCK, KIND, WEIGHT, WIDE_OUT, ROUND, NORMED, FP8, GROUP, MOST, NARROW,
                FLOOR, ZERO_TO_ONE, RECIPROCAL, POWER,
            )  # fmt: skip
        row += blocks
        x, inside, epoch = y, after, epoch + 1
    if not NORM:
        tl.debug_barrier()  # no thread stores the epoch before all have loaded it; with a norm, its sum is a barrier
    if WORLD > 1:
        store_word(state, epoch)
