"""Masters stored as the quantized weight and 16-bit corrections, in torch: 3 bytes for FP8 weights, 4 for BF16.

    bits(|master| / scale) = bits(|data|) + 16 * correction            as FP32; sign of the data

As FP32 is BF16 and 16 bits. FP32 numbers order like their bits, and E4M3 has 3 of the 23 mantissa bits: an ulp of the
data is 65,536 steps of the correction, and a master has 20 significant bits. Subnormal data have constant spacing, like
a binade: 2^-6 is added to both sides.

The data are the quantized master: corrections stay one step inside half an ulp. The scale is made from the amax rounded
to what is stored (`stored_amax`). Dequantized masters therefore quantize to the same data, scales and corrections:
checkpoints hold plain FP32 masters and lose nothing.

    bits(master) = (bits(BF16) << 16) + correction                 for parameters sharded in BF16

Exact for every FP32 number but a NaN's payload. BF16 is the master rounded to nearest even: 65,537 FP32 numbers round
to an even BF16 number, including the ties on both sides, and 65,535 to an odd one. An extra bit distinguishes the two
ties.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_fp8.casts.primitives import dequantize_unscaled, per_element, quantize_with_scale
from ds_fp8.config.formats import FORMATS, SCALE_TYPES, CastSpec
from ds_fp8.optim.moments import CHUNK

FORMAT = "e4m3"
LARGEST_CORRECTION = 32767
MIDDLE = 32768
SMALLEST_NORMAL = 2.0**-6
_ITS_BITS = (127 - 6) << 23


def why_no_correction(spec: CastSpec) -> str | None:
    """Return why masters of weights quantized as `spec` cannot be data with corrections, or None."""
    if type(spec) is CastSpec and (spec.format, spec.granularity) == (FORMAT, "128x128") and not spec.by_torch:
        return None
    return f"weights are quantized as {spec}, not as E4M3 in blocks of 128x128"


def stored_amax(amax: torch.Tensor, scale_type: str) -> torch.Tensor:
    """Return the amax of FP32 masters, rounded such that masters stored and read back have the same scale."""
    if SCALE_TYPES[scale_type].powers_of_two:
        # 20 significant bits, the precision of masters around values where the scale changes.
        return _rounded(amax, 4)
    # A scale of 21 bits times 448 = 7 * 64 is exact, and divided by 448 the scale again.
    largest = torch.full_like(amax, FORMATS[FORMAT].max)
    return torch.where(amax.isfinite(), _rounded(amax / largest, 3) * largest, amax)


def _rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (_shifted(x.view(torch.int32), bits) << bits).view(torch.float32)


def _shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word + ((1 << (bits - 1)) - 1) + ((word >> bits) & 1)) >> bits


def quantize_masters(numbers: torch.Tensor, scale: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix of FP32 masters to (data, int16 corrections); data are NaN where a scale is."""
    data = quantize_with_scale(numbers, scale, FORMAT, granularity)
    # Divided: the error of a rounded reciprocal would accumulate over steps.
    magnitude = per_element(torch.div, numbers, scale, granularity).abs_()
    more = torch.where(magnitude < SMALLEST_NORMAL, SMALLEST_NORMAL, 0.0)
    difference = magnitude.add_(more).view(torch.int32) - (dequantize_unscaled(data).abs() + more).view(torch.int32)
    correction = _shifted(difference, 4).clamp_(-LARGEST_CORRECTION, LARGEST_CORRECTION)
    return data, correction.to(torch.int16)


def dequantize_masters(
    data: torch.Tensor, correction: torch.Tensor, scale: torch.Tensor, granularity: str
) -> torch.Tensor:
    """Return the FP32 masters [R, C] of data and corrections."""
    value = dequantize_unscaled(data)
    magnitude, correction = value.abs(), correction.int()
    # Masters below the smallest normal number, which may round up to it.
    small = magnitude.view(torch.int32) + correction < _ITS_BITS
    more = torch.where(small, SMALLEST_NORMAL, 0.0)
    bits = (magnitude + more).view(torch.int32) + (correction << 4)
    return per_element(torch.mul, torch.copysign(bits.view(torch.float32) - more, value), scale, granularity)


class SplitMasters(NamedTuple):
    """FP32 masters [n] as BF16 and corrections; read and written in pieces that begin at multiples of 8."""

    bf16: torch.Tensor
    correction: torch.Tensor  # int16 [n]
    ties: torch.Tensor  # bits, uint8 [>= n / 8]: a correction of -32768 means 32768

    @classmethod
    def of(cls, bf16: torch.Tensor) -> SplitMasters:
        """Return masters equal to `bf16`, which is not copied."""
        # The last piece may begin anywhere (`piece`) and take one more byte.
        ties = torch.zeros(len(bf16) // 8 + 2, dtype=torch.uint8, device=bf16.device)
        return cls(bf16, torch.zeros_like(bf16, dtype=torch.int16), ties)

    def piece(self, elements: slice) -> SplitMasters:
        return SplitMasters(self.bf16[elements], self.correction[elements], self.ties[-(-elements.start // 8) :])

    def read(self, elements: slice) -> torch.Tensor:
        """Return the FP32 masters of a piece."""
        bf16, correction, ties = (x.to(self.bf16.device) for x in self.piece(elements))
        word = (bf16.view(torch.int16).int() << 16).add_(correction)
        up = (ties[: -(-len(word) // 8), None] >> _bits(ties)) & 1
        return word.add_(up.flatten()[: len(word)].int() << 16).view(torch.float32)

    def write(self, elements: slice, numbers: torch.Tensor) -> None:
        """Write the FP32 masters of a piece."""
        bf16, correction, ties = self.piece(elements)
        rounded = numbers.bfloat16()
        difference = numbers.view(torch.int32) - (rounded.view(torch.int16).int() << 16)
        up = torch.nn.functional.pad(difference == MIDDLE, (0, -len(numbers) % 8)).view(-1, 8).byte()
        ties[: len(up)] = (up << _bits(ties)).sum(1, dtype=torch.uint8)
        bf16.copy_(rounded)
        correction.copy_(difference)

    def read_all(self) -> torch.Tensor:
        """Return all FP32 masters on the CPU."""
        return torch.cat([self.read(elements).cpu() for elements in self._pieces()])

    def write_all(self, numbers: torch.Tensor) -> None:
        """Write all FP32 masters, from any device."""
        for elements in self._pieces():
            self.write(elements, numbers[elements].to(self.bf16.device))

    def _pieces(self) -> list[slice]:
        return [slice(start, start + CHUNK) for start in range(0, len(self.bf16), CHUNK)]


def _bits(ties: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=ties.device)
