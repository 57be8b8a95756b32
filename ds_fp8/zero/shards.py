"""Layout of a weight's shard: rows, scale groups, place in the flat buffers.

A shard is a flat slice [start, stop) of a matrix [R, C]. To find its groups it is laid over the whole rows it touches,
down to a multiple of its blocks' rows, with zeros elsewhere: then the reference cast's own group arithmetic applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec, group_shape, is_of_blocks, scale_shape
from ds_fp8.layers.linear.outliers import OutlierChannels
from ds_fp8.layers.linear.weights import group_of, placeholder
from ds_fp8.zero import seams

SCALE_ALIGNMENT = 4
"""Floats that the rows of 128x128 scales are padded to a multiple of: block-scaled products read them 16 bytes at a
time. The scales of every weight or stack begin at a multiple of it too."""


@dataclass(eq=False)
class ShardedWeight:
    """One weight [R, C] that is gathered in FP8, its cast shard and its scales; experts [E, N, K] are [E*N, K]."""

    parameter: nn.Parameter
    shard: seams.Shard
    spec: CastSpec
    outliers: OutlierChannels | None = None
    """Outlier channels of the input that it is multiplied with."""
    data: torch.Tensor = field(init=False)
    """uint8 [shard.numel], the FP8 codes of the shard; a slice of the buffer of all shards."""
    scale: torch.Tensor = field(init=False)
    """Scales of the whole weight; a view of the buffer of all scales."""
    scale_start: int = field(init=False)
    """Index of the first of them in that buffer."""

    @property
    def granularity(self) -> str:
        """Return which elements share a scale."""
        return self.spec.granularity

    def __post_init__(self) -> None:
        rows, columns = self.shard.shape
        if (why := self.spec.why_not_sharded(self.shard.numel, columns)) is not None:
            raise UserError(
                f"a weight of {rows} x {columns} is sharded over {self.shard.world} ranks in parts of "
                f"{self.shard.numel} elements, which {why}",
                key="fp8.param_gather.format",
                remedy='"param_gather": {"format": "bf16"}',
            )
        self.numel = rows * columns
        # Rows that share a row of scales; the cover begins with a whole group of them.
        self.unit = group_shape(self.granularity)[0] if is_of_blocks(self.granularity) else 1
        # A shard begins anywhere in a row. Casts by torch see whole rows, from the first row of a block of scales on:
        #     cover   rows [first_row, first_row + num_rows) of the weight, zeros where other ranks have the elements
        #     offset  of the shard's first element in the cover
        self.first_row = min(self.shard.start, self.numel) // columns // self.unit * self.unit
        stop = math.ceil((self.shard.start + self.shard.valid) / columns) if self.shard.valid else self.first_row
        self.num_rows = stop - self.first_row
        self.offset = self.shard.start - self.first_row * columns
        whole = seams.full_shape(self.parameter)
        self.placeholder = placeholder(whole, self.parameter.dtype, self.parameter.device)
        self.scale_shape = scale_shape(self.shard.shape, self.granularity)
        # One scale for all of the weight has no dimensions.
        scales_per_row = self.scale_shape[-1] if self.scale_shape else 1
        if self.granularity == "128x128":
            scales_per_row = math.ceil(scales_per_row / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        self.scale_strides = (scales_per_row, 1) if self.scale_shape else ()
        # Padding included: products read whole rows of scales, 16 bytes at a time.
        self.scale_numel = math.prod(self.scale_shape[:1]) * scales_per_row

    @property
    def start(self) -> int:
        """Return the shard's offset in the buffer of all shards."""
        return self.data.storage_offset()

    def scales_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this weight's scales (or amax) in a flat buffer of those of all weights."""
        # A view: what a cast writes is what every holder of these scales reads.
        return buffer.as_strided(self.scale_shape, self.scale_strides, self.scale_start)

    def before_cast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the shard's valid numbers, flat, as they are cast."""
        return self.spec.before_cast(numbers[: self.shard.valid])

    def cover(self, source: torch.Tensor) -> torch.Tensor:
        """Return the shard's valid elements on whole rows [num_rows, C], zeros around; a view if none are needed."""
        shape = (self.num_rows, self.shard.shape[1])
        if self.shard.valid == math.prod(shape):
            return source[: self.shard.valid].view(shape)
        cover = source.new_zeros(math.prod(shape))
        cover[self.offset : self.offset + self.shard.valid] = source[: self.shard.valid]
        return cover.view(shape)

    def covered(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the part of the scales of the whole weight that belongs to the cover."""
        if self.granularity == "tensor":
            return scales
        return scales[self.first_row // self.unit : math.ceil((self.first_row + self.num_rows) / self.unit)]


Source = Callable[[ShardedWeight], torch.Tensor]
"""Returns the flat numbers of a weight to cast: [at least shard.valid], FP32 or BF16, on any device."""


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `numbers` as FP32 on `device`: themselves, or a copy."""
    return numbers.to(device, torch.float32)


def stacks_of(weights: Iterable[ShardedWeight]) -> list[list[ShardedWeight]]:
    """Return `weights` in order, those of one fused product together if all of it is there, every other one alone."""
    present = {id(weight.parameter): weight for weight in weights}
    stacks = []
    for weight in present.values():
        group = [id(p) for p in group_of(weight.parameter)]
        stack = [present[key] for key in group] if all(key in present for key in group) else [weight]
        if stack[0] is weight:
            stacks.append(stack)
    return stacks


def place_scales(stacks: list[list[ShardedWeight]]) -> int:
    """Give every weight its `scale_start`, those of a stack one behind the other; returns the floats needed."""
    place = 0
    for stack in stacks:
        for weight in stack:
            weight.scale_start = place
            place += weight.scale_numel
        place = math.ceil(place / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return place


def without_padding(stack: list[ShardedWeight], landed: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the codes [numel] of every weight of a stack, adjacent: views, or copies where padding parts them.

    Args:
        stack: Weights whose rows are stacked.
        landed: All ranks' shards [W * n] of every weight, adjacent.
    """
    codes = [shards[: weight.numel] for weight, shards in zip(stack, landed, strict=True)]
    # A padded weight leaves a hole before the next one, and a product reads no holes.
    if any(len(mine) < len(shards) for mine, shards in zip(codes[:-1], landed, strict=False)):
        return list(torch.cat(codes).split([weight.numel for weight in stack]))
    return codes
