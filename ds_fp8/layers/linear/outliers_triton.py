"""The outlier block of act(gate) · up in Triton; casts/outliers_triton.py has those of other operands."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.outliers_triton import copy_tile, gather_codes, place_of, store_outlier_block, wide_input
from ds_fp8.casts.primitives_triton import format_arguments
from ds_fp8.casts.store_triton import tiles
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.linear.activations_triton import ACTIVATION_CODES, activate


@triton.jit
def _extend_product(
    data, scale, gate_up, channels, wide, wide_scale, first_tile, M, F, pitch, width, stride, scale_m, scale_k,
    COUNT: tl.constexpr, ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """Do _extend_input of casts/outliers_triton.py for v = act(gate) · up, computed again from [M, 2F]."""
    tile = first_tile + tl.program_id(0)
    m = tl.program_id(1) * 128 + tl.arange(0, 128)
    if tile * 128 < F:
        copy_tile(data, wide, m, tile, M, F, pitch, width)
        tl.store(wide_scale + tile * M + m, tl.load(scale + m * scale_m + tile * scale_k, mask=m < M), mask=m < M)
    else:
        # Only the channels wanted are computed again: a product in high precision was never in memory.
        place = place_of(tile - (F + 127) // 128)
        channel = tl.load(channels + place, mask=place < COUNT, other=0)
        inside = (m < M)[:, None] & (place < COUNT)[None, :]
        address = gate_up + m[:, None].to(tl.int64) * stride + channel[None, :]
        gate = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(address + F, mask=inside, other=0.0).to(tl.float32)
        activated, _ = activate(gate, ACTIVATION)
        rounded = gather_codes(data, scale, m, channel, inside, pitch, scale_m, scale_k, DTYPE)
        store_outlier_block(activated * up, rounded, m, M, wide, wide_scale, tile, width, DTYPE, LARGEST, SMALLEST, POW2)


def extend_product_tiles(
    cast: QuantizedTensor, gate_up: torch.Tensor, activation: str, channels: torch.Tensor
) -> QuantizedTensor:
    """Return the cast [T, F] of act(gate) · up, gate_up [T, 2F], with the outlier block of `channels`."""
    wide, first_tile = wide_input(cast, len(channels))
    M, F = cast.shape
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    if M:
        _extend_product[wide.shape[1] // BLOCK - first_tile, tiles(M)](
            cast.data.view(torch.uint8), cast.scale, gate_up, channels, wide.data.view(torch.uint8), wide.scale,
            first_tile, M, F, cast.data.stride(0), wide.shape[1], gate_up.stride(0), *cast.scale.stride(), COUNT=len(channels),
            ACTIVATION=ACTIVATION_CODES[activation], num_warps=8, **format_arguments(cast.format, cast.scale_type),
        )
    return wide
