"""Casts of master shards to FP8: of a set of weights together, the trained ones or the frozen ones.

    amax[b]  = max over all ranks of |master[i]|, i in block b     one all-reduce MAX, all weights of the set together
    shard    = cast(master shard, scale(amax))                     local, one byte a parameter

Weights whose scale needs no amax need no all-reduce either. The result is bit-equal to casting the whole master tensor
(Micikevicius et al. cast whole tensors; a block on the edge of two shards is why its amax must be agreed).

Weights with outlier channels (casts/outliers.py) have residuals of those columns, which every rank keeps whole:

    codes[n, c] = cast((master[n, k] - code[n, k] * scale) / row_scale[n])     k = channels[c]

Only the rank that holds the master of an element knows what its cast has lost. Each writes its own residuals into a
zeroed buffer of all of them, and one all-reduce adds up what no two ranks have both written: 64 bytes a row of a
weight, where its gather takes K. After that they stay until the masters change again.

On a GPU amax, cast and residuals are one kernel each over all weights at once (cast_triton.py); elsewhere, and for
casts without kernels, torch, weight by weight: the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist

from ds_fp8.casts import cast, group_amax, scale_from_amax
from ds_fp8.casts.outliers import residual_codes, residual_scale
from ds_fp8.casts.primitives import infinite_to_nan
from ds_fp8.config.formats import BLOCK, FORMATS, SCALE_TYPES, CastSpec
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import RESIDUAL
from ds_fp8.zero.collectives import GATHER, WireMeter
from ds_fp8.zero.weight import Numbers, ShardedWeight, on_device, place_scales


class CastSet:
    """Weights with scales in one buffer, cast together."""

    def __init__(self, stacks: Iterable[list[ShardedWeight]]):
        """Order weights and their scales, of stacks of one fused product each, in an order that all ranks agree on."""
        # Weights of one group and one cast side by side: their maxima are one slice, for one all-reduce.
        runs = in_runs(stacks, lambda stack: (id(stack[0].shard.group), str(stack[0].spec)))
        ordered = [stack for run in runs for stack in run]
        self.weights = [weight for stack in ordered for weight in stack]
        self.num_scales = place_scales(ordered)
        ends = [run[0][0].scale_start for run in runs[1:]] + [self.num_scales]
        self._runs = [(run[0][0].shard.group, run[0][0].spec, end) for run, end in zip(runs, ends, strict=True)]
        """Process group and cast of successive weights, and where their scales end."""
        self._pinned: torch.Tensor | None = None

    def place(self, codes: torch.Tensor) -> None:
        """Keep the shards in `codes`, the buffer that every weight's `data` is a view of."""
        self._shard_casts = [
            (make_shard_cast(same, codes, same[0].spec), same[0].spec)
            for same in in_runs(self.weights, lambda weight: str(weight.spec))
        ]
        self._device = codes.device
        with_outliers = [weight for weight in self.weights if weight.outliers is not None]
        self._residuals = OutlierResiduals(with_outliers, codes.device) if with_outliers else None

    @property
    def stale(self) -> bool:
        """Return whether any weight is: the others share its all-reduce and launch."""
        return any(weight.stale for weight in self.weights)

    def pin_scales(self) -> None:
        """Keep the scales where they are from now on: later casts write them in place, for CUDA graphs read them."""
        if self._pinned is None:
            self._pinned = torch.zeros(self.num_scales, device=self._device)
            for weight in self.weights:
                weight.pin_scale(self._pinned)

    def cast(self, wire: WireMeter) -> None:
        """Cast all shards from their numbers, on the current stream. Collective; the host waits for nothing.

        Offloaded numbers are copied here first, and for that the host waits.
        """
        # Zeros: blocks of which this rank has no element must not raise the maximum of the others.
        amax = torch.zeros(self.num_scales, device=self._device)
        for shard_cast, spec in self._shard_casts:
            if SCALE_TYPES[spec.scale].needs_amax:
                shard_cast.write_amax(amax, ShardedWeight.numbers)
        scales = self._agreed(amax, wire)
        if self._pinned is not None:
            # Behind the products of the last micro-step, which read these scales: the cast's stream waits for
            # `_changed`, an event that the optimizer's stream, the products' own, recorded after them.
            scales = self._pinned.copy_(scales)
        for shard_cast, _ in self._shard_casts:
            shard_cast.cast(scales, ShardedWeight.numbers)
        # Views of a new buffer, where they are not pinned: a product whose weight was gathered before this cast goes
        # on reading the scales that it was gathered with.
        for weight in self.weights:
            weight.was_cast(scales)
        self._scales = scales
        self.write_residuals(wire)

    def write_residuals(self, wire: WireMeter, only: OutlierChannels | None = None) -> None:
        """Cast the residuals of outlier channels, of all products that know theirs or of one. Collective.

        On the current stream, behind the cast of the shards.
        """
        if self._residuals is not None:
            self._residuals.write(self._scales, wire, only)

    @property
    def nbytes(self) -> int:
        """Return the bytes of scales and residuals, which every rank has of whole weights."""
        residuals = 0 if self._residuals is None else self._residuals.nbytes
        return self.num_scales * torch.float32.itemsize + residuals

    def _agreed(self, amax: torch.Tensor, wire: WireMeter) -> torch.Tensor:
        scales, start = torch.empty_like(amax), 0
        for group, spec, end in self._runs:
            kind = SCALE_TYPES[spec.scale]
            if kind.needs_amax:
                # One all-reduce for all weights of a group that are cast alike: their maxima lie side by side.
                dist.all_reduce(amax[start:end], op=dist.ReduceOp.MAX, group=group)
                wire.count(GATHER, "all_reduce", amax[start:end].nbytes, group)
            if kind.from_amax is None:
                scales[start:end] = scale_from_amax(amax[start:end], spec.format, spec.scale)
            start = end
        for weight in self.weights:
            spec = weight.spec
            if SCALE_TYPES[spec.scale].from_amax is not None:  # from all amax of a weight together
                own = scale_from_amax(weight.scales_in(amax), spec.format, spec.scale)
                weight.scales_in(scales).copy_(own)
        return scales


def in_runs(items: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return the items in lists of one key each, in the order they come."""
    runs: dict[Any, list[Any]] = {}
    for item in items:
        runs.setdefault(key(item), []).append(item)
    return list(runs.values())


class ReferenceShardCast:
    """The casts of a fixed list of weights in torch, on any device; the oracle of the kernels."""

    def __init__(self, weights: Sequence[ShardedWeight], spec: CastSpec):
        self._weights, self._spec = [weight for weight in weights if weight.shard.valid], spec

    def write_amax(self, amax: torch.Tensor, source: Numbers) -> None:
        """Write the amax of every group that has a part here into the zeroed FP32 buffer `amax`; Inf for NaN or Inf."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), amax.device))
            weight.covered(weight.scales_in(amax)).copy_(group_amax(weight.cover(numbers), weight.granularity))

    def cast(self, scales: torch.Tensor, source: Numbers) -> None:
        """Refill every weight's `data` in units of the agreed scales, a flat FP32 buffer."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), scales.device))
            own = weight.covered(weight.scales_in(scales))
            cover = infinite_to_nan(weight.cover(numbers), self._spec.scale)
            cover = cast(cover, own, self._spec.format, weight.granularity)
            codes = cover.view(torch.uint8).flatten()[weight.offset : weight.offset + weight.shard.valid]
            weight.data[: weight.shard.valid].copy_(codes)


def make_shard_cast(weights: Sequence[ShardedWeight], shards: torch.Tensor, spec: CastSpec) -> ReferenceShardCast:
    """Return the casts of weights whose codes are in the buffer `shards`, by kernels where there are any."""
    if shards.device.type != "cuda" or spec.by_torch:
        return ReferenceShardCast(weights, spec)
    from ds_fp8.zero.cast_triton import TritonShardCast

    return TritonShardCast(weights, shards, spec)


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
        self._cast.write(known, scales, ShardedWeight.numbers)
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
