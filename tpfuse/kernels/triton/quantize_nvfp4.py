"""Values to e2m1, in blocks of 16 that share a scale in e4m3."""

import triton
import triton.language as tl

from tpfuse.kernels.triton.quantize import _magnitude


@triton.jit
def _above(magnitude, edge: tl.constexpr, EVEN: tl.constexpr):
    return tl.where(magnitude >= edge if EVEN else magnitude > edge, 1, 0)


@triton.jit
def tpfuse_quantize_nvfp4(x, scale, packed, scales, count, ELEMENTS: tl.constexpr, SCALED: tl.constexpr):
    """ELEMENTS values, of any rows."""
    first = tl.program_id(0).to(tl.int64) * ELEMENTS
    place = first + tl.arange(0, ELEMENTS)
    wide = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    blocks = tl.reshape(wide, (ELEMENTS // 16, 16))
    outer = tl.load(scale) if SCALED else 1.0
    ideal = tl.math.div_rn(_magnitude(blocks, 1) * (1.0 / 6.0), outer)  # as torch divides by a number on CUDA
    rounded = tl.where(ideal > 448.0, 448.0, ideal).to(tl.float8e4nv)  # keeps NaN
    block = first // 16 + tl.arange(0, ELEMENTS // 16)[:, None]
    tl.store(scales + block, rounded, mask=block < count // 16)
    divisor = rounded.to(tl.float32) * outer
    magnitude = tl.abs(tl.where(divisor > 0.0, tl.math.div_rn(blocks, tl.where(divisor > 0.0, divisor, 1.0)), 0.0))
    code = _above(magnitude, 0.25, False) + _above(magnitude, 0.75, True) + _above(magnitude, 1.25, False)
    code += _above(magnitude, 1.75, True) + _above(magnitude, 2.5, False) + _above(magnitude, 3.5, True)
    code += _above(magnitude, 5.0, False)
    code |= (blocks.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code, (ELEMENTS // 2, 2)))
    pair = first // 2 + tl.arange(0, ELEMENTS // 2)
    tl.store(packed + pair, (low | (high << 4)).to(tl.uint8), mask=pair < count // 2)
