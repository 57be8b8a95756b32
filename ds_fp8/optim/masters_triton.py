"""Masters as quantized data, or BF16, and corrections in Triton; masters.py has the maths."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import over_largest, scale_of, to_fp8
from ds_fp8.optim.masters import LARGEST_CORRECTION, MIDDLE, SMALLEST_NORMAL

_LARGEST_CORRECTION, _SMALLEST_NORMAL = tl.constexpr(LARGEST_CORRECTION), tl.constexpr(SMALLEST_NORMAL)
_MIDDLE = tl.constexpr(MIDDLE)
_ITS_BITS, _BITS_OF_2_14 = tl.constexpr((127 - 6) << 23), tl.constexpr((127 + 14) << 23)
_LARGEST_BITS = tl.constexpr((127 + 8 << 23) + (3 << 21))  # 448 = 1.75 * 2^8


@triton.jit
def _magnitude_of(data):
    return tl.abs(data.to(tl.float8e4nv, bitcast=True).to(tl.float32))


@triton.jit
def _shifted(word, BITS: tl.constexpr):
    return (word + ((1 << (BITS - 1)) - 1) + ((word >> BITS) & 1)) >> BITS


@triton.jit
def dequantize_master(data, correction, scale):
    """dequantize_masters of optim/masters.py; data as bytes."""
    magnitude, t = _magnitude_of(data), correction.to(tl.int32)
    more = tl.where(magnitude.to(tl.int32, bitcast=True) + t < _ITS_BITS, _SMALLEST_NORMAL, 0.0)
    bits = (magnitude + more).to(tl.int32, bitcast=True) + (t << 4)
    bits = (bits.to(tl.float32, bitcast=True) - more).to(tl.int32, bitcast=True) | ((data.to(tl.int32) & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * scale


@triton.jit
def quantize_master(w, scale, reciprocal, POW2: tl.constexpr):
    """quantize_masters of optim/masters.py: (data as bytes, corrections)."""
    data = to_fp8(w, reciprocal, tl.float8e4nv).to(tl.uint8, bitcast=True)
    cast = tl.abs(w * reciprocal)
    x = cast
    if not POW2:
        # The quotient rounded to nearest: one Newton step from the rounded reciprocal (Markstein 1990).
        x = tl.fma(tl.fma(-x, scale + tl.zeros_like(x), tl.abs(w)), reciprocal + tl.zeros_like(x), x)
    small = x < _SMALLEST_NORMAL
    # The dequantized data, by rounding again: ptxas 12.8 miscompiles reading FP8 bytes just computed (from register 1).
    # 20 bits of mantissa are rounded off; around 2^14 the spacing of FP32 is that of subnormal E4M3.
    rounded = tl.minimum(_shifted(cast.to(tl.int32, bitcast=True), 20) << 20, _LARGEST_BITS)
    rounded_small = _ITS_BITS + (((cast + 16384.0).to(tl.int32, bitcast=True) - _BITS_OF_2_14) << 20)
    rounded = tl.where(small, rounded_small, rounded)
    t = _shifted((x + tl.where(small, _SMALLEST_NORMAL, 0.0)).to(tl.int32, bitcast=True) - rounded, 4)
    return data, tl.minimum(tl.maximum(t, -_LARGEST_CORRECTION), _LARGEST_CORRECTION).to(tl.int16)


@triton.jit
def stored_scale(bits, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr):
    """(scale, 1 / scale) from the bits of an amax: scale_from_amax(stored_amax(...)) of optim/masters.py."""
    if POW2:
        stored = _shifted(bits, 4) << 4
    else:
        amax = bits.to(tl.float32, bitcast=True)
        exact = over_largest(amax, LARGEST).to(tl.int32, bitcast=True)
        stored = ((_shifted(exact, 3) << 3).to(tl.float32, bitcast=True) * LARGEST).to(tl.int32, bitcast=True)
    return scale_of(tl.where(bits >= 0x7F800000, bits, stored), LARGEST, SMALLEST, POW2)


@triton.jit
def join_split(bf16, correction, tie):
    """SplitMasters.read of optim/masters.py, from bits of BF16, corrections and ties."""
    word = (bf16.to(tl.int32) << 16) + correction.to(tl.int32) + (tie << 16)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def split_master(w):
    """SplitMasters.write of optim/masters.py: (bits of BF16, corrections, ties)."""
    word = w.to(tl.int32, bitcast=True)
    bf16 = tl.where(w == w, _shifted(word, 16), 0x7FC0)
    difference = word - (bf16 << 16)
    return bf16.to(tl.int16), difference.to(tl.int16), (difference == _MIDDLE).to(tl.int32)
