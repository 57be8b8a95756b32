"""Quantization error of one matrix, without host sync.

On a GPU one kernel counts every element. In torch, amax and range of scales are of all elements, shares and squares of
evenly spaced rows, about `SAMPLE` elements: a resolution of 0.1% at constant cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ds_fp8.casts import QuantizedTensor, group_amax
from ds_fp8.casts.primitives import dequantize_unscaled, per_element
from ds_fp8.config.formats import BLOCK, FORMATS, group_shape, is_native, is_of_blocks

SAMPLE = 2**20
CHUNK = 2**24  # elements at a time, which bounds memory: 64 MiB in FP32
# Tolerance for the rounding of x / scale: the amax of a group is not saturated
QUOTIENT = 1 + 2.0**-20

# signal: sum x²; noise: sum (x - dequantized)²
SUMS = ("elements", "saturated", "flushed", "signal", "noise")
PEAKS = ("amax", "scale_max", "negative_scale_min")

Rows = Callable[[slice], torch.Tensor]  # rows of a matrix that is never materialized


@torch.no_grad()
def add_cast_statistics(
    x: torch.Tensor | Rows,
    quantized: QuantizedTensor,
    sums: torch.Tensor,
    peaks: torch.Tensor,
    elements: int | None = None,
) -> None:
    """Add the statistics of a quantized matrix to `sums` and `peaks`, in place.

    Scales of groups with only zeros or a NaN are ignored.

    Args:
        x: The matrix [M, K], not empty, or a function of its rows.
        quantized: The quantized matrix.
        sums: FP64 [5], to which SUMS are added.
        peaks: FP64 [3], raised to PEAKS.
        elements: As of CastMonitor.observe.
    """
    sums[:1] += quantized.data.numel() if elements is None else elements
    if quantized.data.is_cuda and is_native(quantized.format, quantized.granularity, quantized.scale_type):
        from ds_fp8.monitor.statistics_triton import count

        with torch.cuda.device(quantized.data.device):  # where Triton launches
            for numbers, part in _parts(x, quantized):
                count(numbers, part, _limit(quantized), sums, peaks)
    else:
        rows = x.__getitem__ if isinstance(x, torch.Tensor) else x
        sums[1:] += _count(rows, quantized)
        peaks.copy_(torch.maximum(peaks, _peaks(rows, quantized)))


def _parts(x: torch.Tensor | Rows, quantized: QuantizedTensor) -> Iterator[tuple[torch.Tensor, QuantizedTensor]]:
    """Yield (matrix, quantized matrix), in chunks if x is a function of rows."""
    if isinstance(x, torch.Tensor):
        yield x, quantized
        return
    for rows in _chunks(quantized):
        yield x(rows), replace(quantized, data=quantized.data[rows], scale=_scales_of(quantized, rows))


def _chunks(quantized: QuantizedTensor) -> Iterator[slice]:
    count, columns = quantized.shape
    step = max(BLOCK, CHUNK // columns // BLOCK * BLOCK)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _limit(quantized: QuantizedTensor) -> float:
    # In units of the scale: larger elements are saturated.
    return FORMATS[quantized.format].max * QUOTIENT


def _count(rows: Rows, quantized: QuantizedTensor) -> torch.Tensor:
    numel, granularity, scale = quantized.data.numel(), quantized.granularity, quantized.scale
    spaced = slice(None, None, min(-(-numel // SAMPLE), quantized.shape[0]))
    if is_of_blocks(granularity):
        side, _ = group_shape(granularity)
        scale, granularity = scale.repeat_interleave(side, 0)[: quantized.shape[0]], f"1x{side}"
    if granularity != "tensor":
        scale = scale[spaced]
    sample = rows(spaced).float()
    rounded = dequantize_unscaled(quantized.data[spaced], format=quantized.format)
    units = per_element(torch.div, sample.abs(), scale, granularity)
    saturated = (units > _limit(quantized)).sum()
    flushed = ((units > 0) & (rounded == 0)).sum()
    noise = (sample - per_element(torch.mul, rounded, scale, granularity)).double().square().sum()
    counted = torch.stack([saturated, flushed, sample.double().square().sum(), noise]).double()
    return counted * (numel / sample.numel())


def _peaks(rows: Rows, quantized: QuantizedTensor) -> torch.Tensor:
    peaks = []
    for part in _chunks(quantized):
        amax = group_amax(rows(part), quantized.granularity)
        scale = _scales_of(quantized, part)
        valid = (amax > 0) & scale.isfinite()
        ends = [torch.where(valid, end, -torch.inf).amax() for end in (scale, -scale)]
        peaks.append(torch.stack([amax.amax(), *ends]))
    return torch.stack(peaks).amax(0).double()


def _scales_of(quantized: QuantizedTensor, rows: slice) -> torch.Tensor:
    if quantized.granularity == "tensor":
        return quantized.scale
    unit = group_shape(quantized.granularity)[0] if is_of_blocks(quantized.granularity) else 1
    return quantized.scale[rows.start // unit : -(-rows.stop // unit)]
