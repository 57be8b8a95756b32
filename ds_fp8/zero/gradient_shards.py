"""Flat FP32 shard of the gradients of one optimizer step, with the squares that its norm needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ds_fp8.zero.gradient_sum import add_rows
from ds_fp8.zero.message import Message, Slices, Target, span_count


class GradientShards:
    """Accumulates reduced gradients in DeepSpeed's own buffer, and knows the sum of their squares.

    A gradient that arrives as a message has its sums of squares from the pass that adds it. The others, few and small,
    are read once at the step, as are those that users write into the buffer themselves, who must say so (`written`).

    A gradient that no micro-batch of a step brought is zero in that step; DeepSpeed would take the last one again.
    """

    def __init__(self, flat: torch.Tensor, places: Mapping[str, tuple[int, int]]):
        """Take the accumulator over.

        Args:
            flat: This rank's shards of all gradients, FP32 or BF16 [n]; zeros where nothing has been added.
            places: By parameter name, the first element of its gradient in `flat`, and how many are here, unpadded.
        """
        self._flat, self._places = flat, places
        self._spans: dict[str, int] = {}
        spans = 0
        for name, (_, numel) in places.items():
            self._spans[name] = spans
            spans += span_count(numel)
        # Written whole by each pass, never added to: a sum per span of 4096 elements, final after the last micro-batch.
        self._squares = torch.zeros(spans, dtype=torch.float64, device=flat.device)
        self._unsummed: dict[str, None] = {}
        """Names, in the order of their arrival, for the last bit of the sum depends on it."""
        self._arrived: set[str] = set()
        """Names of the gradients that were added since the last step."""
        self._written: dict[str, None] = {}
        """Names of the gradients that users wrote since the last step, in order."""

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
        """Add the rows of a message, divided, to the gradients of some parameters.

        Args:
            message: uint8 [rows, row bytes], as received.
            shape: Shape of the message; one place.
            format: Format of the codes.
            divisor: What the sum over rows is divided by.
            slices: Place in the message of each gradient.
            names: Names of the parameters, in the order of `slices`.
            accumulate: Add to this step's gradients rather than replace them.
        """
        self._expect(names, accumulate)
        targets = []
        for place, name in zip(slices, names, strict=True):
            start, numel = self._places[name]
            if numel:  # a rank may have no part of a gradient
                targets.append(Target(place.column, start, numel, self._spans[name]))
        add_rows(message, shape, format, divisor, targets, self._flat, self._squares, accumulate)

    def add_slices(self, slices: Sequence[torch.Tensor], names: Sequence[str], accumulate: bool) -> None:
        """Add slices of gradients that did not travel in a message.

        Args:
            slices: This rank's part of each gradient, without padding, in any floating point dtype.
            names: Names of the parameters, in the order of `slices`.
            accumulate: Add to this step's gradients rather than replace them.
        """
        self._expect(names, accumulate)
        for part, name in zip(slices, names, strict=True):
            start, numel = self._places[name]
            if numel:
                place = self._flat[start : start + numel]
                place.add_(part.view(-1)) if accumulate else place.copy_(part.view(-1))
                if name not in self._unsummed:
                    self._unsummed[name] = None
                    # The message may have left a sum here: these squares are taken from the shard itself at the step.
                    self._squares[self._spans[name] : self._spans[name] + span_count(numel)] = 0

    def _expect(self, names: Sequence[str], accumulate: bool) -> None:
        """Clear an earlier step's values of gradients that are accumulated and now arrive for the first time."""
        if accumulate:
            self.clear(name for name in names if name not in self._arrived)
        self._arrived.update(names)

    @property
    def device(self) -> torch.device:
        """Return where the gradients lie."""
        return self._flat.device

    @property
    def arrived(self) -> frozenset[str]:
        """Return the names of the gradients that were added since the last step."""
        return frozenset(self._arrived)

    @arrived.setter
    def arrived(self, names: Iterable[str]) -> None:
        """Note which gradients were added by others than this object, or were not after all."""
        self._arrived = set(names)

    def close_step(self, frozen: Iterable[str]) -> None:
        """Clear the gradients that did not arrive since the last step, and those of the parameters `frozen`."""
        # Sums of squares are cleared together with the gradients: stale ones would enter the norm.
        self.clear((self._places.keys() - self._arrived).union(frozen))
        self._arrived.clear()

    def clear(self, names: Iterable[str]) -> None:
        """Set the gradients of `names` to zero."""
        for name in names:
            start, numel = self._places[name]
            self._flat[start : start + numel] = 0
            self._squares[self._spans[name] : self._spans[name] + span_count(numel)] = 0

    def written(self, names: Iterable[str]) -> None:
        """Note that a user has changed these gradients: they count in this step, arrived or not."""
        known = dict.fromkeys(name for name in names if name in self._places)
        self._written.update(known)
        self._arrived.update(known)

    def sum_of_squares(self) -> torch.Tensor:
        """Return the sum of the squares of all gradients of this rank, FP64 []. The host waits for nothing."""
        for name in self._written:  # the sums there are older than what was written, or of a micro-batch after it
            self._squares[self._spans[name] : self._spans[name] + span_count(self._places[name][1])] = 0
        total = self._squares.sum()
        names = [*self._unsummed, *(name for name in self._written if name not in self._unsummed)]
        self._written.clear()
        if names:
            # Sliced again: offload_states and reload_states move the buffer.
            places = [self._places[name] for name in names]
            parts = [self._flat[start : start + numel] for start, numel in places]
            # In FP64: squares of gradients below 1e-19 are subnormal in FP32.
            norms = torch._foreach_norm(parts, 2, torch.float64)
            total = total + torch.stack(norms).square().sum()
        return total
