"""Outlier blocks: extra elements of the contraction that correct the quantization error of a few input channels.

A few channels O of a layer's input hold most of its energy, and their quantization errors, with those of the weight's
columns of the same channels, are most of the error of the product. With Q(x) the quantized and dequantized x, and the
residuals r(x) = x - Q(x) and r(w) = w - Q(w),

    x wᵀ = Q(x) Q(w)ᵀ + x r(w)ᵀ + r(x) Q(w)ᵀ

The last two terms, for the channels of O alone, become a block of 128 elements of the contraction per 64 channels:

    input   [Q(x) | Q([x_O | r(x_O)])]        [T, P + 128 B]    P: K padded with zeros to full blocks
    weight  [Q(w) | Q([r(w_O) | Q(w_O)])]     [N, P + 128 B]

One GEMM of the same kernel computes all of it. Quantizing the block again costs 3% of the 3% of error. Both halves of a
block share one scale, per token of x and per 128 rows of w: residuals are at most 2^-4 of their values, well within the
17 binades of the format.

Residuals of sharded weights are quantized from the master shard (zero/quantizer.py); most weights are all-gathered with
their outlier block.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_fp8.casts.primitives import apply_factors, dequantize_unscaled, group_amax, quantize_with_scale, scale_from_amax
from ds_fp8.casts.quantization import QuantizedTensor, block_scales, round_up_to_blocks, width_with_outliers
from ds_fp8.config.formats import BLOCK, FORMATS

HALF = BLOCK // 2  # channels of an outlier block


def channel_energy(x: QuantizedTensor) -> torch.Tensor:
    """Return the sum of squares of every column of a quantized matrix [T, K]: FP32 [K]; 0 where not finite."""
    energy = torch.zeros(x.shape[1], device=x.data.device)
    for first in range(0, x.shape[0], 1024):  # in parts: FP32 takes four times the memory
        rows = slice(first, first + 1024)
        # Fixed order and size of the parts: bitwise reproducible.
        energy += replace(x, data=x.data[rows], scale=x.scale[rows]).dequantize().square_().sum(0)
    return energy.nan_to_num_(nan=0.0, posinf=0.0)


def largest_channels(energy: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` channels of largest energy, or all if fewer: int32, ascending."""
    # Stable: ties are decided alike on all ranks and devices.
    order = torch.sort(energy, descending=True, stable=True).indices[:count]
    return order.sort().values.to(torch.int32)


def residual_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return the scales FP32 [N/128] of a weight's outlier block: the largest per row of its scales [N/128, K/128]."""
    return scale.amax(1)


def residual_data(
    values: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor, format: str
) -> torch.Tensor:
    """Quantize the residuals of values [N, C]: (values - data * scale) / row_scale [N, 1]."""
    return _quantize_in_units(values.float() - dequantize_unscaled(data) * scale, row_scale, format)


def weight_residual(weight: torch.Tensor, w: QuantizedTensor, channels: torch.Tensor) -> torch.Tensor:
    """Return the quantized residuals [N, C] of the columns `channels` of a weight [N, K] that is quantized as `w`."""
    of_row = residual_scale(w.scale).repeat_interleave(BLOCK)[: w.shape[0], None]
    at = channels.long()
    scale = w.scale[:, at // BLOCK].repeat_interleave(BLOCK, 0)[: w.shape[0]]
    data = w.data.view(torch.uint8)[:, at].view(w.data.dtype)
    return residual_data(weight.detach()[:, at], data, scale, of_row, w.format)


def residual_in(wide: QuantizedTensor, channels: int) -> torch.Tensor:
    """Return the quantized residuals [N, C] in the outlier block of a weight."""
    blocks = wide.data.view(torch.uint8)[:, -round_up_to_blocks(2 * channels) :].unflatten(1, (-1, 2, HALF))
    return blocks[:, :, 0].flatten(1)[:, :channels].view(wide.data.dtype)


def weight_block(residual: torch.Tensor, columns: torch.Tensor, row_scale: torch.Tensor, format: str) -> torch.Tensor:
    """Return the data of a weight's outlier block, uint8 [N, 128 B].

    residual: data [N, C]; columns: the same columns dequantized, FP32 [N, C]; row_scale: [N, 1].
    """
    # Q(w_O) again with the scale of the block, the largest of the row: nothing saturates.
    again = _quantize_in_units(columns, row_scale, format)
    return _halves(residual.view(torch.uint8), again.view(torch.uint8))


def extend_weight(w: QuantizedTensor, residual: torch.Tensor, channels: torch.Tensor) -> QuantizedTensor:
    """Append the outlier block to a weight [N, K] quantized in 128x128 blocks: [N, P + 128 B].

    residual: data [N, C] with scales `residual_scale`; channels: int32 [C], ascending.
    """
    if w.data.device.type == "cuda":
        from ds_fp8.casts.outliers_triton import extend_weight_tiles

        return extend_weight_tiles(w, residual, channels, residual_scale(w.scale))
    N, K = w.shape
    start, width = round_up_to_blocks(K), width_with_outliers(K, len(channels))
    at = channels.long()
    of_block = residual_scale(w.scale)
    of_row = of_block.repeat_interleave(BLOCK)[:N, None]
    columns = dequantize_unscaled(w.data.view(torch.uint8)[:, at].view(w.data.dtype))
    columns = columns * w.scale[:, at // BLOCK].repeat_interleave(BLOCK, 0)[:N]
    data = torch.zeros(N, width, dtype=torch.uint8, device=w.data.device)
    data[:, :K] = w.data.view(torch.uint8)
    data[:, start:] = weight_block(residual, columns, of_row, w.format)
    scale = block_scales(len(of_block), width // BLOCK, w.data.device)
    scale[:, : start // BLOCK], scale[:, start // BLOCK :] = w.scale, of_block[:, None]
    return QuantizedTensor(data.view(w.data.dtype), scale, w.granularity, w.scale_type)


def extend_input(
    x: QuantizedTensor,
    source: torch.Tensor,
    channels: torch.Tensor,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Append the outlier block to x [T, K], the quantized `source` * factors: [T, P + 128 B].

    channels: int32 [C], ascending; row_factor [T] and column_factor [K] as of `quantize`.
    """
    if x.data.device.type == "cuda":
        from ds_fp8.casts.outliers_triton import extend_input_tiles

        return extend_input_tiles(x, source, channels, row_factor, column_factor)
    at = channels.long()
    factor = None if column_factor is None else column_factor[at]
    return extend_input_reference(x, apply_factors(source[:, at], row_factor, factor), channels)


def extend_input_reference(x: QuantizedTensor, values: torch.Tensor, channels: torch.Tensor) -> QuantizedTensor:
    """extend_input in torch, from the values [T, C] of the channels; the reference of the kernels."""
    T, K = x.shape
    start, width = round_up_to_blocks(K), width_with_outliers(K, len(channels))
    at = channels.long()
    rounded = dequantize_unscaled(x.data.view(torch.uint8)[:, at].view(x.data.dtype))
    values = values.detach().float()
    blocks = _halves(values, values - rounded * x.scale[:, at // BLOCK])
    # The amax of the values: residuals are at most 2^-4 of them.
    own = scale_from_amax(group_amax(_halves(values, values), "1x128"), x.format, x.scale_type)
    data = torch.zeros(T, width, dtype=torch.uint8, device=x.data.device)
    data[:, :K] = x.data.view(torch.uint8)
    data[:, start:] = quantize_with_scale(blocks, own, x.format, "1x128").view(torch.uint8)
    # Group-major, as kernels write scales of 1x128 (primitives_triton.py).
    scale = torch.empty(width // BLOCK, T, device=x.data.device).t()
    scale[:, : start // BLOCK], scale[:, start // BLOCK :] = x.scale, own
    return QuantizedTensor(data.view(FORMATS[x.format].dtype), scale, "1x128", x.scale_type)


def _halves(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Interleave HALF columns of `first` and of `second`: [rows, 128 B], padded with zeros."""
    rows, columns = first.shape
    blocks = -(-columns // HALF)
    result = first.new_zeros(rows, blocks, 2, HALF)
    for half, numbers in enumerate((first, second)):
        padded = torch.nn.functional.pad(numbers, (0, -columns % HALF))
        result[:, :, half] = padded.view(rows, blocks, HALF)
    return result.flatten(1)


def _quantize_in_units(x: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    return quantize_with_scale(x * scale.reciprocal(), torch.ones((), device=x.device), format, "tensor")
