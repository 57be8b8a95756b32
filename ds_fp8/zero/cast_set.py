"""Sharded weights that are cast together, with their scales in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from ds_fp8.casts import scale_from_amax
from ds_fp8.config.formats import SCALE_TYPES, CastSpec
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.zero.collectives import GATHER, WireMeter
from ds_fp8.zero.residuals import OutlierResiduals
from ds_fp8.zero.stacks import place_scales
from ds_fp8.zero.weight import ReferenceShardCast, ShardedWeight


def in_runs(items: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return the items in lists of one key each, in the order they come."""
    runs: dict[Any, list[Any]] = {}
    for item in items:
        runs.setdefault(key(item), []).append(item)
    return list(runs.values())


def has_kernels(device: torch.device) -> bool:
    """Return whether shards on a device are cast by kernels."""
    return device.type == "cuda"


def make_shard_cast(weights: Sequence[ShardedWeight], shards: torch.Tensor, spec: CastSpec) -> ReferenceShardCast:
    """Return the casts of weights whose codes are in the buffer `shards`, by kernels where there are any."""
    if not has_kernels(shards.device) or spec.by_torch:
        return ReferenceShardCast(weights, spec)
    from ds_fp8.zero.cast_triton import TritonShardCast

    return TritonShardCast(weights, shards, spec)


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
        self.amax: torch.Tensor | None = None
        """Of what the next cast reads, where a step has found it and written the codes of blocks that are this rank's
        alone (one_pass.py). That cast takes it away, as do loads and writes of whole masters."""

    def place(self, codes: torch.Tensor) -> None:
        """Keep the shards in `codes`, the buffer that every weight's `data` is a view of."""
        self._shard_casts = [
            (make_shard_cast(same, codes, same[0].spec), same[0].spec)
            for same in in_runs(self.weights, lambda weight: str(weight.spec))
        ]
        self.device = codes.device
        with_outliers = [weight for weight in self.weights if weight.outliers is not None]
        self._residuals = OutlierResiduals(with_outliers, codes.device) if with_outliers else None

    @property
    def stale(self) -> bool:
        """Return whether any weight is: the others share its all-reduce and launch."""
        return any(weight.stale for weight in self.weights)

    def pin_scales(self) -> None:
        """Keep the scales where they are from now on: later casts write them in place, for CUDA graphs read them."""
        if self._pinned is None:
            # All of the buffer: behind the scales of a weight may lie those of its outlier blocks.
            self._scales = self._pinned = self._scales.clone()
            for weight in self.weights:
                weight.scale = weight.scales_in(self._pinned)

    def cast(self, wire: WireMeter) -> None:
        """Cast all shards from their numbers, on the current stream. Collective; the host waits for nothing.

        Offloaded numbers are copied here first, and for that the host waits.
        """
        amax, self.amax = self.amax, None
        if amax is None:
            # Zeros: blocks of which this rank has no element must not raise the maximum of the others.
            amax = torch.zeros(self.num_scales, device=self.device)
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
        self._scales = scales
        self.write_residuals(wire)
        # Last: what ends midway is cast again. Views of a new buffer, where they are not pinned: a product whose weight
        # was gathered before this cast goes on reading the scales that it was gathered with.
        for weight in self.weights:
            weight.was_cast(scales)

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
                scales[start:end] = self._scale_of(amax[start:end], spec)
            start = end
        for weight in self.weights:
            spec = weight.spec
            if SCALE_TYPES[spec.scale].from_amax is not None:  # from all amax of a weight together
                own = scale_from_amax(weight.scales_in(amax), spec.format, spec.scale)
                weight.scales_in(scales).copy_(own)
        return scales

    def _scale_of(self, amax: torch.Tensor, spec: CastSpec) -> torch.Tensor:
        return scale_from_amax(amax, spec.format, spec.scale)
