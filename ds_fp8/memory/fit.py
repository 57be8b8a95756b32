"""The largest micro-batch, or the longest sequence, that fits on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ds_fp8.memory.estimate import estimate_workload
from ds_fp8.memory.workload import Workload

Size = Literal["micro_batch", "sequence_length"]
LARGEST = {"micro_batch": 1 << 16, "sequence_length": 1 << 24}
MULTIPLE = {"micro_batch": 1, "sequence_length": 128}
"""Sizes that are asked about: sequences in whole groups of a cast."""


def largest_that_fits(w: Workload, what: Size, memory_bytes: int) -> int:
    """Return the largest micro-batch (rows) or sequence (tokens) with which `w` needs at most `memory_bytes`.

    0 where nothing fits. A sequence is no longer than the model's max_position_embeddings.
    """
    limit = LARGEST[what]
    if what == "sequence_length" and w.model.longest is not None:
        limit = w.model.longest
    return _largest(w, what, memory_bytes, limit)


def longest_contexts(w: Workload, memory_bytes: int) -> dict[int, int]:
    """Return the longest rows that fit where so many of the GPUs share each: tokens by `sequence_parallel_size`.

    Only memory bounds them: for more positions than the model has, its rotary embedding must be scaled. A size counts
    if it divides the GPUs and the model's heads.
    """
    layer = w.model.layers[0]
    sizes = [
        size
        for size in range(1, w.gpus + 1)
        if w.gpus % size == 0 and layer.heads % size == 0 and (layer.kv_heads % size == 0 or size % layer.kv_heads == 0)
    ]
    limit = LARGEST["sequence_length"]
    return {size: _largest(replace(w, shared_by=size), "sequence_length", memory_bytes, limit) for size in sizes}


def _largest(w: Workload, what: Size, memory_bytes: int, limit: int) -> int:
    unit = MULTIPLE[what] * (w.shared_by if what == "sequence_length" else 1)

    def fits(units: int) -> bool:
        return estimate_workload(w.resized(what, units * unit)).device_bytes <= memory_bytes

    return unit * search(fits, limit // unit)


def search(fits: Callable[[int], bool], limit: int, start: int = 1) -> int:
    """Return the largest number up to `limit` that fits, 0 for none: double from `start`, then halve the interval.

    What is smaller than a number that fits must fit as well. Every number is asked about once.
    """
    if limit < 1:
        return 0
    largest, step = 0, min(max(1, start), limit)
    too_large = limit + 1
    while largest < step < too_large:
        if fits(step):
            largest, step = step, min(2 * step, limit)
        else:
            too_large = step
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        if fits(middle):
            largest = middle
        else:
            too_large = middle
    return largest
