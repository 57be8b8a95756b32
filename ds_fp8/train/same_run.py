"""Compare a stage with the run in its folder: which keys differ that a rerun may not change."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.train.deepspeed_config import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from ds_fp8.train.stage import Stage

# What a rerun may change: how long, where, and what is measured and written. All else would make it another run.
_FREE_TRAIN_KEYS = (
    "run_dir",
    "steps",
    "log_every",
    "eval_every",
    "eval_batches",
    "save_every",
    "keep_last",
    "keep_best",
    "async_save",
    "max_failed_saves",
    "epochs",
    "spike",
    "spike_threshold",
    "exact_match_problems",
    "timeout",
    "max_new_tokens",
)
BATCH_KEYS = (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)
"""Keys that also may change on another number of ranks: the batch is compared as a whole then."""
_FREE_DATA_KEYS = ("workers", "cache_dir")
_FREE_SECTIONS = ("wandb", "tensorboard", "csv_monitor", "comet", "steps_per_print", "log_level")


def changed_keys(stage: Stage, stored: dict[str, Any], free: Sequence[str]) -> list[str]:
    """Return the dotted keys in which the stage is not that of a run with the JSON `stored`, in order."""
    before, now = fixed_keys(stored, free), fixed_keys(stage.raw, free)
    paths = stage.paths()
    return sorted(
        key
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and not (key in paths and _same_place(before.get(key), now[key]))
    )


def check_same_run(stage: Stage, stored: dict[str, Any], free: Sequence[str]) -> None:
    """Raise UserError where the stage is not that of a run with the JSON `stored`, but for the keys `free`."""
    changed = changed_keys(stage, stored, free)
    if changed:
        key = changed[0]
        before, now = (fixed_keys(raw, free).get(key) for raw in (stored, stage.raw))
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"{stage.run_dir} holds a run with {key} = {clipped(json.dumps(before))}, "
            f"not {clipped(json.dumps(now))}{more}",
            key=key,
            remedy="set it back to resume that run, or choose another train.run_dir",
        )


def _same_place(before: Any, now: str) -> bool:
    """Return whether two paths name one file or folder: spelt otherwise, or moved since with a folder around it."""
    if not isinstance(before, str):
        return False
    old, new = os.path.expanduser(before), os.path.expanduser(now)
    if not os.path.exists(new):  # also where no file can have such a name
        return False
    return os.path.samefile(old, new) if os.path.exists(old) else Path(old).name == Path(new).name


def fixed_keys(raw: dict[str, Any], free_keys: Sequence[str]) -> dict[str, Any]:
    """Return dotted keys and values of everything that may not change within a run."""
    free = {
        *free_keys,
        *_FREE_SECTIONS,
        *(f"train.{key}" for key in _FREE_TRAIN_KEYS),
        *(f"data.{key}" for key in _FREE_DATA_KEYS),
    }
    flat: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if prefix in free:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        elif prefix == "data.sources" and isinstance(value, list):
            for number, inner in enumerate(value):
                flatten(f"{prefix}[{number}]", inner)
        else:
            flat[prefix] = value

    flatten("", raw)
    return flat
