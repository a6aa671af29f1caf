"""Numbers in e4m3 inside kernels: 4 bits of exponent, 3 of mantissa, ±448, no infinity.

Chips from sm_89 on convert by an instruction. Older ones, and the interpreter (whose conversion rounds ties and
subnormals wrongly), compute the code from the bits of the float32: two ways to the same bytes. The constexpr CONVERTS
says which, :attr:`.launch.Chip.converts_e4m3`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_engine.kernels.formats.division import divide

SMALLEST_AMAX = 1e-4  # a block of smaller numbers is quantised as if it held one of this size
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_PER_LARGEST = tl.constexpr(1 / 448)  # rounded to float32, like every number of a kernel


@triton.jit
def encode_e4m3(x, CONVERTS: tl.constexpr):
    """float32 within ±448 to uint8: the nearest e4m3, ties to even. NaN stays NaN."""
    if CONVERTS:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # 20 bits of mantissa are rounded off, then the exponent's bias falls from 127 to 7.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 steps are 2^-9, as those of a float32 beside 2^14 = 0x46800000: the addition rounds.
        subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < (121 << 23), subnormal, normal)
        code = (tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def decode_e4m3(code, CONVERTS: tl.constexpr):
    """uint8 to float32, exact."""
    if CONVERTS:
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int32)
        # Exponent and mantissa at their bits of a float32 are 2^120 too small, subnormals included.
        x = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), tl.where(bits >= 0x80, -x, x))
    return x


@triton.jit
def quantize_tile(x, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr):
    """Quantises the rows of ``x [rows, columns]``, float32: uint8 codes, and float32 scales ``[rows, 1]``."""
    largest = tl.max(tl.abs(x), axis=1, keep_dims=True)
    scale = tl.maximum(largest, _SMALLEST_AMAX) * _PER_LARGEST
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF  # up, unless the mantissa is 0
        scale = bits.to(tl.float32, bitcast=True)
        scaled = x * ((254 << 23) - bits).to(tl.float32, bitcast=True)  # its reciprocal: exponents add up to 2 · 127
    else:
        scaled = divide(x, scale)  # codes are those of the reference
    return encode_e4m3(scaled, CONVERTS), scale
