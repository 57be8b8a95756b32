"""Masters of FP8 weights in 3 bytes, one of which is gathered anyway: E4M3 codes and 16-bit corrections, in torch.

    |master| = (|code| + correction * ulp(code) / 65536) * scale         the sign is the code's

ulp(code) is the distance from a code to the next larger one, 2^-9 where codes are subnormal: a master has 20
significant bits, or is a multiple of 2^-25 scale.

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
BELOW_A_POWER_OF_TWO = 16383
"""Largest correction downwards where codes below lie half as far apart."""


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
    word = x.view(torch.int32)
    return ((word + ((1 << (bits - 1)) - 1) + ((word >> bits) & 1)) & -(1 << bits)).view(torch.float32)


def encode(numbers: torch.Tensor, scale: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, corrections int16) of a matrix of FP32 numbers; NaN's code and 0 where a scale is NaN."""
    codes = cast(numbers, scale, FORMAT, granularity)
    magnitude, step = _grid(codes)
    # Divided, not multiplied by a rounded reciprocal: its error would be the same in every step, and add up.
    in_units = per_element(torch.div, numbers, scale, granularity).abs_()
    correction = in_units.sub_(magnitude).div_(step).round_()
    power_of_two = ((magnitude.view(torch.int32) & 0x007FFFFF) == 0) & (magnitude > 2.0**-6)
    lowest = torch.where(power_of_two, -BELOW_A_POWER_OF_TWO, -LARGEST_CORRECTION)
    correction = torch.minimum(torch.maximum(correction, lowest), torch.full_like(correction, LARGEST_CORRECTION))
    return codes, torch.where(correction.isfinite(), correction, 0).to(torch.int16)


def decode(codes: torch.Tensor, correction: torch.Tensor, scale: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return the FP32 masters [R, C] of a matrix of codes."""
    magnitude, step = _grid(codes)
    sign = numbers_of(codes)
    return per_element(torch.mul, torch.copysign(magnitude + correction.float() * step, sign), scale, granularity)


def _grid(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the magnitudes of codes, and the step of corrections there: ulp / 65536."""
    magnitude = numbers_of(codes).abs()
    exponent = (magnitude.view(torch.int32) >> 23).clamp_min(127 - 6)  # subnormal codes are all one ulp apart
    return magnitude, ((exponent - 3 - 16) << 23).view(torch.float32)
