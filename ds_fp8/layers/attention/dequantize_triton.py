"""Dequantize tensors of FP8 attention in one pass, with a mean added or a rotation undone.

    output     y = data · scale + mean of v        one mean a row of the batch and head
    gradient   y = (data · scale) Rᵀ               of rotated q and k (hadamard_triton.py)

One program takes a tile of 128 tokens x 128 features. Scales are powers of two: BF16 holds data · scale exactly, and the
sum or product is rounded once, as on the CPU path in fp8_attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import is_even, tiles
from ds_fp8.casts.quantization_triton import load_tile
from ds_fp8.layers.attention.hadamard import Rotation, kernel_arguments
from ds_fp8.layers.attention.hadamard_triton import turn_tile


@triton.jit
def _dequantize_tiles(
    data, scale, mean, matrix, result, M, K, S, FACTOR: tl.constexpr, NARROW: tl.constexpr, EVEN: tl.constexpr
):
    m = tl.program_id(0) * 128 + tl.arange(0, 128)  # the first axis alone may have more than 65535 programs
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    tile = load_tile(data, None, None, m, k, M, K, K, 0, EVEN) * tl.load(scale)
    inside = (m < M)[:, None] & (k < K)[None, :]
    if mean is not None:
        tile += tl.load(mean + (m // S)[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    if matrix is not None:
        tile = turn_tile(tile, matrix, 1, FACTOR, NARROW, True)
    address = result + m[:, None].to(tl.int64) * K + k[None, :]
    tl.store(address, tile.to(result.dtype.element_ty), mask=inside)


def dequantize_tiles(
    data: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    mean: torch.Tensor | None = None,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Dequantize data [B, S, heads, D] by `scale` [], contiguous in `dtype`.

    mean [B, kv_heads, 1, D] is added, or the rotation of every head undone; D divides 128 and is a multiple of the
    rotation's block.
    """
    data, result = data.contiguous(), torch.empty(data.shape, dtype=dtype, device=data.device)
    B, S, heads, D = data.shape
    if not result.numel():
        return result
    M, K = B * S, heads * D
    matrix, factor = None, 1.0
    if rotation is not None:
        matrix, _, factor, _ = kernel_arguments(rotation, result.view(M, K))
    if mean is not None:
        mean = mean.repeat_interleave(heads // mean.shape[1], 1).view(B, K)  # [B, heads · D]
    _dequantize_tiles[(tiles(M), tiles(K))](
        data, scale, mean, matrix, result, M, K, S,
        FACTOR=factor, NARROW=matrix is not None and matrix.dtype is not torch.float32, EVEN=is_even(M, K), num_warps=8,
    )  # fmt: skip
    return result
