"""Where a weight's shard lies in it: its rows, its groups of scales, its place among all shards and all scales.

A shard is a flat slice [start, stop) of a matrix [R, C]. To find its groups it is laid over the whole rows it touches,
down to a multiple of 128 rows, with zeros elsewhere: then the reference cast's own group arithmetic applies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_fp8.formats import BLOCK, scale_shape
from ds_fp8.modules.weights import GROUP, placeholder
from ds_fp8.zero import seams

SCALE_ALIGNMENT = 4
"""Floats that the rows of 128x128 scales are padded to a multiple of: block-scaled products read them 16 bytes at a
time. The scales of every weight or stack begin at a multiple of it too."""


@dataclass(eq=False)
class ShardedWeight:
    """One weight [R, C] that is gathered in FP8, its cast shard and its scales."""

    parameter: nn.Parameter
    shard: seams.Shard
    granularity: str
    data: torch.Tensor = field(init=False)
    """uint8 [shard.numel], the FP8 codes of the shard; a slice of the buffer of all shards."""
    scale: torch.Tensor = field(init=False)
    """Scales of the whole weight; a view of the buffer of all scales."""
    scale_start: int = field(init=False)
    """Where they begin in that buffer."""

    def __post_init__(self) -> None:
        rows, columns = self.shard.shape
        self.numel = rows * columns
        # Rows that share a row of scales; the cover begins with a whole group of them.
        self.unit = BLOCK if self.granularity == "128x128" else 1
        self.first_row = min(self.shard.start, self.numel) // columns // self.unit * self.unit
        stop = math.ceil((self.shard.start + self.shard.valid) / columns) if self.shard.valid else self.first_row
        self.num_rows = stop - self.first_row
        self.offset = self.shard.start - self.first_row * columns
        self.placeholder = placeholder(self.shard.shape, self.parameter.dtype, self.parameter.device)
        self.scale_shape = scale_shape(self.shard.shape, self.granularity)
        scales_per_row = self.scale_shape[-1] if self.scale_shape else 1
        if self.granularity == "128x128":
            scales_per_row = math.ceil(scales_per_row / SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        self.scale_strides = (scales_per_row, 1) if self.scale_shape else ()
        self.scale_numel = math.prod(self.scale_shape[:1]) * scales_per_row

    @property
    def start(self) -> int:
        """Where the shard begins in the buffer of all shards."""
        return self.data.storage_offset()

    def scales_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """This weight's scales (or amax) in a flat buffer of those of all weights."""
        return buffer.as_strided(self.scale_shape, self.scale_strides, self.scale_start)

    def cover(self, source: torch.Tensor) -> torch.Tensor:
        """The shard's valid elements on whole rows [num_rows, C], zeros around them; a view where none are needed."""
        shape = (self.num_rows, self.shard.shape[1])
        if self.shard.valid == math.prod(shape):
            return source[: self.shard.valid].view(shape)
        cover = source.new_zeros(math.prod(shape))
        cover[self.offset : self.offset + self.shard.valid] = source[: self.shard.valid]
        return cover.view(shape)

    def covered(self, scales: torch.Tensor) -> torch.Tensor:
        """The part of the scales of the whole weight that belongs to the cover."""
        if self.granularity == "tensor":
            return scales
        return scales[self.first_row // self.unit : math.ceil((self.first_row + self.num_rows) / self.unit)]


def stacks_of(weights: Iterable[ShardedWeight]) -> list[list[ShardedWeight]]:
    """`weights` in their order, those of one fused product together where all of it is there, every other one alone."""
    present = {id(weight.parameter): weight for weight in weights}
    stacks = []
    for weight in present.values():
        group = [id(p) for p in getattr(weight.parameter, GROUP, (weight.parameter,))]
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


def side_by_side(shards: list[torch.Tensor], numels: list[int]) -> list[torch.Tensor]:
    """Of every weight its shards [W, n] as one flat tensor [numel], adjacent in a new buffer."""
    starts = list(itertools.accumulate(numels, initial=0))
    codes = shards[0].new_empty(max(start + s.numel() for start, s in zip(starts[:-1], shards, strict=True)))
    for start, pieces in zip(starts[:-1], shards, strict=True):
        # The padding behind a weight's last shard lands where the next weight begins, which is written after it.
        codes[start : start + pieces.numel()].view(pieces.shape).copy_(pieces)
    return [codes[start:stop] for start, stop in itertools.pairwise(starts)]
