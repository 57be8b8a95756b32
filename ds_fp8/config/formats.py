"""Number formats, granularities and scale types: definitions, no arithmetic.

A cast has three properties, which are keys of the JSON:

    format        how one element is stored        e4m3 | e5m2
    granularity   which elements share a scale     tensor | row | 1x128 | 128x128
    scale         what values a scale may take     fp32 | pow2

These are what Hopper's tensor cores support; ds_fp8.research registers more formats and scales, and other sizes of
groups (registry.py). "fp32" is amax / (largest number of the format); "pow2" is "fp32" rounded up to a power of two,
which cannot overflow and multiplies exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

FormatName = Literal["e4m3", "e5m2"]
Granularity = Literal["tensor", "row", "1x128", "128x128"]
ScaleName = Literal["fp32", "pow2"]
NATIVE_FORMATS: tuple[str, ...] = get_args(FormatName)
NATIVE_GRANULARITIES: tuple[str, ...] = get_args(Granularity)
NATIVE_SCALES: tuple[str, ...] = get_args(ScaleName)  # supported by kernels and tensor cores

BLOCK = 128  # elements along one side of a `1x128` group or a `128x128` block

SMALLEST_SCALE = 2.0**-126
"""The smallest normal FP32 number: GPUs flush subnormal quotients to zero."""


@dataclass(frozen=True)
class Format:
    """A number format: the storage of one element of a tensor."""

    name: str
    dtype: torch.dtype  # uint8 without a torch dtype
    max: float  # largest finite number; saturates
    smallest_subnormal: float
    # For uint8: encode(FP32 tensor, draws from [0, 1) or None: to nearest) -> uint8, saturated; decode(uint8, dtype)
    codec: Any = None
    exact_in_bf16: bool = True  # whether BF16 represents all numbers


FORMATS = {
    "e4m3": Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9),
    "e5m2": Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16),
}
"""E4M3 and E5M2 as of Micikevicius et al. (arXiv 2209.05433)."""


@dataclass(frozen=True)
class ScaleType:
    """A type of scales."""

    powers_of_two: bool = False  # whether all scales are
    multiplied: bool = True  # whether GEMMs on tensor cores support it
    needs_amax: bool = True  # False: constant scales, with saturation
    from_amax: Callable[[torch.Tensor, str], torch.Tensor] | None = None
    """Scales from (amax of all groups of a tensor, format); None: scale_from_amax of casts/primitives.py."""
    from_numbers: Callable[[torch.Tensor, str, str], torch.Tensor] | None = None
    """Scales from (tensor, format, granularity), if not made from an amax."""


SCALE_TYPES = {"fp32": ScaleType(), "pow2": ScaleType(powers_of_two=True)}


def check_scale_type(scale: str) -> None:
    if scale not in SCALE_TYPES:
        raise ValueError(f"scale {scale!r} is not one of {', '.join(SCALE_TYPES)}")


def is_native(format: str, granularity: str, scale: str) -> bool:
    """Return whether kernels support a cast; torch quantizes otherwise."""
    return format in NATIVE_FORMATS and granularity in NATIVE_GRANULARITIES and scale in NATIVE_SCALES


_GROUP = re.compile("([1-9][0-9]*)x([1-9][0-9]*)")


def group_shape(granularity: str) -> tuple[int, int]:
    """Return (rows, columns) of a group or block of a granularity such as "1x128"."""
    found = _GROUP.fullmatch(granularity)
    if found is None:
        raise ValueError(f"granularity {granularity!r} is not one of {', '.join(NATIVE_GRANULARITIES)}")
    return int(found[1]), int(found[2])


def is_of_groups(granularity: str) -> bool:
    """Return whether groups lie along rows, as in 1x128."""
    return granularity.startswith("1x")


def is_of_blocks(granularity: str) -> bool:
    """Return whether groups are square blocks, as in 128x128, which a transpose keeps."""
    return "x" in granularity and not is_of_groups(granularity)


@dataclass(frozen=True)
class CastSpec:
    """The cast of a matrix: format, granularity and scale type; subclassed in ds_fp8.research."""

    format: str = "e4m3"
    granularity: str = "1x128"
    scale: str = "pow2"

    def __str__(self) -> str:
        return f"{self.format} {self.granularity} {self.scale}"

    @property
    def emulated(self) -> bool:
        """Return whether only the backend "reference" multiplies such operands."""
        native = self.format in NATIVE_FORMATS and self.granularity in NATIVE_GRANULARITIES
        return not (native and SCALE_TYPES[self.scale].multiplied)

    @property
    def by_torch(self) -> bool:
        return not is_native(self.format, self.granularity, self.scale)

    @property
    def why_not_gathered(self) -> str | None:
        """Return why shards of a weight cannot be quantized so for the all-gather, or None."""
        return None

    def why_not_sharded(self, numel: int, columns: int) -> str | None:
        """Return why parts of `numel` elements of a weight with `columns` cannot be quantized separately, or None."""
        return None

    def before_cast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Transform a flat shard before quantization."""
        return numbers

    def in_granularity(self, granularity: str) -> CastSpec:
        return replace(self, granularity=granularity)


def format_of(dtype: torch.dtype) -> Format:
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
        shape: Shape of the tensor.
        granularity: Elements that share a scale.
    """
    shape = tuple(shape)
    if granularity == "tensor":
        return ()
    if granularity != "row":
        rows, columns = group_shape(granularity)
    if not shape:
        raise ValueError(f"granularity {granularity!r} needs at least one dimension, got a scalar")
    if granularity == "row":
        return (*shape[:-1], 1)
    # 1xN supports any number of dimensions; blocks need a matrix.
    if rows == 1:
        return (*shape[:-1], math.ceil(shape[-1] / columns))
    if len(shape) != 2:
        raise ValueError(f"granularity {granularity!r} needs a matrix, got shape {shape}")
    return (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns))
