"""Messages of the gradient reduction: layout, casts of gradients into them, destinations of their sums.

A message is uint8 [rows, places * width * 33/32], one row for each rank it goes to: first the codes, `width` for each
of `places` slices, then one FP32 scale for every 128 of them. The slice of rank r lies in row r mod rows, place r div
rows; one flat exchange has as many rows as ranks and one place, the first of two levels has a place for every node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_fp8.config.formats import BLOCK

SPAN = 4096
"""Elements of a gradient slice that share one sum of squares."""


@dataclass(frozen=True)
class Message:
    """The shape of a message; `width` is a multiple of 128."""

    rows: int
    places: int
    width: int

    @property
    def codes(self) -> int:
        """Return the codes of one row."""
        return self.places * self.width

    @property
    def row_bytes(self) -> int:
        """Return the codes and scales of one row."""
        return self.codes + self.codes // BLOCK * torch.float32.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for such a message, uint8 [rows, row bytes], uninitialised."""
        return torch.empty(self.rows, self.row_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Slices:
    """Offsets of one flat gradient in a message: rank r gets its elements [r * length, (r + 1) * length)."""

    length: int
    column: int
    """Column where its slice begins in the `width` codes of every place; a multiple of 128."""

    @property
    def padded(self) -> int:
        """Return the codes that a slice takes: whole groups."""
        return -(-self.length // BLOCK) * BLOCK


@dataclass(frozen=True)
class CastOptions:
    """Options of a gradient's cast."""

    format: str
    scale: torch.Tensor | None = None
    """FP32 [], one scale for the whole gradient, with saturation; None gives every group of 128 its own."""
    clipped: torch.Tensor | None = None
    """int32 [], where the elements that saturated in units of `scale` are counted, NaN left out."""


class Target(NamedTuple):
    """Offset of one gradient's slice in a message, and the destination of its sum."""

    column: int
    """First code in every row of the message; a multiple of 128."""
    start: int
    """First element in the flat gradient shards."""
    numel: int
    """Elements of the slice."""
    span: int
    """First of its sums of squares."""


def span_count(numel: int) -> int:
    """Return the number of sums of squares of a slice of `numel` elements."""
    return -(-numel // SPAN)
