"""Which rows a step trains on, and which of them a rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def rows_of_step(step: int, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """The `global_batch` row indices of optimizer step `step` (from 0), a function of its arguments alone.

    Every epoch visits each row once in an order of its own; a step may end one epoch and begin the next.
    """
    if num_rows < 1 or global_batch < 1 or step < 0:
        raise ValueError(f"no rows for step {step}, num_rows {num_rows}, global_batch {global_batch}")
    places = range(step * global_batch, (step + 1) * global_batch)
    return [int(_epoch_order(place // num_rows, num_rows, seed)[place % num_rows]) for place in places]


def local_micro_batches(
    rows: Sequence[int], rank: int, world: int, micro_batch: int, accumulation: int
) -> list[list[int]]:
    """The `accumulation` micro-batches of `micro_batch` rows that `rank` of `world` takes of a step's `rows`.

    Raises ValueError unless len(rows) == world * micro_batch * accumulation.
    """
    if len(rows) != world * micro_batch * accumulation:
        raise ValueError(f"{len(rows)} rows do not make {world} x {micro_batch} x {accumulation}")
    starts = [(index * world + rank) * micro_batch for index in range(accumulation)]
    return [list(rows[start : start + micro_batch]) for start in starts]


@lru_cache(maxsize=2)
def _epoch_order(epoch: int, num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
