"""Casts of tensors and matrices to FP8: in Triton on a GPU and in plain torch elsewhere, the same bits either way."""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_fp8.casts.primitives import apply_factors, cast, infinite_to_nan, scales_for
from ds_fp8.casts.tensor import QuantizedTensor
from ds_fp8.config.formats import FORMATS, check_scale_type, is_native, is_of_blocks


def quantize(
    x: torch.Tensor,
    format: str = "e4m3",
    granularity: str = "1x128",
    scale: str = "pow2",
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    room: int = 0,
) -> QuantizedTensor:
    """Cast a floating point tensor of any shape, with scales from its own amax.

    Args:
        x: Floating point, of any shape; a matrix for blocks such as "128x128" and for factors.
        format: "e4m3", "e5m2" or another name of config.formats.FORMATS.
        granularity: Elements that share a scale: "tensor", "row" (the last dimension), "1x128" (128 elements along the
            last dimension), "128x128", or groups and blocks of other sizes. Ragged edges are groups of their own.
        scale: "pow2" (powers of two), "fp32", "fitted" (as "fp32", but of groups of 1x128 that of the smallest squared
            error), or another name of config.formats.SCALE_TYPES.
        row_factor: [M], multiplied in FP32 into the rows of a matrix [M, K] before the cast.
        column_factor: [K], multiplied into its columns after that.
        room: Codes, whole blocks, that kernels leave free behind every row of a matrix cast per 1x128, for outlier
            blocks (outliers.py). The result is then a view of a wider operand; on a CPU it never is.

    Returns:
        The cast, of the shape of x; a group that holds Inf or NaN is NaN as a whole.

    Raises:
        ValueError: For an unknown option, or a shape that the granularity does not fit.
    """
    # Kernels take matrices. Leading dimensions are joined, which changes groups of 128x128 alone.
    if x.device.type == "cuda" and is_native(format, granularity, scale) and x.dim():
        if x.dim() == 2:
            return quantize_both(x, format, granularity, None, scale, row_factor, column_factor, room)[0]
        if granularity != "128x128":
            result, _ = quantize_both(x.reshape(-1, x.shape[-1]), format, granularity, None, scale)
            scales = result.scale.reshape(*x.shape[:-1], -1) if result.scale.dim() else result.scale
            return QuantizedTensor(result.data.view(x.shape), scales, granularity, scale)
    _check_words(format, scale)
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
    """Cast a matrix x [M, K] along its first dimension: quantize(x.t()), of shape [K, M], in one pass."""
    return quantize_both(x, format, None, granularity, scale, row_factor, column_factor)[1]


def quantize_both(
    x: torch.Tensor,
    format: str = "e4m3",
    rowwise: str | None = "1x128",
    columnwise: str | None = "1x128",
    scale: str = "pow2",
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
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
        room: As for `quantize`, of the first result.

    Returns:
        (x cast along K or None, x cast along M or None).

    Raises:
        ValueError: For an unknown option, or an x that is no matrix.
    """
    _check_words(format, scale)
    if x.dim() != 2:
        raise ValueError(f"a cast along both dimensions needs a matrix, got shape {tuple(x.shape)}")
    native = all(granularity is None or is_native(format, granularity, scale) for granularity in (rowwise, columnwise))
    if x.device.type == "cuda" and native:
        from ds_fp8.casts.quantization_triton import quantize_tiles

        return quantize_tiles(x.detach(), format, scale, rowwise, columnwise, row_factor, column_factor, room)
    x = apply_factors(x.detach(), row_factor, column_factor)
    row = None if rowwise is None else _reference(x, format, rowwise, scale)
    if columnwise is None:
        return row, None
    # Transposed before the cast: groups along M are then groups along the last dimension, as the reference has them.
    return row, _reference(x.t().contiguous(), format, columnwise, scale)


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
    if q.granularity != "tensor" and not is_of_blocks(q.granularity):
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


def _reference(x: torch.Tensor, format: str, granularity: str, scale: str) -> QuantizedTensor:
    factors = scales_for(x, format, granularity, scale)
    name = None if FORMATS[format].codec is None else format
    codes = cast(infinite_to_nan(x, scale), factors, format, granularity)
    return QuantizedTensor(codes, factors, granularity, scale, name)


def _check_words(format: str, scale: str) -> None:
    if not FORMATS.knows(format):
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    check_scale_type(scale)
