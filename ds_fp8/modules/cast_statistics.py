"""What one cast of a matrix did to it, counted on its device: the host waits for nothing.

The amax and the range of the scales are of the whole tensor. Shares and squares are of rows evenly spaced over it,
about `SAMPLE` elements, weighted to stand for all: enough to tell 0.1%, at a cost that does not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fp8.formats import BLOCK, FORMATS
from ds_fp8.quantize import QuantizedTensor, group_amax
from ds_fp8.quantize.reference import decode, per_element

SAMPLE = 2**20
CHUNK = 2**24
"""Elements that are looked at together, for the sake of memory: 64 MiB in FP32."""
QUOTIENT = 1 + 2.0**-20
"""By how much a number divided by its scale may be rounded up: the largest of a group is not saturated by that."""

SUMS = ("elements", "saturated", "flushed", "signal", "noise")
"""signal: squares of the numbers; noise: squares of what the cast changed them by."""
PEAKS = ("amax", "scale_max", "negative_scale_min")

Rows = Callable[[slice], torch.Tensor]
"""The given rows of a matrix that is nowhere in memory as a whole."""


@torch.no_grad()
def cast_statistics(
    x: torch.Tensor | Rows, quantized: QuantizedTensor, elements: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(SUMS, PEAKS), FP64 [5] and [3], of a cast of x [M, K], which has elements.

    Scales of groups that hold only zeros or a NaN do not count: they say nothing of the numbers. elements: of x, where
    it has zeros that are no part of the tensor.
    """
    rows = x.__getitem__ if isinstance(x, torch.Tensor) else x
    return _count(rows, quantized, elements), _peaks(rows, quantized)


def _count(rows: Rows, quantized: QuantizedTensor, elements: int | None) -> torch.Tensor:
    numel, granularity, scale = quantized.data.numel(), quantized.granularity, quantized.scale
    spaced = slice(None, None, min(-(-numel // SAMPLE), quantized.shape[0]))
    if granularity == "128x128":
        scale, granularity = scale.repeat_interleave(BLOCK, 0)[: quantized.shape[0]], "1x128"
    if granularity != "tensor":
        scale = scale[spaced]
    sample = rows(spaced).float()
    codes = decode(quantized.data[spaced])
    units = per_element(torch.div, sample.abs(), scale, granularity)
    saturated = (units > FORMATS[quantized.format].max * QUOTIENT).sum()
    flushed = ((units > 0) & (codes == 0)).sum()
    noise = (sample - per_element(torch.mul, codes, scale, granularity)).double().square().sum()
    counted = torch.stack([saturated, flushed, sample.double().square().sum(), noise]).double()
    counted *= numel / sample.numel()
    return torch.cat([counted.new_full((1,), numel if elements is None else elements), counted])


def _peaks(rows: Rows, quantized: QuantizedTensor) -> torch.Tensor:
    count, columns = quantized.shape
    step = max(BLOCK, CHUNK // columns // BLOCK * BLOCK)
    peaks = []
    for start in range(0, count, step):
        amax = group_amax(rows(slice(start, start + step)), quantized.granularity)
        scale = _scales_of(quantized, start, start + step)
        tells = (amax > 0) & scale.isfinite()
        ends = [torch.where(tells, end, -torch.inf).amax() for end in (scale, -scale)]
        peaks.append(torch.stack([amax.amax(), *ends]))
    return torch.stack(peaks).amax(0).double()


def _scales_of(quantized: QuantizedTensor, start: int, stop: int) -> torch.Tensor:
    """The scales of rows that begin at a block."""
    if quantized.granularity == "tensor":
        return quantized.scale
    unit = BLOCK if quantized.granularity == "128x128" else 1
    return quantized.scale[start // unit : -(-stop // unit)]
