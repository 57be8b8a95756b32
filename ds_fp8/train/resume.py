"""Resume a run: find the newest checkpoint that is whole, and load it, on any number of ranks."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.files import remove
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.config.sequence_parallel import KEY
from ds_fp8.export.on_all_ranks import on_all_ranks
from ds_fp8.monitor.records import layers_in_bf16
from ds_fp8.optim.moments import Moment
from ds_fp8.train.checkpoints import Damaged, Manifest, RunState, folder_of, problems_of, steps_in
from ds_fp8.train.loop import Callback, Run
from ds_fp8.train.processes import on_first_rank
from ds_fp8.train.run_folder import (
    BATCH_KEYS,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    MODEL,
    RESULT,
    Invalid,
    check_same_run,
    read_object,
)
from ds_fp8.train.stage import Lora, Stage
from ds_fp8.zero.deepspeed.checkpoints import load_tensors, tensors_only


def inspect_run(stage: Stage) -> RunState:
    """Return the state in the stage's run folder, or the one that `train.resume` names. Writes nothing."""
    run_dir = stage.run_dir
    folder = run_dir / CHECKPOINTS
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is not a folder", key="train.run_dir", remedy="choose another run_dir")
    newest = _newest(run_dir, "train.run_dir")
    # A start that failed before its first checkpoint may have rewritten config.json; the manifest has a checksum.
    stored = newest[1].config if newest else _object_or_none(run_dir / CONFIG)
    if stored is None:
        foreign = [name for name in (CONFIG, CHECKPOINTS, METRICS, MODEL, RESULT) if os.path.lexists(run_dir / name)]
        if foreign:
            why = f"{foreign[0]} is damaged" if foreign[0] == CONFIG else f"it holds {foreign[0]} but no {CONFIG}"
            raise UserError(
                f"{run_dir} is not the folder of a run: {why}", key="train.run_dir", remedy="choose another run_dir"
            )
        return _branch(stage)
    # Other ranks need other numbers for the same batch, which is checked as a whole.
    check_same_run(stage, stored, BATCH_KEYS if newest and newest[1].ranks != stage.world else ())
    result = _object_or_none(run_dir / RESULT) or {}
    length = "steps" if stage.train.steps else "epochs"
    if result.get(length) == getattr(stage.train, length) and type(result.get("steps")) is int:
        return RunState(result["steps"], result=result)
    if newest is None:
        return _branch(stage)
    state = _state(*newest, stage, newest[1].step)
    check_length(stage, state)
    return state


def check_length(stage: Stage, state: RunState) -> None:
    if stage.train.steps is not None and state.step > stage.train.steps:
        raise UserError(
            f"the run in {stage.run_dir} has already done {state.step} steps, and the stage has {stage.train.steps}",
            key="train.steps",
            remedy=f"at least {state.step}, or another run_dir",
        )


def check_data(stage: Stage, state: RunState, data: list[dict[str, Any]]) -> None:
    """Refuse to go on with other data, by the identity of each source: a run's place in them, its splits, would differ.

    Another run's state (train.resume) may go on with any data.
    """
    if not state.step or not state.data:
        return

    def described(source: dict[str, Any]) -> str:
        return f"{source['tokens']:,} tokens in {source['examples']:,} examples (digest {source['digest'][:8]})"

    several = stage.data.sources is not None
    for number, (before, now) in enumerate(zip(state.data, data, strict=True)):
        if {**before, "path": ""} != {**now, "path": ""}:
            raise UserError(
                f"{now['path']} has changed since the run in {stage.run_dir} read it: it gave {described(before)}, "
                f"and now {described(now)}",
                key=f"data.sources[{number}].path" if several else "data.path",
                remedy="restore the file to resume; to train on other data choose another train.run_dir, with "
                f'"resume": "{stage.run_dir}" to keep weights and optimizer',
            )


def settle(stage: Stage, say: Callable[[str], None]) -> RunState:
    """Return the state of `inspect_run` after checking every file of its checkpoint, each rank a part. Collective."""
    # One rank looks and all get its answer: with a shared folder two hosts may see different states of it.
    state = on_first_rank(lambda: inspect_run(stage))
    if state.checkpoint is not None:
        started = time.monotonic()
        found = on_all_ranks(partial(problems_of, state.checkpoint, dist.get_rank(), dist.get_world_size()))
        if problems := [problem for part in found for problem in part]:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise _damaged(state.checkpoint, problems[0] + more, "train.run_dir" if state.step else "train.resume")
        _check_base(stage, state)
        further = f"; goes on behind step {state.step} of {stage.train.steps}" if state.step else ""
        say(f"checkpoint {state.checkpoint.name}: all as it was saved ({time.monotonic() - started:.1f} s){further}")
    return state


def _check_base(stage: Stage, state: RunState) -> None:
    """Refuse a checkpoint without frozen weights where the files that these are read from are not as they were."""
    base = state.base
    changed = sorted(name for name, digest in base.items() if stage.base.get(name) != digest)
    if changed or (base and stage.base.keys() - base.keys()):
        raise UserError(
            f"{state.checkpoint} holds adapters alone, and the weights that they were trained beside have changed "
            f"({', '.join(changed[:3]) or 'there are more files'})",
            key="train.init_from" if stage.train.init_from else "model.path",
            remedy="restore the model's files, or choose another train.run_dir",
        )


def check_model(state: RunState, model: nn.Module) -> None:
    """Refuse another run's checkpoint of another model: one without a trained parameter, or with what is not here.

    By the shapes in the files, for the same model may be described in several ways.
    """
    if state.step:  # of this run itself
        return
    folder = state.checkpoint
    content = load_tensors(min(folder.glob("*_model_states.pt")))
    groups = content.get("param_shapes") or [{name: weight.shape for name, weight in content["module"].items()}]
    stored = {name: tuple(shape) for group in groups for name, shape in group.items()}
    here = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters() if p.requires_grad}
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    problems = [f"{name} is not in it" for name in here if name not in stored]
    problems += [f"it has {name}, and this model has not" for name in stored if name not in known]
    problems += [
        f"{name} has the shape {stored[name]} in it, and {shape} here"
        for name, shape in here.items()
        if stored.get(name, shape) != shape
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"the checkpoint {folder} is of another model: {problems[0]}{more}",
            key="train.resume",
            remedy="the model of that run, or a checkpoint of this stage's",
        )


def _newest(run_dir: Path, key: str) -> tuple[Path, Manifest] | None:
    steps = steps_in(run_dir)
    return _sound(folder_of(run_dir, steps[-1]), key) if steps else None


def _sound(folder: Path, key: str) -> tuple[Path, Manifest]:
    try:
        return folder, Manifest.read(folder)
    except Damaged as error:
        raise _damaged(folder, str(error), key) from None


def _damaged(folder: Path, reason: str, key: str) -> UserError:
    return UserError(
        f"the checkpoint {folder} is damaged: {reason}",
        key=key,
        remedy="restore it, or remove it: the run then goes on from the checkpoint before",
    )


def _branch(stage: Stage) -> RunState:
    if stage.train.resume is None:
        return RunState()
    named, found = Path(stage.train.resume).expanduser(), None
    if named.name == CHECKPOINTS and steps_in(named.parent):
        named = named.parent
    if os.path.isdir(named / CHECKPOINTS):  # False for a name that no folder can have
        found = _newest(named, "train.resume")
    elif os.path.isdir(named):
        found = _sound(named, "train.resume")
    if found is None:
        raise UserError(
            f"{clipped(str(named))} holds no checkpoint",
            key="train.resume",
            remedy=f"give a run_dir with checkpoints, or one of them: run_dir/{CHECKPOINTS}/step_N",
        )
    _check_fits(*found, stage)
    return _state(*found, stage, 0)


def _check_fits(folder: Path, manifest: Manifest, stage: Stage) -> None:
    """Refuse a checkpoint of another run whose files are of another kind, or are for other parameters, than here."""
    weights_alone = "or train.init_from, with the folder of the finished run, which takes its weights alone"
    before, now = Configuration(manifest.config).stage, stage.configuration.stage
    # Stages 1 and 2 divide the optimizer's state in the same way.
    if before != now and {before, now} != {1, 2}:
        raise UserError(
            f"the checkpoint {folder} is of ZeRO stage {before}, and this stage trains in ZeRO stage {now}",
            key="zero_optimization.stage",
            remedy=f'"zero_optimization": {{"stage": {before}}}, {weights_alone}',
        )
    lora = manifest.config["train"].get("lora")
    before, now = _adapters(None if lora is None else Lora(**lora)), _adapters(stage.train.lora)
    if before != now:
        raise UserError(
            f"the checkpoint {folder} is of a run that trains {before}, and this stage trains {now}",
            key="train.lora",
            remedy=f"train.lora as in that run, {weights_alone}",
        )


def _adapters(lora: Lora | None) -> str:
    """Return in words which parameters are trained."""
    if lora is None:
        return "all weights"
    targets = lora.targets if isinstance(lora.targets, str) else ", ".join(sorted(lora.targets))
    return f"adapters of rank {lora.r} on {targets}"


def _state(folder: Path, manifest: Manifest, stage: Stage, step: int) -> RunState:
    """Return the state of a checkpoint of this run, or at step 0 of another, if this stage can go on from it."""
    batch, ranks = manifest.global_batch, manifest.ranks
    if batch != stage.global_batch:
        raise UserError(
            f"the checkpoint {folder} was made with batches of {batch}, and this stage has {stage.global_batch}: its "
            "place in the data would be lost",
            key="train_batch_size",
            remedy=f'"train_batch_size": {batch}, with a micro-batch that divides it over {stage.world} ranks',
        )
    masters = parse_fp8(manifest.config).optimizer.master
    other_shards = ranks != stage.world or masters != stage.fp8.optimizer.master
    if other_shards:
        same = f"{ranks} ranks, and masters, as before"
        if stage.train.lora and stage.train.resume and manifest.in_shards and not manifest.base:
            # DeepSpeed's universal checkpoints have no frozen weights: those of this stage's model would stay.
            raise UserError(
                f"{folder} holds frozen weights, which cannot be divided over {stage.world} ranks, or other sub-groups",
                key="train.resume",
                remedy=same,
            )
        if stage.shared_by > 1:
            raise UserError(
                f"{folder} was saved by {ranks} ranks that share sequences, not {stage.world}", key=KEY, remedy=same
            )
    return RunState(
        step, manifest.data_step, manifest.losses, folder, other_shards, manifest.data, manifest.base,
        records=manifest.records if step else 0,
    )  # fmt: skip


def _object_or_none(file: Path) -> dict[str, Any] | None:
    try:
        return read_object(file)
    except (FileNotFoundError, Invalid):
        return None


class Resume(Callback):
    """Loads the checkpoint that a run begins from."""

    def on_start(self, run: Run) -> None:
        if run.engine.fp8.health is not None:
            known = dict(run.engine.module.named_modules())
            layers = [layer for layer in layers_in_bf16(run.log.records) if layer in known]
            # Before the checkpoint is loaded: it restores the state of a model in which these layers are BF16 already.
            run.engine.fp8.health.move_to_bf16(layers)
        if run.saved.checkpoint is not None:
            load(run.engine, run.stage, run.saved)
            if not run.step:
                run.engine.skipped_steps = 0  # those before were the other run's


def load(engine: deepspeed.DeepSpeedEngine, stage: Stage, state: RunState) -> None:
    """Restore model and optimizer from the checkpoint of `state`, and of this stage's own the schedule. Collective.

    At step 0 it is another stage's: the engine keeps its own learning rate, weight decay and the like.
    """
    folder, own = state.checkpoint, state.step > 0
    # DeepSpeed's load replaces learning rate and weight decay too.
    settings = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    with tensors_only(folder):
        # Without a file of optimizer states a rank (ZeRO stage 0) every rank loads the same, however many there are.
        if not state.other_shards or not any(folder.glob("*_optim_states.pt")):
            loaded, _ = engine.load_checkpoint(
                str(folder.parent),
                tag=folder.name,
                load_module_strict=not stage.base,  # frozen weights are in no checkpoint
                load_lr_scheduler_states=own,
            )
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
    # The learning rate of the next step: the one in the checkpoint is of the run's length at that time.
    scheduler = engine.lr_scheduler
    for group, peak, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = peak * factor(scheduler.last_epoch)


def load_on_other_ranks(
    engine: deepspeed.DeepSpeedEngine, folder: Path, scratch: Path, *, with_schedule: bool
) -> str | None:
    """Load a checkpoint by way of DeepSpeed's universal format; returns what engine.load_checkpoint does. Collective.

    Needs as much room in `scratch` as the checkpoint takes, for the time of loading: all ranks must see it.
    """
    universal = scratch / "universal"

    def convert() -> None:
        try:
            remove(universal)
            _write_universal(folder, universal / folder.name)
        except OSError as error:
            shutil.rmtree(universal, ignore_errors=True)
            raise UserError(
                f"{folder} could not be rewritten for {dist.get_world_size()} ranks: {error.strerror or error}",
                key="train.run_dir",
                remedy=f"make room in {scratch} for as much again, or train on as many ranks as before",
            ) from error

    on_first_rank(convert)
    # An engine loads either kind of checkpoint as its configuration says; later ones of this run are of the other kind.
    engine.load_universal_checkpoint = lambda: True
    try:
        loaded, _ = engine.load_checkpoint(
            str(universal), tag=folder.name, load_module_strict=False, load_lr_scheduler_states=with_schedule
        )
    finally:
        del engine.load_universal_checkpoint
    # No rank may still read the folder when rank 0 removes it.
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(universal)
    return loaded


def _write_universal(folder: Path, universal: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    options = Namespace(
        input_folder=str(folder),
        output_folder=str(universal),
        # One worker each: the extraction of several would fork a process that has threads and a CUDA context.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # stages 1 and 2 write none of what tensor parallelism would need
    )
    universal.mkdir(parents=True)
    load = torch.load
    # DeepSpeed divides FP32 moments alone; written to files first they would take 12 bytes a parameter.
    torch.load = lambda *args, **options: _without_packed_moments(load(*args, **options))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(options)
    finally:
        torch.load = load


def _without_packed_moments(state: Any) -> Any:
    """Return what a file holds with the moments of a compact checkpoint dequantized, as any other holds them."""
    if isinstance(state, dict) and {"codec", "codes"} <= state.keys():
        return Moment.unpacked(state).dequantize()
    if isinstance(state, dict):
        return {key: _without_packed_moments(value) for key, value in state.items()}
    return [*map(_without_packed_moments, state)] if type(state) is list else state
