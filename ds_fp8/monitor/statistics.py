"""Errors of one cast of a matrix, counted on its device: the host waits for nothing.

On a GPU one kernel counts every element. In torch, the amax and the range of the scales are of the whole tensor, shares
and squares of rows evenly spaced over it, about `SAMPLE` elements, weighted to stand for all: that resolves 0.1%, at a
cost that does not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ds_fp8.casts import QuantizedTensor, group_amax
from ds_fp8.casts.primitives import dequantize_unscaled, per_element
from ds_fp8.config.formats import BLOCK, FORMATS, group_shape, is_native, is_of_blocks

SAMPLE = 2**20
CHUNK = 2**24  # elements that are looked at together, for the sake of memory: 64 MiB in FP32
# By how much a number divided by its scale may be rounded up: the largest of a group is not saturated by that
QUOTIENT = 1 + 2.0**-20

# signal: squares of the numbers; noise: squares of what the cast changed them by
SUMS = ("elements", "saturated", "flushed", "signal", "noise")
PEAKS = ("amax", "scale_max", "negative_scale_min")

Rows = Callable[[slice], torch.Tensor]  # the given rows of a matrix that is nowhere in memory as a whole


@torch.no_grad()
def add_cast_statistics(
    x: torch.Tensor | Rows,
    quantized: QuantizedTensor,
    sums: torch.Tensor,
    peaks: torch.Tensor,
    elements: int | None = None,
) -> None:
    """Add the statistics of a cast to those of earlier ones, in place.

    Scales of groups that hold only zeros or a NaN do not count: they say nothing of the numbers.

    Args:
        x: What was cast [M, K], not empty, or what gives its rows.
        quantized: The cast.
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
    """Yield a matrix and its cast; what is nowhere in memory as a whole, one part after the other."""
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
    # In units of a scale: what is beyond was saturated.
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
        tells = (amax > 0) & scale.isfinite()
        ends = [torch.where(tells, end, -torch.inf).amax() for end in (scale, -scale)]
        peaks.append(torch.stack([amax.amax(), *ends]))
    return torch.stack(peaks).amax(0).double()


def _scales_of(quantized: QuantizedTensor, rows: slice) -> torch.Tensor:
    if quantized.granularity == "tensor":
        return quantized.scale
    unit = group_shape(quantized.granularity)[0] if is_of_blocks(quantized.granularity) else 1
    return quantized.scale[rows.start // unit : -(-rows.stop // unit)]
