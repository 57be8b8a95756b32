"""Residuals of outlier channels (casts/outliers.py): of those columns of sharded weights, kept whole by every rank.

    codes[n, c] = cast((master[n, k] - code[n, k] * scale) / row_scale[n])     k = channels[c]

Only the rank that holds the master of an element knows what its cast has lost. Each writes its own residuals into a
zeroed buffer of all of them, and one all-reduce adds up what no two ranks have both written: 64 bytes a row of a
weight, where its gather takes K. After that they stay until the masters change again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from deepspeed import comm as dist

from ds_fp8.casts.outliers import residual_codes, residual_scale
from ds_fp8.config.formats import BLOCK, FORMATS
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import RESIDUAL
from ds_fp8.zero.collectives import GATHER, WireMeter
from ds_fp8.zero.weight import Numbers, ShardedWeight, on_device


class OutlierWeight(NamedTuple):
    """A sharded weight with outlier channels."""

    weight: ShardedWeight
    residual: torch.Tensor
    """Codes [N, C] of all rows, as bytes; a view of the buffer of all residuals."""


class ReferenceResidualCast:
    """Residuals in torch, on any device; the oracle of the kernel."""

    def write(self, weights: Sequence[OutlierWeight], scales: torch.Tensor, source: Numbers) -> None:
        """Write residuals of the shards' elements, zero so far, of weights whose channels are known."""
        for weight, residual in weights:
            write_residual(weight, residual, scales, source)


def write_residual(weight: ShardedWeight, residual: torch.Tensor, scales: torch.Tensor, source: Numbers) -> None:
    """Write the residuals of one weight's shard into `residual`, uint8 [N, C]."""
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
    codes = weight.data[place].view(FORMATS[weight.spec.format].dtype)
    of_row = residual_scale(scale)[row // BLOCK]
    found = residual_codes(values, codes, scale[row // BLOCK, at // BLOCK], of_row, weight.spec.format)
    residual[rows] = torch.where(inside, found.view(torch.uint8), residual[rows])


class OutlierResiduals:
    """Keeps the residuals of all weights with outlier channels up to date."""

    def __init__(self, weights: Sequence[ShardedWeight], device: torch.device) -> None:
        """Allocate the residuals of weights in the order of the shards: those of one product are neighbours."""
        shapes = [(w.shard.shape[0], min(w.outliers.count, w.shard.shape[1])) for w in weights]
        numels = [rows * columns for rows, columns in shapes]
        self._buffer = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
        views = [flat.view(shape) for flat, shape in zip(self._buffer.split(numels), shapes, strict=True)]
        self._weights = [OutlierWeight(weight, view) for weight, view in zip(weights, views, strict=True)]
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
        runs = [list(run) for _, run in groupby(known, lambda one: id(one.weight.shard.group))]
        parts = [self._from(run[0], run[-1]).zero_() for run in runs]
        # One launch; of shards on the host one after the other, for their copies are as large as they are.
        for some in [[one] for one in known] if any(one.weight.on_host for one in known) else [known]:
            self._cast.write(some, scales, ShardedWeight.numbers)
        for run, part in zip(runs, parts, strict=True):
            group = run[0].weight.shard.group
            dist.all_reduce(part, group=group)
            wire.count(GATHER, "all_reduce", part.nbytes, group)
        for one in known:
            dtype = FORMATS[one.weight.spec.format].dtype
            setattr(one.weight.parameter, RESIDUAL, one.residual.view(dtype))

    def _from(self, first: OutlierWeight, last: OutlierWeight) -> torch.Tensor:
        """Return the buffer from the residuals of one weight to those of another."""
        return self._buffer[first.residual.storage_offset() : last.residual.storage_offset() + last.residual.numel()]
