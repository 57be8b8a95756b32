"""quantize_both and transpose of quantization.py in Triton: every byte is read once, both results are written once.

One program quantizes a tile of 128 x 128 elements, full groups of 1x128 and 128x128:

    x = x * row_factor[m] * column_factor[k]          (optional: RMSNorm, or a weight's scales per row)
    rowwise:     scale[m] = f(max_k |x|),  data[m, k] = round(x / scale)       contraction k, for fprop and dgrad
    columnwise:  scale[k] = f(max_m |x|),  data[k, m] = round(x / scale)       contraction m (tokens), for wgrad

For 1x128 and 128x128 the amax is of the tile. `row` and `tensor` take two launches: `_amax_tiles` reduces x to the amax
of rows and columns, then the tile kernel quantizes with their scales.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import (
    MODES,
    NONE,
    ROW,
    TILE,
    amax_bits,
    empty_result,
    format_arguments,
    is_even,
    raise_amax,
    result_arguments,
    store_cast,
    store_cast_columnwise,
    store_cast_rowwise,
    tiles,
)
from ds_fp8.casts.quantization import QuantizedTensor


@triton.jit
def load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS: tl.constexpr, EVEN: tl.constexpr):
    """Return the FP32 tile [128, 128] at rows m, columns k; zero outside."""
    address = x + m[:, None].to(tl.int64) * stride_m + k[None, :]
    if EVEN:
        tile = tl.load(address).to(tl.float32)
    else:
        tile = tl.load(address, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    # FACTORS: a bit each. Rows first, as in apply_factors.
    if FACTORS & 1:
        tile *= tl.load(row_factor + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    if FACTORS & 2:
        tile *= tl.load(column_factor + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def _cast_tiles(
    x, row_factor, column_factor, M, K, stride_m,
    row_data, row_pitch, row_scale, row_amax, row_scale_along, row_scale_across,
    column_data, column_scale, column_amax, column_scale_along, column_scale_across,
    FACTORS: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr, EVEN: tl.constexpr,
):
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    first_m = tl.program_id(1) * 128
    # A tile is loaded once and quantized both ways:
    #     rows:     scale[m, group] = f(max_k |x|);  row_data[m, k]    = round(x / scale)
    #     columns:  scale[k, group] = f(max_m |x|);  column_data[k, m] = round(x / scale)
    # Every fourth row, for store_cast_columnwise; TILE needs the maximum of all 128 rows.
    if EVEN and COLUMNWISE != NONE and ROWWISE != TILE:
        m = first_m + 4 * tl.arange(0, 32)
        x0 = load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
        x1 = load_tile(x, row_factor, column_factor, m + 1, k, M, K, stride_m, FACTORS, EVEN)
        x2 = load_tile(x, row_factor, column_factor, m + 2, k, M, K, stride_m, FACTORS, EVEN)
        x3 = load_tile(x, row_factor, column_factor, m + 3, k, M, K, stride_m, FACTORS, EVEN)
        if ROWWISE != NONE:
            store_cast_rowwise(
                x0, x1, x2, x3, first_m, k, M, K, row_data, row_pitch, row_scale, row_amax, row_scale_along,
                row_scale_across, ROWWISE, DTYPE, LARGEST, SMALLEST, POW2,
            )
        store_cast_columnwise(
            x0, x1, x2, x3, first_m, k, M, K,
            column_data, column_scale, column_amax, column_scale_along, column_scale_across,
            COLUMNWISE, DTYPE, LARGEST, SMALLEST, POW2,
        )
    else:
        m = first_m + tl.arange(0, 128)
        tile = load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
        if ROWWISE != NONE:
            store_cast(
                tile, k, m, K, M, row_data, row_pitch, row_scale, row_amax, row_scale_along, row_scale_across,
                1, ROWWISE, DTYPE, LARGEST, SMALLEST, POW2, EVEN,
            )
        if COLUMNWISE != NONE:
            store_cast(
                tile, m, k, M, K, column_data, M, column_scale, column_amax, column_scale_along, column_scale_across,
                0, COLUMNWISE, DTYPE, LARGEST, SMALLEST, POW2, EVEN,
            )


@triton.jit
def _amax_tiles(
    x, row_factor, column_factor, M, K, stride_m, row_amax, column_amax,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):
    """Write the bits of the amax of every row and column of x into zeroed int32 [M] and [K] (TENSOR: into element 0)."""
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    m = tl.program_id(1) * 128 + tl.arange(0, 128)
    tile = load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
    rows = amax_bits(tile, 1)
    raise_amax(row_amax, rows, m, M, ROWS)
    # For TENSOR either reduction will do.
    columns = rows
    if COLUMNS == ROW:
        columns = amax_bits(tile, 0)
    raise_amax(column_amax, columns, k, K, COLUMNS)


@triton.jit
def _transpose_tiles(x, result, M, K, pitch, SIZE: tl.constexpr):
    """Transpose the bytes of each matrix, [M, K] -> [K, M]; row stride `pitch` bytes."""
    # Grid axis 2 is the matrix; int64, for stacks of experts exceed 2^31 bytes.
    matrix = tl.program_id(2).to(tl.int64) * M
    x += matrix * pitch
    result += matrix * K
    k = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (m < M)[:, None] & (k < K)[None, :]
    # Loads and stores are coalesced; Triton transposes in shared memory.
    tile = tl.load(x + m[:, None].to(tl.int64) * pitch + k[None, :], mask=inside)
    tl.store(result + k[None, :].to(tl.int64) * M + m[:, None], tile, mask=inside)


def quantize_tiles(
    x: torch.Tensor,
    format: str,
    scale: str,
    rowwise: str | None,
    columnwise: str | None,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    room: int = 0,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """quantize_both on the GPU; `room` as of empty_result, for the rowwise result."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    row = empty_result(M, K, format, rowwise, scale, x.device, room)
    column = empty_result(K, M, format, columnwise, scale, x.device)
    if x.numel() == 0:
        return row, column
    grid = (tiles(K), tiles(M))
    common = {"FACTORS": (row_factor is not None) + 2 * (column_factor is not None), "EVEN": is_even(M, K)}
    source = (x, row_factor, column_factor, M, K, x.stride(0))
    row_amax = column_amax = None
    if {rowwise, columnwise} & {"row", "tensor"}:
        # One allocation and fill for both; 0 is the bits of amax 0.
        row_amax, column_amax = torch.zeros(M + K, dtype=torch.int32, device=x.device).split([M, K])
        _amax_tiles[grid](
            *source, row_amax, column_amax, ROWS=MODES[rowwise], COLUMNS=MODES[columnwise], num_warps=8, **common
        )
    row_data, row_scale, *row_strides = result_arguments(row)
    column_data, column_scale, *column_strides = result_arguments(column)
    _cast_tiles[grid](
        *source, row_data, 0 if row is None else row_data.stride(0), row_scale, row_amax, *row_strides, column_data, column_scale, column_amax, *column_strides,
        ROWWISE=MODES[rowwise], COLUMNWISE=MODES[columnwise], num_warps=8 if column is None else 4,
        **format_arguments(format, scale), **common,
    )
    return row, column


def transpose_bytes(data: torch.Tensor) -> torch.Tensor:
    """Transpose an FP8 matrix [M, K] with contiguous rows, or contiguous [B, M, K], into contiguous memory."""
    *matrices, M, K = data.shape
    result = torch.empty(*matrices, K, M, dtype=data.dtype, device=data.device)
    if data.numel():
        size = 128
        _transpose_tiles[triton.cdiv(K, size), triton.cdiv(M, size), math.prod(matrices)](
            data.view(torch.uint8), result.view(torch.uint8), M, K, data.stride(-2), SIZE=size, num_warps=8
        )
    return result
