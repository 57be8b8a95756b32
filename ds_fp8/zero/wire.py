"""Bytes on the wire, counted where they are sent, for FP8 and BF16 alike."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed import comm as dist

from ds_fp8.zero import seams

GATHER, GRADIENT, OTHER = "all_gather_bytes", "grad_bytes", "other_bytes"

# Category of a collective, the arguments that may hold its input, and the share of the input's bytes that one rank
# sends to others, as a function of the group's size W (an all-reduce is a reduce-scatter and an all-gather).
_COLLECTIVES = {
    "all_gather": (GATHER, ("tensor", 1), lambda w: w - 1),
    "all_gather_into_tensor": (GATHER, ("input_tensor", 1), lambda w: w - 1),
    "all_gather_coalesced": (GATHER, ("input_tensors", 1), lambda w: w - 1),
    "reduce_scatter": (GRADIENT, ("input_list", 1), lambda w: (w - 1) / w),
    "reduce_scatter_tensor": (GRADIENT, ("input_tensor", 1), lambda w: (w - 1) / w),
    "all_to_all_single": (GRADIENT, ("input", 1), lambda w: (w - 1) / w),
    "all_reduce": (OTHER, ("tensor", 0), lambda w: 2 * (w - 1) / w),
    "all_reduce_coalesced": (OTHER, ("tensors", 0), lambda w: 2 * (w - 1) / w),
    "broadcast": (OTHER, ("tensor", 0), lambda w: 1),
}


class WireMeter:
    """Counts the bytes this rank sends to other ranks through DeepSpeed, by purpose.

    Parameter gathers (with the amax all-reduce that FP8 adds to them), gradient reductions, and everything else.
    """

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._category = threading.local()
        seams.observe_collectives(list(_COLLECTIVES), self._observe)

    def _observe(self, name: str, args: tuple, kwargs: dict) -> None:
        category, (keyword, position), share = _COLLECTIVES[name]
        payload = kwargs[keyword] if keyword in kwargs else args[position]
        tensors = [payload] if isinstance(payload, torch.Tensor) else payload
        world = dist.get_world_size(kwargs.get("group"))
        category = getattr(self._category, "name", None) or category
        self._sent[category] += round(sum(tensor.nbytes for tensor in tensors) * share(world))

    @contextmanager
    def counted_as(self, category: str) -> Iterator[None]:
        """Count the collectives inside as `category`, whatever they are."""
        self._category.name = category
        try:
            yield
        finally:
            self._category.name = None

    def take(self) -> dict[str, int]:
        """Bytes sent since the last call, by category."""
        sent = {category: self._sent[category] for category in (GATHER, GRADIENT, OTHER)}
        self._sent.clear()
        return sent
