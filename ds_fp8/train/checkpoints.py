"""The run folder: checkpoints that are complete or invisible, and whether a command starts, resumes or has finished.

run_dir/config.json                      the stage as it was started
run_dir/checkpoints/step_N/              DeepSpeed's checkpoint after N steps
run_dir/checkpoints/step_N/complete.json written last, when every rank's files are on disk
run_dir/metrics.jsonl, result.json, model/
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist

from ds_fp8.errors import UserError
from ds_fp8.train.deepspeed_config import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from ds_fp8.train.metrics import write_atomically
from ds_fp8.train.reshard import load_on_other_ranks
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
    "keep_best",
    "epochs",
    "spike",
    "spike_threshold",
    "exact_match_problems",
    "max_new_tokens",
)
BATCH_KEYS = (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)
_FREE_DATA_KEYS = ("workers", "cache_dir")
_FREE_SECTIONS = ("wandb", "tensorboard", "csv_monitor", "comet", "steps_per_print", "log_level")


@dataclass(frozen=True)
class RunState:
    """Where a run begins or goes on."""

    step: int = 0
    """Steps of this stage that are done and saved."""
    data_step: int = 0
    """Batches of training data that are used up or left out."""
    losses: tuple[float, ...] = ()
    """The last losses, for the detection of spikes."""
    checkpoint: Path | None = None
    """What to load: a checkpoint of this run, or one of the run that `train.resume` names."""
    ranks: int | None = None
    """How many ranks wrote it."""
    result: dict[str, Any] | None = None
    """Of a run that has finished."""


def inspect_run(stage: Stage) -> RunState:
    """What is already in the stage's run folder, or where `train.resume` lets it begin. Writes nothing.

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
        return _branch(stage)
    step = newest_step(run_dir)
    marker = {} if step is None else json.loads((_folder(run_dir, step) / COMPLETE).read_text())
    # Other ranks need other numbers for the same batch, which is checked as a whole.
    free = BATCH_KEYS if marker.get("ranks", stage.world) != stage.world else ()
    _check_same_run(stage, json.loads((run_dir / CONFIG).read_text()), free)
    if step is None:
        return _branch(stage)
    result = json.loads((run_dir / RESULT).read_text()) if (run_dir / RESULT).exists() else None
    length = ("steps", stage.train.steps) if stage.train.steps else ("epochs", stage.train.epochs)
    if result and result.get(length[0]) == length[1]:
        return RunState(step, result=result)
    state = _state(_folder(run_dir, step), stage, step)
    check_length(stage, state)
    return state


def check_length(stage: Stage, state: RunState) -> None:
    """Raise UserError when more steps are done than the stage has."""
    if stage.train.steps is not None and state.step > stage.train.steps:
        raise UserError(
            f"the run in {stage.run_dir} has already done {state.step} steps, and the stage has {stage.train.steps}",
            key="train.steps",
            remedy=f"at least {state.step}, or another run_dir",
        )


def _branch(stage: Stage) -> RunState:
    """The state to begin with: nothing, or that of the checkpoint which `train.resume` names."""
    if stage.train.resume is None:
        return RunState()
    named = Path(stage.train.resume).expanduser()
    folder = named
    if (named / CHECKPOINTS).is_dir():
        newest = newest_step(named)
        folder = named if newest is None else _folder(named, newest)
    if not (folder / COMPLETE).exists():
        raise UserError(
            f"{named} holds no complete checkpoint",
            key="train.resume",
            remedy=f"give a run_dir with checkpoints, or one of them: run_dir/{CHECKPOINTS}/step_N",
        )
    return _state(folder, stage, 0)


def _state(folder: Path, stage: Stage, step: int) -> RunState:
    """What the marker of a complete checkpoint says."""
    marker = json.loads((folder / COMPLETE).read_text())
    batch = marker.get("global_batch", stage.global_batch)
    if batch != stage.global_batch:
        raise UserError(
            f"the checkpoint {folder} was made with batches of {batch}, and this stage has {stage.global_batch}: its "
            "place in the data would be lost",
            key="train_batch_size",
            remedy=f'"train_batch_size": {batch}, with a micro-batch that divides it over {stage.world} ranks',
        )
    return RunState(
        step, marker.get("data_step", marker["step"]), tuple(marker.get("losses", ())), folder, marker["ranks"]
    )


def newest_step(run_dir: Path) -> int | None:
    """The steps done at the newest complete checkpoint, None without one."""
    return max(_complete_steps(run_dir), default=None)


def prune(run_dir: Path, keep_last: int, best: int | None = None) -> None:
    """Delete all checkpoints but the `keep_last` newest complete ones and that of step `best`."""
    kept = {_folder(run_dir, step) for step in sorted(_complete_steps(run_dir))[-keep_last:]}
    if best is not None:
        kept.add(_folder(run_dir, best))
    for folder in set((run_dir / CHECKPOINTS).glob("step_*")) - kept:
        # The marker goes first: a checkpoint that is half deleted must not look complete.
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def best_step(run_dir: Path, losses: Mapping[int, float]) -> int | None:
    """The complete checkpoint with the lowest of the validation losses by step; None where none is known."""
    known = [step for step in _complete_steps(run_dir) if losses.get(step) is not None]
    return min(known, key=lambda step: (losses[step], step), default=None)


def save(engine: deepspeed.DeepSpeedEngine, stage: Stage, state: RunState, best: int | None = None) -> RunState:
    """Save a checkpoint of `state`, then delete older ones as `prune` does; returns the state with it. Collective."""
    folder = _folder(stage.run_dir, state.step)
    # DeepSpeed itself names a checkpoint `latest` before the other ranks have written theirs: mark it after them.
    engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state={"step": state.step}, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        mark(folder, stage, state)
        write_atomically(folder.parent / "latest", folder.name)
        prune(stage.run_dir, stage.train.keep_last, best)
    dist.barrier()
    return replace(state, checkpoint=folder, ranks=stage.world)


def mark(folder: Path, stage: Stage, state: RunState) -> None:
    """Write that the checkpoint in `folder` is complete, and the state it belongs to."""
    marker = {
        "step": state.step,
        "ranks": stage.world,
        "global_batch": stage.global_batch,
        "data_step": state.data_step,
        "losses": list(state.losses),
    }
    write_atomically(folder / COMPLETE, json.dumps(marker) + "\n")


def load(engine: deepspeed.DeepSpeedEngine, stage: Stage, state: RunState) -> None:
    """Restore model and optimizer from the checkpoint of `state`, and for a run of this stage the schedule. Collective.

    At step 0 it is another stage's checkpoint: the engine keeps its own learning rate, weight decay and the like.
    """
    folder, own = state.checkpoint, state.step > 0
    settings = [_settings(group) for group in engine.optimizer.param_groups]
    if state.ranks == stage.world:
        loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=own)
    else:
        loaded = load_on_other_ranks(engine, folder, stage.run_dir / CHECKPOINTS, with_schedule=own)
    if loaded is None:
        raise UserError(
            f"the checkpoint {folder} cannot be read", key="train.run_dir", remedy=f"remove {folder} to go back further"
        )
    if not own:
        for group, before in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(before)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _complete_steps(run_dir: Path) -> list[int]:
    markers = run_dir.glob(f"{CHECKPOINTS}/step_*/{COMPLETE}")
    return [int(marker.parent.name.removeprefix("step_")) for marker in markers]


def _folder(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step}"


def _check_same_run(stage: Stage, stored: dict[str, Any], free: Sequence[str]) -> None:
    before, now = _fixed_keys(stored, free), _fixed_keys(stage.raw, free)
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


def _fixed_keys(raw: dict[str, Any], free_keys: Sequence[str]) -> dict[str, Any]:
    """Dotted keys and values of all that may not change within a run."""
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
        else:
            flat[prefix] = value

    flatten("", raw)
    return flat
