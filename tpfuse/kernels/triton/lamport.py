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
