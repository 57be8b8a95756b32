"""Messages of gradients, and the receiver's half of a reduction: sums in FP32, with the squares of the norm.

A message is uint8 [rows, places * width * 33/32], one row for each rank it goes to: first the data, `width` for each
of `places` slices, then one FP32 scale for every 128 of them. The slice of rank r lies in row r mod rows, place r div
rows; one flat exchange has as many rows as ranks and one place, the first of two levels has a place for every node.

    gradient[i]  = 1/W * sum over rows of data * scale              first micro-batch of a step
    gradient[i] += the same                                         later ones
    squares[s]   = sum of gradient[i]² over the SPAN elements i of span s, after that

One pass: each message byte is read once, each accumulated element written once. The sums of squares make up the
gradient norm without another read. They are FP64 and each is written by one program, so that runs are bitwise
reproducible and a norm does not overflow before its gradient does. Inf or NaN anywhere makes the norm Inf or NaN.

Each function has a kernel in reduce_triton.py; formats with a codec have the reference only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ds_fp8.casts.primitives import dequantize_unscaled
from ds_fp8.config.formats import BLOCK, FORMATS

LIMIT = 1024  # items of a cache: buckets are far fewer where all steps have the same, and endless where they vary
SPAN = 4096  # elements of a gradient slice that share one sum of squares


@dataclass(frozen=True)
class Message:
    """The shape of a message; `width` is a multiple of 128."""

    rows: int
    places: int
    width: int

    @property
    def row_numel(self) -> int:
        return self.places * self.width

    @property
    def row_bytes(self) -> int:
        return self.row_numel + self.row_numel // BLOCK * torch.float32.itemsize

    def parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of data, uint8 [rows, places, width], and scales, FP32 [rows, places, width/128]."""
        data = message[:, : self.row_numel].unflatten(1, (self.places, self.width))
        scales = message.view(torch.float32)[:, self.row_numel // 4 :]
        return data, scales.unflatten(1, (self.places, self.width // BLOCK))

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.rows, self.row_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Slices:
    """Offsets of one flat gradient in a message: rank r gets its elements [r * length, (r + 1) * length)."""

    length: int
    column: int  # where its slice begins in the `width` elements of every place; a multiple of 128

    @property
    def padded(self) -> int:
        """Elements of a slice, padded to full groups."""
        return -(-self.length // BLOCK) * BLOCK


class Target(NamedTuple):
    """Offset of one gradient's slice in a message, and the destination of its sum."""

    column: int  # first element in every row of the message; a multiple of 128
    start: int  # first element in the flat gradient shards
    numel: int  # elements of the slice
    span: int  # first of its sums of squares


def span_count(numel: int) -> int:
    """Return the number of sums of squares of a slice of `numel` elements."""
    return -(-numel // SPAN)


# ---------------------------------------------------------------- sums of rows


def has_kernel(tensor: torch.Tensor, format: str) -> bool:
    """Return whether messages of a format are packed and summed by kernels where a tensor lies."""
    return tensor.device.type == "cuda" and FORMATS[format].codec is None


def sum_rows(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """Sum the rows of a message in order, in FP32, and divide the sum; returns FP32 [places * width]."""
    summed = sum_rows_reference
    if has_kernel(message, format):
        from ds_fp8.zero.reduce_triton import sum_rows as summed
    return summed(message, shape, format, divisor)


def sum_rows_reference(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """sum_rows in torch, on any device; the reference of the kernel."""
    total = torch.zeros(shape.row_numel // BLOCK, BLOCK, device=message.device)
    for row, scale in zip(*shape.parts(message), strict=True):
        numbers = dequantize_unscaled(row.contiguous().view(FORMATS[format].dtype), format=format)
        total += numbers.view(-1, BLOCK) * scale.reshape(-1, 1)
    return (total / divisor).flatten()


def add_rows_reference(
    message: torch.Tensor,
    shape: Message,
    format: str,
    divisor: int,
    targets: Sequence[Target],
    gradient: torch.Tensor,
    squares: torch.Tensor,
    accumulate: bool,
) -> None:
    """Sum the rows of a received message into the gradient shards, in torch; the reference of the kernel.

    `targets`, of which none overlap, are added to the flat shards of all gradients, FP32 or BF16, or replace what they
    hold; `squares`, FP64 [spans], are sums over what `gradient` then holds.
    """
    total = sum_rows_reference(message, shape, format, divisor)
    for target in targets:
        found = total[target.column : target.column + target.numel]
        place = gradient[target.start : target.start + target.numel]
        place.copy_(place + found if accumulate else found)
        spans = pad(place, (0, -target.numel % SPAN)).view(-1, SPAN)
        squares[target.span : target.span + len(spans)] = spans.double().square().sum(1)


class GradientShards:
    """Accumulates reduced gradients in DeepSpeed's own buffer, and knows the sum of their squares.

    A gradient that arrives as a message has its sums of squares from the pass that adds it. The others, few and small,
    are read once at the step, as are those that users write into the buffer themselves, who must say so (`written`).

    A gradient that no micro-batch of a step brought is zero in that step; DeepSpeed would take the last one again.
    """

    def __init__(self, flat: torch.Tensor, places: Mapping[str, tuple[int, int]]):
        """Take over `flat`, this rank's shards of all gradients, zeros where nothing has been added.

        `places` has by name the first element of a gradient in it, and how many are here, unpadded.
        """
        self._flat, self._places = flat, places
        self._spans: dict[str, slice] = {}
        spans = 0
        for name, (_, numel) in places.items():
            self._spans[name] = slice(spans, spans := spans + span_count(numel))
        # Overwritten by each pass, never added to: a sum per span of 4096 elements, final after the last micro-batch.
        self._squares = torch.zeros(spans, dtype=torch.float64, device=flat.device)
        # Names, in the order of their arrival, for the last bit of the sum depends on it.
        self._unsummed: dict[str, None] = {}
        self._arrived: set[str] = set()  # names of the gradients that were added since the last step
        self._written: dict[str, None] = {}  # names of the gradients that users wrote since the last step, in order

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @property
    def arrived(self) -> frozenset[str]:
        return frozenset(self._arrived)

    @arrived.setter
    def arrived(self, names: Iterable[str]) -> None:
        """Note which gradients were added by others than this object, or were not after all."""
        self._arrived = set(names)

    def add_message(
        self,
        message: torch.Tensor,
        shape: Message,
        format: str,
        divisor: int,
        slices: Sequence[Slices],
        names: Sequence[str],
        accumulate: bool,
    ) -> None:
        """Add the rows of a message of one place, divided, to the gradients `names`, or put them there."""
        self._expect(names, accumulate)
        targets = []
        for place, name in zip(slices, names, strict=True):
            start, numel = self._places[name]
            if numel:  # a rank may have no part of a gradient
                targets.append(Target(place.column, start, numel, self._spans[name].start))
        add_rows = add_rows_reference
        if has_kernel(message, format):
            from ds_fp8.zero.reduce_triton import add_rows
        add_rows(message, shape, format, divisor, targets, self._flat, self._squares, accumulate)

    def add_slices(self, slices: Sequence[torch.Tensor], names: Sequence[str], accumulate: bool) -> None:
        """Add this rank's slices of gradients, without padding, that did not travel in a message."""
        self._expect(names, accumulate)
        for part, name in zip(slices, names, strict=True):
            place = self._shard(name)
            if len(place):
                place.add_(part.view(-1)) if accumulate else place.copy_(part.view(-1))
                if name not in self._unsummed:
                    self._unsummed[name] = None
                    # The message may have left a sum here: these squares are taken from the shard itself at the step.
                    self._squares[self._spans[name]] = 0

    def written(self, names: Iterable[str]) -> None:
        """Note that a user has changed these gradients: they count in this step, arrived or not."""
        known = dict.fromkeys(name for name in names if name in self._places)
        self._written.update(known)
        self._arrived.update(known)

    def clear_missing(self, frozen: Iterable[str]) -> None:
        """Clear the gradients that did not arrive since the last step, and those of the parameters `frozen`."""
        self.clear((self._places.keys() - self._arrived).union(frozen))

    def close_step(self) -> None:
        """Let the next gradients be those of another step."""
        self._arrived.clear()
        self._written.clear()

    def clear(self, names: Iterable[str]) -> None:
        for name in names:
            self._shard(name).zero_()
            # Together with the gradients: stale sums of squares would enter the norm.
            self._squares[self._spans[name]] = 0

    def sum_of_squares(self) -> torch.Tensor:
        """Return the sum of the squares of all gradients of this rank, FP64 []. The host waits for nothing."""
        for name in self._written:  # the sums there are older than what was written, or of a micro-batch after it
            self._squares[self._spans[name]] = 0
        total = self._squares.sum()
        names = [*self._unsummed, *(name for name in self._written if name not in self._unsummed)]
        if names:
            # Sliced again: offload_states and reload_states move the buffer. In FP64: squares of gradients below 1e-19
            # are subnormal in FP32.
            norms = torch._foreach_norm([self._shard(name) for name in names], 2, torch.float64)
            total = total + torch.stack(norms).square().sum()
        return total

    def _shard(self, name: str) -> torch.Tensor:
        start, numel = self._places[name]
        return self._flat[start : start + numel]

    def _expect(self, names: Sequence[str], accumulate: bool) -> None:
        if accumulate:
            self.clear(name for name in names if name not in self._arrived)
        self._arrived.update(names)
