"""Casts between high precision and FP8."""

from __future__ import annotations

import torch

from ds_fp8.formats import FORMATS
from ds_fp8.quantize.reference import cast, group_amax, scale_from_amax
from ds_fp8.quantize.tensor import QuantizedTensor

__all__ = ["QuantizedTensor", "cast", "group_amax", "quantize", "scale_from_amax"]


def quantize(x: torch.Tensor, format: str = "e4m3", granularity: str = "1x128", scale: str = "pow2") -> QuantizedTensor:
    """Cast a floating point tensor of any shape to FP8, with scales from its own amax.

    format "e4m3" | "e5m2"; granularity "tensor", "row" (one scale per row of the last dimension), "1x128" (per 128
    elements along the last dimension) or "128x128" (matrices only); scale "fp32" | "pow2". Ragged edges are groups of
    their own. Raises ValueError for an unknown word or a shape that the granularity does not fit.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    factors = scale_from_amax(group_amax(x, granularity), format, scale)
    return QuantizedTensor(cast(x, factors, format, granularity), factors, granularity, scale)
