"""Residuals of outlier channels (casts/outliers.py): of those columns of sharded weights, kept whole by every rank.

    codes[n, c] = cast((master[n, k] - code[n, k] * scale) / row_scale[n])     k = channels[c]

Only the rank that holds the master of an element knows what its cast has lost. Where shards are whole rows, it writes
the whole outlier block behind the codes of the row, and every gather brings it.

Where rows are cut, or masters are codes, each rank writes its own residuals into a zeroed buffer of all of them, and
one all-reduce adds up what no two ranks have both written: a byte a row and channel. Every forward makes an operand of
them. Either way they stay until the masters or the channels change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from deepspeed import comm as dist

from ds_fp8.casts.outliers import residual_codes, residual_scale, weight_block
from ds_fp8.casts.primitives import decode
from ds_fp8.casts.quantization import whole_blocks
from ds_fp8.config.formats import BLOCK, FORMATS
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import RESIDUAL
from ds_fp8.zero.collectives import GATHER, WireMeter
from ds_fp8.zero.param import FP8Param, Numbers, on_device


class OutlierWeight(NamedTuple):
    """A sharded weight with outlier channels."""

    weight: FP8Param
    residual: torch.Tensor
    """Bytes: codes [N, C] of all rows, a view of the buffer of all residuals; of a weight with room the outlier blocks
    of the shard's rows, behind their codes."""


class ReferenceResidualCast:
    """Residuals in torch, on any device; the oracle of the kernel."""

    def write(self, weights: Sequence[OutlierWeight], scales: torch.Tensor, source: Numbers) -> None:
        """Write residuals of the shards' elements, zero so far, of weights whose channels are known."""
        for weight, residual in weights:
            write_residual(weight, residual, scales, source)


def write_residual(weight: FP8Param, residual: torch.Tensor, scales: torch.Tensor, source: Numbers) -> None:
    """Write the residuals of one weight's shard into `residual`, or its outlier blocks, where it has room for them."""
    shard, at = weight.shard, weight.outliers.channels.long()
    if not shard.valid:
        return
    columns = shard.shape[1]
    rows = slice(shard.start // columns, -(-(shard.start + shard.valid) // columns))
    row = torch.arange(rows.start, rows.stop, device=at.device)[:, None]
    place = row * columns + at - shard.start
    inside = (place >= 0) & (place < shard.valid)
    place = place.clamp(0, shard.valid - 1)
    scale = weight.scales_in(scales)
    values = on_device(source(weight), at.device)[place]
    codes = weight.data[place // columns * weight.pitch + place % columns if weight.has_room else place]
    codes, scale_of_row = codes.view(FORMATS[weight.spec.format].dtype), residual_scale(scale)
    of_row, of_code = scale_of_row[row // BLOCK], scale[row // BLOCK, at // BLOCK]
    found = residual_codes(values, codes, of_code, of_row, weight.spec.format)
    if weight.has_room:
        residual.copy_(weight_block(found, decode(codes) * of_code, of_row, weight.spec.format))
        weight.block_scales_in(scales).copy_(scale_of_row[:, None])
    else:
        residual[rows] = torch.where(inside, found.view(torch.uint8), residual[rows])


class OutlierResiduals:
    """Keeps the residuals of all weights with outlier channels up to date."""

    def __init__(self, weights: Sequence[FP8Param], device: torch.device) -> None:
        """Allocate the residuals of weights in the order of the shards: those of one product are neighbours."""
        cut = [weight for weight in weights if not weight.has_room]
        shapes = [(w.shard.shape[0], min(w.outliers.count, w.shard.shape[1])) for w in cut]
        numels = [rows * columns for rows, columns in shapes]
        self._buffer = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
        views = [flat.view(shape) for flat, shape in zip(self._buffer.split(numels), shapes, strict=True)]
        self._weights = [OutlierWeight(weight, view) for weight, view in zip(cut, views, strict=True)]
        self._weights += [OutlierWeight(w, w.rows[:, whole_blocks(w.shard.shape[1]) :]) for w in weights if w.has_room]
        if device.type == "cuda":
            from ds_fp8.zero.cast_triton import TritonResidualCast

            self._cast: ReferenceResidualCast = TritonResidualCast()
        else:
            self._cast = ReferenceResidualCast()

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def write(self, scales: torch.Tensor, wire: WireMeter, only: OutlierChannels | None = None) -> None:
        """Cast the residuals again, of all weights whose channels are known or those of one product. Collective.

        On the current stream, behind the cast of the shards.
        """
        known = [
            one
            for one in self._weights
            if one.weight.outliers.channels is not None and only in (None, one.weight.outliers)
        ]
        if not known:
            return
        # One collective for neighbours of one process group: what lies between belongs to products without channels,
        # and is zero. Each is added up over its own group alone: a sum of sums would be no code.
        cut = [one for one in known if not one.weight.has_room]
        runs = [list(run) for _, run in groupby(cut, lambda one: id(one.weight.shard.group))]
        parts = [self._from(run[0], run[-1]).zero_() for run in runs]
        # One launch; of shards on the host one after the other, for their copies are as large as they are.
        for some in [[one] for one in known] if any(one.weight.on_host for one in known) else [known]:
            self._cast.write(some, scales, FP8Param.numbers)
        for run, part in zip(runs, parts, strict=True):
            group = run[0].weight.shard.group
            dist.all_reduce(part, group=group)
            wire.count(GATHER, "all_reduce", part.nbytes, group)
        for one in cut:
            dtype = FORMATS[one.weight.spec.format].dtype
            setattr(one.weight.parameter, RESIDUAL, one.residual.view(dtype))

    def _from(self, first: OutlierWeight, last: OutlierWeight) -> torch.Tensor:
        """Return the buffer from the residuals of one weight to those of another."""
        return self._buffer[first.residual.storage_offset() : last.residual.storage_offset() + last.residual.numel()]
