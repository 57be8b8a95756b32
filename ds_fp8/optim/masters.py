"""Masters of FP8 weights in 3 bytes, one of which is gathered anyway: E4M3 codes and 16-bit corrections, in torch.

    bits(|master| / scale) = bits(|code|) + 16 * correction            as FP32; the sign is the code's

That is how FP32 is BF16 and 16 bits. FP32 numbers order like their bits, and E4M3 has 3 of their 23 bits of mantissa:
an ulp of a code is 65,536 steps, and a master has 20 significant bits. Subnormal codes are all one ulp apart, as the
numbers of one binade are: there 2^-6 is added to both sides.

The code is the cast of the master: corrections stay one step inside of half an ulp. And the scale is that of the
masters' own amax: the amax is rounded to what masters keep (`kept_amax`) before a scale is made of it. So the FP32
numbers that masters stand for encode to the same codes, scales and corrections again: checkpoints hold FP32 masters
like any other run's, and lose nothing.
"""

from __future__ import annotations

import torch

from ds_fp8.casts.primitives import cast, per_element
from ds_fp8.casts.primitives import decode as numbers_of
from ds_fp8.config.formats import FORMATS, CastSpec, has_power_of_two_scales

FORMAT = "e4m3"
LARGEST_CORRECTION = 32767
SMALLEST_NORMAL = 2.0**-6
_ITS_BITS = (127 - 6) << 23


def why_no_correction(spec: CastSpec) -> str | None:
    """Return why masters of weights that are cast like this cannot be codes with corrections, or None."""
    if type(spec) is CastSpec and (spec.format, spec.granularity) == (FORMAT, "128x128") and not spec.by_torch:
        return None
    return f"weights are cast as {spec}, and not as E4M3 in blocks of 128x128"


def kept_amax(amax: torch.Tensor, scale_type: str) -> torch.Tensor:
    """Return the amax that masters will have as they are kept, from that of FP32 numbers."""
    if has_power_of_two_scales(scale_type):
        # 20 significant bits: the grid of masters on both sides of the numbers at which the scale changes.
        return _rounded(amax, 4)
    # Of a scale of 21 bits the product with 448 = 7 * 64 is exact, and the quotient the scale again.
    largest = torch.full_like(amax, FORMATS[FORMAT].max)
    return torch.where(amax.isfinite(), _rounded(amax / largest, 3) * largest, amax)


def _rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round the lowest bits of positive FP32 numbers away, to nearest even."""
    return (_shifted(x.view(torch.int32), bits) << bits).view(torch.float32)


def _shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word + ((1 << (bits - 1)) - 1) + ((word >> bits) & 1)) >> bits


def encode(numbers: torch.Tensor, scale: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, corrections int16) of a matrix of FP32 numbers; the codes are NaN where a scale is."""
    codes = cast(numbers, scale, FORMAT, granularity)
    # Divided, not multiplied by a rounded reciprocal: its error would be the same in every step, and add up.
    magnitude = per_element(torch.div, numbers, scale, granularity).abs_()
    more = torch.where(magnitude < SMALLEST_NORMAL, SMALLEST_NORMAL, 0.0)
    difference = magnitude.add_(more).view(torch.int32) - (numbers_of(codes).abs() + more).view(torch.int32)
    correction = _shifted(difference, 4).clamp_(-LARGEST_CORRECTION, LARGEST_CORRECTION)
    return codes, correction.to(torch.int16)


def decode(codes: torch.Tensor, correction: torch.Tensor, scale: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return the FP32 masters [R, C] of a matrix of codes."""
    code = numbers_of(codes)
    magnitude, correction = code.abs(), correction.int()
    # What lies below the smallest normal number, which is also the code of some numbers below it.
    small = magnitude.view(torch.int32) + correction < _ITS_BITS
    more = torch.where(small, SMALLEST_NORMAL, 0.0)
    bits = (magnitude + more).view(torch.int32) + (correction << 4)
    return per_element(torch.mul, torch.copysign(bits.view(torch.float32) - more, code), scale, granularity)
