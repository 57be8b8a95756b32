"""Casts between high precision and FP8, in Triton on a GPU and in plain torch elsewhere: the same bits either way."""

from __future__ import annotations

import torch

from ds_fp8.formats import FORMATS, GRANULARITIES, SCALE_TYPES
from ds_fp8.quantize.reference import apply_factors, cast, group_amax, scale_from_amax
from ds_fp8.quantize.tensor import QuantizedTensor

__all__ = [
    "QuantizedTensor",
    "apply_factors",
    "cast",
    "group_amax",
    "quantize",
    "quantize_both",
    "quantize_columnwise",
    "scale_from_amax",
    "transpose",
]


def quantize(
    x: torch.Tensor,
    format: str = "e4m3",
    granularity: str = "1x128",
    scale: str = "pow2",
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Cast a floating point tensor of any shape to FP8, with scales from its own amax.

    format "e4m3" | "e5m2"; granularity "tensor", "row" (one scale per row of the last dimension), "1x128" (per 128
    elements along the last dimension) or "128x128" (matrices only); scale "fp32" | "pow2". Ragged edges are groups of
    their own. A matrix [M, K] may be multiplied on the way, in FP32, by row_factor [M] and then column_factor [K].
    Raises ValueError for an unknown word or a shape that the granularity does not fit.
    """
    if x.device.type == "cuda" and x.dim() and (x.dim() == 2 or granularity != "128x128"):
        matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        result, _ = quantize_both(matrix, format, granularity, None, scale, row_factor, column_factor)
        if x.dim() == 2:
            return result
        scales = result.scale.reshape(*x.shape[:-1], -1) if result.scale.dim() else result.scale
        return QuantizedTensor(result.data.view(x.shape), scales, granularity, scale)
    _check_words(format, scale, granularity)
    return _reference(apply_factors(x, row_factor, column_factor), format, granularity, scale)


def quantize_columnwise(
    x: torch.Tensor,
    format: str = "e4m3",
    granularity: str = "1x128",
    scale: str = "pow2",
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Cast a matrix x [M, K] along its first dimension: quantize(x.t()) of shape [K, M] in one pass."""
    return quantize_both(x, format, None, granularity, scale, row_factor, column_factor)[1]


def quantize_both(
    x: torch.Tensor,
    format: str = "e4m3",
    rowwise: str | None = "1x128",
    columnwise: str | None = "1x128",
    scale: str = "pow2",
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """The casts of a matrix x [M, K] that its two products read, in one pass: [M, K] along K and [K, M] along M.

    `rowwise` and `columnwise` are granularities, or None for a result that is not wanted. Other arguments and errors
    as for `quantize`.
    """
    _check_words(format, scale, rowwise, columnwise)
    if x.dim() != 2:
        raise ValueError(f"a cast along both dimensions needs a matrix, got shape {tuple(x.shape)}")
    if x.device.type == "cuda":
        from ds_fp8.quantize.kernels import quantize_tiles

        return quantize_tiles(x.detach(), format, scale, rowwise, columnwise, row_factor, column_factor)
    x = apply_factors(x.detach(), row_factor, column_factor)
    row = None if rowwise is None else _reference(x, format, rowwise, scale)
    return row, None if columnwise is None else _reference(x.t().contiguous(), format, columnwise, scale)


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """The transposed matrix with its bytes laid out anew, contiguous along the other dimension.

    Raises ValueError for granularities that cannot be transposed without casting again (QuantizedTensor.t).
    """
    turned = q.t()
    if q.data.device.type == "cuda":
        from ds_fp8.quantize.kernels import transpose_bytes

        return QuantizedTensor(transpose_bytes(q.data.contiguous()), turned.scale, q.granularity, q.scale_type)
    return QuantizedTensor(turned.data.contiguous(), turned.scale, q.granularity, q.scale_type)


def _reference(x: torch.Tensor, format: str, granularity: str, scale: str) -> QuantizedTensor:
    factors = scale_from_amax(group_amax(x, granularity), format, scale)
    return QuantizedTensor(cast(x, factors, format, granularity), factors, granularity, scale)


def _check_words(format: str, scale: str, *granularities: str | None) -> None:
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if scale not in SCALE_TYPES:
        raise ValueError(f"scale {scale!r} is not one of {', '.join(SCALE_TYPES)}")
    for granularity in granularities:
        if granularity is not None and granularity not in GRANULARITIES:
            raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
