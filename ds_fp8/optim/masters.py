"""Masters that are the quantized weight and 16-bit corrections, in torch: of FP8 weights in 3 bytes, of BF16 in 4.

    bits(|master| / scale) = bits(|code|) + 16 * correction            as FP32; the sign is the code's

That is how FP32 is BF16 and 16 bits. FP32 numbers order like their bits, and E4M3 has 3 of their 23 bits of mantissa:
an ulp of a code is 65,536 steps, and a master has 20 significant bits. Subnormal data are all one ulp apart, as the
numbers of one binade are: there 2^-6 is added to both sides.

The code is the cast of the master: corrections stay one step inside of half an ulp. And the scale is that of the
masters' own amax: the amax is rounded to what masters keep (`stored_amax`) before a scale is made of it. So the FP32
numbers that masters stand for encode to the same data, scales and corrections again: checkpoints hold FP32 masters
like any other run's, and lose nothing.

    bits(master) = (bits(BF16) << 16) + correction                 of parameters that are sharded in BF16

Exact, whatever the FP32 number (of NaN but for its payload). BF16 is the master rounded to nearest even: an even number
is that of 65,537 FP32 numbers, of the middles on both of its sides too, an odd one of 65,535. A bit tells the middles
apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_fp8.casts.primitives import dequantize_unscaled, per_element, quantize_with_scale
from ds_fp8.config.formats import FORMATS, CastSpec, has_power_of_two_scales
from ds_fp8.optim.moments import CHUNK

FORMAT = "e4m3"
LARGEST_CORRECTION = 32767
MIDDLE = 32768
SMALLEST_NORMAL = 2.0**-6
_ITS_BITS = (127 - 6) << 23


def why_no_correction(spec: CastSpec) -> str | None:
    """Return why masters of weights that are cast like this cannot be data with corrections, or None."""
    if type(spec) is CastSpec and (spec.format, spec.granularity) == (FORMAT, "128x128") and not spec.by_torch:
        return None
    return f"weights are cast as {spec}, and not as E4M3 in blocks of 128x128"


def stored_amax(amax: torch.Tensor, scale_type: str) -> torch.Tensor:
    """Return the amax that masters will have as they are kept, from that of FP32 numbers."""
    if has_power_of_two_scales(scale_type):
        # 20 significant bits: the grid of masters on both sides of the numbers at which the scale changes.
        return _rounded(amax, 4)
    # Of a scale of 21 bits the product with 448 = 7 * 64 is exact, and the quotient the scale again.
    largest = torch.full_like(amax, FORMATS[FORMAT].max)
    return torch.where(amax.isfinite(), _rounded(amax / largest, 3) * largest, amax)


def _rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (_shifted(x.view(torch.int32), bits) << bits).view(torch.float32)


def _shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word + ((1 << (bits - 1)) - 1) + ((word >> bits) & 1)) >> bits


def quantize_masters(numbers: torch.Tensor, scale: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data, corrections int16) of a matrix of FP32 numbers; the data are NaN where a scale is."""
    data = quantize_with_scale(numbers, scale, FORMAT, granularity)
    # Divided, not multiplied by a rounded reciprocal: its error would be the same in every step, and add up.
    magnitude = per_element(torch.div, numbers, scale, granularity).abs_()
    more = torch.where(magnitude < SMALLEST_NORMAL, SMALLEST_NORMAL, 0.0)
    difference = magnitude.add_(more).view(torch.int32) - (dequantize_unscaled(data).abs() + more).view(torch.int32)
    correction = _shifted(difference, 4).clamp_(-LARGEST_CORRECTION, LARGEST_CORRECTION)
    return data, correction.to(torch.int16)


def dequantize_masters(
    data: torch.Tensor, correction: torch.Tensor, scale: torch.Tensor, granularity: str
) -> torch.Tensor:
    """Return the FP32 masters [R, C] of a matrix of data."""
    code = dequantize_unscaled(data)
    magnitude, correction = code.abs(), correction.int()
    # What lies below the smallest normal number, which is also the code of some numbers below it.
    small = magnitude.view(torch.int32) + correction < _ITS_BITS
    more = torch.where(small, SMALLEST_NORMAL, 0.0)
    bits = (magnitude + more).view(torch.int32) + (correction << 4)
    return per_element(torch.mul, torch.copysign(bits.view(torch.float32) - more, code), scale, granularity)


class SplitMasters(NamedTuple):
    """FP32 numbers [n], BF16 and corrections; written and read in pieces that begin at multiples of 8."""

    bf16: torch.Tensor
    correction: torch.Tensor  # int16 [n]
    ties: torch.Tensor  # bits, uint8 [at least n / 8]: the correction, read as -32768, is 32768

    @classmethod
    def of(cls, bf16: torch.Tensor) -> SplitMasters:
        """Return the masters that are the BF16 numbers themselves, beside these."""
        # A piece at the end that begins anywhere (`piece`) takes a byte more.
        ties = torch.zeros(len(bf16) // 8 + 2, dtype=torch.uint8, device=bf16.device)
        return cls(bf16, torch.zeros_like(bf16, dtype=torch.int16), ties)

    def piece(self, elements: slice) -> SplitMasters:
        return SplitMasters(self.bf16[elements], self.correction[elements], self.ties[-(-elements.start // 8) :])

    def read(self, elements: slice) -> torch.Tensor:
        """Return the numbers of a piece."""
        bf16, correction, ties = (x.to(self.bf16.device) for x in self.piece(elements))
        word = (bf16.view(torch.int16).int() << 16).add_(correction)
        up = (ties[: -(-len(word) // 8), None] >> _bits(ties)) & 1
        return word.add_(up.flatten()[: len(word)].int() << 16).view(torch.float32)

    def write(self, elements: slice, numbers: torch.Tensor) -> None:
        """Write the numbers of a piece, and round them into BF16."""
        bf16, correction, ties = self.piece(elements)
        rounded = numbers.bfloat16()
        difference = numbers.view(torch.int32) - (rounded.view(torch.int16).int() << 16)
        up = torch.nn.functional.pad(difference == MIDDLE, (0, -len(numbers) % 8)).view(-1, 8).byte()
        ties[: len(up)] = (up << _bits(ties)).sum(1, dtype=torch.uint8)
        bf16.copy_(rounded)
        correction.copy_(difference)

    def read_all(self) -> torch.Tensor:
        """Return all numbers, in memory of the host."""
        return torch.cat([self.read(elements).cpu() for elements in self._pieces()])

    def write_all(self, numbers: torch.Tensor) -> None:
        """Write all numbers, which may lie anywhere."""
        for elements in self._pieces():
            self.write(elements, numbers[elements].to(self.bf16.device))

    def _pieces(self) -> list[slice]:
        return [slice(start, start + CHUNK) for start in range(0, len(self.bf16), CHUNK)]


def _bits(ties: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=ties.device)
