"""Number formats, granularities and scale types: definitions only, no arithmetic.

A cast is described by three words, which are also what a user writes in the JSON:

    format        how one element is stored        e4m3 | e5m2
    granularity   which elements share a scale     tensor | row | 1x128 | 128x128
    scale         what values a scale may take     fp32 | pow2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

FormatName = Literal["e4m3", "e5m2"]
Granularity = Literal["tensor", "row", "1x128", "128x128"]
ScaleType = Literal["fp32", "pow2"]

GRANULARITIES: tuple[str, ...] = get_args(Granularity)
SCALE_TYPES: tuple[str, ...] = get_args(ScaleType)

BLOCK = 128
"""Elements along one side of a `1x128` group or a `128x128` block."""

SMALLEST_SCALE = 2.0**-126
"""Scales never fall below FP32's smallest normal number: GPUs flush subnormal quotients to zero."""


@dataclass(frozen=True)
class Format:
    """An 8-bit floating point format (Micikevicius et al., arXiv 2209.05433)."""

    name: str
    dtype: torch.dtype
    max: float
    """Largest finite magnitude; casts saturate here."""
    smallest_subnormal: float


FORMATS: dict[str, Format] = {
    "e4m3": Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9),
    "e5m2": Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16),
}


def format_of(dtype: torch.dtype) -> Format:
    """The format stored as `dtype`. Raises ValueError for a dtype that is not an FP8 one."""
    for candidate in FORMATS.values():
        if candidate.dtype is dtype:
            return candidate
    raise ValueError(f"{dtype} is not one of {', '.join(str(f.dtype) for f in FORMATS.values())}")


def scale_shape(shape: tuple[int, ...] | torch.Size, granularity: str) -> tuple[int, ...]:
    """Shape of the scales of a tensor of `shape`.

    tensor [...] -> []; row [..., K] -> [..., 1]; 1x128 [..., K] -> [..., ceil(K/128)];
    128x128 [M, K] -> [ceil(M/128), ceil(K/128)]. Ragged last groups and blocks have a scale of their own.
    Raises ValueError where the granularity does not fit the number of dimensions.
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
    if granularity == "1x128":
        return (*shape[:-1], math.ceil(shape[-1] / BLOCK))
    if len(shape) != 2:
        raise ValueError(f"granularity '128x128' needs a matrix, got shape {shape}")
    return (math.ceil(shape[0] / BLOCK), math.ceil(shape[1] / BLOCK))
