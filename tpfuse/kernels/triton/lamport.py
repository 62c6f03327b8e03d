"""Device functions that move 16 bytes at a time between ranks, where the data is its own arrival flag (after Lamport).

A slot is filled with ``SENTINEL`` before use. A pusher stores its words straight into the peer's slot, the taker spins
until no word of its 16 bytes is the sentinel: one trip over the wire and no flag. The sentinel is a pair of bf16 or fp16
negative zeros; a pusher sends zeros in its place. As an fp32 it is -4.6e-41, sent as zero too.

Addresses are 64-bit integers, masks are int32: 0 leaves an element out (it reads as 0), 1 takes part, 2 reads as NaN
(``take`` on a dead arena). All accesses are volatile: the compiler keeps their order.

A spin looks at the clock every 1024 turns. Past the deadline it writes a record {1, tag, epoch, 0} to pinned host
memory, sets the abort flag in the control block and reads as NaN; so does every other spin of the arena once the flag is
set. The control block is {int32 abort, int32 -, int64 deadline in ns, int64 address of the record}.
"""

import triton
import triton.language as tl

BF16, FP16, FP32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SENTINEL = 0x80008000
_POISON = "0x7fc07fc0"  # NaN as fp32, and twice NaN as bf16 and as fp16
_WORDS = (tl.int32, tl.int32, tl.int32, tl.int32)
WORDS, SIXTEEN_WORDS = tl.constexpr(_WORDS), tl.constexpr(4 * _WORDS)


def _take_ptx(count: int, stride: int, wait: bool = True) -> tuple[tl.constexpr, tl.constexpr]:
    """PTX and constraints of a spin over ``count`` vectors of a thread; operands: addresses, masks, control, tag, epoch.

    stride  1: the vectors are elements of one tensor (an operand's elements follow each other, and so do a word's); 4: they
            are of ``count`` tensors (a vector's words follow each other), and control, tag and epoch are there once
    """
    elements = stride == 1
    vectors, words = range(count), range(4)
    out = lambda j, k: f"${k * count + j}" if elements else f"${4 * j + k}"  # noqa: E731
    address, mask = (lambda j: f"${4 * count + j}"), (lambda j: f"${5 * count + j}")
    control, tag, epoch = (f"${6 * count + i * (count if elements else 1)}" for i in range(3))
    vector = lambda j: "{" + ", ".join(out(j, k) for k in words) + "}"  # noqa: E731
    lines = [
        "{ .reg .pred q, x; .reg .b32 turns, low; .reg .b64 start, now, limit, record;",
        ".reg .pred " + ", ".join(f"take{j}" for j in vectors) + ";",
        "mov.b32 turns, 0; mov.b64 start, 0;",
    ]
    for j in vectors:
        lines.append(f"setp.eq.b32 q, {mask(j)}, 2; selp.b32 low, {_POISON}, 0, q;")
        lines += [f"mov.b32 {out(j, k)}, low;" for k in words]
        lines.append(f"setp.eq.b32 take{j}, {mask(j)}, 1;")
    lines.append("spin:")
    lines += [f"@take{j} ld.relaxed.sys.global.v4.b32 {vector(j)}, [{address(j)}];" for j in vectors]
    if wait:
        lines.append("setp.ne.b32 q, 0, 0;")
        lines += [f"setp.eq.or.b32 q, {out(j, k)}, {SENTINEL:#x}, q;" for j in vectors for k in words]
        lines += [
            "@!q bra done;",
            "add.u32 turns, turns, 1; and.b32 low, turns, 1023; setp.ne.b32 x, low, 0; @x bra spin;",
            "mov.u64 now, %globaltimer; setp.eq.b64 x, start, 0; @x mov.b64 start, now;",
            f"ld.relaxed.sys.global.b32 low, [{control}]; setp.ne.b32 x, low, 0; @x bra poison;",
            f"ld.relaxed.sys.global.b64 limit, [{control}+8]; sub.u64 now, now, start;",
            "setp.lt.u64 x, now, limit; @x bra spin;",
            f"ld.relaxed.sys.global.b64 record, [{control}+16]; mov.b32 turns, 1; mov.b32 low, 0;",
            f"st.relaxed.sys.global.v4.b32 [record], {{turns, {tag}, {epoch}, low}};",
            f"st.relaxed.sys.global.b32 [{control}], turns;",
            "poison:",
        ]
        lines += [f"@take{j} mov.b32 {out(j, k)}, {_POISON};" for j in vectors for k in words]
        lines.append("done:")
    lines.append("}")
    repeats = count if elements else 1
    constraints = ["=&r"] * 4 * count + ["l"] * count + ["r"] * count + [c for c in "lrr" for _ in range(repeats)]
    return tl.constexpr("\n".join(lines)), tl.constexpr(",".join(constraints))


_PTX_0, _LIST_0 = _take_ptx(1, 1, wait=False)
_PTX_1, _LIST_1 = _take_ptx(1, 1)
_PTX_2, _LIST_2 = _take_ptx(2, 1)
_PTX_4, _LIST_4 = _take_ptx(4, 1)
_PTX_PARTS, _LIST_PARTS = _take_ptx(4, 4)
_PTX_PARTS_0, _LIST_PARTS_0 = _take_ptx(4, 4, wait=False)


@triton.jit
def take(address, mask, control, tag, epoch, PACK: tl.constexpr):
    """Spin until a peer's 16 bytes have arrived. PACK vectors of a thread wait together; 0: do not wait (for a test)."""
    arguments = [address, mask, control, tag, epoch]
    if PACK == 0:
        return tl.inline_asm_elementwise(_PTX_0, _LIST_0, arguments, WORDS, is_pure=False, pack=1)
    elif PACK == 1:
        return tl.inline_asm_elementwise(_PTX_1, _LIST_1, arguments, WORDS, is_pure=False, pack=1)
    elif PACK == 2:
        return tl.inline_asm_elementwise(_PTX_2, _LIST_2, arguments, WORDS, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise(_PTX_4, _LIST_4, arguments, WORDS, is_pure=False, pack=4)


@triton.jit
def take_parts(a, m, control, tag, epoch, WAIT: tl.constexpr):
    """``take`` of the four parts of a row together: four addresses and masks, four times four words."""
    arguments = [a[0], a[1], a[2], a[3], m[0], m[1], m[2], m[3], control, tag, epoch]
    if WAIT:
        w = tl.inline_asm_elementwise(_PTX_PARTS, _LIST_PARTS, arguments, SIXTEEN_WORDS, is_pure=False, pack=1)
    else:
        w = tl.inline_asm_elementwise(_PTX_PARTS_0, _LIST_PARTS_0, arguments, SIXTEEN_WORDS, is_pure=False, pack=1)
    return (w[0], w[1], w[2], w[3]), (w[4], w[5], w[6], w[7]), (w[8], w[9], w[10], w[11]), (w[12], w[13], w[14], w[15])


@triton.jit
def sendable(words):
    """The words with zero in place of the sentinel: what a peer will see, and so what this rank has to add as well."""
    return (
        tl.where(words[0] == -0x7FFF8000, 0, words[0]),
        tl.where(words[1] == -0x7FFF8000, 0, words[1]),
        tl.where(words[2] == -0x7FFF8000, 0, words[2]),
        tl.where(words[3] == -0x7FFF8000, 0, words[3]),
    )


@triton.jit
def push(address, mask, words):
    """Store 16 sendable bytes into a peer's slot."""
    tl.inline_asm_elementwise(
        "{ .reg .pred q; setp.eq.b32 q, $2, 1; @q st.relaxed.sys.global.v4.b32 [$1], {$3, $4, $5, $6}; mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r",
        [address, mask, words[0], words[1], words[2], words[3]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def clear(address, mask):
    """Make 16 bytes of an own slot empty again."""
    tl.inline_asm_elementwise(
        """{ .reg .pred q; .reg .b32 s; mov.b32 s, 0x80008000;
        setp.eq.b32 q, $2, 1; @q st.relaxed.sys.global.v4.b32 [$1], {s, s, s, s}; mov.b32 $0, 0; }""",
        "=r,l,r",
        [address, mask],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load16(address, mask):
    return tl.inline_asm_elementwise(
        """{ .reg .pred q; setp.eq.b32 q, $5, 1; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        @q ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }""",
        "=&r,=&r,=&r,=&r,l,r",
        [address, mask],
        WORDS,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store16(address, mask, words):
    tl.inline_asm_elementwise(
        "{ .reg .pred q; setp.eq.b32 q, $2, 1; @q st.global.v4.b32 [$1], {$3, $4, $5, $6}; mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r",
        [address, mask, words[0], words[1], words[2], words[3]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_word(address):
    """One int32 at an integer address, the same for every thread."""
    return tl.inline_asm_elementwise(
        "ld.volatile.global.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_address(address):
    """One int64 at an integer address, the same for every thread."""
    return tl.inline_asm_elementwise(
        "ld.volatile.global.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def low(word, KIND: tl.constexpr):
    """The first (16-bit dtypes: lower) element of a word, as fp32."""
    if KIND == BF16:
        return (word << 16).to(tl.float32, bitcast=True)
    elif KIND == FP16:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return word.to(tl.float32, bitcast=True)


@triton.jit
def high(word, KIND: tl.constexpr):
    """The second element of a word, as fp32; an fp32 word has none (zero)."""
    if KIND == BF16:
        return (word & -65536).to(tl.float32, bitcast=True)
    elif KIND == FP16:
        return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (word & 0).to(tl.float32, bitcast=True)


@triton.jit
def join(lower, upper, KIND: tl.constexpr):
    """A word from its elements, rounded to nearest even."""
    if KIND == BF16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [upper, lower], dtype=tl.int32, is_pure=True, pack=1
        )
    elif KIND == FP16:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [upper, lower], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return lower.to(tl.int32, bitcast=True)


@triton.jit
def lows(words, KIND: tl.constexpr):
    return low(words[0], KIND), low(words[1], KIND), low(words[2], KIND), low(words[3], KIND)


@triton.jit
def highs(words, KIND: tl.constexpr):
    return high(words[0], KIND), high(words[1], KIND), high(words[2], KIND), high(words[3], KIND)


@triton.jit
def joins(lower, upper, KIND: tl.constexpr):
    return (
        join(lower[0], upper[0], KIND),
        join(lower[1], upper[1], KIND),
        join(lower[2], upper[2], KIND),
        join(lower[3], upper[3], KIND),
    )


@triton.jit
def add4(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@triton.jit
def mul4(a, b):
    return a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]


@triton.jit
def scale4(a, factor):
    return a[0] * factor, a[1] * factor, a[2] * factor, a[3] * factor


@triton.jit
def shift4(a, offset):
    return a[0] + offset, a[1] + offset, a[2] + offset, a[3] + offset


@triton.jit
def select4(condition, a, b):
    return (
        tl.where(condition, a[0], b[0]),
        tl.where(condition, a[1], b[1]),
        tl.where(condition, a[2], b[2]),
        tl.where(condition, a[3], b[3]),
    )
