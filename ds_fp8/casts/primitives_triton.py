"""The parts of casting kernels in Triton: amax, scale, rounding, random words; primitives.py has the maths.

Bit for bit what primitives.py and stochastic.py compute. An amax travels as the bits of its float: magnitudes order like
their bits, with NaN above Inf, so that a reduction of integers carries what is not finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_fp8.casts.stochastic import MULTIPLIERS
from ds_fp8.config.formats import FORMATS, SMALLEST_SCALE, has_power_of_two_scales

NONE, GROUP, TILE, ROW, TENSOR = (tl.constexpr(i) for i in range(5))
"""Scales of a result: not wanted, one scale per 1x128 group, per tile, per row of the result, for all of it."""
MODES = {None: 0, "1x128": 1, "128x128": 2, "row": 3, "tensor": 4}
FITTED = tl.constexpr(2)
"""Value of POW2 where scales of 1x128 groups are fitted_scales of primitives.py; 1 where they are powers of two, else 0.
Elsewhere it means 0."""
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""True where kernels are compiled, and may hold assembly: Triton's interpreter runs none."""
_STEP, _FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def random_word(index, key):
    """Return the 32 bits whose upper half `uniform` of stochastic.py takes."""
    # A counter-based generator: the same word for the same element wherever the kernel's tiles begin, and no state that
    # programs would have to share. Multiply and xor-shift twice: an avalanche, so that neighbours have nothing in
    # common.
    word = index.to(tl.uint32) * _STEP + key.to(tl.uint32)
    word = (word ^ (word >> 16)) * _FIRST
    word = (word ^ (word >> 15)) * _SECOND
    return word ^ (word >> 16)


@triton.jit
def magnitude_bits(x):
    """Return magnitudes of FP32 `x` as their bits, which order like the numbers, with NaN above Inf."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """Return the largest magnitude of FP32 `x` along `axis`, as its bits."""
    return tl.max(magnitude_bits(x), axis)


@triton.jit
def raise_amax(amax, bits, at, length, MODE: tl.constexpr):
    """Raise int32 `amax` to the bits of a tile's rows `at` < length: an element a row (ROW), the first one (TENSOR)."""
    if MODE == ROW:
        # Relaxed: nobody reads the amax before the next launch, which orders them. A maximum does not depend on the
        # order in which programs arrive either, so the result is the same bits in every run.
        tl.atomic_max(amax + at, bits, mask=at < length, sem="relaxed")
    elif MODE == TENSOR:
        tl.atomic_max(amax, tl.max(bits, 0), sem="relaxed")


@triton.jit
def scale_of(bits, largest: tl.constexpr, smallest_scale: tl.constexpr, POW2: tl.constexpr):
    """Return (scale, 1 / scale) of scale_from_amax in primitives.py, from the bits of the amax.

    The largest value of both formats is 1.75 * 2^E. With amax = m * 2^e the power of two not below amax / largest is
    2^(e - E), or twice that when m > 1.75: a carry out of the mantissa.
    """
    amax = bits.to(tl.float32, bitcast=True)
    overflow = bits >= 0x7F800000
    if POW2 == 1:
        E: tl.constexpr = 8 if largest < 500 else 15
        # mantissa m in [1, 2): 0x1FFFFF carries into the exponent if m > 1.75, the first mantissa that exceeds the
        # largest
        #    scale   = 2^(ceil(log2(amax / largest)))     without a logarithm or a division
        #    divisor = 2^-(its exponent)                  the same bits mirrored around 127, exactly
        # The floor at 1 << 23 is the smallest normal number: subnormal scales would have no normal reciprocal.
        exponent = ((bits + 0x1FFFFF) & 0x7F800000) - (E << 23)
        exponent = tl.where(bits == 0, 127 << 23, tl.maximum(exponent, 1 << 23))
        scale = exponent.to(tl.float32, bitcast=True)
        reciprocal = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    else:
        # div_rn, not "/": the approximate division of the GPU differs from torch's in the last bit, and then the codes
        # do.
        scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + largest), smallest_scale)
        scale = tl.where(bits == 0, 1.0, scale)
        # One division a group, and a product an element: a division takes as long as the rest of a cast.
        reciprocal = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return tl.where(overflow, float("nan"), scale), tl.where(overflow, float("nan"), reciprocal)


@triton.jit
def error_in_units(x, reciprocal, largest: tl.constexpr):
    """Return the squared error of each x in units of its scale, of a cast to E4M3 (largest 448) or else to E5M2.

    Rounded by arithmetic, not by a cast and back: ptxas 12.8 reads a register that was never written where FP8 is made
    and unpacked.
    """
    EPSILON: tl.constexpr = 0.125 if largest < 500 else 0.25
    SUBNORMAL: tl.constexpr = 2.0**-9 if largest < 500 else 2.0**-16
    units = tl.abs(x * reciprocal)
    shift = spacing_of(units, EPSILON, SUBNORMAL) * 12582912.0  # 1.5 * 2^23 spacings have no room for fractions
    lost = (units + shift) - shift - units
    return lost * lost


@triton.jit
def fit(scale, reciprocal, least, bits, lost, sevenths: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr):
    """Return (scale, reciprocal, least error) with those of `sevenths` of the largest number, where they lose less.

    `lost` is the error with them, in units of their scale.
    """
    other, its_reciprocal = scale_of(bits, largest * sevenths / 7, smallest, 0)
    lost *= (7.0 / sevenths) * (7.0 / sevenths)
    better = lost < least
    return tl.where(better, other, scale), tl.where(better, its_reciprocal, reciprocal), tl.minimum(lost, least)


@triton.jit
def fitted_scale_of(tile, bits, AXIS: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr):
    """Return (scale, 1 / scale) of fitted_scales in primitives.py, of the groups of a tile along AXIS."""
    scale, reciprocal = scale_of(bits, largest, smallest, 0)
    least = tl.sum(error_in_units(tile, tl.expand_dims(reciprocal, AXIS), largest), AXIS)
    for sevenths in tl.static_range(6, 3, -1):
        # In the order of the reference, from the largest number down, and `<` keeps the first of equal errors.
        _, its = scale_of(bits, largest * sevenths / 7, smallest, 0)
        lost = tl.sum(error_in_units(tile, tl.expand_dims(its, AXIS), largest), AXIS)
        scale, reciprocal, least = fit(scale, reciprocal, least, bits, lost, sevenths, largest, smallest)
    return scale, reciprocal


@triton.jit
def to_fp8(x, reciprocal, dtype: tl.constexpr):
    """Return x in units of its scale, rounded to nearest even; NaN stays NaN.

    Nothing saturates: the amax that made the scale is at least |x|. `reciprocal` as from scale_of, broadcasting.
    """
    return (x * reciprocal).to(dtype)


@triton.jit
def spacing_of(x, EPSILON: tl.constexpr, SUBNORMAL: tl.constexpr):
    """Return the spacing around x of the numbers of a format with this machine epsilon and smallest subnormal number."""
    # The exponent bits alone are the largest power of two not above |x|: the numbers of a binade are equally far apart.
    binade = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(binade * EPSILON, SUBNORMAL)


@triton.jit
def round_stochastically(x, draw, EPSILON: tl.constexpr, SUBNORMAL: tl.constexpr):
    """Round x to a format's grid, up or down so that its expectation stays; `draw` in [0, 1). NaN stays NaN."""
    spacing = spacing_of(x, EPSILON, SUBNORMAL)
    in_steps = tl.div_rn(tl.abs(x), spacing)
    below = tl.floor(in_steps)
    # The fraction first: added to the whole, a draw would lose the bits that FP32 has no room for.
    magnitude = tl.where(in_steps - below + draw >= 1.0, below + 1.0, below) * spacing
    return tl.where(x.to(tl.int32, bitcast=True) < 0, -magnitude, magnitude)  # zero has a sign, too


TRITON_DTYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


def format_arguments(format: str, scale: str) -> dict[str, object]:
    """Return the compile-time arguments of every casting kernel."""
    return {
        # Kernels are compiled with a format that they do not cast to, too: some have no type here.
        "DTYPE": TRITON_DTYPES.get(format, tl.float8e4nv),
        "LARGEST": FORMATS[format].max,
        "SMALLEST": SMALLEST_SCALE,
        "POW2": FITTED.value if scale == "fitted" else int(has_power_of_two_scales(scale)),
    }
