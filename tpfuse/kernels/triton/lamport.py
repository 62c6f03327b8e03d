"""Device functions that move 16 bytes at a time between ranks, where the data is its own arrival flag (after Lamport).

A slot is filled with ``SENTINEL`` before use. A pusher stores its words straight into the peer's slot, the taker spins
until no word of its 16 bytes is the sentinel: one trip over the wire and no flag. The sentinel is a pair of bf16 or fp16
negative zeros; a pusher sends zeros in its place. As an fp32 it is -4.6e-41, sent as zero too.

What one call leaves for the next (slots, the blocks' state, the sum that is the next residual) would be driven out of the
L2 cache by the weights that the GEMMs between read once: KEEP asks the cache to evict it last.

Addresses are 64-bit integers, masks are int32: 0 leaves an element out (it reads as 0), 1 takes part, 2 reads as NaN
(``take`` on a dead arena). Accesses are inline assembly with side effects: the compiler keeps their order.

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
WORDS, TWENTY_WORDS, WORDS_AND_LATE = tl.constexpr(_WORDS), tl.constexpr(5 * _WORDS), tl.constexpr((*_WORDS, tl.int32))


@triton.constexpr_function
def _kept(keep: bool) -> tuple[str, str, str]:
    """What an access that asks to be evicted last needs: declarations, its suffix, its last operand."""
    if not keep:
        return "", "", ""
    return ".reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;", ".L2::cache_hint", ", policy"


@triton.constexpr_function
def _take_ptx(count: int, elements: bool, wait: bool, keep: bool) -> str:
    """A spin over ``count`` vectors of a thread. Results: four words of each and whether it gave up; operands: addresses,
    masks, control, tag, epoch.

    elements  True: the vectors are elements of one tensor (an operand's elements follow each other, and so do a word's);
              False: they are of ``count`` tensors (a vector's results follow each other), and control, tag and epoch are
              there once
    """
    vectors, words = range(count), range(4)
    declare, hint, policy = _kept(keep)
    out = lambda j, k: f"${k * count + j}" if elements else f"${5 * j + k}"  # noqa: E731
    address, mask = (lambda j: f"${5 * count + j}"), (lambda j: f"${6 * count + j}")
    control, tag, epoch = (f"${7 * count + i * (count if elements else 1)}" for i in range(3))
    vector = lambda j: "{" + ", ".join(out(j, k) for k in words) + "}"  # noqa: E731
    lines = [
        "{ .reg .pred q, x; .reg .b32 turns, low; .reg .b64 start, now, limit, record;" + declare,
        ".reg .pred " + ", ".join(f"take{j}" for j in vectors) + ";",
        "mov.b32 turns, 0; mov.b64 start, 0;",
    ]
    for j in vectors:
        lines.append(f"setp.eq.b32 q, {mask(j)}, 2; selp.b32 low, {_POISON}, 0, q; selp.b32 {out(j, 4)}, 1, 0, q;")
        lines += [f"mov.b32 {out(j, k)}, low;" for k in words]
        lines.append(f"setp.eq.b32 take{j}, {mask(j)}, 1;")
    lines.append("spin:")
    lines += [f"@take{j} ld.relaxed.sys.global{hint}.v4.b32 {vector(j)}, [{address(j)}]{policy};" for j in vectors]
    if wait:
        lines += [
            *_any_is_empty([out(j, k) for j in vectors for k in words]),
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
        for j in vectors:
            lines += [f"@take{j} mov.b32 {out(j, k)}, {_POISON};" for k in words]
            lines.append(f"@take{j} mov.b32 {out(j, 4)}, 1;")
        lines.append("done:")
    lines.append("}")
    return "\n".join(lines)


@triton.constexpr_function
def _any_is_empty(words: list[str]) -> list[str]:
    """q = a word is the sentinel. In three chains: in one, each comparison would wait for the one before."""
    lines = [".reg .pred q0, q1, q2;"]
    for n, word in enumerate(words):
        chain = f"q{n % 3}"
        if n < 3:
            lines.append(f"setp.eq.b32 {chain}, {word}, {SENTINEL:#x};")
        else:
            lines.append(f"setp.eq.or.b32 {chain}, {word}, {SENTINEL:#x}, {chain};")
    return [*lines, "or.pred q, q0, q1; or.pred q, q, q2;"]


@triton.constexpr_function
def _take_constraints(count: int, elements: bool) -> str:
    repeats = count if elements else 1
    return ",".join(["=&r"] * 5 * count + ["l"] * count + ["r"] * count + [c for c in "lrr" for _ in range(repeats)])


@triton.jit
def take(address, mask, control, tag, epoch, PACK: tl.constexpr, KEEP: tl.constexpr):
    """Spin until a peer's 16 bytes have arrived: (words, 1 where it gave up). PACK vectors of a thread wait together; 0: do
    not wait (for a test)."""
    COUNT: tl.constexpr = PACK if PACK > 0 else 1
    w = tl.inline_asm_elementwise(
        _take_ptx(COUNT, True, PACK > 0, KEEP),
        _take_constraints(COUNT, True),
        [address, mask, control, tag, epoch],
        WORDS_AND_LATE,
        is_pure=False,
        pack=COUNT,
    )
    return (w[0], w[1], w[2], w[3]), w[4]


@triton.jit
def take_parts(a, m, control, tag, epoch, WAIT: tl.constexpr, KEEP: tl.constexpr):
    """The words of the four parts of a row, which wait together: four addresses and masks. (Whether it gave up is left out:
    a row in parts is pushed once.)"""
    w = tl.inline_asm_elementwise(
        _take_ptx(4, False, WAIT, KEEP),
        _take_constraints(4, False),
        [a[0], a[1], a[2], a[3], m[0], m[1], m[2], m[3], control, tag, epoch],
        TWENTY_WORDS,
        is_pure=False,
        pack=1,
    )
    return (w[0], w[1], w[2], w[3]), (w[5], w[6], w[7], w[8]), (w[10], w[11], w[12], w[13]), (w[15], w[16], w[17], w[18])


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


@triton.constexpr_function
def _store_ptx(what: str, how: str, keep: bool) -> str:
    declare, hint, policy = _kept(keep)
    store = f"st{how}.global{hint}.v4.b32 [$1], {{{what}}}{policy};"
    empty = f".reg .b32 s; mov.b32 s, {SENTINEL:#x};"
    return f"{{ .reg .pred q; {declare} {empty} setp.eq.b32 q, $2, 1; @q {store} mov.b32 $0, 0; }}"


@triton.jit
def clear(address, mask, KEEP: tl.constexpr):
    """Make 16 bytes of an own slot empty again."""
    tl.inline_asm_elementwise(
        _store_ptx("s, s, s, s", ".relaxed.sys", KEEP),
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
def store16(address, mask, words, KEEP: tl.constexpr = False):
    tl.inline_asm_elementwise(
        _store_ptx("$3, $4, $5, $6", "", KEEP),
        "=r,l,r,r,r,r,r",
        [address, mask, words[0], words[1], words[2], words[3]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.constexpr_function
def _word_ptx(access: str) -> str:
    declare, hint, policy = _kept(True)
    return f"{{ {declare} {access.format(hint=hint, policy=policy)} }}"


@triton.jit
def load_word(address):
    """One int32 at an integer address, the same for every thread."""
    return tl.inline_asm_elementwise(
        _word_ptx("ld.relaxed.sys.global{hint}.b32 $0, [$1]{policy};"),
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_word(address, word):
    tl.inline_asm_elementwise(
        _word_ptx("st.relaxed.sys.global{hint}.b32 [$1], $2{policy}; mov.b32 $0, 0;"),
        "=r,l,r",
        [address, word],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_address(address):
    """One int64 at an integer address, the same for every thread."""
    return tl.inline_asm_elementwise(
        _word_ptx("ld.relaxed.sys.global{hint}.b64 $0, [$1]{policy};"),
        "=l,l",
        [address],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
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
def hoist(value):
    """The fp32 values, computed here: the compiler would put it off until after the spin that follows."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def hoist4(values):
    return hoist(values[0]), hoist(values[1]), hoist(values[2]), hoist(values[3])


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


@triton.constexpr_function
def _sum_ptx(count: int, warps: int) -> str:
    """The sum of ``count`` values of each thread of all ``warps`` warps, to each thread ``count`` times."""
    own = [f"${count + i}" for i in range(count)]
    lines = [
        "{ .reg .f32 s, t, u, v, w; .reg .b32 thread, at, base; .reg .pred first; .shared .align 16 .b8 partial[128];",
        # The first lane of a warp writes to byte 4 * warp.
        "mov.u32 base, partial; mov.u32 thread, %tid.x; shr.u32 at, thread, 3; add.u32 at, at, base;",
        f"and.b32 thread, thread, 31; setp.eq.u32 first, thread, 0; mov.b32 s, {own[0]};",
        *(f"add.f32 s, s, {each};" for each in own[1:]),
        *(f"shfl.sync.bfly.b32 t, s, {step}, 31, -1; add.f32 s, s, t;" for step in (16, 8, 4, 2, 1)),
    ]
    if warps > 1:
        lines.append("@first st.shared.f32 [at], s; bar.sync 0; mov.b32 s, 0;")
        for group in range(0, warps, 4):
            lines.append(f"ld.shared.v4.f32 {{t, u, v, w}}, [base + {4 * group}];")
            lines.append("".join(f"add.f32 s, s, {each};" for each, _ in zip("tuvw", range(group, warps), strict=False)))
    lines += [f"mov.b32 ${i}, s;" for i in range(count)]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _sum_constraints(count: int) -> str:
    return ",".join(["=&f"] * count + ["f"] * count)


@triton.jit
def sum_once(values, BLOCK: tl.constexpr):
    """The sum of a block's BLOCK fp32 values, for each of its threads. One barrier: tl.sum has two.

    Once in a kernel, not in a branch or a loop; BLOCK is a multiple of the threads.
    """
    WARPS: tl.constexpr = tl.extra.cuda.num_warps()
    COUNT: tl.constexpr = BLOCK // (32 * WARPS)
    return tl.inline_asm_elementwise(
        _sum_ptx(COUNT, WARPS), _sum_constraints(COUNT), [values], dtype=tl.float32, is_pure=False, pack=COUNT
    )
