"""Number formats, granularities and scale types: definitions only, no arithmetic.

A cast is described by three words, which are also what a user writes in the JSON:

    format        how one element is stored        e4m3 | e5m2 | one of EMULATED
    granularity   which elements share a scale     tensor | row | 1x128 | 128x128 | 1x32 | 32x32 | 1x16 | 16x16
    scale         what values a scale may take     fp32 | fitted | pow2 | e4m3 | mse | static

E4M3 and E5M2 with the first four granularities and three scale types are what Hopper multiplies. All else is emulated:
a byte an element, decoded for its products. MXFP8 and MXFP4 are e4m3 and e2m1 in groups of 32 with a power-of-two
scale, NVFP4 is e2m1 in groups of 16 with scale type "e4m3": a scale of E4M3 each, in units of one FP32 scale of the
tensor. "fp32" is amax / (largest number of the format); "fitted" brings the amax of each 1x128 group to that of the
format's four largest multiples of a power of two which leaves it the smallest squared error; "pow2" is "fp32" rounded
up to a power of two: nothing overflows, and multiplying by it is exact. "mse" is that or half of it, whichever leaves
the group the smaller squared error: with half of it the largest elements may saturate. "static" is one fixed power of
two for all of a tensor, whatever its values: nothing looks for an amax.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

NativeFormat = Literal["e4m3", "e5m2"]
EmulatedFormat = Literal[
    "e2m1", "e3m0", "e2m2", "e3m1", "e4m0", "e2m3", "e3m2", "e4m1", "e5m0", "e2m4", "e3m3", "e4m2", "e5m1", "e2m5",
    "e3m4", "int4", "int6", "int8", "log8",
]  # fmt: skip
FormatName = Literal[NativeFormat, EmulatedFormat]
Granularity = Literal["tensor", "row", "1x128", "128x128", "1x32", "32x32", "1x16", "16x16"]
ScaleType = Literal["fp32", "fitted", "pow2", "e4m3", "mse", "static"]

GRANULARITIES: tuple[str, ...] = get_args(Granularity)
SCALE_TYPES: tuple[str, ...] = get_args(ScaleType)

BLOCK = 128
"""Elements along one side of a `1x128` group or a `128x128` block."""

SMALLEST_SCALE = 2.0**-126
"""Scales never fall below FP32's smallest normal number: GPUs flush subnormal quotients to zero."""


NATIVE_FORMATS: tuple[str, ...] = get_args(NativeFormat)
NATIVE_GRANULARITIES = ("tensor", "row", "1x128", "128x128")
SQUARE = ("128x128", "32x32", "16x16")
"""Granularities of blocks, which a transposed matrix keeps."""
ALONG_CONTRACTION = ("1x128", "1x32", "1x16")
"""Granularities of groups, which a transposed matrix does not keep."""


@dataclass(frozen=True)
class Format:
    """A number format: the storage of one element of a tensor."""

    name: str
    dtype: torch.dtype
    """uint8 for codes that torch has no dtype for."""
    max: float
    """Largest finite magnitude; casts saturate here."""
    smallest_subnormal: float
    bits: int = 8
    magnitudes: tuple[float, ...] = ()
    """Numbers of an emulated format, from 0 upwards. The code of magnitudes[i] is i, that of its negative
    i + 2^(bits - 1)."""

    @functools.cached_property
    def exact_in_bf16(self) -> bool:
        """Return whether every number of the format is one of BF16."""
        return all(torch.tensor(number).bfloat16().item() == number for number in self.magnitudes)


def _minifloat(name: str) -> Format:
    """Return ExMy: sign, x bits of exponent, y of mantissa, subnormals, no Inf; in 8 bits the last code is NaN's."""
    exponent_bits, mantissa_bits = int(name[1]), int(name[3])
    bits, bias, ones = 1 + exponent_bits + mantissa_bits, 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    magnitudes = []
    # Each code in turn: subnormals share the exponent of the first normal numbers, without the leading one.
    for code in range(2 ** (bits - 1) - (bits == 8)):
        exponent, mantissa = divmod(code, ones)
        significand = mantissa / ones + (exponent > 0)
        magnitudes.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return _emulated(name, bits, magnitudes)


def _integer(name: str) -> Format:
    """Return INTb as sign and magnitude, so that the range is symmetric."""
    bits = int(name[3:])
    return _emulated(name, bits, [float(number) for number in range(2 ** (bits - 1))])


def _logarithmic(name: str) -> Format:
    """Return zero and powers of 2^(1/8) up to 1, rounded to FP32 (a logarithmic number system, 2106.13914)."""
    bits = int(name[3:])
    # In FP64, rounded once: every platform has the same table.
    powers = torch.arange(2 - 2 ** (bits - 1), 1, dtype=torch.float64).div(8).exp2().float()
    return _emulated(name, bits, [0.0, *powers.tolist()])


def _emulated(name: str, bits: int, magnitudes: list[float]) -> Format:
    return Format(name, torch.uint8, magnitudes[-1], magnitudes[1], bits, tuple(magnitudes))


_KINDS = {"e": _minifloat, "i": _integer, "l": _logarithmic}

FORMATS: dict[str, Format] = {
    "e4m3": Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9),
    "e5m2": Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16),
    **{name: _KINDS[name[0]](name) for name in get_args(EmulatedFormat)},
}
"""E4M3 and E5M2 as of Micikevicius et al. (arXiv 2209.05433)."""


def static_scale_type(exponent: int = 0) -> str:
    """Return the scale type, as casts know it, of the fixed scale 2^exponent: "static", "static 2^-24"."""
    return f"static 2^{exponent}" if exponent else "static"


def fixed_scale(scale: str) -> float | None:
    """Return the scale that a type fixes: 1 of "static", 2^-24 of "static 2^-24", None of those that need an amax."""
    if scale == "static":
        return 1.0
    word, _, exponent = scale.partition(" 2^")
    return 2.0 ** int(exponent) if word == "static" and exponent else None


def has_power_of_two_scales(scale: str) -> bool:
    """Return whether all scales of a type are powers of two."""
    return scale in ("pow2", "mse") or fixed_scale(scale) is not None


def check_scale_type(scale: str) -> None:
    """Raise ValueError unless the argument is a scale type."""
    if scale not in SCALE_TYPES and fixed_scale(scale) is None:
        raise ValueError(f"scale {scale!r} is not one of {', '.join(SCALE_TYPES)}")


def is_emulated(format: str, granularity: str, scale: str) -> bool:
    """Return whether no kernel and no product but the reference knows such a cast."""
    return format not in NATIVE_FORMATS or granularity not in NATIVE_GRANULARITIES or scale in ("e4m3", "mse")


def group_shape(granularity: str) -> tuple[int, int]:
    """Return (rows, columns) of a group or block of a granularity such as "1x128"."""
    rows, columns = granularity.split("x")
    return int(rows), int(columns)


ROTATION_BLOCKS = (16, 32, 64, 128)
"""Sizes of the Hadamard transforms that operands can be rotated by."""


@dataclass(frozen=True)
class Rotation:
    """A block Hadamard transform of a matrix before its cast (casts/rotation.py)."""

    block: int = BLOCK
    """Neighbours that are transformed together, one of ROTATION_BLOCKS."""
    seed: int | None = None
    """Seed of the signs that the elements of every block are multiplied by before it; None: no signs."""
    axis: int = 1
    """Dimension of the matrix along which blocks lie: 1 its columns, 0 its rows."""

    def __str__(self) -> str:
        return f"rotated by {self.block}" + ("" if self.seed is None else f" with the signs of seed {self.seed}")


@dataclass(frozen=True)
class Recast:
    """Second casts, for dgrad and wgrad, of what fprop multiplied."""

    scale: str = "pow2"
    rounding: str = "stochastic"
    zero_clipped: bool = True
    """True: elements that fprop's cast clipped get no gradient."""


@dataclass(frozen=True)
class CastSpec:
    """The cast of a matrix: format, granularity, scale type, rounding, and the rotation before it."""

    format: str = "e4m3"
    granularity: str = "1x128"
    scale: str = "pow2"
    rounding: str = "nearest"
    rotation: Rotation | None = None

    def __str__(self) -> str:
        words = f"{self.format} {self.granularity} {self.scale}" + " stochastic" * (self.rounding == "stochastic")
        return words if self.rotation is None else f"{words}, {self.rotation}"

    @property
    def emulated(self) -> bool:
        """Return whether only the reference multiplies such operands."""
        return is_emulated(self.format, self.granularity, self.scale)

    @property
    def by_torch(self) -> bool:
        """Return whether no kernel casts like this."""
        return self.emulated or self.rounding == "stochastic"

    @property
    def why_not_gathered(self) -> str | None:
        """Return why ranks cannot cast their shards of a weight like this, or None where they can.

        The gathered bytes serve a weight's both products.
        """
        if self.granularity in ALONG_CONTRACTION:
            return f"{self.granularity} weights are cast along either contraction, from high precision"
        if self.rounding == "stochastic":
            return "weights rounded stochastically are cast where they are used"
        if self.scale == "mse":
            return 'scales of type "mse" follow from all of a group, of which a rank may have a part'
        return None


def format_of(dtype: torch.dtype) -> Format:
    """Return the format stored as `dtype`.

    Raises:
        ValueError: For a dtype that is not an FP8 one.
    """
    native = [FORMATS[name] for name in NATIVE_FORMATS]
    for candidate in native:
        if candidate.dtype is dtype:
            return candidate
    raise ValueError(f"{dtype} is not one of {', '.join(str(f.dtype) for f in native)}")


def scale_shape(shape: tuple[int, ...] | torch.Size, granularity: str) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of `shape`.

    tensor [...] -> []; row [..., K] -> [..., 1]; 1x128 [..., K] -> [..., ceil(K/128)];
    128x128 [M, K] -> [ceil(M/128), ceil(K/128)]; others alike. Ragged last groups and blocks have separate scales.

    Args:
        shape: Shape of the tensor that is cast.
        granularity: Elements that share a scale.

    Raises:
        ValueError: If the granularity is unknown or does not fit the number of dimensions.
    """
    shape = tuple(shape)
    if granularity == "tensor":
        return ()
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    if not shape:
        raise ValueError(f"granularity {granularity!r} needs at least one dimension, got a scalar")
    if granularity == "row":
        return (*shape[:-1], 1)
    rows, columns = group_shape(granularity)
    # Groups along the last dimension fit tensors of any rank; blocks need a matrix.
    if rows == 1:
        return (*shape[:-1], math.ceil(shape[-1] / columns))
    if len(shape) != 2:
        raise ValueError(f"granularity {granularity!r} needs a matrix, got shape {shape}")
    return (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns))
