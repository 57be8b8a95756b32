"""layout.py in Triton: a stable counting sort of the pairs by expert, permute_quantize and unpermute.

    counts  [E, chunks]  the pairs of each expert in each chunk of pairs         _count_pairs
    through [E, chunks]  their running sum over the chunks                       torch.cumsum
    row of a pair = first row of its expert                                      _plan_rows
                  + pairs of its expert in earlier chunks + in its chunk before it   _place_pairs

The order is fixed: no atomics. Quantization is that of casts/quantization_triton.py; every byte is read and written
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.primitives_triton import (
    GROUP,
    MODES,
    NONE,
    empty_result,
    format_arguments,
    result_arguments,
    store_cast,
    store_cast_columnwise,
    store_cast_rowwise,
    tiles,
)
from ds_fp8.config.formats import BLOCK

CELLS = 16384  # pairs of a chunk x experts: comparisons of one program
TILES = 64  # tiles of rows per program of _plan_rows


@triton.jit
def _is_of_expert(index, pairs, E, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the pairs of the program's chunk and whether each chose each expert, int32 [CHUNK, EXPERTS]."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, EXPERTS)
    chosen = tl.load(index + pair, mask=pair < pairs, other=-1)
    return pair, ((chosen[:, None] == expert[None, :]) & (expert < E)[None, :]).to(tl.int32)


@triton.jit
def _count_pairs(index, pairs, E, counts, chunks, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    _, ours = _is_of_expert(index, pairs, E, CHUNK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + expert * chunks + tl.program_id(0), tl.sum(ours, 0), mask=expert < E)


@triton.jit
def _plan_rows(through, chunks, E, tiles, counts, starts, of_tile, TILES: tl.constexpr, EXPERTS: tl.constexpr):
    """Store counts and starts of the experts, and the experts of TILES tiles."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(through + expert * chunks + chunks - 1, mask=expert < E, other=0)
    padded = (count + 127) // 128
    end = tl.cumsum(padded, 0)
    if tl.program_id(0) == 0:
        tl.store(counts + expert, count, mask=expert < E)
        tl.store(starts + expert, (end - padded) * 128, mask=expert < E)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = tl.sum(((end[None, :] <= tile[:, None]) & (expert < E)[None, :]).to(tl.int32), 1)
    tl.store(of_tile + tile, tl.where(before < E, before, -1), mask=tile < tiles)


@triton.jit
def _place_pairs(
    index, pairs, E, counts, through, starts, chunks, place, source, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    pair, ours = _is_of_expert(index, pairs, E, CHUNK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    at = expert * chunks + tl.program_id(0)
    earlier = tl.load(through + at, mask=expert < E, other=0) - tl.load(counts + at, mask=expert < E, other=0)
    first = tl.load(starts + expert, mask=expert < E, other=0) + earlier
    # at most one expert of a pair is 1 in `ours`: the sum picks its row
    row = tl.sum(ours * (first[None, :] + tl.cumsum(ours, 0) - 1), 1)
    row = tl.where(tl.sum(ours, 1) > 0, row, -1)
    tl.store(place + pair, row, mask=pair < pairs)
    tl.store(source + row, pair, mask=(pair < pairs) & (row >= 0))


def lay_out(index: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the fields of an ExpertLayout of `rows` rows, for at least one pair."""
    pairs, device, index = index.numel(), index.device, index.contiguous()
    width = triton.next_power_of_2(experts)  # Triton's ranges are powers of two
    chunk = min(max(CELLS // width, 16), 1024)
    chunks, tiles = triton.cdiv(pairs, chunk), rows // BLOCK
    integers = {"dtype": torch.int32, "device": device}
    in_chunks, place = torch.empty(experts, chunks, **integers), torch.empty(index.shape, **integers)
    counts, starts, of_tile = (torch.empty(length, **integers) for length in (experts, experts, tiles))
    source = torch.full((rows,), -1, **integers)
    sizes = {"CHUNK": chunk, "EXPERTS": width, "num_warps": 8}
    _count_pairs[(chunks,)](index, pairs, experts, in_chunks, chunks, **sizes)
    through = in_chunks.cumsum(1, dtype=torch.int32)
    _plan_rows[(triton.cdiv(tiles, TILES),)](
        through, chunks, experts, tiles, counts, starts, of_tile, TILES=TILES, EXPERTS=width, num_warps=8
    )
    _place_pairs[(chunks,)](index, pairs, experts, in_chunks, through, starts, chunks, place, source, **sizes)
    return source, place, counts, starts, of_tile


@triton.jit
def _permuted(x, source, m, k, stride_m, CHOICES: tl.constexpr):
    """Return the FP32 tile of permuted tokens at rows m, columns k; zeros in padding."""
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
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    first_m = tl.program_id(1) * 128
    if COLUMNWISE == NONE:
        m = first_m + tl.arange(0, 128)
        tile = _permuted(x, source, m, k, stride_m, CHOICES)
        store_cast(
            tile, k, m, K, R, row_data, K, row_scale, None, row_scale_along, row_scale_across,
            1, GROUP, DTYPE, LARGEST, SMALLEST, POW2, True,
        )
    else:
        m = first_m + 4 * tl.arange(0, 32)  # rows 4i, 4i + 1, ... in separate tensors, for store_cast_columnwise
        x0 = _permuted(x, source, m, k, stride_m, CHOICES)
        x1 = _permuted(x, source, m + 1, k, stride_m, CHOICES)
        x2 = _permuted(x, source, m + 2, k, stride_m, CHOICES)
        x3 = _permuted(x, source, m + 3, k, stride_m, CHOICES)
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
    x: torch.Tensor,
    source: torch.Tensor,
    choices: int,
    format: str,
    rowwise: str | None,
    columnwise: str | None,
    scale: str,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Compute permute_quantize; the sides of its results are multiples of 128."""
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    R, K = len(source), x.shape[1]
    row = empty_result(R, K, format, rowwise, scale, x.device)
    column = empty_result(K, R, format, columnwise, scale, x.device)
    _permute_tiles[tiles(K), R // BLOCK](
        x, source, R, K, x.stride(0), *result_arguments(row), *result_arguments(column), CHOICES=choices,
        ROWWISE=MODES[rowwise], COLUMNWISE=MODES[columnwise], num_warps=8 if column is None else 4,
        **format_arguments(format, scale),
    )
    return row, column


def sum_rows(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    T, k = place.shape
    H = rows.shape[1]
    result = torch.empty(T, H, dtype=rows.dtype, device=rows.device)
    if T:
        # one program sums all rows of a token, in the order of the choices, without atomics
        width = min(1024, triton.next_power_of_2(H))
        _sum_rows[T, triton.cdiv(H, width)](
            rows.contiguous(), place, result, H, CHOICES=k, WIDTH=width, num_warps=4
        )
    return result
