"""permute_cast and unpermute of permutation.py in Triton: every byte is read and written once.

The casts are those of casts/quantization_triton.py, of a tile whose rows are gathered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.primitives_triton import GROUP, MODES, NONE, format_arguments
from ds_fp8.casts.store_triton import (
    empty_result,
    result_arguments,
    store_cast,
    store_cast_columnwise,
    store_cast_rowwise,
    tiles,
)
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.experts.layout import ExpertLayout


@triton.jit
def _gathered(x, source, m, k, stride_m, CHOICES: tl.constexpr):
    """Return the FP32 tile of the tokens in rows m, columns k; zeros in rows without one."""
    # One index a row, read by all programs of that row's tiles: it stays in the L2 cache.
    pair = tl.load(source + m)
    address = x + (pair // CHOICES)[:, None].to(tl.int64) * stride_m + k[None, :]
    return tl.load(address, mask=(pair >= 0)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _permute_tiles(
    x, source, R, K, stride_m, row_data, row_scale, row_scale_along, row_scale_across,
    column_data, column_scale, column_scale_along, column_scale_across,
    CHOICES: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """Store the casts of 128 rows x 128 features."""
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    first_m = tl.program_id(1) * 128
    if COLUMNWISE == NONE:
        m = first_m + tl.arange(0, 128)
        tile = _gathered(x, source, m, k, stride_m, CHOICES)
        store_cast(
            tile, k, m, K, R, row_data, K, row_scale, None, row_scale_along, row_scale_across,
            1, GROUP, DTYPE, LARGEST, SMALLEST, POW2, True,
        )
    else:
        m = first_m + 4 * tl.arange(0, 32)  # rows 4i, 4i + 1, ... apart, as store_cast_columnwise wants them
        x0 = _gathered(x, source, m, k, stride_m, CHOICES)
        x1 = _gathered(x, source, m + 1, k, stride_m, CHOICES)
        x2 = _gathered(x, source, m + 2, k, stride_m, CHOICES)
        x3 = _gathered(x, source, m + 3, k, stride_m, CHOICES)
        if ROWWISE != NONE:
            store_cast_rowwise(
                x0, x1, x2, x3, first_m, k, R, K, row_data, K, row_scale, None, row_scale_along, row_scale_across,
                ROWWISE, DTYPE, LARGEST, SMALLEST, POW2,
            )
        store_cast_columnwise(
            x0, x1, x2, x3, first_m, k, R, K, column_data, column_scale, None, column_scale_along, column_scale_across,
            COLUMNWISE, DTYPE, LARGEST, SMALLEST, POW2,
        )


@triton.jit
def _sum_rows(rows, place, result, H, CHOICES: tl.constexpr, WIDTH: tl.constexpr):
    """Store the sum of the rows of one token, WIDTH features."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(place + token * CHOICES + choice)
        total += tl.load(rows + row.to(tl.int64) * H + h, mask=(h < H) & (row >= 0), other=0.0).to(tl.float32)
    tl.store(result + token * H + h, total.to(result.dtype.element_ty), mask=h < H)


def permute_tiles(
    x: torch.Tensor, layout: ExpertLayout, format: str, rowwise: str | None, columnwise: str | None, scale: str
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Compute permute_cast; the sides of its results are multiples of 128."""
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    R, K = len(layout.source), x.shape[1]
    row = empty_result(R, K, format, rowwise, scale, x.device)
    column = empty_result(K, R, format, columnwise, scale, x.device)
    _permute_tiles[tiles(K), R // BLOCK](
        x,
        layout.source,
        R,
        K,
        x.stride(0),
        *result_arguments(row),
        *result_arguments(column),
        CHOICES=layout.choices,
        ROWWISE=MODES[rowwise],
        COLUMNWISE=MODES[columnwise],
        num_warps=8 if column is None else 4,
        **format_arguments(format, scale),
    )
    return row, column


def sum_rows(rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Compute unpermute."""
    T, k = layout.place.shape
    H = rows.shape[1]
    result = torch.empty(T, H, dtype=rows.dtype, device=rows.device)
    if T:
        # One program sums all rows of a token for these features, so no atomics: the order is that of the choices.
        width = min(1024, triton.next_power_of_2(H))
        _sum_rows[T, triton.cdiv(H, width)](
            rows.contiguous(), layout.place, result, H, CHOICES=k, WIDTH=width, num_warps=4
        )
    return result
