"""Heads of q and k on one GPU: [RMSNorm of each head ->] rotary embedding, in one pass over memory.

A program has some heads of one token, of q or of k; they stay in registers from the load to the store. What is rotated
against each other (the two halves of a head, or neighbours) is in one thread's registers. Every step rounds where the
model's own operations round.

D  head size     R  elements of a head that are rotated, the first ones
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _table(table, place, step, mask, BLOCK: tl.constexpr):
    """[BLOCK, n], alike in each row: every thread loads what belongs to its own elements, in vectors as wide as theirs.
    A load of [n] would be narrower, and go through shared memory."""
    places = place[None, :] * step + tl.zeros((BLOCK, 1), tl.int32)
    return tl.load(table + places, mask=mask[None, :] & (places >= 0), other=0.0).to(tl.float32)


@triton.jit
def _normed(
    x, root, weight, column, mask, offset,
    DTYPE: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """x [H, n] in fp32, times the inverse root [H, 1] and the weight at ``column`` [n]."""
    y = x * root
    if ROUND:
        y = y.to(DTYPE).to(tl.float32)
    if WEIGHT:
        w = _table(weight, column, 1, mask, x.shape[0])
        y *= w + offset if OFFSET else w
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def _turned(a, b, cos, sin, DTYPE: tl.constexpr, NARROW: tl.constexpr):
    """a * cos + b * sin."""
    left, right = a * cos, b * sin
    if NARROW:  # each product is rounded
        left, right = left.to(DTYPE).to(tl.float32), right.to(DTYPE).to(tl.float32)
    return (left + right).to(DTYPE)


@triton.jit
def _kept(x, y, scale, SCALED: tl.constexpr):
    """x as it is stored at y: divided by the scale, for a cache in FP8 (the conversion saturates)."""
    if SCALED:
        x = tl.math.div_rn(x.to(tl.float32), tl.load(scale)).to(y.dtype.element_ty)
    return x


@triton.jit
def _pairs(x):
    """(elements 0, 2, .. of each row, elements 1, 3, ..)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _neighbours(
    x, y, weight, cos, sin, scale, first, heads, x_head, y_head, step, eps, offset,
    BLOCK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SHARED: tl.constexpr, NARROW: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, SIZE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Elements 2 i and 2 i + 1 are rotated against each other."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    head = (first + tl.arange(0, BLOCK)).to(tl.int64)
    column, pair = tl.arange(0, SIZE), tl.arange(0, SIZE // 2)
    mask = (head < heads)[:, None] & (column < D)[None, :]
    h = tl.load(x + head[:, None] * x_head + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        root = tl.math.rsqrt(tl.sum(h * h, 1) / D + eps)[:, None]
        h = _normed(h, root, weight, column, column < D, offset, DTYPE, WEIGHT, OFFSET, ROUND)
    place = column // 2 if SHARED else column
    cos_a, cos_b = _pairs(_table(cos, place, step, column < R, BLOCK))
    sin_a, sin_b = _pairs(_table(sin, place, step, column < R, BLOCK))
    a, b = _pairs(h)
    inside = pair < R // 2
    left = tl.where(inside[None, :], _turned(a, -b, cos_a, sin_a, DTYPE, NARROW), a.to(DTYPE))
    right = tl.where(inside[None, :], _turned(b, a, cos_b, sin_b, DTYPE, NARROW), b.to(DTYPE))
    both = tl.reshape(tl.join(left, right), (BLOCK, SIZE))
    tl.store(y + head[:, None] * y_head + column[None, :], _kept(both, y, scale, SCALED), mask=mask)


@triton.jit
def _halves(
    x, y, weight, cos, sin, scale, first, heads, x_head, y_head, step, eps, offset,
    BLOCK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SHARED: tl.constexpr, NARROW: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Elements i and i + R / 2 are rotated against each other."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    head = (first + tl.arange(0, BLOCK)).to(tl.int64)
    there = (head < heads)[:, None]
    column = tl.arange(0, HALF)
    inside = column < R // 2
    mask = there & inside[None, :]
    source, target = x + head[:, None] * x_head + column[None, :], y + head[:, None] * y_head + column[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + R // 2, mask=mask, other=0.0).to(tl.float32)
    if TAIL:
        rest = tl.arange(0, TAIL)
        tail_mask = there & (rest < D - R)[None, :]
        tail = tl.load(x + head[:, None] * x_head + rest[None, :] + R, mask=tail_mask, other=0.0).to(tl.float32)
    cos_a, sin_a = _table(cos, column, step, inside, BLOCK), _table(sin, column, step, inside, BLOCK)
    cos_b, sin_b = cos_a, sin_a
    if not SHARED:
        cos_b, sin_b = _table(cos, column + R // 2, step, inside, BLOCK), _table(sin, column + R // 2, step, inside, BLOCK)
    if NORM:
        squares = tl.sum(a * a + b * b, 1)
        if TAIL:
            squares += tl.sum(tail * tail, 1)
        root = tl.math.rsqrt(squares / D + eps)[:, None]
        a = _normed(a, root, weight, column, inside, offset, DTYPE, WEIGHT, OFFSET, ROUND)
        b = _normed(b, root, weight, column + R // 2, inside, offset, DTYPE, WEIGHT, OFFSET, ROUND)
        if TAIL:
            tail = _normed(tail, root, weight, rest + R, rest < D - R, offset, DTYPE, WEIGHT, OFFSET, ROUND)
    tl.store(target, _kept(_turned(a, -b, cos_a, sin_a, DTYPE, NARROW), y, scale, SCALED), mask=mask)
    tl.store(target + R // 2, _kept(_turned(b, a, cos_b, sin_b, DTYPE, NARROW), y, scale, SCALED), mask=mask)
    if TAIL:
        tl.store(y + head[:, None] * y_head + rest[None, :] + R, _kept(tail.to(DTYPE), y, scale, SCALED), mask=tail_mask)


@triton.jit
def _heads(
    x, y, weight, cos, sin, scale, first, heads, x_head, y_head, step, eps, offset,
    BLOCK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, SHARED: tl.constexpr,
    NARROW: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        _neighbours(
            x, y, weight, cos, sin, scale, first, heads, x_head, y_head, step, eps, offset,
            BLOCK, D, R, SHARED, NARROW, NORM, WEIGHT, OFFSET, ROUND, SIZE, SCALED,
        )  # fmt: skip
    else:
        _halves(
            x, y, weight, cos, sin, scale, first, heads, x_head, y_head, step, eps, offset,
            BLOCK, D, R, SHARED, NARROW, NORM, WEIGHT, OFFSET, ROUND, HALF, TAIL, SCALED,
        )  # fmt: skip


@triton.jit
def tpfuse_qk_norm_rope(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, length, q_heads, k_heads, q_blocks, blocks,
    q_batch, q_token, q_head, k_batch, k_token, k_head, cos_batch, cos_token, sin_batch, sin_token, step, eps, offset,
    BLOCK: tl.constexpr, HEADS_FIRST: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHARED: tl.constexpr, NARROW: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr, ROUND: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some heads of one token.

    HEADS_FIRST  heads are the slower dimension of the results than tokens
    SHARED  one number of a table is for both elements that it rotates    NARROW  products are rounded to q's dtype
    HALF, TAIL, SIZE  powers of two: no smaller than R / 2, D - R (0: none), D
    """
    program = tl.program_id(0)
    token, block = program // blocks, program % blocks
    batch, at = (token // length).to(tl.int64), (token % length).to(tl.int64)
    cos += batch * cos_batch + at * cos_token
    sin += batch * sin_batch + at * sin_token
    y_head = length * D if HEADS_FIRST else D
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if block < q_blocks:
        y = q_out + batch * length * q_heads * D + at * (D if HEADS_FIRST else q_heads * D)
        _heads(
            q + batch * q_batch + at * q_token, y, q_weight, cos, sin, cos,
            block * BLOCK, q_heads, q_head, y_head, step, eps, offset, BLOCK,
            D, R, INTERLEAVED, SHARED, NARROW, NORM, WEIGHT, OFFSET, ROUND, HALF, TAIL, SIZE, False,
        )  # fmt: skip
    else:
        y = k_out + batch * length * k_heads * D + at * (D if HEADS_FIRST else k_heads * D)
        _heads(
            k + batch * k_batch + at * k_token, y, k_weight, cos, sin, cos,
            (block - q_blocks) * BLOCK, k_heads, k_head, y_head, step, eps, offset, BLOCK,
            D, R, INTERLEAVED, SHARED, NARROW, NORM, WEIGHT, OFFSET, ROUND, HALF, TAIL, SIZE, False,
        )  # fmt: skip


@triton.jit
def tpfuse_rope_kvcache(
    q, k, v, q_out, k_cache, v_cache, slots, k_scale, v_scale, q_weight, k_weight, cos, sin, length, q_heads, k_heads,
    q_blocks, k_blocks, blocks, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    cos_batch, cos_token, sin_batch, sin_token, step, eps, offset,
    slot_batch, slot_token, slot_end, page, k_page, k_place, kc_head, v_page, v_place, vc_head,
    BLOCK: tl.constexpr, HEADS_FIRST: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHARED: tl.constexpr, NARROW: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr, ROUND: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, SIZE: tl.constexpr,
    EARLY: tl.constexpr, OWN_PAGE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: of q, to q_out; of k and of v, to the slot of that token in the caches.

    OWN_PAGE  each sequence has a page of its own, else slots count through all pages
    slot_end  a slot from there on, or below 0, is none
    """
    program = tl.program_id(0)
    token, block = program // blocks, program % blocks
    batch, at = (token // length).to(tl.int64), (token % length).to(tl.int64)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    cos += batch * cos_batch + at * cos_token
    sin += batch * sin_batch + at * sin_token
    if block < q_blocks:
        y_head = length * D if HEADS_FIRST else D
        y = q_out + batch * length * q_heads * D + at * (D if HEADS_FIRST else q_heads * D)
        _heads(
            q + batch * q_batch + at * q_token, y, q_weight, cos, sin, cos,
            block * BLOCK, q_heads, q_head, y_head, step, eps, offset, BLOCK,
            D, R, INTERLEAVED, SHARED, NARROW, NORM, WEIGHT, OFFSET, ROUND, HALF, TAIL, SIZE, False,
        )  # fmt: skip
    else:
        slot = tl.load(slots + batch * slot_batch + at * slot_token).to(tl.int64)
        if (slot >= 0) & (slot < slot_end):
            where = batch if OWN_PAGE else slot // page
            place = slot if OWN_PAGE else slot % page
            if block < q_blocks + k_blocks:
                _heads(
                    k + batch * k_batch + at * k_token, k_cache + where * k_page + place * k_place, k_weight, cos, sin,
                    k_scale, (block - q_blocks) * BLOCK, k_heads, k_head, kc_head, step, eps, offset, BLOCK,
                    D, R, INTERLEAVED, SHARED, NARROW, NORM, WEIGHT, OFFSET, ROUND, HALF, TAIL, SIZE, SCALED,
                )  # fmt: skip
            else:
                head = ((block - q_blocks - k_blocks) * BLOCK + tl.arange(0, BLOCK)[:, None]).to(tl.int64)
                column = tl.arange(0, SIZE)[None, :]
                mask = (head < k_heads) & (column < D)
                x = tl.load(v + batch * v_batch + at * v_token + head * v_head + column, mask=mask, other=0.0)
                y = v_cache + where * v_page + place * v_place + head * vc_head + column
                tl.store(y, _kept(x, v_cache, v_scale, SCALED), mask=mask)
