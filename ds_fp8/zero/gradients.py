"""The receiver's half of a reduction: messages summed in FP32 into the gradient shards, with the squares of the norm.

    gradient[i]  = 1/W * sum over rows of code * scale              first micro-batch of a step
    gradient[i] += the same                                         later ones
    squares[s]   = sum of gradient[i]² over the SPAN elements i of span s, after that

One pass: each message byte is read once, each accumulated element written once. The sums of squares make up the
gradient norm without another read. They are FP64 and each is written whole by one program, so a run repeats bit for bit
and a norm does not overflow before its gradient does. Inf or NaN anywhere makes the norm Inf or NaN.

Each function has a kernel in reduce_triton.py; formats with a codec have the reference only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.functional import pad

from ds_fp8.casts.primitives import decode
from ds_fp8.config.formats import BLOCK, FORMATS
from ds_fp8.zero.messages import SPAN, Message, Slices, Target, span_count


def has_kernel(tensor: torch.Tensor, format: str) -> bool:
    """Return whether messages of a format are packed and summed by kernels where a tensor lies."""
    return tensor.device.type == "cuda" and FORMATS[format].codec is None


def sum_rows(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """Sum the rows of a message in order, in FP32, and divide the sum; returns FP32 [places * width]."""
    if has_kernel(message, format):
        from ds_fp8.zero import reduce_triton

        return reduce_triton.sum_rows(message, shape, format, divisor)
    return sum_rows_reference(message, shape, format, divisor)


def sum_rows_reference(message: torch.Tensor, shape: Message, format: str, divisor: int = 1) -> torch.Tensor:
    """Do sum_rows in torch, on any device; the oracle of the kernel."""
    total = torch.zeros(shape.codes // BLOCK, BLOCK, device=message.device)
    codes, scales = shape.parts(message)
    for row, scale in zip(codes, scales, strict=True):
        numbers = decode(row.contiguous().view(FORMATS[format].dtype), format=format)
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
    """Sum the rows of a received message into the gradient shards, in torch; the oracle of the kernel.

    Args:
        message: uint8 [rows, row bytes].
        shape: Shape of the message; one place.
        format: Format of its codes.
        divisor: What the sum is divided by.
        targets: Slices of the message to add; none may overlap another.
        gradient: Flat shards of all gradients, FP32 or BF16 [n], written in place.
        squares: FP64 [spans], written in place: sums over what `gradient` then holds.
        accumulate: Add to what `gradient` holds rather than replace it.
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
        # Written whole by each pass, never added to: a sum per span of 4096 elements, final after the last micro-batch.
        self._squares = torch.zeros(spans, dtype=torch.float64, device=flat.device)
        self._unsummed: dict[str, None] = {}
        """Names, in the order of their arrival, for the last bit of the sum depends on it."""
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
