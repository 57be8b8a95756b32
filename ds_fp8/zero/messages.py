"""Messages of gradients: their layout, and a cache of what is made for each.

A message of gradients is uint8 [rows, places * width * 33/32], one row for each rank it goes to: first the codes,
`width` for each of `places` slices, then one FP32 scale for every 128 of them. The slice of rank r lies in row r mod
rows, place r div rows; one flat exchange has as many rows as ranks and one place, the first of two levels has a place
for every node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from ds_fp8.config.formats import BLOCK

LIMIT = 1024
"""Items of a cache: buckets of gradients are far fewer where all steps have the same, and endless where they vary."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
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
        return self.places * self.width

    @property
    def row_bytes(self) -> int:
        return self.codes + self.codes // BLOCK * torch.float32.itemsize

    def parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of codes, uint8 [rows, places, width], and scales, FP32 [rows, places, width/128]."""
        codes = message[:, : self.codes].unflatten(1, (self.places, self.width))
        scales = message.view(torch.float32)[:, self.codes // 4 :].unflatten(1, (self.places, self.width // BLOCK))
        return codes, scales

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.rows, self.row_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Slices:
    """Offsets of one flat gradient in a message: rank r gets its elements [r * length, (r + 1) * length)."""

    length: int
    column: int  # column where its slice begins in the `width` codes of every place; a multiple of 128

    @property
    def padded(self) -> int:
        """Return the codes that a slice takes: whole groups."""
        return -(-self.length // BLOCK) * BLOCK


class Target(NamedTuple):
    """Offset of one gradient's slice in a message, and the destination of its sum."""

    column: int  # first code in every row of the message; a multiple of 128
    start: int  # first element in the flat gradient shards
    numel: int  # elements of the slice
    span: int  # first of its sums of squares


def span_count(numel: int) -> int:
    """Return the number of sums of squares of a slice of `numel` elements."""
    return -(-numel // SPAN)


class Recent(Generic[K, V]):
    """The values of the keys that were used last, at most `limit`."""

    def __init__(self, limit: int = LIMIT):
        self._limit = limit
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value  # the last one now
        if len(self._values) > self._limit:
            del self._values[next(iter(self._values))]
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
