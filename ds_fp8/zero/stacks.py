"""The weights of one fused product (`GROUP`: q, k, v; gate, up): their scales lie side by side, and so do their codes.

Then a product reads them as one operand, which is a view. DeepSpeed may fetch them one by one, as its prefetch does
where its bucket ends between them: the first to be fetched leaves room for the others. Codes that are parted by padding
are copied: of a fetch of all of them when they arrive, else by the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from ds_fp8.layers.linear.weights import group_of
from ds_fp8.zero import streams
from ds_fp8.zero.deepspeed.parameters import is_gathered
from ds_fp8.zero.weight import SCALE_ALIGNMENT, ShardedWeight


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
    """Return the codes of every weight of a stack, flat and adjacent, of all ranks' shards [W * n] of each, adjacent.

    Views, or copies where padding parts them.
    """
    codes = [shards[: weight.codes_in_all] for weight, shards in zip(stack, landed, strict=True)]
    if _padded(stack[:-1]):
        return list(torch.cat(codes).split([weight.codes_in_all for weight in stack]))
    return codes


def _padded(weights: Iterable[ShardedWeight]) -> bool:
    """Return whether one of them leaves a hole before the next: a product reads no holes."""
    return any(weight.shard.world * weight.codes_in_shard > weight.codes_in_all for weight in weights)


class Rooms:
    """Memory that gathered codes land in."""

    def __init__(self, stacks: Iterable[list[ShardedWeight]]) -> None:
        """Remember which weights make one product."""
        self._product = {weight: stack for stack in stacks for weight in stack}
        self._left: dict[ShardedWeight, tuple[torch.Tensor, object | None]] = {}
        """Weights of a product of which others have been fetched -> room beside those, and the stream it is for."""

    def take(
        self, stack: list[ShardedWeight], allocate: Callable[[int], torch.Tensor], leaves_room: bool = True
    ) -> Sequence[torch.Tensor]:
        """Return memory for all ranks' shards [W * n] of each weight of a product, or of one of its weights.

        On the current stream: what was left for another one is not in the order of this. `leaves_room`: whether the
        rest of the product may follow.
        """
        stream, product = streams.current_stream(), stack
        if leaves_room:
            room, of_stream = self._left.pop(stack[0], (None, None))
            if len(stack) == 1 and room is not None and of_stream == stream:
                return [room]
            product = self._product[stack[0]]
        others = [weight for weight in product if weight not in stack]
        if _padded(product[:-1]) or any(is_gathered(w.parameter) or not w.in_fp8 or w.kept is not None for w in others):
            product, others = stack, []  # not all would lie side by side
        lengths = [weight.shard.world * weight.codes_in_shard for weight in product]
        rooms = dict(zip(product, allocate(sum(lengths)).split(lengths), strict=True))
        self._left |= {weight: (rooms[weight], stream) for weight in others}
        return [rooms[weight] for weight in stack]

    def resharded(self, weight: ShardedWeight) -> None:
        """Leave no room beside a weight that is there no longer."""
        for other in self._product[weight]:
            self._left.pop(other, None)
