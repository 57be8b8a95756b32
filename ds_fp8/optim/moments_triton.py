"""Decoding and encoding of a tile of optimizer state in Triton, as moments.py has it; adamw_step_triton.py puts them into a step.

A tile is ROWS groups of 128 elements, [ROWS, 128]. Expansion takes two logarithms and two exponentials an element and
moment; on a GPU they are the approximate instructions (FAST), whose errors of 1e-5 are far below E4M3's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ds_fp8.casts.primitives_triton import magnitude_bits

# Storage of a state: as a number, in units of a scale, in units of a scale and raised to an exponent.
PLAIN, SCALED, EXPANDED = (tl.constexpr(i) for i in range(3))
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_SIGN = tl.constexpr(-0x80000000)
_LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        result = libdevice.fast_log2f(x)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def divide(x, y, FAST: tl.constexpr):
    """Return x / y; with FAST, approximately."""
    if FAST:
        result = libdevice.fast_dividef(x, y)
    else:
        result = x / y
    return result


@triton.jit
def _with_sign_of(magnitude, x):
    """Return `magnitude`, which is not negative, with the sign of x: one instruction on bits."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dequantize_tile(data, scale, exponent, rows, inside, KIND: tl.constexpr, DTYPE: tl.constexpr, MAX: tl.constexpr,
            LOG2_MAX: tl.constexpr, STEPS: tl.constexpr, SIGNED: tl.constexpr, TENSOR: tl.constexpr, FAST: tl.constexpr):
    """Return the FP32 tile of the numbers stored as `codes`, a loaded tile; FP8 codes come as bytes."""
    if DTYPE.primitive_bitwidth == 8:
        x = data.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        x = data.to(tl.float32)
    if KIND != PLAIN:
        # rows * 0 and not 0: every row loads the one scale of the tensor, with the shape of scales by group.
        factor = tl.load(scale + (rows * 0 if TENSOR else rows), mask=inside, other=1.0)
        if KIND == EXPANDED:
            # scale * (|x| / MAX) ** (1 / power) as one exponential of one multiply-add; the log of 0 is -inf.
            steps = tl.load(exponent + rows, mask=inside, other=1).to(tl.float32)
            inverse = divide(tl.zeros_like(steps) + STEPS, steps, FAST)
            offset = _log2(factor, FAST) - LOG2_MAX * inverse
            magnitude = tl.exp2(_log2(tl.abs(x), FAST) * inverse[:, None] + offset[:, None])
            x = _with_sign_of(magnitude, x) if SIGNED else magnitude
        else:
            x = x * factor[:, None]
    return x


@triton.jit
def normal_magnitude_bits(x):
    """Return the bits of |x|, which order like the numbers; 0 for subnormal x, which codecs take for zero."""
    bits = magnitude_bits(x)
    return tl.where(bits < _SMALLEST_NORMAL, 0, bits)


@triton.jit
def scale_of_group(bits, MAX: tl.constexpr, MASK: tl.constexpr, SMALLEST: tl.constexpr):
    """Return amax / MAX rounded up as MASK says, from the bits of amax; 1 for a group of zeros, NaN for one of Inf or NaN.

    `scale_of` of the casts knows two formats and powers of two or no rounding; here are FP16, and scales of 13 bits.
    """
    amax = bits.to(tl.float32, bitcast=True)
    exact = tl.div_rn(amax, tl.zeros_like(amax) + MAX)
    rounded = ((exact.to(tl.int32, bitcast=True) + MASK) & (-1 - MASK)).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(rounded, SMALLEST))
    return tl.where(bits > _LARGEST_FINITE, float("nan"), scale)


@triton.jit
def _growth(t, bend):
    """Return ((1 + t)**bend - 1) / bend, t in [0, 1/2], by its series: the growth of a number whose code grows by t.

    Right to 2e-3 for bend up to 6; more than that bends only what ranges over 2^100 and more.
    """
    series = 1.0 + (bend - 4.0) * (1.0 / 5) * t
    series = 1.0 + (bend - 3.0) * (1.0 / 4) * t * series
    series = 1.0 + (bend - 2.0) * (1.0 / 3) * t * series
    return t * (1.0 + (bend - 1.0) * (1.0 / 2) * t * series)


@triton.jit
def _with_noise(y, noise, bend, KIND: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr,
                MIN_EXPONENT: tl.constexpr, FAST: tl.constexpr):
    """Return one of the two numbers of the format around y >= 0, right on average over noise in [0, 1): _round_with_noise."""
    #     step    = 2^(exponent - mantissa bits)               spacing of the format around y
    #     floor   = largest multiple of step not above y;      share = (y - floor) / step in [0, 1)
    #     result  = floor or floor + step, with probabilities so that the decoded number is right on average
    # Exponents are clamped from below: subnormal numbers of the format are all one step apart.
    # y >= 0, so the shift leaves the biased exponent of FP32, without a sign.
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) >> 23, MIN_EXPONENT + 127)
    # 2^(exponent - MANTISSA), put together from bits; `inverse` is its exact reciprocal, and no division is needed.
    step = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent + MANTISSA) << 23).to(tl.float32, bitcast=True)
    floor = tl.floor(y * inverse)  # in steps
    share = y * inverse - floor
    if KIND == EXPANDED:
        # No number but 0 lies below the first step, so dividing by one step there changes nothing.
        t = divide(tl.zeros_like(floor) + 1.0, tl.maximum(floor, 1.0), FAST)
        up = _growth(share * t, bend) >= (1.0 - noise) * _growth(t, bend)
    else:
        up = share + noise >= 1
    return tl.minimum(tl.where(up, floor + 1.0, floor) * step, MAX)


@triton.jit
def quantize_store(
    x, data, scale, exponent, offsets, rows, inside, valid, noise, amax,
    KIND: tl.constexpr, DTYPE: tl.constexpr, MAX: tl.constexpr, LOG2_MAX: tl.constexpr, MASK: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, LOG2_RANGE: tl.constexpr,
    STEPS: tl.constexpr, LARGEST_STEPS: tl.constexpr, SIGNED: tl.constexpr, NOISE: tl.constexpr,
    TENSOR: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):
    """Encode the tile x and store its codes, scales and exponents; where TENSOR, `amax` has the bits of the tensor's."""
    if KIND == PLAIN:
        if NOISE and DTYPE == tl.bfloat16:
            # BF16 is the upper half of FP32.
            bits = (x.to(tl.int32, bitcast=True) + (noise * 65536.0).to(tl.int32)) & -65536
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN of all ones would carry into the sign
        result = x.to(DTYPE)
    else:
        if KIND == EXPANDED:
            #     ratio   = log2(largest / smallest)                   of a group; zeros do not count
            #     power   = min(range of the format / ratio, ...)      in STEPS-ths, an integer of one byte
            #     code    = round(MAX * (|x| / largest)^power)         spreads the group over the whole format
            bits = magnitude_bits(x)
            largest = tl.max(bits, 1)
            largest = tl.where(largest < _SMALLEST_NORMAL, 0, largest)
            smallest = tl.min(tl.where(bits < _SMALLEST_NORMAL, _LARGEST_FINITE, bits), 1)
            factor = largest.to(tl.float32, bitcast=True)
            log_largest = _log2(tl.where(largest == 0, 1.0, factor), FAST)
            ratio = log_largest - _log2(smallest.to(tl.float32, bitcast=True), FAST)
            # Equal values have ratio 0, and a group of zeros a negative one.
            steps = tl.floor(divide(tl.zeros_like(ratio) + STEPS * LOG2_RANGE, tl.maximum(ratio, 1e-6), FAST))
            steps = tl.minimum(tl.maximum(steps, 1.0), LARGEST_STEPS)
            power = steps * (1.0 / STEPS)
            offset = LOG2_MAX - log_largest * power
            # MAX * (|x| / largest) ** power; the smallest comes to 2.3 steps of the format, so nothing becomes zero.
            magnitude = bits.to(tl.float32, bitcast=True)
            if not FAST:
                magnitude = tl.where(bits < _SMALLEST_NORMAL, 0.0, magnitude)  # on a GPU the logarithm does
            y = tl.exp2(_log2(magnitude, FAST) * power[:, None] + offset[:, None])
            bend = divide(tl.zeros_like(steps) + STEPS, steps, FAST)[:, None]
            tl.store(exponent + rows, steps.to(tl.uint8), mask=inside)
            tl.store(scale + rows, factor, mask=inside)
        else:
            bits = normal_magnitude_bits(x)
            if TENSOR:
                largest = tl.load(amax) + rows.to(tl.int32) * 0
                factor = scale_of_group(largest, MAX, MASK, SMALLEST_SCALE)
                tl.store(scale + rows * 0, factor, mask=rows == 0)
            else:
                largest = tl.max(bits, 1)
                factor = scale_of_group(largest, MAX, MASK, SMALLEST_SCALE)
                tl.store(scale + rows, factor, mask=inside)
            bend = inside
            inverse = tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
            # The reciprocal is rounded where scales are no powers of two; codecs.py multiplies by it too: the same
            # codes.
            y = bits.to(tl.float32, bitcast=True) * inverse[:, None]
            if not SIGNED:
                y = tl.where((bits > 0) & (y < SMALLEST), SMALLEST, y)
        if NOISE:
            rounded = _with_noise(y, noise, bend, KIND, MAX, MANTISSA, MIN_EXPONENT, FAST)
            if KIND == EXPANDED or MASK == 0x7FF:
                # Noise must not round the largest down, or decoding and encoding again would find another scale.
                rounded = tl.where((bits == largest[:, None]) & (largest > 0)[:, None], MAX, rounded)
            y = tl.where(y == y, rounded, y)  # NaN stays
        # Casts to nearest need no clamp: rounding errors above MAX are far below half a step.
        result = (_with_sign_of(y, x) if SIGNED else y).to(DTYPE)
    if DTYPE.primitive_bitwidth == 8:
        result = result.to(tl.uint8, bitcast=True)
    if EVEN:
        tl.store(data + offsets, result)
    else:
        tl.store(data + offsets, result, mask=valid)
