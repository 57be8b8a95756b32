"""Outlier blocks in Triton; outliers.py has the maths and the references.

Programs beyond the last tile of K write an outlier block each, of ROWS tokens or of 128 rows of a weight:

    v      = source[m, channels[c]] * factors                   64 channels c
    block  = [v | v - data * scale]                             data and scale of the same channels in the quantized x
    scale  = f(amax of the block),  data = round(block / scale)

If K is a multiple of 128, the quantized x has padding after every row for the blocks. Otherwise, and for weights
without padding, programs copy a tile of data each into a wider matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import amax_bits, format_arguments, reciprocal_of, scale_of, tiles, to_fp8
from ds_fp8.casts.quantization import QuantizedTensor, block_scales, widened, width_with_outliers
from ds_fp8.config.formats import BLOCK

# Tokens of a program: with 128 there are too few programs to fill a GPU (docs/log/zero3.md, 2026-11-27)
ROWS = tl.constexpr(32)
# For kernels that compute residuals: with FMA the difference would round once less than the reference
ROUND_EVERY_PRODUCT = {"enable_fp_fusion": False}


@triton.jit
def copy_tile(data, wide, m, tile, M, K, pitch, width):
    """Copy a tile of data from [M, K] with row stride `pitch` into [M, width], with zeros beyond K."""
    k = tile * 128 + tl.arange(0, 128)
    inside = (m < M)[:, None] & (k < K)[None, :]
    loaded = tl.load(data + m[:, None].to(tl.int64) * pitch + k[None, :], mask=inside, other=0)
    tl.store(wide + m[:, None].to(tl.int64) * width + k[None, :], loaded, mask=(m < M)[:, None])


@triton.jit
def dequantize_channels(data, scale, m, channel, inside, pitch, scale_m, scale_k, DTYPE: tl.constexpr):
    """Dequantize data [M, K] with row stride `pitch` at rows m and columns `channel`, FP32."""
    loaded = tl.load(data + m[:, None].to(tl.int64) * pitch + channel[None, :], mask=inside, other=0)
    factor = tl.load(scale + m[:, None] * scale_m + (channel // 128)[None, :] * scale_k, mask=inside, other=0.0)
    return loaded.to(DTYPE, bitcast=True).to(tl.float32) * factor


@triton.jit
def store_outlier_block(
    value, rounded, m, M, wide, wide_scale, tile, width,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """Quantize and store [value | value - rounded], FP32 [rows, 64] each."""
    #     row of the block:   [v_0 .. v_63 | v_0 - r_0 .. v_63 - r_63]        r = Q(v)
    # times the weight's  [w - Q(w) | Q(w)]  adds  v (w - Q(w)) + (v - Q(v)) Q(w), the error of the narrow product. Both
    # halves share one scale: residuals are far smaller, so the amax is that of `value`.
    scale, reciprocal = scale_of(amax_bits(value, 1), LARGEST, SMALLEST, POW2)
    to, inside = wide + m[:, None].to(tl.int64) * width + (tile * 128 + tl.arange(0, 64))[None, :], (m < M)[:, None]
    tl.store(to, to_fp8(value, reciprocal[:, None], DTYPE).to(tl.uint8, bitcast=True), mask=inside)
    tl.store(to + 64, to_fp8(value - rounded, reciprocal[:, None], DTYPE).to(tl.uint8, bitcast=True), mask=inside)
    # Group-major, like all scales of 1x128: row `tile` of [width / 128, M].
    tl.store(wide_scale + tile * M + m, scale, mask=m < M)


@triton.jit
def _extend_input(
    data, scale, source, row_factor, column_factor, channels, wide, wide_scale, first_tile, M, K, pitch, width, stride,
    scale_m, scale_k, COUNT: tl.constexpr, FACTORS: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    # first_tile: 0 to copy x, too; K / 128 to write outlier blocks alone, if x has padding for them.
    tile = first_tile + tl.program_id(0)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tile * 128 < K:
        copy_tile(data, wide, m, tile, M, K, pitch, width)
        factor = tl.load(scale + m * scale_m + tile * scale_k, mask=m < M)
        tl.store(wide_scale + tile * M + m, factor, mask=m < M)
    else:
        place = (tile - (K + 127) // 128) * 64 + tl.arange(0, 64)
        channel = tl.load(channels + place, mask=place < COUNT, other=0)
        inside = (m < M)[:, None] & (place < COUNT)[None, :]
        value = tl.load(source + m[:, None].to(tl.int64) * stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        if FACTORS & 1:
            value *= tl.load(row_factor + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
        if FACTORS & 2:
            value *= tl.load(column_factor + channel).to(tl.float32)[None, :]
        # Dequantized from x itself, not rounded again here.
        rounded = dequantize_channels(data, scale, m, channel, inside, pitch, scale_m, scale_k, DTYPE)
        store_outlier_block(value, rounded, m, M, wide, wide_scale, tile, width, DTYPE, LARGEST, SMALLEST, POW2)


@triton.jit
def _extend_weight(
    data, scale, row_scale, residual, channels, wide, wide_scale, N, K, width, scale_n, wide_scale_n,
    COUNT: tl.constexpr, DTYPE: tl.constexpr,
):
    """Write the outlier block as [residual | Q(w_O)]; row_scale and the scales are of 128 rows each."""
    tile, rows = tl.program_id(0), tl.program_id(1)
    n = rows * 128 + tl.arange(0, 128)
    if tile * 128 < K:
        copy_tile(data, wide, n, tile, N, K, K, width)
        tl.store(wide_scale + rows * wide_scale_n + tile, tl.load(scale + rows * scale_n + tile))
    else:
        column = tl.arange(0, 128)
        place = (tile - (K + 127) // 128) * 64 + column % 64
        channel = tl.load(channels + place, mask=place < COUNT, other=0)
        inside = (n < N)[:, None] & (place < COUNT)[None, :]
        of_row = tl.load(row_scale + rows)
        loaded = tl.load(data + n[:, None].to(tl.int64) * K + channel[None, :], mask=inside, other=0)
        factor = tl.load(scale + rows * scale_n + channel // 128)
        number = loaded.to(DTYPE, bitcast=True).to(tl.float32) * factor[None, :]
        # Q(w_O) with the scale of the block, which residuals share.
        again = to_fp8(number, reciprocal_of(of_row), DTYPE).to(tl.uint8, bitcast=True)
        first = tl.load(residual + n[:, None].to(tl.int64) * COUNT + place[None, :], mask=inside, other=0)
        block = tl.where((column < 64)[None, :], first, again)
        # Zeros beyond the last channel: uninitialised data may be NaN.
        block = tl.where(inside, block, 0)
        tl.store(wide + n[:, None].to(tl.int64) * width + (tile * 128 + column)[None, :], block, mask=(n < N)[:, None])
        tl.store(wide_scale + rows * wide_scale_n + tile, of_row)


def wide_input(x: QuantizedTensor, channels: int) -> tuple[QuantizedTensor, int]:
    """Return the quantized matrix for x [T, K] and its outlier blocks, and the first tile of 128 to be written.

    A view if x has padding for the blocks, else uninitialised.
    """
    T, K = x.shape
    width = width_with_outliers(K, channels)
    if (wide := widened(x, channels)) is not None:
        return wide, K // BLOCK
    data = torch.empty(T, width, dtype=x.data.dtype, device=x.data.device)
    scale = torch.empty(width // BLOCK, T, device=x.data.device).t()
    return QuantizedTensor(data, scale, "1x128", x.scale_type), 0


def extend_input_tiles(
    x: QuantizedTensor,
    source: torch.Tensor,
    channels: torch.Tensor,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> QuantizedTensor:
    wide, first_tile = wide_input(x, len(channels))
    M, K = x.shape
    source = source if source.stride(-1) == 1 else source.contiguous()
    if M:
        _extend_input[wide.shape[1] // BLOCK - first_tile, triton.cdiv(M, ROWS.value)](
            x.data.view(torch.uint8), x.scale, source, row_factor, column_factor, channels,
            wide.data.view(torch.uint8), wide.scale, first_tile, M, K, x.data.stride(0), wide.shape[1], source.stride(0),
            *x.scale.stride(),
            COUNT=len(channels), FACTORS=(row_factor is not None) + 2 * (column_factor is not None), num_warps=4,
            **format_arguments(x.format, x.scale_type), **ROUND_EVERY_PRODUCT,
        )
    return wide


def extend_weight_tiles(
    w: QuantizedTensor, residual: torch.Tensor, channels: torch.Tensor, row_scale: torch.Tensor
) -> QuantizedTensor:
    """extend_weight of outliers.py in one launch; row_scale [N/128] is the scale of the block."""
    N, K = w.shape
    width = width_with_outliers(K, len(channels))
    # Bytes: torch has few operations on FP8 tensors.
    data = torch.empty(N, width, dtype=torch.uint8, device=w.data.device)
    scale = block_scales(tiles(N), width // BLOCK, w.data.device)
    _extend_weight[width // BLOCK, tiles(N)](
        w.data.view(torch.uint8), w.scale, row_scale, residual.view(torch.uint8), channels,
        data, scale, N, K, width, w.scale.stride(0), scale.stride(0), COUNT=len(channels),
        DTYPE=format_arguments(w.format, w.scale_type)["DTYPE"], num_warps=8,
    )
    return QuantizedTensor(data.view(w.data.dtype), scale, w.granularity, w.scale_type)
