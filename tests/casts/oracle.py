"""FP8 casts by definition, in numpy, sharing nothing with the code under test.

The values of a format are enumerated from its sign, exponent and mantissa bits, elements are rounded by search among
them, and groups are formed element by element from indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

SMALLEST_SCALE = 2.0**-126
POWERS_OF_TWO = 2.0 ** np.arange(-126, 128)


@dataclass(frozen=True)
class Layout:
    """Bits of an 8-bit float: 1 sign bit, then exponent, then mantissa bits."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int  # The largest positive finite code; larger ones are Inf or NaN
    dtype: torch.dtype

    def magnitude(self, code: int) -> float:
        """Value of a code below 128, sign bit clear."""
        exponent, mantissa = code >> self.mantissa_bits, code & (2**self.mantissa_bits - 1)
        if exponent == 0:
            return mantissa * 2.0 ** (1 - self.bias - self.mantissa_bits)
        return (1 + mantissa / 2**self.mantissa_bits) * 2.0 ** (exponent - self.bias)

    @property
    def magnitudes(self) -> np.ndarray:
        """All finite magnitudes in order of their codes, which is their order by size."""
        return np.array([self.magnitude(code) for code in range(self.largest_code + 1)])

    @property
    def max(self) -> float:
        return self.magnitude(self.largest_code)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """FP64 values of uint8 codes; NaN for every code that is not finite."""
        table = np.full(256, np.nan)
        table[: self.largest_code + 1] = self.magnitudes
        table[128 : 128 + self.largest_code + 1] = -self.magnitudes
        return table[codes]

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Codes (uint8) of finite numbers: nearest value, ties to the even code, saturated."""
        magnitudes = self.magnitudes
        midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
        size = np.minimum(np.abs(numbers.astype(np.float64)), self.max)
        below, not_above = np.searchsorted(midpoints, size, "left"), np.searchsorted(midpoints, size, "right")
        # The two differ for a number on a midpoint alone; of two neighbouring codes one is even.
        code = np.where(below % 2 == 0, below, not_above)
        return (code + 128 * np.signbit(numbers)).astype(np.uint8)


LAYOUTS = {
    "e4m3": Layout(4, 3, bias=7, largest_code=0b1111_110, dtype=torch.float8_e4m3fn),  # 1111_111 is NaN, no Inf
    "e5m2": Layout(5, 2, bias=15, largest_code=0b11110_11, dtype=torch.float8_e5m2),  # 11111_00 is Inf
}


def groups(shape: tuple[int, ...], granularity: str) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Index of each scale, and the slices of the tensor that it covers."""
    if granularity == "tensor":
        yield (), (...,)
        return
    height = 128 if granularity == "128x128" else 1
    width = 128 if "128" in granularity else shape[-1]
    starts = [*(range(0, size, height) for size in shape[:-1]), range(0, shape[-1], width)]
    for corner in itertools.product(*starts):
        sizes = [height] * (len(shape) - 1) + [width]
        index = tuple(start // size for start, size in zip(corner, sizes, strict=True))
        yield index, tuple(slice(start, start + size) for start, size in zip(corner, sizes, strict=True))


def scale_of(group: np.ndarray, layout: Layout, scale_type: str) -> float:
    """Scale of one group of FP32 numbers."""
    if not np.isfinite(group).all():
        return np.nan
    amax = np.abs(group).max(initial=0)
    if amax == 0:
        return 1.0
    quotient = max(float(np.float32(amax) / np.float32(layout.max)), SMALLEST_SCALE)
    return POWERS_OF_TWO[np.searchsorted(POWERS_OF_TWO, quotient)] if scale_type == "pow2" else quotient


def quantize(x: np.ndarray, format: str, granularity: str, scale_type: str) -> tuple[np.ndarray, dict]:
    """Codes (uint8, shape of x) and scales by group index, of FP32 numbers; a group of scale NaN has code 0x7f."""
    layout = LAYOUTS[format]
    codes, scales = np.zeros(x.shape, np.uint8), {}
    for index, where in groups(x.shape, granularity):
        scales[index] = scale = np.float32(scale_of(x[where], layout, scale_type))
        codes[where] = 0x7F if np.isnan(scale) else layout.encode(x[where] * (np.float32(1) / scale))
    return codes, scales
