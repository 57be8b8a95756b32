"""Resume a run: find the newest checkpoint that is whole, and the state to begin with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.schema import shown
from ds_fp8.engine.sequence_parallel import KEY
from ds_fp8.train.checkpoints import CHECKPOINTS, CONFIG, METRICS, MODEL, RESULT, SAVED, RunState, survey
from ds_fp8.train.durable import flush
from ds_fp8.train.manifest import Damaged, Manifest
from ds_fp8.train.processes import on_first_rank
from ds_fp8.train.run_files import Invalid, Result, SavedStep, read_checked, read_lines, read_object
from ds_fp8.train.same_run import BATCH_KEYS, changed_keys, check_same_run, fixed_keys
from ds_fp8.train.stage import Stage


def inspect_run(stage: Stage, rejected: Container[Path] = ()) -> RunState:
    """Return the state found in the stage's run folder, or the one that `train.resume` names. Writes nothing.

    Args:
        stage: the stage to start.
        rejected: checkpoints to pass over.

    Raises:
        UserError: the folder belongs to another run, this run cannot go on from it, or all its checkpoints are damaged.
    """
    run_dir = stage.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder", key="train.run_dir", remedy="choose another run_dir")
    for file in (run_dir / name for name in (CONFIG, METRICS, RESULT, SAVED)):
        if file.is_dir() and not file.is_symlink():  # found now, and not once a file is to be written there
            raise UserError(
                f"{file} is a folder, and a run writes a file there", key="train.run_dir", remedy=f"move {file} away"
            )
    whole, bad = _survey(stage)
    # Newest first, as `survey` lists them.
    found = next(((folder, manifest) for folder, manifest in whole if folder not in rejected), None)
    # What a start wrote that failed before its first checkpoint does not count.
    # The manifest is covered by a checksum; config.json beside it may have been edited.
    stored = found[1].config if found else _object_or_none(run_dir / CONFIG)
    if stored is None:
        foreign = [name for name in (CHECKPOINTS, METRICS, MODEL, RESULT, SAVED) if os.path.lexists(run_dir / name)]
        if os.path.lexists(run_dir / CONFIG):
            raise UserError(
                f"{run_dir / CONFIG} is damaged, and no checkpoint holds a copy of it",
                key="train.run_dir",
                remedy="restore it from a copy, or choose another run_dir",
            )
        if foreign:
            raise UserError(
                f"{run_dir} holds {foreign[0]} but no {CONFIG}: it is not the folder of a run",
                key="train.run_dir",
                remedy="choose another run_dir",
            )
        return _branch(stage, rejected)
    if found:
        _check_shared(stage, found[1])
    # Other ranks need other numbers for the same batch, which is checked as a whole.
    free = BATCH_KEYS if found and found[1].ranks != stage.world else ()
    check_same_run(stage, stored, free)
    # A result is checked against the newest checkpoint: one of an earlier length of the run does not count.
    result, _ = _result(stage, found[1].step if found else None)
    if result is not None:
        return RunState(result["steps"], result=result)
    if found is None:
        _refuse_to_start_anew(run_dir, bad)
        return _branch(stage, rejected)
    folder, manifest = found
    state = _state(folder, manifest, stage, manifest.step)
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


def settle(stage: Stage, say: Callable[[str], None]) -> RunState:
    """Return the state of `inspect_run` after checking every file of its checkpoint. Collective.

    Each rank reads a part of it. A damaged checkpoint of the run is named and renamed to step_N.damaged.

    Raises:
        UserError: there are checkpoints, and none is whole.
    """
    rejected: set[Path] = set()
    # One rank looks and all get its answer: with a shared folder two hosts may see different states of it.
    bad = on_first_rank(lambda: _survey(stage)[1])
    if dist.get_rank() == 0:
        rejected |= {_set_aside(folder, reason, say) for folder, reason in bad.items()}
    # Each turn rejects one checkpoint more, and ends at the first that is whole or where none is left.
    while True:
        state = on_first_rank(lambda: inspect_run(stage, rejected))
        if state.checkpoint is None:
            return state
        # All ranks get the same list, and take the same turn.
        problems = _problems_anywhere(state.checkpoint, say)
        if not problems:
            if state.step and dist.get_rank() == 0:
                for warning in _warnings(stage, state):
                    say(f"WARNING: {warning}")
            return state
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if dist.get_rank() == 0:
            if state.step:
                rejected.add(_set_aside(state.checkpoint, problems[0] + more, say))
            else:  # another run's: not ours to rename
                say(f"checkpoint {state.checkpoint} is damaged: {problems[0]}{more}")
                rejected.add(state.checkpoint)


def _survey(stage: Stage) -> tuple[list[tuple[Path, Manifest]], dict[Path, str]]:
    """Return the checkpoints in the run folder that are this run's and sound, and what is wrong with each other one.

    Where nothing in the folder is of this stage all its checkpoints are taken for one run, which is not to be touched.
    """
    whole, bad = survey(stage.run_dir)
    reasons = {folder: _unlike(stage, manifest) for folder, manifest in whole}
    stored = _object_or_none(stage.run_dir / CONFIG)
    # Another number of ranks may have changed the batch keys: they do not make it another run.
    ours = stored is not None and not changed_keys(stage, stored, BATCH_KEYS)
    if ours or not all(reasons.values()):
        bad |= {folder: reason for folder, reason in reasons.items() if reason}
        whole = [(folder, manifest) for folder, manifest in whole if not reasons[folder]]
    return whole, bad


def _unlike(stage: Stage, manifest: Manifest) -> str | None:
    """Return why a checkpoint with this manifest is not one of the stage's run, or None."""
    alike = manifest.ranks == stage.world
    if changed := changed_keys(stage, manifest.config, () if alike else BATCH_KEYS):
        return f"it is of another run, with {changed[0]} = {shown(fixed_keys(manifest.config, ()).get(changed[0]))}"
    if alike and manifest.global_batch != stage.global_batch:
        return f"it records batches of {manifest.global_batch}, and its configuration of {stage.global_batch}"
    return None


def _result(stage: Stage, saved: int | None) -> tuple[dict[str, Any] | None, str | None]:
    """Return the stage's result where the run has finished, and what is wrong with a result that does not count.

    Args:
        stage: the stage to start.
        saved: steps done at the newest checkpoint, None without one.
    """
    again = "it is written again"
    try:
        result = read_checked(stage.run_dir / RESULT, Result)
    except Invalid as error:
        return None, f"{RESULT} {error}: {again}"
    length = ("steps", stage.train.steps) if stage.train.steps else ("epochs", stage.train.epochs)
    if result is None or result.get(length[0]) != length[1]:
        return None, None
    if saved is not None and saved < result["steps"]:
        return None, f"{RESULT} records {result['steps']} steps, and the newest checkpoint of {saved}: {again}"
    return result, None


def _branch(stage: Stage, rejected: Container[Path]) -> RunState:
    """Return the state to begin with: nothing, or that of the checkpoint which `train.resume` names."""
    if stage.train.resume is None:
        return RunState()
    named = Path(stage.train.resume).expanduser()
    if os.path.isdir(named / CHECKPOINTS):  # False for a name that no folder can have
        whole, damaged = survey(named)
        found = [(folder, manifest) for folder, manifest in whole if folder not in rejected]
    else:
        found, damaged = [], {}
        if os.path.isdir(named):
            try:
                found = [(named, Manifest.read(named))] if named not in rejected else []
            except Damaged as error:
                damaged[named] = str(error)
    if not found:
        reasons = "".join(f"; {folder.name}: {reason}" for folder, reason in damaged.items())
        raise UserError(
            f"{clipped(str(named))} holds no complete checkpoint{reasons}",
            key="train.resume",
            remedy=f"give a run_dir with checkpoints, or one of them: run_dir/{CHECKPOINTS}/step_N",
        )
    return _state(*found[0], stage, 0)


def _state(folder: Path, manifest: Manifest, stage: Stage, step: int) -> RunState:
    """Return the state of a checkpoint of this run, or at step 0 of another. Raises UserError for other batches."""
    batch = manifest.global_batch
    if batch != stage.global_batch:
        raise UserError(
            f"the checkpoint {folder} was made with batches of {batch}, and this stage has {stage.global_batch}: its "
            "place in the data would be lost",
            key="train_batch_size",
            remedy=f'"train_batch_size": {batch}, with a micro-batch that divides it over {stage.world} ranks',
        )
    return RunState(step, manifest.data_step, manifest.losses, folder, manifest.ranks)


def _refuse_to_start_anew(run_dir: Path, damaged: Mapping[Path, str]) -> None:
    """Raise UserError where a run without a good checkpoint has had one."""
    aside = [path.name for path in (run_dir / CHECKPOINTS).glob("step_*.damaged")]
    reasons = [f"{folder.name}: {reason}" for folder, reason in damaged.items()] + aside
    # A run that was ended before its first save left metrics as well.
    saved = [record["step"] for record in read_lines(run_dir / METRICS)[0] if record.get("saved")]
    traces = [
        f"the checkpoints that {name} records are missing"
        for name in (SAVED, RESULT, MODEL)
        if os.path.lexists(run_dir / name)
    ]
    traces += [f"step {max(saved)}, which {METRICS} records, is missing"] if saved else []
    reasons = reasons or traces[:1]
    if reasons:
        raise UserError(
            f"no checkpoint of the run in {run_dir} is good ({'; '.join(reasons)})",
            key="train.run_dir",
            remedy=f"restore a checkpoint into {run_dir / CHECKPOINTS}, or start again in another run_dir",
        )


def _set_aside(folder: Path, reason: str, say: Callable[[str], None]) -> Path:
    """Rename a damaged checkpoint, where that is allowed, and say why; returns its folder as it was named."""
    aside = folder.with_name(f"{folder.name}.damaged")
    number = 2
    # Earlier damage stays where it is, for whoever wants to look at it.
    while aside.exists():
        aside, number = folder.with_name(f"{folder.name}.damaged-{number}"), number + 1
    done = f"set aside as {aside.name}"
    try:
        folder.rename(aside)
        flush(folder.parent)
    except OSError as error:
        done = f"it cannot be renamed ({error.strerror})"
    say(f"WARNING: checkpoint {folder.name} is damaged: {reason}; {done}")
    return folder


def _warnings(stage: Stage, state: RunState) -> list[str]:
    """Return what else in the folder of a run that goes on from `state` is not as it was left."""
    found = [_result(stage, state.step)[1]]
    try:
        newest = (read_checked(stage.run_dir / SAVED, SavedStep) or {}).get("step", 0)
        if newest > state.step:
            found.append(f"the run goes back to step {state.step}, although step {newest} was saved")
    except Invalid as error:
        found.append(f"{SAVED} {error}")
    records, mistakes = read_lines(stage.run_dir / METRICS)
    if mistakes:
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        found.append(f"{METRICS}: {mistakes[0]}{more}; what is damaged is left out of the result")
    # The last line of a step counts: after a rollback the same step is logged once more.
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    logged = [step for step in losses if step <= state.step]
    here, there = losses.get(state.step), state.losses[-1] if state.losses else None
    if 1 not in logged or max(logged) <= state.step - stage.train.log_every:
        found.append(f"{METRICS} lacks steps up to {state.step}: the result's figures are without them")
    elif None not in (here, there) and here != there:
        found.append(
            f"{METRICS} is of another run: the loss of step {state.step} was {there:.6g}, and not {here:.6g}. "
            "The result's figures mix both"
        )
    return [warning for warning in found if warning]


def _problems_anywhere(folder: Path, say: Callable[[str], None]) -> list[str]:
    """Read the whole checkpoint, each rank a part, and return on all ranks what is wrong with it. Collective."""
    started = time.monotonic()
    try:
        manifest = Manifest.read(folder)
        mine = manifest.missing_files() or manifest.problems(
            folder, manifest.names_for(dist.get_rank(), dist.get_world_size())
        )
    except Damaged as error:
        mine = [str(error)]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    problems = [problem for part in found for problem in part]
    if not problems:
        seconds, size = time.monotonic() - started, manifest.bytes / 2**30
        say(
            f"checkpoint {folder.name}: {len(manifest.files)} files, {size:.2f} GiB, "
            f"all as they were saved ({seconds:.1f} s)"
        )
    return problems


def _object_or_none(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in `file`, None where there is none."""
    try:
        return read_object(file)
    except (FileNotFoundError, Invalid):
        return None


def _check_shared(stage: Stage, manifest: Manifest) -> None:
    """Raise UserError where ranks that share sequences would go on in another number, which nobody has tried."""
    if stage.shared_by > 1 and manifest.ranks != stage.world:
        raise UserError(
            f"the run in {stage.run_dir} shares sequences and was saved by {manifest.ranks} ranks, not {stage.world}",
            key=KEY,
            remedy=f"{manifest.ranks} ranks, or another train.run_dir",
        )
