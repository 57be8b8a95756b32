"""Statistics of a quantized matrix in one launch; statistics.py defines them.

One program takes 128 x 128 elements, ROWS rows of one scale each at a time:

    saturated, flushed   elements with |x| / scale > limit; with x / scale != 0 and data = 0
    signal, noise        scale² · sum (x / scale)², scale² · sum ((x - data · scale) / scale)²
    peaks                max |x|, largest and smallest scale of rows that are not all zero

Squares of 128 elements are summed in FP32 in units of the scale, then weighted and summed in FP64: no scale overflows.
Programs add to FP64 totals in any order: the last bits may differ between runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.primitives_triton import TRITON_DTYPES
from ds_fp8.config.formats import BLOCK

ROWS = 32
_INFINITY = tl.constexpr(float("inf"))


# Addresses and strides differ by layer; not worth a kernel each.
@triton.jit(
    do_not_specialize=["scale_m", "scale_k", "stride_sums", "stride_peaks"],
    do_not_specialize_on_alignment=["scale", "sums", "peaks"],
)
def _count(
    x, data, scale, sums, peaks, M, K, stride_x, stride_data, scale_m, scale_k, stride_sums, stride_peaks,
    DTYPE: tl.constexpr, LIMIT: tl.constexpr, SCALE_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    #     units = x / scale;   lost = (x - data * scale) / scale
    #     saturated += |units| > LIMIT;   flushed += units != 0 and data == 0
    #     signal += scale^2 sum units^2;  noise += scale^2 sum lost^2
    groups = tl.cdiv(K, 128)
    saturated = tl.zeros([ROWS], tl.int64)
    flushed = tl.zeros([ROWS], tl.int64)
    signal = tl.zeros([ROWS], tl.float64)
    noise = tl.zeros([ROWS], tl.float64)
    largest = tl.zeros([ROWS], tl.int32)
    highest = tl.zeros([ROWS], tl.float32) - _INFINITY
    lowest = tl.zeros([ROWS], tl.float32) + _INFINITY
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    k = group * 128 + tl.arange(0, 128)
    for part in range(128 // ROWS):
        m = block.to(tl.int64) * 128 + part * ROWS + tl.arange(0, ROWS)
        inside = (m < M)[:, None] & (k < K)[None, :]
        number = tl.load(x + m[:, None] * stride_x + k[None, :], mask=inside, other=0.0).to(tl.float32)
        rounded = tl.load(data + m[:, None] * stride_data + k[None, :], mask=inside, other=0)
        rounded = rounded.to(DTYPE, bitcast=True).to(tl.float32)
        factor = tl.load(scale + m // SCALE_ROWS * scale_m + group * scale_k, mask=m < M, other=1.0)
        factors = factor[:, None] + tl.zeros_like(number)
        units = tl.div_rn(number, factors)
        lost = (number - rounded * factors) / factors
        saturated += tl.sum((tl.abs(units) > LIMIT).to(tl.int32), 1)
        flushed += tl.sum(((units != 0.0) & (units == units) & (rounded == 0.0)).to(tl.int32), 1)
        weight = factor.to(tl.float64) * factor.to(tl.float64)
        signal += tl.sum(units * units, 1).to(tl.float64) * weight
        noise += tl.sum(lost * lost, 1).to(tl.float64) * weight
        bits = tl.max(tl.abs(number).to(tl.int32, bitcast=True), 1)  # orders like the numbers, NaN above Inf
        largest = tl.maximum(largest, bits)
        valid = (bits > 0) & (tl.abs(factor) < _INFINITY)
        highest = tl.maximum(highest, tl.where(valid, factor, -_INFINITY))
        lowest = tl.minimum(lowest, tl.where(valid, factor, _INFINITY))
    # NaN, above Inf as an integer, counts as Inf: an FP64 maximum would not order it.
    amax = tl.minimum(tl.max(largest, 0), 0x7F800000).to(tl.float32, bitcast=True)
    tl.atomic_add(sums + stride_sums, tl.sum(saturated, 0).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 2 * stride_sums, tl.sum(flushed, 0).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 3 * stride_sums, tl.sum(signal, 0), sem="relaxed")
    tl.atomic_add(sums + 4 * stride_sums, tl.sum(noise, 0), sem="relaxed")
    tl.atomic_max(peaks, amax.to(tl.float64), sem="relaxed")
    tl.atomic_max(peaks + stride_peaks, tl.max(highest, 0).to(tl.float64), sem="relaxed")
    tl.atomic_max(peaks + 2 * stride_peaks, (-tl.min(lowest, 0)).to(tl.float64), sem="relaxed")


def count(x: torch.Tensor, quantized: QuantizedTensor, limit: float, sums: torch.Tensor, peaks: torch.Tensor) -> None:
    """Add SUMS but for the first, the number of elements, and raise PEAKS, in place.

    Args:
        x: The matrix [M, K], of any floating point dtype.
        quantized: The quantized matrix.
        limit: In units of the scale; elements beyond it are saturated.
        sums: FP64 [5], of any stride.
        peaks: FP64 [3], of any stride.
    """
    (M, K), scale = quantized.shape, quantized.scale
    x = x if x.stride(1) == 1 else x.contiguous()
    data = quantized.data if quantized.data.stride(1) == 1 else quantized.data.contiguous()
    along, across = (scale.stride(0), scale.stride(1)) if scale.dim() else (0, 0)
    if quantized.granularity == "row":
        across = 0
    _count[(triton.cdiv(M, BLOCK) * triton.cdiv(K, BLOCK),)](
        x, data.view(torch.uint8), scale, sums, peaks, M, K, x.stride(0), data.stride(0), along, across,
        sums.stride(0), peaks.stride(0), DTYPE=TRITON_DTYPES[quantized.format], LIMIT=limit,
        SCALE_ROWS=BLOCK if quantized.granularity == "128x128" else 1, ROWS=ROWS, num_warps=8,
    )  # fmt: skip
