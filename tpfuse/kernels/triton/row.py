"""What the kernels do to a row, or a part of one: push it to the peers, sum it over ranks, finish and normalise it.

Every rank pushes its part of a row to every other rank and sums all parts in rank order, in fp32: one trip over the wire,
and the same bits on all ranks. A row is ``vectors`` vectors of 16 bytes; masks, words and addresses are as in lamport.py.

Why a slot is empty when a peer writes it: with SLOTS = 4 it was used four items ago. A peer that pushes item t has taken
our item t - 2 (split.py: t - 1), which we pushed after clearing item t - 4 (split.py: in the call after it). Within one
launch of ring.py nothing orders that clearing but the two trips over the wire that lie between.
"""

import triton
import triton.language as tl

from tpfuse.comm import arena
from tpfuse.kernels.triton.lamport import load16, load_address, push, store16, take
from tpfuse.kernels.triton.vectors import BF16, FP16, FP32, add4, highs, joins, lows, mul4, scale4, select4, shift4

SLOTS = tl.constexpr(arena.SLOTS)
NO_WEIGHT, SAME_WEIGHT, WIDE_WEIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: Parameters that a kernel is not compiled anew for.
RUN_TIME = (
    *("input", "residual", "bias", "weight", "factor", "normed", "total", "values", "scales", "given", "base", "next_base"),
    *("peers", "region", "state", "control", "rank", "rows", "vectors", "inverse", "all_vectors", "tag", "eps", "scale"),
    *("offset", "floor"),
)


def named(algorithm: str):
    """What profilers call a kernel: the operation that it is compiled for, and the algorithm."""

    def name(specialization) -> str:
        constants = specialization.constants
        norm = f"{'_rms_norm' if constants['NORM'] else ''}{'_fp8' if constants['FP8'] else ''}"
        return f"tpfuse{norm}" if constants["WORLD"] == 1 else f"tpfuse_all_reduce{norm}_{algorithm}"

    return name


@triton.jit
def push_to_all(place, mask, words, next_base, peers, rank, region, index, WORLD: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """Into slot ``index`` of every peer. Source s has the (s - owner - 1) mod WORLD-th part of each slot of an owner.

    next_base: address of the next rank's arena; peers: of the table of all
    """
    offset = region + index.to(tl.int64) * ((WORLD - 1) * SLOT_BYTES)
    if WORLD > 1:
        push(next_base + offset + (WORLD - 2) * SLOT_BYTES + place, mask, words)
    for i in tl.static_range(1, WORLD - 1):
        peer = load_address(peers + ((rank + 1 + i) % WORLD) * 8)
        push(peer + offset + (WORLD - 2 - i) * SLOT_BYTES + place, mask, words)


@triton.jit
def widen(words, KIND: tl.constexpr):
    """(lows, highs) of words, as fp32."""
    return lows(words, KIND), highs(words, KIND)


@triton.jit
def sum_over_ranks(
    own, slot, mask, control, tag, epoch, rank,
    WORLD: tl.constexpr, SLOT_BYTES: tl.constexpr, PACK: tl.constexpr, KEEP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sum over ranks, in rank order, of this rank's words and those that arrive in its slot: (lows, highs), and 1 where a
    peer was given up."""
    lower, upper = widen(own, KIND)
    late = mask & 0
    if WORLD == 2:  # one addition: its order does not matter
        words, late = take(slot, mask, control, tag, epoch, PACK, KEEP)
        lower, upper = add4(lower, lows(words, KIND)), add4(upper, highs(words, KIND))
    elif WORLD > 2:
        for source in tl.static_range(WORLD):
            mine = rank == source
            place = (source - rank - 1 + WORLD) % WORLD
            others = mask * tl.where(mine, 0, 1)
            theirs = slot + tl.where(mine, 0, place) * SLOT_BYTES
            words, gone = take(theirs, others, control, tag + 256 * source, epoch, PACK, KEEP)
            late |= gone
            words = select4(mine, own, words)
            if source == 0:
                lower, upper = widen(words, KIND)
            else:
                lower, upper = add4(lower, lows(words, KIND)), add4(upper, highs(words, KIND))
    return (lower, upper), late


@triton.jit
def load_weight(weight, k, mask, WEIGHT: tl.constexpr):
    """The words of the weight: one vector per vector of the row, two where it is fp32 and the row is not; any without."""
    if WEIGHT == NO_WEIGHT:
        words = mask, mask, mask, mask
        return words, words
    elif WEIGHT == WIDE_WEIGHT:
        return load16(weight + k * 32, mask), load16(weight + k * 32 + 16, mask)
    else:
        words = load16(weight + k * 16, mask)
        return words, words


@triton.jit
def widen_weight(words, offset, KIND: tl.constexpr, WEIGHT: tl.constexpr):
    """(lows, highs) of weight + offset, as fp32."""
    if WEIGHT == WIDE_WEIGHT:
        a, b = lows(words[0], FP32), lows(words[1], FP32)
        lower, upper = (a[0], a[2], b[0], b[2]), (a[1], a[3], b[1], b[3])
    else:
        lower, upper = widen(words[0], KIND)
    return shift4(lower, offset), shift4(upper, offset)


@triton.jit
def load_element(address, KIND: tl.constexpr):
    """One element, as fp32."""
    if KIND == BF16:
        return tl.load(address.to(tl.pointer_type(tl.bfloat16)), volatile=True).to(tl.float32)
    elif KIND == FP16:
        return tl.load(address.to(tl.pointer_type(tl.float16)), volatile=True).to(tl.float32)
    else:
        return tl.load(address.to(tl.pointer_type(tl.float32)), volatile=True)


@triton.jit
def modify(
    values, residual, bias, factor, scale, k, mask,
    KIND: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """(lows, highs) of the reduced vectors -> the same after bias, scale and residual, which is (lows, highs) as well.

    k: the vectors' numbers in the row
    """
    lower, upper = values
    if BIAS:
        words = load16(bias + k * 16, mask)
        lower, upper = add4(lower, lows(words, KIND)), add4(upper, highs(words, KIND))
    if SCALE:
        lower, upper = scale4(lower, scale), scale4(upper, scale)
    if FACTOR:
        element = load_element(factor, KIND)
        lower, upper = scale4(lower, element), scale4(upper, element)
    if RESIDUAL:
        lower, upper = add4(lower, residual[0]), add4(upper, residual[1])
    return lower, upper


@triton.jit
def squares_of(values):
    """Sum of the squares of a vector's elements, per vector."""
    a, b = mul4(values[0], values[0]), mul4(values[1], values[1])
    return (a[0] + b[0]) + (a[1] + b[1]) + (a[2] + b[2]) + (a[3] + b[3])


@triton.jit
def normalize(values, root, weight, KIND: tl.constexpr, WEIGHT: tl.constexpr, ROUND: tl.constexpr):
    """values * root * weight, all as (lows, highs)."""
    lower, upper = scale4(values[0], root), scale4(values[1], root)
    if ROUND:
        lower, upper = widen(joins(lower, upper, KIND), KIND)
    if WEIGHT != NO_WEIGHT:
        lower, upper = mul4(lower, weight[0]), mul4(upper, weight[1])
    return lower, upper


@triton.jit
def store_normed(values, normed, at, mask, KIND: tl.constexpr, WIDE_OUT: tl.constexpr):
    """at: byte offsets in a matrix like the input."""
    lower, upper = values
    if WIDE_OUT:
        store16(normed + at * 2, mask, joins((lower[0], upper[0], lower[1], upper[1]), lower, FP32))
        store16(normed + at * 2 + 16, mask, joins((lower[2], upper[2], lower[3], upper[3]), lower, FP32))
    else:
        store16(normed + at, mask, joins(lower, upper, KIND))
