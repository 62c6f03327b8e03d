"""Arithmetic on the four 32-bit words of a 16-byte vector, and the sum of what a block's threads have.

A word holds two bf16 or fp16 elements, the lower first, or one fp32: as fp32 numbers a vector is (lows, highs), four each.
"""

import triton
import triton.language as tl

BF16, FP16, FP32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
