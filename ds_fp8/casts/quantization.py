"""Casts of tensors and matrices to FP8: in Triton on a GPU and in plain torch elsewhere, the same bits either way."""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_fp8.casts.primitives import apply_factors, cast, infinite_to_nan, per_element, scales_for
from ds_fp8.casts.rotation import rotate
from ds_fp8.casts.tensor import QuantizedTensor
from ds_fp8.config.formats import (
    FORMATS,
    GRANULARITIES,
    NATIVE_FORMATS,
    SQUARE,
    Rotation,
    check_scale_type,
    fixed_scale,
    is_emulated,
)


def quantize(
    x: torch.Tensor,
    format: str = "e4m3",
    granularity: str = "1x128",
    scale: str = "pow2",
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    rounding: str = "nearest",
    rotation: Rotation | None = None,
    room: int = 0,
) -> QuantizedTensor:
    """Cast a floating point tensor of any shape, with scales from its own amax.

    Args:
        x: Floating point, of any shape; a matrix for blocks such as "128x128" and for factors.
        format: "e4m3", "e5m2" or another name of config.formats.FORMATS.
        granularity: Elements that share a scale: "tensor", "row" (the last dimension), "1x128" (128 elements along the
            last dimension), "128x128", or smaller groups and blocks of 32 and 16. Ragged edges are groups of their own.
        scale: "pow2" (powers of two), "fp32", "fitted" (as "fp32", but of groups of 1x128 that of the smallest squared
            error), "e4m3" (E4M3 in units of one FP32 scale of the tensor), "static" (1), or another fixed power of two,
            "static 2^-24"; static ones have granularity "tensor". "mse": as "pow2" or half of it, by the smaller
            squared error.
        row_factor: [M], multiplied in FP32 into the rows of a matrix [M, K] before the cast.
        column_factor: [K], multiplied into its columns after that.
        rounding: "nearest", to even, or "stochastic", with torch's random numbers.
        rotation: Rotation of a matrix, after the factors and before the cast (rotation.py).
        room: Codes, whole blocks, that kernels leave free behind every row of a matrix cast per 1x128, for outlier
            blocks (outliers.py). The result is then a view of a wider operand; on a CPU it never is.

    Returns:
        The cast, of the shape of x (rotated along its rows: padded); a group that holds Inf or NaN is NaN as a whole,
        under a static scale the element alone.

    Raises:
        ValueError: For an unknown option, or a shape that the granularity does not fit.
    """
    # Stochastic rounding draws torch's random numbers, which kernels do not have.
    native = rounding == "nearest" and not is_emulated(format, granularity, scale)
    # Kernels take matrices. Leading dimensions are joined, which changes groups of 128x128 alone.
    if x.device.type == "cuda" and native and x.dim() and (x.dim() == 2 or granularity != "128x128"):
        matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        result, _ = quantize_both(
            matrix, format, granularity, None, scale, row_factor, column_factor, row_rotation=rotation, room=room
        )
        if x.dim() == 2:
            return result
        scales = result.scale.reshape(*x.shape[:-1], -1) if result.scale.dim() else result.scale
        return QuantizedTensor(result.data.view(x.shape), scales, granularity, scale)
    _check_words(format, scale, granularity)
    x = rotate(apply_factors(x, row_factor, column_factor), rotation)
    return _reference(x, format, granularity, scale, rounding)


def quantize_columnwise(
    x: torch.Tensor,
    format: str = "e4m3",
    granularity: str = "1x128",
    scale: str = "pow2",
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    rounding: str = "nearest",
    rotation: Rotation | None = None,
) -> QuantizedTensor:
    """Cast a matrix x [M, K] along its first dimension: quantize(x.t()), of shape [K, M], in one pass.

    Args and errors are those of `quantize`; rotation.axis is one of x [M, K].
    """
    words = format, None, granularity, scale
    return quantize_both(x, *words, row_factor, column_factor, rounding, column_rotation=rotation)[1]


def quantize_both(
    x: torch.Tensor,
    format: str = "e4m3",
    rowwise: str | None = "1x128",
    columnwise: str | None = "1x128",
    scale: str = "pow2",
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    rounding: str = "nearest",
    row_rotation: Rotation | None = None,
    column_rotation: Rotation | None = None,
    room: int = 0,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Cast a matrix x [M, K] for both of its products in one pass: [M, K] along K and [K, M] along M.

    Args:
        x: The matrix, of any floating point dtype.
        format: As for `quantize`, of both results.
        rowwise: Granularity of the first result; None if it is not wanted.
        columnwise: Granularity of the second result; None if it is not wanted.
        scale: As for `quantize`, of both results.
        row_factor: As for `quantize`.
        column_factor: As for `quantize`.
        rounding: As for `quantize`.
        row_rotation: Rotation of x [M, K] before its first cast.
        column_rotation: Rotation of x [M, K] before its second cast.
        room: As for `quantize`, of the first result.

    Returns:
        (x cast along K or None, x cast along M or None).

    Raises:
        ValueError: For an unknown option, or an x that is no matrix.
    """
    _check_words(format, scale, rowwise, columnwise)
    if x.dim() != 2:
        raise ValueError(f"a cast along both dimensions needs a matrix, got shape {tuple(x.shape)}")
    emulated = any(g is not None and is_emulated(format, g, scale) for g in (rowwise, columnwise))
    if x.device.type == "cuda" and rounding == "nearest" and not emulated:
        from ds_fp8.casts.quantization_triton import quantize_statically, quantize_tiles

        factors, rotations = (row_factor, column_factor), (row_rotation, column_rotation)
        if rotations != (None, None):
            from ds_fp8.casts.rotation_triton import quantize_rotated

            return quantize_rotated(x.detach(), format, scale, rowwise, columnwise, *rotations, *factors)
        if fixed_scale(scale) is not None:
            wanted = rowwise is not None, columnwise is not None
            return quantize_statically(x.detach(), format, scale, *wanted, row_factor, column_factor)
        return quantize_tiles(x.detach(), format, scale, rowwise, columnwise, row_factor, column_factor, room)
    x = apply_factors(x.detach(), row_factor, column_factor)
    row = None if rowwise is None else _reference(rotate(x, row_rotation), format, rowwise, scale, rounding)
    if columnwise is None:
        return row, None
    # Transposed before the cast: groups along M are then groups along the last dimension, as the reference has them.
    return row, _reference(rotate(x, column_rotation).t().contiguous(), format, columnwise, scale, rounding)


def clipped(x: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    """Return which elements saturated when x, as it was after factors and rotation, was cast to q: bool, of its shape.

    Only scales of type "mse" and static ones let an element saturate.
    """
    in_units = per_element(torch.div, x.detach(), q.scale, q.granularity)
    return in_units.abs_() > FORMATS[q.format].max


def transpose(q: QuantizedTensor, matrices: int = 1) -> QuantizedTensor:
    """Return the transposed matrix with its bytes copied to lie contiguous along the other dimension.

    Args:
        q: A matrix [M, K] cast per tensor or per 128x128 block.
        matrices: How many matrices of equal shape q stacks along its rows; each is transposed. Blocks belong to one.

    Returns:
        The same numbers as [K, M], or stacked as [matrices * K, M / matrices], not cast again.

    Raises:
        ValueError: For granularities that cannot be transposed without casting again (QuantizedTensor.t).
    """
    if matrices == 1:
        turned = q.t()
        return replace(turned, data=_transposed(q.data))
    if q.granularity not in ("tensor", *SQUARE):
        q.t()  # raises
    scale = q.scale
    if scale.dim():
        # Blocks of each matrix are transposed like its elements; which matrix is first does not change.
        scale = scale.unflatten(0, (matrices, -1)).transpose(1, 2).flatten(0, 1)
    return replace(q, data=_transposed(q.data.unflatten(0, (matrices, -1))).flatten(0, 1), scale=scale)


def _transposed(data: torch.Tensor) -> torch.Tensor:
    """Return codes [..., M, K] as contiguous [..., K, M]."""
    if data.device.type == "cuda":
        from ds_fp8.casts.quantization_triton import transpose_bytes

        return transpose_bytes(data.contiguous())
    return data.transpose(-2, -1).contiguous()


def _reference(x: torch.Tensor, format: str, granularity: str, scale: str, rounding: str) -> QuantizedTensor:
    factors = scales_for(x, format, granularity, scale)
    emulated = format if FORMATS[format].magnitudes else None
    codes = cast(infinite_to_nan(x, scale), factors, format, granularity, rounding)
    return QuantizedTensor(codes, factors, granularity, scale, emulated)


def _check_words(format: str, scale: str, *granularities: str | None) -> None:
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    check_scale_type(scale)
    if fixed_scale(scale) is not None and format not in NATIVE_FORMATS:
        raise ValueError(f"a static scale would hide overflow: format {format!r} has no NaN")
    for granularity in granularities:
        if granularity is not None and granularity not in GRANULARITIES:
            raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
        if granularity not in (None, "tensor") and fixed_scale(scale) is not None:
            raise ValueError(f"a static scale is one for all of a tensor, not one for each {granularity}")
