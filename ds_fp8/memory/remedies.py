"""Changes of a stage that does not fit on a GPU: which of them make it fit, from the most harmless on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override
from ds_fp8.engine.sequence_parallel import sequence_parallel_size
from ds_fp8.memory.estimate import estimate_workload
from ds_fp8.memory.workload import read_workload
from ds_fp8.train.deepspeed_config import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, resolve_batch

MAX_GPUS = 1024
TILE_TOKENS = 8192
"""Tokens of an MLP's tile: enough for its products to fill a GPU."""


@dataclass(frozen=True)
class Remedy:
    """A change that makes a stage fit."""

    change: str
    """Arguments to add to the command."""
    device_bytes: int
    """Memory that a GPU needs then."""


def settings_that_fit(raw: Mapping[str, Any], gpus: int, memory_bytes: int) -> Remedy | None:
    """Return the first change of settings with which the stage fits on as many GPUs, or None.

    Recomputed layers, smaller micro-batches, activations on the host and MLPs in tiles keep the result of a step;
    compressed moments and an optimizer on the host, which are tried after them, do not, or take time.

    Args:
        raw: The stage.
        gpus: Number of ranks.
        memory_bytes: Memory of a GPU.
    """
    for changes in _changes(raw, gpus):
        needed = _needed(raw, gpus, changes)
        if needed is not None and needed <= memory_bytes:
            return Remedy(" ".join(f"--set {change}" for change in changes), needed)
    return None


def gpus_that_fit(raw: Mapping[str, Any], gpus: int, memory_bytes: int) -> Remedy | None:
    """Return the fewest GPUs, a power of two times as many, over which the stage fits as it is, or None."""
    least = None
    while (gpus := 2 * gpus) <= MAX_GPUS:
        needed = _needed(raw, gpus, ())
        if needed is None:
            continue
        if needed <= memory_bytes:
            return Remedy(f"--gpus {gpus}", needed)
        if least is not None and needed > 0.99 * least:
            return None  # what is left is not sharded
        least = needed
    return None


def _changes(raw: Mapping[str, Any], gpus: int) -> Iterator[tuple[str, ...]]:
    """Return lists of `--set` values, the most harmless first."""
    recompute = ("model.activation_checkpointing=true",)
    rows = _one_row(raw, gpus)
    offload = ("model.activation_checkpointing=offload",)
    moments = ("fp8.optimizer.exp_avg=e4m3_expanded", "fp8.optimizer.exp_avg_sq=e4m3_expanded")
    host = ('zero_optimization.offload_optimizer.device="cpu"',)
    yield recompute
    if rows:
        yield rows
        yield (*recompute, *rows)
    yield (*offload, *rows)
    if raw.get("fp8", {}).get("enabled", "fp8" in raw):
        yield (*offload, *rows, f"fp8.activations.mlp_tile_tokens={TILE_TOKENS}")
        yield moments
        yield (*offload, *rows, *moments)
    yield (*offload, *rows, *host)


def _one_row(raw: Mapping[str, Any], gpus: int) -> tuple[str, ...]:
    """Return the changes that take micro-batches of one row, with as many rows in a step; none where it has one."""
    _, micro_batch, accumulation = resolve_batch(dict(raw), gpus // sequence_parallel_size(raw))
    if micro_batch == 1:
        return ()
    changes = (f"{MICRO_BATCH}=1",)
    if ACCUMULATION in raw or TRAIN_BATCH not in raw:
        changes += (f"{ACCUMULATION}={micro_batch * accumulation}",)
    return changes


def _needed(raw: Mapping[str, Any], gpus: int, changes: tuple[str, ...]) -> int | None:
    """Return the memory that a GPU needs after the changes, None where the stage refuses them."""
    changed = copy.deepcopy(dict(raw))
    try:
        for change in changes:
            apply_override(changed, change)
        return estimate_workload(read_workload(changed, gpus=gpus)).device_bytes
    except UserError:
        return None
