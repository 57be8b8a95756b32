"""Saves that fail, saves in the background, and two runs in one folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from unittest import mock

import psutil
import pytest
import torch
from deepspeed.constants import default_pg_timeout
from safetensors.torch import load_file

from ds_fp8.config.errors import UserError
from ds_fp8.train import load_stage, result, saving, train
from ds_fp8.train.checkpoints import steps_in
from ds_fp8.train.run_folder import lock
from ds_fp8.train.saving import checkpoint_files, host_copy
from tests.refusals import refused
from tests.train.conftest import ROOT

MAX_FILE_BYTES = 400_000  # Less than an optimizer's shard of the tiny model takes, more than any other file


def run(file: str, overrides: list[str], failing: bool = False, undeletable: str = "") -> tuple[str, str]:
    """Train on this rank, with validation losses that rise; returns the error it ended in, and what it printed.

    Where it is `failing` the disk is full at the first save, and refuses large files from then on. The folder
    `undeletable` cannot be deleted, as one that another user protects.
    """
    stage = load_stage(file, overrides)
    usage, times = shutil.disk_usage, []

    def full_once(path):
        times.append(path)
        return usage(path)._replace(free=1000) if len(times) == 1 else usage(path)

    rmtree = shutil.rmtree

    def not_this(path, *more, **options):
        if str(path).endswith(undeletable):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        rmtree(path, *more, **options)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.ExitStack() as failures:
            failures.enter_context(
                mock.patch("ds_fp8.train.evaluation.validation_loss", side_effect=itertools.count(1.0))
            )
            if failing:
                resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, before[1]))
                failures.enter_context(mock.patch.object(shutil, "disk_usage", full_once))
            if undeletable:
                failures.enter_context(mock.patch.object(shutil, "rmtree", not_this))
            train(stage)
    except UserError as error:
        return str(error), said.getvalue()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", said.getvalue()


def test_saves_that_fail_leave_the_last_good_one_and_the_run_goes_on(tiny, write, ranks, tmp_path):
    """And the weights are those of a run that nothing happened to, saved in the background or not."""
    tiny["fp8"] = {"enabled": False}
    tiny["train"]["schedule"] = {"type": "constant", "warmup": 0}
    tiny["train"] |= {"steps": 3, "save_every": 1, "keep_last": 1, "eval_every": 1, "max_failed_saves": 2}
    file = str(write(tiny))

    def go(name: str, *overrides: str, failing: bool = False, undeletable: str = "") -> tuple[list[str], str]:
        """Return the errors by rank, and what rank 0 printed."""
        ends = ranks(2, run, file, [f"train.run_dir={tmp_path / name}", *overrides], failing, undeletable)
        return [error for error, _ in ends], ends[0][1]

    errors, said = go("whole", "train.keep_best=true", undeletable="step_2.deleted")
    assert errors == ["", ""]
    assert steps_in(tmp_path / "whole") == [1, 3]  # the best and the last
    assert "step 3 is saved, but a later part of saving failed: Permission denied" in said
    assert "was not saved" not in said
    folder = tmp_path / "cut"
    assert go("cut", "train.steps=1")[0] == ["", ""]
    errors, said = go("cut", failing=True)
    assert all("2 checkpoints in a row could not be saved" in error for error in errors), errors
    assert all("train.max_failed_saves" in error for error in errors)
    assert steps_in(folder) == [1]
    assert not list((folder / "checkpoints").glob("*.part"))
    assert "step 2 was not saved: rank 0" in said
    assert "GiB are needed, and 0.00 GiB are free" in said
    assert "step 3 was not saved: rank" in said
    assert os.strerror(errno.EFBIG) in said
    assert "The run continues" in said
    errors, said = go("cut", "train.steps=2", failing=True)
    assert all("step 2, the last, was not saved: rank 0" in error for error in errors), errors
    assert all("goes on from step 1" in error for error in errors)
    assert "The run continues" not in said
    assert json.loads((folder / "result.json").read_text())["steps"] == 1

    # What is in the way of a save is replaced, and what a link leads to is left alone.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    (folder / "checkpoints" / "step_2.part").write_text("")
    (folder / "checkpoints" / "step_3.part").symlink_to(tmp_path / "elsewhere")
    assert go("cut", "train.async_save=true")[0] == ["", ""]
    assert steps_in(folder) == [3]
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["mine"]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def run_slowly(file: str) -> list[int]:
    """Train with one file of the last rank, and the model of the first, later than the process group's timeout."""
    stage = load_stage(file)

    def with_timeout(*arguments, **options):
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
        return checkpoint_files(*arguments, **options)

    def late(rank: int, function):
        left = [4.5] if torch.distributed.get_rank() == rank else []

        def called(*arguments, **options):
            time.sleep(left.pop() if left else 0)
            return function(*arguments, **options)

        return called

    try:
        with (
            mock.patch.object(saving, "checkpoint_files", with_timeout),
            mock.patch.object(saving, "save_file", late(1, saving.save_file)),
            mock.patch.object(result, "_write_model", late(0, result._write_model)),
        ):
            train(stage)
    finally:
        torch.distributed.distributed_c10d._set_pg_timeout(default_pg_timeout)
    return steps_in(stage.run_dir)


def test_a_save_that_takes_longer_than_the_timeout_of_the_process_group_ends_well(tiny, write, ranks):
    tiny["train"] |= {"steps": 2, "save_every": 1}
    assert ranks(2, run_slowly, str(write(tiny))) == [[1, 2]] * 2


def hold(run_dir) -> tuple[int, int]:
    """Start a process that holds the lock on a run folder; returns its id once it does, and what to close to end it."""
    (told, tell), (ended, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        lock(run_dir, print)
        os.write(tell, b"1")
        os.read(ended, 1)
        os._exit(0)
    os.close(ended)
    os.read(told, 1)
    return child, end


def test_a_second_run_in_the_folder_is_refused_and_the_first_named(tmp_path):
    child, end = hold(tmp_path / "run")
    with refused(f"in use by another run: process {child} on {os.uname().nodename}", "train.run_dir"):
        lock(tmp_path / "run", print)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(end)
    os.close(lock(tmp_path / "run", pytest.fail))  # what a killed run leaves behind does not count


def test_a_file_system_without_locks_says_so(tmp_path, monkeypatch):
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    said = []
    os.close(lock(tmp_path, said.append))
    assert "has no locks" in said[0]


def run_to(file: str, *overrides: str) -> None:
    train(load_stage(file, list(overrides)))


@pytest.mark.parametrize("stage", [3, 2])
def test_compact_checkpoints_go_on_on_another_number_of_ranks_as_others_do(tiny, write, ranks, tmp_path, stage):
    linears = {"preset": "coat", "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
    tiny["fp8"] |= linears if stage == 2 else {"preset": {"linear": "precise", "optimizer": "compact"}}
    tiny["zero_optimization"] |= {"stage": stage}
    tiny["train_batch_size"] = tiny.pop("gradient_accumulation_steps") * 4
    tiny["train"] |= {"schedule": {"type": "constant", "warmup": 0}, "eval_batches": 1}
    file = str(write(tiny))
    for name, compact in (("packed", "true"), ("expanded", "false")):
        settings = f"train.run_dir={tmp_path / name}", f"train.compact_checkpoints={compact}"
        ranks(2, run_to, file, "train.steps=2", *settings)
        ranks(1, run_to, file, "train.steps=3", *settings)
    packed, expanded = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("packed", "expanded"))
    assert all(torch.equal(packed[name], weight) for name, weight in expanded.items())
    files = [next((tmp_path / name).rglob("step_3/*optim_states.pt")) for name in ("packed", "expanded")]
    assert files[0].stat().st_size < 0.6 * files[1].stat().st_size


def state(seed: int, random_bytes: int) -> dict:
    torch.manual_seed(seed)
    return {
        "masters": [torch.randn(5), torch.randn(0), torch.randn(5).bfloat16()],
        "random": torch.randint(0, 255, (random_bytes,), dtype=torch.uint8),
        "moments": ({"exp_avg": torch.randn(5)}, torch.randn(7, 3)),
        "step": 3,
    }


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in inner for tensor in tensors(one)]


def test_copies_have_the_values_and_memory_of_their_own():
    original = state(0, 10)
    copied = host_copy(original)
    assert copied["step"] == 3
    assert [type(copied[name]) for name in original] == [type(part) for part in original.values()]
    for ours, theirs in zip(tensors(copied), tensors(original), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.numel() == 0 or ours.data_ptr() != theirs.data_ptr()


# ---------------------------------------------------------------- kills


def runs_in(folder) -> list[psutil.Process]:
    """Return the processes that were started with `folder` as TMPDIR, and theirs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # ended since it was listed, or another user's
            continue
    return found


@pytest.mark.slow
def test_killed_runs_end_as_undisturbed_ones(tmp_path):
    """Of ranks and of whole runs, one kill inside a save: equal weights, equal losses of every step, ever."""
    command = [sys.executable, str(ROOT / "scripts/faults/kills.py"), "--presets", "coat", "--by-launcher", "0"]
    options = ["--steps", "8", "--seed", "18", "--kills", "3", "--in-save", "1", "--set", "keep_last=1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kills, in_saves, runs = map(int, re.search(r"(\d+) kills .* (\d+) inside a save, (\d+) runs", done.stdout).groups())
    assert kills >= 3
    assert in_saves >= 1
    assert re.search(r"resumed from steps \[\d", done.stdout)
    assert done.stdout.count(": equal") == runs >= 1
    assert runs_in(tmp_path) == []
