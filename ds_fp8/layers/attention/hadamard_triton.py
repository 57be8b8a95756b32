"""rotate and unrotate in Triton: a tile is read once, multiplied by the matrix in registers, and stored.

One program takes a tile of 128 x 128 elements, a multiple of every block size along both axes:

    axis 1    tile R        axis 0    Rᵀ tile        R: block-diagonal, 1 and -1

BF16 and FP16 elements are multiplied as such (1 and -1 are exact) and summed in FP32; others are FP32 throughout. Inf and
NaN spread over a row (axis 1) or column (axis 0) of the tile, in the reference over one block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import is_even, tiles
from ds_fp8.casts.quantization_triton import load_tile


@triton.jit
def _rotate_tiles(
    x, matrix, result, M, K, rows, stride_m,
    AXIS: tl.constexpr, FACTOR: tl.constexpr, NARROW: tl.constexpr, INVERSE: tl.constexpr, EVEN: tl.constexpr,
):
    """Write x [M, K], multiplied along an axis by the block-diagonal matrix or its transpose, into result [rows, K]."""
    #     y = x R / sqrt(block)         AXIS 1        R block-diagonal, of 1, -1 and 0
    #     y = R' x / sqrt(block)        AXIS 0        R' = R transposed; R R' = block times the identity
    # INVERSE exchanges R and R', read by columns from the same matrix.
    m = tl.program_id(0) * 128 + tl.arange(0, 128)  # the first axis alone may have more than 65535 programs
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    tile = load_tile(x, None, None, m, k, M, K, stride_m, 0, EVEN)
    i = tl.arange(0, 128)
    if (AXIS == 1) != INVERSE:
        r = tl.load(matrix + i[:, None] * 128 + i[None, :])
    else:
        r = tl.load(matrix + i[None, :] * 128 + i[:, None])
    if NARROW:
        # Exact: the tile was loaded from this type.
        tile = tile.to(matrix.dtype.element_ty)
    if AXIS == 1:
        turned = tl.dot(tile, r, input_precision="ieee") * FACTOR
    else:
        turned = tl.dot(r, tile, input_precision="ieee") * FACTOR
    address = result + m[:, None].to(tl.int64) * K + k[None, :]
    tl.store(address, turned.to(result.dtype.element_ty), mask=(m < rows)[:, None] & (k < K)[None, :])


def rotate_tiles(
    x: torch.Tensor, matrix: torch.Tensor, axis: int, factor: float, rows: int, dtype: torch.dtype, inverse: bool = False
) -> torch.Tensor:
    """Return x [M, K] multiplied along an axis by a block-diagonal matrix [128, 128], or `inverse` by its transpose.

    rows: of the result; along axis 0 M padded with zeros to a multiple of the block.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    result = torch.empty(rows, K, dtype=dtype, device=x.device)
    _rotate_tiles[(tiles(rows), tiles(K))](
        x, matrix, result, M, K, rows, x.stride(0),
        AXIS=axis, FACTOR=factor, NARROW=matrix.dtype is not torch.float32, INVERSE=inverse, EVEN=is_even(M, K),
        num_warps=8,
    )  # fmt: skip
    return result
