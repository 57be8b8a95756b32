"""rotate, unrotate and rotated casts in Triton: a tile is read once, multiplied by the matrix in registers, and stored.

One program takes a tile of 128 x 128 elements, which holds whole blocks of every size along both axes:

    axis 1    tile R        axis 0    Rᵀ tile        R: the blocks of one tile on its diagonal, 1 and -1

BF16 and FP16 elements are multiplied as such, for 1 and -1 are exact, and summed in FP32; others are FP32 throughout. What
is not finite spoils the tile's whole rows (axis 1) or columns (axis 0), where the reference spoils one block of them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ds_fp8.casts.hadamard import padded, rotation_matrix
from ds_fp8.casts.primitives import apply_factors
from ds_fp8.casts.primitives_triton import MODES, NONE, ROW, TENSOR, amax_bits, format_arguments, raise_amax
from ds_fp8.casts.quantization_triton import load_tile, quantize_statically
from ds_fp8.casts.store_triton import empty_result, is_even, result_arguments, store_cast, tiles
from ds_fp8.casts.tensor import QuantizedTensor
from ds_fp8.config.formats import BLOCK, Rotation, fixed_scale

UNROTATED = tl.constexpr(2)
"""Value of an axis that is not rotated."""


@triton.jit
def _rotated(tile, matrix, AXIS: tl.constexpr, FACTOR: tl.constexpr, NARROW: tl.constexpr, INVERSE: tl.constexpr):
    """Return the FP32 tile [128, 128] multiplied along AXIS by R, or for INVERSE by its transpose."""
    result = tile
    if AXIS != UNROTATED:
        #     y = x R / sqrt(block)         AXIS 1        R holds a tile's blocks on its diagonal, of 1, -1 and 0
        #     y = R' x / sqrt(block)        AXIS 0        R' = R transposed; R R' = block times the identity
        # The inverse reads the same matrix by columns: no second copy of it.
        i = tl.arange(0, 128)
        # AXIS 1 multiplies by R from the right, AXIS 0 by its transpose from the left; INVERSE exchanges the two.
        if (AXIS == 1) != INVERSE:
            r = tl.load(matrix + i[:, None] * 128 + i[None, :])
        else:
            r = tl.load(matrix + i[None, :] * 128 + i[:, None])
        x = tile
        if NARROW:
            # Nothing is lost: x was of this type, and no factor has been multiplied in (NARROW).
            x = tile.to(matrix.dtype.element_ty)
        if AXIS == 1:
            result = tl.dot(x, r, input_precision="ieee") * FACTOR
        else:
            result = tl.dot(r, x, input_precision="ieee") * FACTOR
    return result


@triton.jit
def _rotate_tiles(
    x, matrix, result, M, K, rows, stride_m,
    AXIS: tl.constexpr, FACTOR: tl.constexpr, NARROW: tl.constexpr, INVERSE: tl.constexpr, EVEN: tl.constexpr,
):
    """Write the rotated x [M, K] into result [rows, K]."""
    m = tl.program_id(0) * 128 + tl.arange(0, 128)  # the first axis alone may have more than 65535 programs
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    tile = load_tile(x, None, None, m, k, M, K, stride_m, 0, EVEN)
    tile = _rotated(tile, matrix, AXIS, FACTOR, NARROW, INVERSE)
    address = result + m[:, None].to(tl.int64) * K + k[None, :]
    tl.store(address, tile.to(result.dtype.element_ty), mask=(m < rows)[:, None] & (k < K)[None, :])


@triton.jit
def _amax_rotated_tiles(
    x, row_factor, column_factor, M, K, stride_m, row_matrix, column_matrix, rows, columns, row_amax, column_amax,
    FACTORS: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, NARROW: tl.constexpr, EVEN: tl.constexpr,
    ROW_AXIS: tl.constexpr, ROW_FACTOR: tl.constexpr, COLUMN_AXIS: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
):
    """Write the bits of the amax of the rows and columns that have one scale into zeroed int32 (TENSOR: element 0)."""
    m = tl.program_id(0) * 128 + tl.arange(0, 128)  # the first axis alone may have more than 65535 programs
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    tile = load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
    if ROWWISE == ROW or ROWWISE == TENSOR:
        bits = amax_bits(_rotated(tile, row_matrix, ROW_AXIS, ROW_FACTOR, NARROW, False), 1)
        raise_amax(row_amax, bits, m, rows, ROWWISE)
    if COLUMNWISE == ROW or COLUMNWISE == TENSOR:
        bits = amax_bits(_rotated(tile, column_matrix, COLUMN_AXIS, COLUMN_FACTOR, NARROW, False), 0)
        raise_amax(column_amax, bits, k, K, COLUMNWISE)


@triton.jit
def _cast_rotated_tiles(
    x, row_factor, column_factor, M, K, stride_m, row_matrix, column_matrix, rows, columns, row_amax, column_amax,
    row_data, row_scale, row_scale_along, row_scale_across,
    column_data, column_scale, column_scale_along, column_scale_across,
    FACTORS: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, NARROW: tl.constexpr, EVEN: tl.constexpr,
    ROW_AXIS: tl.constexpr, ROW_FACTOR: tl.constexpr, COLUMN_AXIS: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """Cast the rotated x [M, K] into row_data [rows, K] and column_data [K, columns]."""
    m = tl.program_id(0) * 128 + tl.arange(0, 128)  # the first axis alone may have more than 65535 programs
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    tile = load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
    if ROWWISE != NONE:
        store_cast(
            _rotated(tile, row_matrix, ROW_AXIS, ROW_FACTOR, NARROW, False), k, m, K, rows,
            row_data, K, row_scale, row_amax, row_scale_along, row_scale_across,
            1, ROWWISE, DTYPE, LARGEST, SMALLEST, POW2, EVEN,
        )
    if COLUMNWISE != NONE:
        store_cast(
            _rotated(tile, column_matrix, COLUMN_AXIS, COLUMN_FACTOR, NARROW, False), m, k, columns, K,
            column_data, columns, column_scale, column_amax, column_scale_along, column_scale_across,
            0, COLUMNWISE, DTYPE, LARGEST, SMALLEST, POW2, EVEN,
        )


def rotate_tiles(x: torch.Tensor, rotation: Rotation, dtype: torch.dtype, inverse: bool = False) -> torch.Tensor:
    """Return x [M, K] rotated, or for `inverse` rotated back, in `dtype`; along axis 0 padded with zeros to whole blocks."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    rows, narrow = padded(M, rotation), _is_narrow(x)
    result = torch.empty(rows, K, dtype=dtype, device=x.device)
    _rotate_tiles[(tiles(rows), tiles(K))](
        x, _matrix(rotation, x.device, x.dtype if narrow else torch.float32), result, M, K, rows, x.stride(0),
        AXIS=rotation.axis, FACTOR=rotation.block**-0.5, NARROW=narrow, INVERSE=inverse, EVEN=is_even(M, K),
        num_warps=8,
    )  # fmt: skip
    return result


def quantize_rotated(
    x: torch.Tensor,
    format: str,
    scale: str,
    rowwise: str | None,
    columnwise: str | None,
    row_rotation: Rotation | None,
    column_rotation: Rotation | None,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Rotate and cast a matrix x [M, K]: row-wise as [M, K], column-wise as [K, M]; None where its granularity is.

    Raises:
        ValueError: K is no multiple of the block of a rotation along it.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    for rotation in (row_rotation, column_rotation):
        if rotation is not None and rotation.axis == 1 and K % rotation.block:
            raise ValueError(f"{K} columns are not a multiple of the rotation block {rotation.block}")
    if fixed_scale(scale) is not None:  # its cast needs no tile: a pass of its own
        x = apply_factors(x, row_factor, column_factor)
        # FP32 in between: a rotated matrix rounded to BF16 first would be rounded twice.
        by_row, by_column = (
            x if rotation is None else rotate_tiles(x, rotation, torch.float32)
            for rotation in (row_rotation, column_rotation)
        )
        row = quantize_statically(by_row, format, scale, True, False)[0] if rowwise else None
        return row, quantize_statically(by_column, format, scale, False, True)[1] if columnwise else None
    # Only a rotation along the rows pads M, each result by its own: the grid covers the longer.
    rows, columns = padded(M, row_rotation), padded(M, column_rotation)
    row = empty_result(rows, K, format, rowwise, scale, x.device)
    column = empty_result(K, columns, format, columnwise, scale, x.device)
    if x.numel() == 0:
        return row, column
    factors = (row_factor is not None) + 2 * (column_factor is not None)
    narrow = _is_narrow(x) and not factors
    dtype = x.dtype if narrow else torch.float32
    matrices = [None if r is None else _matrix(r, x.device, dtype) for r in (row_rotation, column_rotation)]
    row_amax = column_amax = None
    if {rowwise, columnwise} & {"row", "tensor"}:
        row_amax, column_amax = torch.zeros(rows + K, dtype=torch.int32, device=x.device).split([rows, K])
    common = {
        "FACTORS": factors, "ROWWISE": MODES[rowwise], "COLUMNWISE": MODES[columnwise], "NARROW": narrow,
        "EVEN": is_even(M, K), "num_warps": 8, **_words("ROW", row_rotation), **_words("COLUMN", column_rotation),
    }  # fmt: skip
    source = (x, row_factor, column_factor, M, K, x.stride(0), *matrices, rows, columns, row_amax, column_amax)
    grid = (tiles(max(rows, columns)), tiles(K))
    if row_amax is not None:
        _amax_rotated_tiles[grid](*source, **common)
    _cast_rotated_tiles[grid](
        *source, *result_arguments(row), *result_arguments(column), **common, **format_arguments(format, scale)
    )
    return row, column


def _words(prefix: str, rotation: Rotation | None) -> dict[str, object]:
    axis, factor = (UNROTATED.value, 1.0) if rotation is None else (rotation.axis, rotation.block**-0.5)
    return {f"{prefix}_AXIS": axis, f"{prefix}_FACTOR": factor}


def _is_narrow(x: torch.Tensor) -> bool:
    """Return whether products of x's elements are taken in their own dtype; Triton's interpreter has none in BF16."""
    return x.dtype is torch.float16 or (x.dtype is torch.bfloat16 and x.is_cuda)


@functools.lru_cache
def _matrix(rotation: Rotation, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [128, 128] of a tile's blocks, of 1, -1 and 0."""
    one = rotation_matrix(rotation, device, dtype)
    # Zeros off the diagonal add exact zeros to the sums: blocks below 128 cost no kernel of another shape.
    return torch.block_diag(*[one] * (BLOCK // rotation.block)).contiguous()
