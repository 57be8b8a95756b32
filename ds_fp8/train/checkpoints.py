"""The run folder: checkpoints that are complete or invisible, and whether a command starts, resumes or has finished.

run_dir/config.json                      the stage as it was started
run_dir/checkpoints/step_N/              DeepSpeed's checkpoint after N steps
run_dir/checkpoints/step_N/complete.json written last, when every rank's files are on disk
run_dir/metrics.jsonl, result.json, model/
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist

from ds_fp8.errors import UserError
from ds_fp8.train.metrics import write_atomically
from ds_fp8.train.stage import Stage

CHECKPOINTS, COMPLETE, CONFIG, METRICS, MODEL, RESULT = (
    "checkpoints",
    "complete.json",
    "config.json",
    "metrics.jsonl",
    "model",
    "result.json",
)
# What a rerun may change: how long, and what is measured and written. All else would make it another run.
_FREE_TRAIN_KEYS = (
    "steps",
    "log_every",
    "eval_every",
    "eval_batches",
    "save_every",
    "keep_last",
    "exact_match_problems",
    "max_new_tokens",
)
_FREE_SECTIONS = ("wandb", "tensorboard", "csv_monitor", "comet", "steps_per_print", "log_level")


@dataclass(frozen=True)
class RunState:
    """What a run folder already holds: `step` steps done and saved; `result` if it has finished."""

    step: int
    result: dict[str, Any] | None = None


def inspect_run(stage: Stage) -> RunState:
    """What is already in the stage's run folder. Writes nothing.

    Raises UserError when the folder belongs to another run, or this run cannot go on from it.
    """
    run_dir = stage.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder", key="train.run_dir", remedy="choose another run_dir")
    if not (run_dir / CONFIG).exists():
        foreign = [name for name in (CHECKPOINTS, METRICS, MODEL, RESULT) if (run_dir / name).exists()]
        if foreign:
            raise UserError(
                f"{run_dir} holds {foreign[0]} but no {CONFIG}: it is not the folder of a run",
                key="train.run_dir",
                remedy="choose another run_dir",
            )
        return RunState(step=0)
    _check_same_run(stage, json.loads((run_dir / CONFIG).read_text()))
    step = newest_step(run_dir)
    if step is None:
        return RunState(step=0)
    if step > stage.train.steps:
        raise UserError(
            f"the run in {run_dir} has already done {step} steps",
            key="train.steps",
            remedy=f"at least {step}, or another run_dir",
        )
    ranks = json.loads((_folder(run_dir, step) / COMPLETE).read_text())["ranks"]
    result = json.loads((run_dir / RESULT).read_text()) if (run_dir / RESULT).exists() else None
    if result and result["steps"] == stage.train.steps:
        return RunState(step, result)
    if ranks != stage.world:
        raise UserError(
            f"the run in {run_dir} was made by {ranks} ranks and cannot go on with {stage.world}",
            key="train.run_dir",
            remedy=f"start {ranks} ranks, or begin another run_dir with train.init_from",
        )
    return RunState(step)


def newest_step(run_dir: Path) -> int | None:
    """The steps done at the newest complete checkpoint, None without one."""
    return max(_complete_steps(run_dir), default=None)


def prune(run_dir: Path, keep_last: int) -> None:
    """Delete all checkpoints but the `keep_last` newest complete ones."""
    kept = {_folder(run_dir, step) for step in sorted(_complete_steps(run_dir))[-keep_last:]}
    for folder in set((run_dir / CHECKPOINTS).glob("step_*")) - kept:
        # The marker goes first: a checkpoint that is half deleted must not look complete.
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def save(engine: deepspeed.DeepSpeedEngine, run_dir: Path, step: int, keep_last: int) -> None:
    """Save a checkpoint after `step` steps, then delete all but the `keep_last` newest. Collective."""
    folder = _folder(run_dir, step)
    # DeepSpeed itself names a checkpoint `latest` before the other ranks have written theirs: mark it after them.
    engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state={"step": step}, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        write_atomically(folder / COMPLETE, json.dumps({"step": step, "ranks": dist.get_world_size()}) + "\n")
        write_atomically(folder.parent / "latest", folder.name)
        prune(run_dir, keep_last)
    dist.barrier()


def load(engine: deepspeed.DeepSpeedEngine, run_dir: Path, step: int) -> None:
    """Restore model, optimizer and schedule as they were after `step` steps. Collective."""
    folder = _folder(run_dir, step)
    loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if loaded is None:
        raise UserError(
            f"the checkpoint {folder} cannot be read", key="train.run_dir", remedy=f"remove {folder} to go back further"
        )


def _complete_steps(run_dir: Path) -> list[int]:
    markers = run_dir.glob(f"{CHECKPOINTS}/step_*/{COMPLETE}")
    return [int(marker.parent.name.removeprefix("step_")) for marker in markers]


def _folder(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step}"


def _check_same_run(stage: Stage, stored: dict[str, Any]) -> None:
    before, now = _fixed_keys(stored), _fixed_keys(stage.raw)
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        key = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"{stage.run_dir} holds a run with {key} = {json.dumps(before.get(key))}, "
            f"not {json.dumps(now.get(key))}{more}",
            key=key,
            remedy="set it back to resume that run, or choose another train.run_dir",
        )


def _fixed_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys and values of all that may not change within a run."""
    free = {*_FREE_SECTIONS, *(f"train.{key}" for key in _FREE_TRAIN_KEYS)}
    flat: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if prefix in free:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    flatten("", raw)
    return flat
