"""Cast of all master shards to FP8, in two halves around the all-reduce of every amax.

    write_amax   amax[g] = max |master[i]| over this rank's elements i of group g, into one flat buffer
    cast         code[i] = cast(master[i] / scale[g]), into one flat buffer of codes

Where scales need no amax there is nothing to agree on, and only the second half is run.

On a GPU each half is one kernel over all weights at once; elsewhere, and for casts without kernels, torch, weight by
weight: the same bits either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ds_fp8.casts import cast, group_amax
from ds_fp8.casts.primitives import infinite_to_nan
from ds_fp8.config.formats import CastSpec
from ds_fp8.zero.shards import ShardedWeight, Source, on_device


class ShardCast(Protocol):
    """Both halves, for a fixed list of weights whose `data` and `scale_start` are set."""

    def write_amax(self, amax: torch.Tensor, source: Source) -> None:
        """Write the amax of every group that has a part here into the zeroed FP32 buffer `amax`; Inf for NaN or Inf."""

    def cast(self, scales: torch.Tensor, source: Source) -> None:
        """Refill every weight's `data` in units of the agreed scales, a flat FP32 buffer."""


class ReferenceShardCast:
    """ShardCast in torch, on any device; the oracle of the kernels."""

    def __init__(self, weights: Sequence[ShardedWeight], spec: CastSpec):
        self._weights, self._spec = [weight for weight in weights if weight.shard.valid], spec

    def write_amax(self, amax: torch.Tensor, source: Source) -> None:
        """Write the amax of every group, as ShardCast says."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), amax.device))
            weight.covered(weight.scales_in(amax)).copy_(group_amax(weight.cover(numbers), weight.granularity))

    def cast(self, scales: torch.Tensor, source: Source) -> None:
        """Refill every weight's `data`, as ShardCast says."""
        for weight in self._weights:
            numbers = weight.before_cast(on_device(source(weight), scales.device))
            own = weight.covered(weight.scales_in(scales))
            cover = infinite_to_nan(weight.cover(numbers), self._spec.scale)
            cover = cast(cover, own, self._spec.format, weight.granularity)
            codes = cover.view(torch.uint8).flatten()[weight.offset : weight.offset + weight.shard.valid]
            weight.data[: weight.shard.valid].copy_(codes)


def make_shard_cast(weights: Sequence[ShardedWeight], shards: torch.Tensor, spec: CastSpec) -> ShardCast:
    """Return the faster ShardCast of the device that `shards`, the buffer of all codes, is on."""
    if shards.device.type != "cuda" or spec.by_torch:
        return ReferenceShardCast(weights, spec)
    from ds_fp8.zero.shard_cast_triton import TritonShardCast

    return TritonShardCast(weights, shards, spec)
