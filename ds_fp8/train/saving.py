"""Save checkpoints: write one beside, read it back, rename it, and only then delete older ones.

    step_N.part/...            every rank writes its files and flushes them
    step_N.part/manifest.json  rank 0
                               every rank reads its files back from the disk, as a resume does
    step_N                     renamed
    latest                     names it

A save that fails on one rank fails on all, removes what it wrote and leaves the checkpoints before it.
"""

from __future__ import annotations

import copy
import platform
import shutil
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

import ds_fp8
from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import flush, remove, write_atomically
from ds_fp8.config.log import logger
from ds_fp8.export.on_all_ranks import on_all_ranks
from ds_fp8.train import checkpoints
from ds_fp8.train.checkpoints import Manifest, RunState, SavedFile, problems_of, save_file
from ds_fp8.train.loop import Callback, Run
from ds_fp8.train.run_folder import CHECKPOINTS, warn_unwritten
from ds_fp8.train.stage import Stage
from ds_fp8.zero.deepspeed.checkpoints import checkpoint_files, copy_recovery_scripts

_OF_DISK = "train.run_dir"  # Key of what a run goes on after, up to train.max_failed_saves times in a row


def versions() -> dict[str, str]:
    others = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": platform.python_version(), "ds_fp8": ds_fp8.__version__, **others}


def host_copy(state: Any) -> Any:
    """Return nested dicts, lists and tuples with copies of their tensors in host memory, pinned for an accelerator's.

    torch keeps pinned memory that is given back for the next save: pinning it again would take seconds.
    """
    if isinstance(state, torch.Tensor):
        copied = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.device.type != "cpu")
        return copied.copy_(state.detach(), non_blocking=True)
    if isinstance(state, dict):
        return type(state)((key, host_copy(inner)) for key, inner in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(host_copy, state))
    return copy.copy(state)


class Checkpoint(Callback):
    """Saves the checkpoints of a run, one at a time. Making one is collective."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self._rank = torch.distributed.get_rank()
        self._thread: threading.Thread | None = None
        # A thread must not share the group that training sends through: its messages would mix with the step's.
        in_thread = stage.train.async_save
        self._group = torch.distributed.new_group(backend="gloo", timeout=watchdog.LONGEST_WAIT) if in_thread else None
        self._saved: RunState | None = None
        self._error: Exception | None = None
        self._failed_saves = 0
        self._failure: UserError | None = None  # Why the save that `finish` waited for last failed, if it did

    def on_start(self, run: Run) -> None:
        # A stop between checkpoint and the files that name it leaves those behind: they are written again.
        if run.step and self._rank == 0:
            with warn_unwritten("which checkpoint is the latest"):
                self._complete(run.step, run.log.by_step("validation_loss"))

    def on_step(self, run: Run) -> None:
        if run.is_due(self._stage.train.save_every):
            self.save(run)

    def on_interrupt(self, run: Run) -> None:
        self.save(run)
        self.finish(run)
        done = "saved" if run.saved.step == run.step else "not saved"
        logger.info(f"interrupted: {run.step} steps are done and {done}; the same command resumes")

    def on_end(self, run: Run) -> None:
        self.finish(run)
        if self._failure is not None:
            raise UserError(
                f"step {run.step}, the last, was not saved: {self._failure.problem}",
                key="train.run_dir",
                remedy="make room or repair the file system; the same command goes on from "
                + (f"step {run.saved.step}" if run.saved.step else "the beginning"),
            )

    def save(self, run: Run) -> None:
        """Save the step, or begin to where saving is asynchronous; `finish` says how that went."""
        self.finish(run)
        if run.step <= run.saved.step:
            return
        parts = {key: value for callback in run.callbacks for key, value in callback.state(run).items()}
        state = RunState(run.step, run.data_step, data=run.data.identity, **parts)
        # Tensors in here are the ones in use. Written at once below, or copied first: the next step changes them.
        client = {"step": state.step}
        files = checkpoint_files(self._engine, f"step_{state.step}", client, without_frozen=bool(self._stage.base))
        # The checkpoint of the lowest of these is kept where the stage wants that.
        losses = run.log.by_step("validation_loss")
        if self._group is None:
            self._write(files, state, losses)
            self.finish(run)
            return
        arguments = (host_copy(files), state, losses)
        if get_accelerator().device_name() != "cpu":
            # One wait for all copies: behind it the next step may overwrite what was copied, and the thread may read
            # the copies.
            get_accelerator().current_stream().synchronize()
        # A daemon: a rank that is told to end does not wait for a disk that hangs.
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, run: Run) -> None:
        """Wait for the save that was begun last, if any: `run.saved` is what it saved, or as before where it failed."""
        watchdog.beat("saving a checkpoint", slow=True)
        if self._thread is not None:
            # On every rank at the same step, for what follows on success or failure is collective.
            self._thread.join()
            self._thread = None
        saved, error = self._saved, self._error
        self._saved = self._error = None
        if saved is not None:
            self._failed_saves, self._failure, run.saved = 0, None, saved
            run.log.append({"step": saved.step, "saved": True})
        elif isinstance(error, UserError) and error.key == _OF_DISK:
            self._failed_saves, self._failure = self._failed_saves + 1, error
            # Training on without a checkpoint would lose more at the next failure than it gains until then.
            if self._failed_saves >= self._stage.train.max_failed_saves:
                raise UserError(
                    f"{self._failed_saves} checkpoints in a row could not be saved, the last one because "
                    f"{error.problem}",
                    key="train.max_failed_saves",
                    remedy="make room or repair the file system; the same command resumes from the last good one",
                )
        elif error is not None:
            raise error

    def _write(self, files: dict[str, Any], state: RunState, losses: Mapping[int, float]) -> None:
        """Write, read back and rename; leave in `_saved` what was saved, or in `_error` why it was not."""
        folder = checkpoints.folder_of(self._stage.run_dir, state.step)
        part = folder.with_name(f"{folder.name}.part")
        # Every phase ends with all ranks in agreement: no rank writes into a folder that rank 0 has yet to make, and
        # none renames what another has not read back.
        together = partial(on_all_ranks, words=_explained, group=self._group)
        try:
            needed = sum(together(lambda: _tensor_bytes(files)))
            together(lambda: self._rank or _make_room(part, needed))
            written = together(lambda: _write_files(part, files, self._rank))
            of_all = {name: saved for mine in written for name, saved in mine.items()}
            manifest = Manifest(
                state.step, self._stage.world, self._stage.global_batch, state.data_step, state.losses,
                self._stage.raw, versions(), of_all, state.data or [], dict(self._stage.base), state.records,
            )  # fmt: skip
            together(lambda: self._rank or manifest.write(part))
            together(lambda: self._read_back(part))
            together(lambda: self._rank or self._commit(part, folder, state.step, losses))
            self._saved = replace(state, checkpoint=folder)
        except Exception as error:
            self._error = error
            if self._rank == 0 and isinstance(error, UserError):
                shutil.rmtree(part, ignore_errors=True)
                then = " The run continues." if state.step < self._stage.train.steps else ""
                logger.info(f"WARNING: step {state.step} was not saved: {error.problem}.{then}")

    def _read_back(self, part: Path) -> None:
        if problems := problems_of(part, self._rank, self._stage.world):
            raise OSError(f"the files read back differ from those written: {problems[0]}")

    def _commit(self, part: Path, folder: Path, step: int, losses: Mapping[int, float]) -> None:
        # Atomic: a reader sees no checkpoint of this step or a whole one.
        part.rename(folder)
        flush(folder.parent)
        try:
            self._complete(step, losses)
        except OSError as error:  # the checkpoint itself is whole
            logger.info(f"WARNING: step {step} is saved, but a later part of saving failed: {_words(error)}")

    def _complete(self, step: int, losses: Mapping[int, float]) -> None:
        """Name the newest whole checkpoint, of `step`, the latest and delete older ones. For rank 0 alone.

        A resumed run does so first, for a kill may have come between a checkpoint and this.
        """
        run_dir, train = self._stage.run_dir, self._stage.train
        copy_recovery_scripts(self._engine, run_dir / CHECKPOINTS)
        # For DeepSpeed's tools; before anything older is deleted: at no moment does it name a folder that is gone.
        write_atomically(run_dir / CHECKPOINTS / "latest", f"step_{step}")
        best = checkpoints.best_step(run_dir, losses) if train.keep_best else None
        checkpoints.prune(run_dir, train.keep_last, (best,))


def _make_room(part: Path, needed: int) -> None:
    remove(part)  # what a kill in an earlier save of this step has left
    part.mkdir(parents=True)
    free = shutil.disk_usage(part).free
    # Before gigabytes are written: a full disk would show only at the end, and disturb other runs meanwhile.
    if free < needed:
        raise OSError(f"{needed / 2**30:.2f} GiB are needed, and {free / 2**30:.2f} GiB are free in {part.parent}")


def _write_files(part: Path, files: dict[str, Any], rank: int) -> dict[str, SavedFile]:
    part.mkdir(exist_ok=True)  # where another host's view of the folder is late
    saved = {name: save_file(state, part / name, rank) for name, state in files.items()}
    flush(part)
    return saved


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(_tensor_bytes, inner))


def _words(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


def _explained(error: Exception) -> Exception:
    """Return a failure of the disk as one of the save; an error of the code itself ends the run with its traceback."""
    if not isinstance(error, OSError):
        return error
    return UserError(f"rank {torch.distributed.get_rank()} on {socket.gethostname()}: {_words(error)}", key=_OF_DISK)
