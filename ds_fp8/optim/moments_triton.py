"""Quantize and dequantize a tile of a moment in Triton; moments.py has the maths, adamw_step_triton.py the step.

A tile is ROWS groups of 128 elements, [ROWS, 128]. Expansion takes two logarithms and two exponentials per element and
moment, on a GPU by approximate instructions (FAST), with errors of 1e-5, far below those of E4M3.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ds_fp8.casts.primitives_triton import magnitude_bits

# Storage: unscaled; scaled; scaled and expanded
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
    """Return the dequantized FP32 tile of `data`, a loaded tile; FP8 as bytes."""
    if DTYPE.primitive_bitwidth == 8:
        x = data.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        x = data.to(tl.float32)
    if KIND != PLAIN:
        # rows * 0, not 0: one scale per tensor in the shape of scales per group.
        factor = tl.load(scale + (rows * 0 if TENSOR else rows), mask=inside, other=1.0)
        if KIND == EXPANDED:
            # scale * (|x| / MAX) ** (1 / power) as one exponential of one FMA; log2(0) is -inf.
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
    """Return the bits of |x|, which order like the numbers; 0 for subnormal x."""
    bits = magnitude_bits(x)
    return tl.where(bits < _SMALLEST_NORMAL, 0, bits)


@triton.jit
def scale_of_group(bits, MAX: tl.constexpr, MASK: tl.constexpr, SMALLEST: tl.constexpr):
    """Return amax / MAX rounded up by MASK, from the bits of amax; 1 for a group of zeros, NaN for one with Inf or NaN.

    Other than `scale_of` in casts it supports FP16, and scales of 13 bits.
    """
    amax = bits.to(tl.float32, bitcast=True)
    exact = tl.div_rn(amax, tl.zeros_like(amax) + MAX)
    rounded = ((exact.to(tl.int32, bitcast=True) + MASK) & (-1 - MASK)).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(rounded, SMALLEST))
    return tl.where(bits > _LARGEST_FINITE, float("nan"), scale)


@triton.jit
def _growth(t, bend):
    """Return ((1 + t)**bend - 1) / bend, t in [0, 1/2], by its series: the relative growth of a value whose data grow by t.

    Error at most 2e-3 for bend up to 6; beyond, the range of the group is above 2^100.
    """
    series = 1.0 + (bend - 4.0) * (1.0 / 5) * t
    series = 1.0 + (bend - 3.0) * (1.0 / 4) * t * series
    series = 1.0 + (bend - 2.0) * (1.0 / 3) * t * series
    return t * (1.0 + (bend - 1.0) * (1.0 / 2) * t * series)


@triton.jit
def _with_noise(y, noise, bend, KIND: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr,
                MIN_EXPONENT: tl.constexpr, FAST: tl.constexpr):
    """_round_with_noise of moments.py: y >= 0 to an adjacent number of the format, unbiased over noise in [0, 1)."""
    #     step    = 2^(exponent - mantissa bits)               spacing of the format around y
    #     floor   = largest multiple of step not above y;      share = (y - floor) / step in [0, 1)
    #     result  = floor or floor + step, so that the dequantized value is unbiased
    # Clamped from below: subnormals of the format have constant spacing. The shift leaves the biased exponent, as y >=
    # 0.
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) >> 23, MIN_EXPONENT + 127)
    # 2^(exponent - MANTISSA) from bits; `inverse` is its exact reciprocal.
    step = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent + MANTISSA) << 23).to(tl.float32, bitcast=True)
    floor = tl.floor(y * inverse)  # in steps
    share = y * inverse - floor
    if KIND == EXPANDED:
        # floor 0: nothing but 0 lies below the first step, so that dividing by 1 is fine.
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
    """Quantize the tile x and store data, scales and exponents; TENSOR: `amax` is the bits of the tensor's amax."""
    if KIND == PLAIN:
        if NOISE and DTYPE == tl.bfloat16:
            # BF16 is the upper half of FP32.
            bits = (x.to(tl.int32, bitcast=True) + (noise * 65536.0).to(tl.int32)) & -65536
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # NaN of all ones would carry into the sign
        result = x.to(DTYPE)
    else:
        if KIND == EXPANDED:
            #     ratio   = log2(largest / smallest)                   of a group, without zeros
            #     power   = min(range of the format / ratio, ...)      in STEPS-ths, an integer of one byte
            #     data    = round(MAX * (|x| / largest)^power)         expands the group to the range of the format
            bits = magnitude_bits(x)
            largest = tl.max(bits, 1)
            largest = tl.where(largest < _SMALLEST_NORMAL, 0, largest)
            smallest = tl.min(tl.where(bits < _SMALLEST_NORMAL, _LARGEST_FINITE, bits), 1)
            factor = largest.to(tl.float32, bitcast=True)
            log_largest = _log2(tl.where(largest == 0, 1.0, factor), FAST)
            ratio = log_largest - _log2(smallest.to(tl.float32, bitcast=True), FAST)
            # Ratio 0 for equal values, negative for a group of zeros.
            steps = tl.floor(divide(tl.zeros_like(ratio) + STEPS * LOG2_RANGE, tl.maximum(ratio, 1e-6), FAST))
            steps = tl.minimum(tl.maximum(steps, 1.0), LARGEST_STEPS)
            power = steps * (1.0 / STEPS)
            offset = LOG2_MAX - log_largest * power
            # MAX * (|x| / largest) ** power; the smallest is 2.3 steps of the format: nothing becomes zero.
            magnitude = bits.to(tl.float32, bitcast=True)
            if not FAST:
                magnitude = tl.where(bits < _SMALLEST_NORMAL, 0.0, magnitude)  # the GPU's logarithm flushes them
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
            # By the rounded reciprocal, as in moments.py: bitwise equal data.
            y = bits.to(tl.float32, bitcast=True) * inverse[:, None]
            if not SIGNED:
                y = tl.where((bits > 0) & (y < SMALLEST), SMALLEST, y)
        if NOISE:
            rounded = _with_noise(y, noise, bend, KIND, MAX, MANTISSA, MIN_EXPONENT, FAST)
            if KIND == EXPANDED or MASK == 0x7FF:
                # The largest must not be rounded down: quantizing again would find another scale.
                rounded = tl.where((bits == largest[:, None]) & (largest > 0)[:, None], MAX, rounded)
            y = tl.where(y == y, rounded, y)  # NaN stays
        # No clamp for rounding to nearest: y exceeds MAX by far less than half a step.
        result = (_with_sign_of(y, x) if SIGNED else y).to(DTYPE)
    if DTYPE.primitive_bitwidth == 8:
        result = result.to(tl.uint8, bitcast=True)
    if EVEN:
        tl.store(data + offsets, result)
    else:
        tl.store(data + offsets, result, mask=valid)
