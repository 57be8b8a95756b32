"""The products of grouped.py in Triton for Hopper: FP8 tensor cores, scales applied per 128 of the contraction.

Operands are loaded by tensor descriptors (TMA) in tiles of 128 x 128. The grid covers the worst case; programs read the
group of a tile and the rows of a group on the GPU.

Hopper's tensor cores accumulate FP8 products in fewer bits than FP32: each tl.dot sums 128 products from zero, and its
result is added in FP32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import BLOCK
from ds_fp8.gemm.grouped import RowGroups

WARPS = 8
# Tiles of either operand in flight. Registers allow one program per SM.
STAGES = 4
REGISTERS: int | None = None  # limit of registers per thread; 128 and 3 stages would allow two programs per SM
PANEL = 8  # tiles of rows per panel: programs go column by column within one, for reuse in the L2 cache


@triton.jit
def _multiply_tiles(
    a, a_scale, b, b_scale, of_tile, result, tiles, a_scale_along, b_scale_across,
    N: tl.constexpr, K: tl.constexpr, PANEL: tl.constexpr,
):
    """Store one tile of a · b_gᵀ; zeros without group."""
    per_panel = PANEL * (N // 128)
    # Numbered panel by panel, and down the rows of a column in one: PANEL tiles of a share a tile of b.
    first = tl.program_id(0) // per_panel * PANEL
    height = tl.minimum(tiles - first, PANEL)
    within = tl.program_id(0) % per_panel
    tile = first + within % height
    column = within // height
    m = tile * 128 + tl.arange(0, 128)
    n = column * 128 + tl.arange(0, 128)
    address = result + m[:, None].to(tl.int64) * N + n[None, :]
    # Known on the device alone: the host never syncs.
    group = tl.load(of_tile + tile)
    accumulator = tl.zeros([128, 128], dtype=tl.float32)
    if group < 0:
        tl.store(address, accumulator.to(result.dtype.element_ty))
        return
    a_scale += m
    b_scale += (group * (N // 128) + column) * b_scale_across
    factor = tl.load(a_scale) * tl.load(b_scale)
    for block in range(K // 128):
        # prefetch the scales of the next block
        following = (block + 1) % (K // 128)
        factor_a, factor_b = tl.load(a_scale + following * a_scale_along), tl.load(b_scale + following)
        left = a.load([tile * 128, block * 128])
        right = b.load([group * N + column * 128, block * 128])
        accumulator += tl.dot(left, right.T) * factor[:, None]
        factor = factor_a * factor_b
    tl.store(address, accumulator.to(result.dtype.element_ty))


@triton.jit
def _multiply_along_rows(
    dy, dy_scale, x, x_scale, starts, counts, result, dy_scale_along, x_scale_along, x_scale_across,
    N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Store one tile of dyᵀ · x over the rows of a group; BLOCKS: x has a scale per 128x128 block, else per 1x128."""
    group = tl.program_id(2)
    first_n = tl.program_id(1) * 128
    first_k = tl.program_id(0) * 128
    n = first_n + tl.arange(0, 128)
    k = first_k + tl.arange(0, 128)
    begin = tl.load(starts + group) // 128
    end = begin + (tl.load(counts + group) + 127) // 128
    # Clamps the prefetch of scales at the end and for groups without rows.
    last = tl.maximum(end - 1, 0)
    dy_scale += n
    x_scale += first_k // 128 * x_scale_across if BLOCKS else k
    factor_dy = tl.load(dy_scale + tl.minimum(begin, last) * dy_scale_along)
    factor_x = tl.load(x_scale + tl.minimum(begin, last) * x_scale_along)
    accumulator = tl.zeros([128, 128], dtype=tl.float32)
    for tile in range(begin, end):
        following = tl.minimum(tile + 1, last)  # as in _multiply_tiles
        next_dy = tl.load(dy_scale + following * dy_scale_along)
        next_x = tl.load(x_scale + following * x_scale_along)
        left = dy.load([first_n, tile * 128])
        right = x.load([first_k, tile * 128])
        product = tl.dot(left, right.T)
        if BLOCKS:
            accumulator += product * (factor_dy * factor_x)[:, None]
        else:
            accumulator += product * factor_dy[:, None] * factor_x[None, :]
        factor_dy, factor_x = next_dy, next_x
    address = result + (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(address, accumulator.to(result.dtype.element_ty))


def multiply_tiles(
    a: QuantizedTensor, b: QuantizedTensor, groups: RowGroups, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    rows, contraction = a.shape
    columns = b.shape[0] // len(groups.counts)
    tiles = rows // BLOCK
    result = torch.empty(rows, columns, dtype=out_dtype, device=a.data.device)
    a_scale, b_scale = _by_group(a.scale), b.scale if b.scale.stride(1) == 1 else b.scale.contiguous()
    _multiply_tiles[(tiles * (columns // BLOCK),)](
        _descriptor(a.data), a_scale, _descriptor(b.data), b_scale, groups.of_tile, result, tiles,
        a_scale.stride(1), b_scale.stride(0), N=columns, K=contraction, PANEL=PANEL, num_warps=WARPS, num_stages=STAGES,
        maxnreg=REGISTERS,
    )  # fmt: skip
    return result


def multiply_along_rows(
    dy: QuantizedTensor, x: QuantizedTensor, groups: RowGroups, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    features, inputs, number = dy.shape[0], x.shape[0], len(groups.counts)
    blocks = x.granularity == "128x128"
    result = torch.empty(number, features, inputs, dtype=out_dtype, device=dy.data.device)
    dy_scale = _by_group(dy.scale)
    x_scale = x.scale if blocks else _by_group(x.scale)
    across, along = x_scale.stride()
    _multiply_along_rows[inputs // BLOCK, features // BLOCK, number](
        _descriptor(dy.data), dy_scale, _descriptor(x.data), x_scale, groups.starts, groups.counts, result,
        dy_scale.stride(1), along, across, N=features, K=inputs, BLOCKS=blocks, num_warps=WARPS, num_stages=STAGES,
        maxnreg=REGISTERS,
    )  # fmt: skip
    return result


def _descriptor(data: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(data.contiguous(), [BLOCK, BLOCK])


def _by_group(scale: torch.Tensor) -> torch.Tensor:
    # Kernels write scales group-major; others are copied.
    return scale if scale.stride(0) == 1 else scale.t().contiguous().t()
