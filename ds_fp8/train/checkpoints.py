"""The run folder and its checkpoints: each is complete, or does not count.

run_dir/config.json                      the stage as it was started
run_dir/checkpoints/step_N/              DeepSpeed's checkpoint after N steps, with its manifest (manifest.py)
run_dir/checkpoints/step_N.part/         one that is being written (saving.py)
run_dir/checkpoints/step_N.damaged/      one that was found damaged and set aside
run_dir/saved.json                       the newest step that was ever saved
run_dir/metrics.jsonl, result.json, model/
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError
from ds_fp8.train.durable import remove, write_atomically
from ds_fp8.train.manifest import Damaged, Manifest
from ds_fp8.train.random_states import restore_random_states
from ds_fp8.train.reshard import load_on_other_ranks
from ds_fp8.train.stage import Stage
from ds_fp8.zero.safe_load import load_tensors, tensors_only

CHECKPOINTS, CONFIG, METRICS, MODEL, RESULT, SAVED = (
    "checkpoints",
    "config.json",
    "metrics.jsonl",
    "model",
    "result.json",
    "saved.json",
)
_STEP = re.compile(r"step_([0-9]{1,18})")
_LEFTOVER = re.compile(r"step_[0-9]+\.(part|deleted)|universal")


@dataclass(frozen=True)
class RunState:
    """Position at which a run begins or resumes."""

    step: int = 0
    """Steps of this stage that are done and saved."""
    data_step: int = 0
    """Batches of training data that are used up or left out."""
    losses: tuple[float, ...] = ()
    """The last losses, for the detection of spikes."""
    checkpoint: Path | None = None
    """Checkpoint to load: one of this run, or of the run that `train.resume` names."""
    ranks: int | None = None
    """Number of ranks that wrote it."""
    result: dict[str, Any] | None = None
    """Result of a run that has finished."""


def survey(run_dir: Path) -> tuple[list[tuple[Path, Manifest]], dict[Path, str]]:
    """Return the checkpoints of a run with a sound manifest, newest first, and by folder what is wrong with others.

    Files other than manifests are not read.
    """
    whole, damaged = [], {}
    for folder in _step_folders(run_dir):
        try:
            if not folder.is_dir():
                raise Damaged("it is not a folder")
            whole.append((folder, Manifest.read(folder)))
        except Damaged as error:
            damaged[folder] = str(error)
    return whole, damaged


def newest_step(run_dir: Path) -> int | None:
    """Return the steps done at the newest checkpoint with a sound manifest, None without one."""
    return max(_complete_steps(run_dir), default=None)


def prune(run_dir: Path, keep_last: int, keep: Collection[int | None] = ()) -> None:
    """Delete all checkpoints but the `keep_last` newest ones and those of steps `keep`, and what a kill left behind."""
    steps = sorted(_complete_steps(run_dir))
    kept = {*steps[-keep_last:], *keep}
    for step in set(steps) - kept:
        # Renamed first: a checkpoint that is half deleted must not look like a damaged one.
        folder = folder_of(run_dir, step)
        folder.rename(folder.with_name(f"{folder.name}.deleted"))
    for leftover in (run_dir / CHECKPOINTS).iterdir():
        if _LEFTOVER.fullmatch(leftover.name):
            remove(leftover)


def best_step(run_dir: Path, losses: Mapping[int, float]) -> int | None:
    """Return the checkpoint with the lowest of the validation losses by step; None where none is known."""
    known = [step for step in _complete_steps(run_dir) if losses.get(step) is not None]
    return min(known, key=lambda step: (losses[step], step), default=None)


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run_dir / CHECKPOINTS / f"step_{step}"


def random_file(rank: int) -> str:
    """Return the name of the file with a rank's random states."""
    return f"random_rank_{rank:05d}.pt"


def name_latest(run_dir: Path, step: int) -> None:
    """Write that `step` is saved: for DeepSpeed's tools, and so that its loss would be noticed."""
    # In this order: `saved.json` promises a checkpoint, and a kill in between must not leave a promise alone.
    write_atomically(run_dir / CHECKPOINTS / "latest", folder_of(run_dir, step).name)
    write_atomically(run_dir / SAVED, json.dumps({"step": step}) + "\n")


def move_in_data(state: RunState) -> None:
    """Let a run that resumes from the checkpoint of `state` go on with the data of `state`."""
    # Only the manifest is written again; the tensors beside it stay as they were verified.
    manifest = Manifest.read(state.checkpoint)
    replace(manifest, data_step=state.data_step, losses=state.losses).write(state.checkpoint)


def load(engine: deepspeed.DeepSpeedEngine, stage: Stage, state: RunState) -> None:
    """Restore model and optimizer from the checkpoint of `state`, and for a run of this stage the schedule. Collective.

    At step 0 it is another stage's checkpoint: the engine keeps its own learning rate, weight decay and the like.
    """
    folder, own = state.checkpoint, state.step > 0
    # DeepSpeed's load replaces learning rate and weight decay too; a stage that begins from another's checkpoint has
    # its own.
    settings = [_settings(group) for group in engine.optimizer.param_groups]
    with tensors_only(folder):
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
        return
    _follow_schedule(engine)
    # Random states belong to a rank. On another number of ranks they are drawn from the seed again.
    if state.ranks == stage.world:
        restore_random_states(load_tensors(folder / random_file(dist.get_rank())))


def _follow_schedule(engine: deepspeed.DeepSpeedEngine) -> None:
    """Set the learning rate of the next step: the one in the checkpoint is of the run's length at that time."""
    scheduler = engine.lr_scheduler
    groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, peak, factor in groups:
        group["lr"] = peak * factor(scheduler.last_epoch)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _step_folders(run_dir: Path) -> list[Path]:
    """Return everything that is named like a checkpoint, newest first."""
    folder = run_dir / CHECKPOINTS
    try:
        named = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}",
            key="train.run_dir",
            remedy="repair it, or choose another run_dir",
        ) from None
    steps = [(int(match[1]), path) for match, path in named if match]
    return [path for _, path in sorted(steps, reverse=True)]


def _complete_steps(run_dir: Path) -> list[int]:
    return [manifest.step for _, manifest in survey(run_dir)[0]]
