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
import random
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import numpy as np
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.train import checkpoints
from ds_fp8.train.checkpoints import Manifest, RunState, SavedFile, problems_of, save_file
from ds_fp8.train.run_folder import CHECKPOINTS, flush, remove, write_atomically
from ds_fp8.train.stage import Stage
from ds_fp8.zero.deepspeed.checkpoints import checkpoint_files, copy_recovery_scripts

T = TypeVar("T")
# Time that ranks wait for the slowest of them to write its part of an asynchronous checkpoint
MAX_WRITE = timedelta(hours=4)


class SaveFailed(Exception):
    """Raised on all ranks when one could not do its part of a save."""


def versions() -> dict[str, str]:
    others = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"python": platform.python_version(), "ds_fp8": ds_fp8.__version__, **others}


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the accelerator's generators, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if get_accelerator().device_name() != "cpu":
        states["accelerator"] = get_accelerator().get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    kind, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if "accelerator" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["accelerator"].clone())


class HostCopies:
    """Host memory for the copies, kept from one save to the next: pinned for tensors of an accelerator."""

    def __init__(self) -> None:
        # By bytes and whether they are pinned, which takes seconds
        self._buffers: dict[tuple[int, bool], list[torch.Tensor]] = {}

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return nested dicts, lists and tuples with their tensors in this memory, valid until the next call."""
        free, self._buffers = self._buffers, {}
        copied = self._copy(state, free)
        if get_accelerator().device_name() != "cpu":
            # One wait for all copies: behind it the next step may overwrite what was copied, and the thread may read
            # the copies.
            get_accelerator().current_stream().synchronize()
        return copied

    def _copy(self, value: Any, free: dict[tuple[int, bool], list[torch.Tensor]]) -> Any:
        if isinstance(value, torch.Tensor):
            size = value.nbytes, value.device.type != "cpu"
            # Buffers of the last save are used again by size; those that fit nothing now are dropped with `free`.
            buffer = free[size].pop() if free.get(size) else torch.empty(size[0], dtype=torch.uint8, pin_memory=size[1])
            self._buffers.setdefault(size, []).append(buffer)
            return buffer.view(value.dtype).view(value.shape).copy_(value, non_blocking=True)
        if isinstance(value, dict):
            return type(value)((key, self._copy(inner, free)) for key, inner in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copy(inner, free) for inner in value)
        return copy.copy(value)


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time. Making one is collective."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, stage: Stage, say: Callable[[str], None]) -> None:
        self._engine, self._stage, self._say = engine, stage, say
        self._rank = torch.distributed.get_rank()
        self._thread: threading.Thread | None = None
        self._copies = HostCopies() if stage.train.async_save else None
        # A thread must not share the group that training sends through: its messages would mix with the step's.
        self._group = torch.distributed.new_group(backend="gloo", timeout=MAX_WRITE) if self._copies else None
        self._saved: RunState | None = None
        self._error: Exception | None = None
        self._failed_saves = 0
        self.failure: SaveFailed | None = None  # Why the save that `finish` waited for last failed, if it did

    def save(self, state: RunState, losses: Mapping[int, float]) -> None:
        """Save a checkpoint of `state`, or begin to where saving is asynchronous; `finish` says how that went.

        `losses` are validation losses by step; the checkpoint with the lowest is kept where the stage wants that.
        """
        self.finish()
        # Tensors in here are the ones in use. Written at once below, or copied first: the next step changes them.
        tag = f"step_{state.step}"
        files = checkpoint_files(self._engine, tag, {"step": state.step}, without_frozen=bool(self._stage.base))
        files[checkpoints.random_file(self._rank)] = random_states()
        if self._copies is None:
            self._write(files, state, losses)
        else:
            arguments = (self._copies.copy(files), state, dict(losses))
            # A daemon: a rank that is told to end does not wait for a disk that hangs.
            self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
            self._thread.start()

    def finish(self) -> RunState | None:
        """Wait for the save that was begun last, and return what it saved; None where it failed or there was none."""
        if self._thread is not None:
            # On every rank at the same step, for what follows on success or failure is collective.
            self._thread.join()
            self._thread = None
        saved, error = self._saved, self._error
        self._saved = self._error = None
        if saved is not None:
            self._failed_saves, self.failure = 0, None
        elif isinstance(error, SaveFailed):
            self._failed_saves, self.failure = self._failed_saves + 1, error
            # Training on without a checkpoint would lose more at the next failure than it gains until then.
            if self._failed_saves >= self._stage.train.max_failed_saves:
                raise UserError(
                    f"{self._failed_saves} checkpoints in a row could not be saved, the last one because {error}",
                    key="train.max_failed_saves",
                    remedy="make room or repair the file system; the same command resumes from the last good one",
                )
        elif error is not None:
            raise error
        return saved

    def _write(self, files: dict[str, Any], state: RunState, losses: Mapping[int, float]) -> None:
        folder = checkpoints.folder_of(self._stage.run_dir, state.step)
        part = folder.with_name(f"{folder.name}.part")
        try:
            needed = sum(self._on_every_rank(lambda: _tensor_bytes(files)))
            # Every phase ends with all ranks in agreement: no rank writes into a folder that rank 0 has yet to make,
            # and none renames what another has not read back.
            self._on_every_rank(lambda: self._make_room(part, needed))
            written = self._on_every_rank(lambda: self._write_files(part, files))
            of_all = {name: saved for mine in written for name, saved in mine.items()}
            manifest = Manifest(
                state.step, self._stage.world, self._stage.global_batch, state.data_step, state.losses,
                self._stage.raw, versions(), of_all, state.data or [], dict(self._stage.base), state.records,
            )  # fmt: skip
            self._on_every_rank(lambda: self._rank or manifest.write(part))
            self._on_every_rank(lambda: self._read_back(part))
            self._on_every_rank(lambda: self._commit(part, folder, state.step, losses))
            self._saved = replace(state, checkpoint=folder, ranks=self._stage.world)
        except SaveFailed as error:
            self._error = error
            if self._rank == 0:
                shutil.rmtree(part, ignore_errors=True)
                then = " The run continues." if state.step < self._stage.train.steps else ""
                self._say(f"WARNING: step {state.step} was not saved: {error}.{then}")
        except Exception as error:
            self._error = error

    def _on_every_rank(self, work: Callable[[], T]) -> list[T]:
        """Do `work` and return every rank's result. Raises SaveFailed on all ranks where one of them fails."""
        try:
            mine = (work(), None)
        except OSError as error:
            # Only OSError: errors of the code itself end the run with their traceback.
            mine = (None, f"rank {self._rank} on {socket.gethostname()}: {_words(error)}")
        results: list = [None] * self._stage.world
        torch.distributed.all_gather_object(results, mine, group=self._group)
        problems = [problem for _, problem in results if problem]
        if problems:
            more = f" (and {len(problems) - 1} other ranks)" if len(problems) > 1 else ""
            raise SaveFailed(f"{problems[0]}{more}")
        return [result for result, _ in results]

    def _make_room(self, part: Path, needed: int) -> None:
        if self._rank:
            return
        # What a kill in an earlier save of this step has left.
        remove(part)
        part.mkdir(parents=True)
        free = shutil.disk_usage(part).free
        # Before gigabytes are written: a full disk would show only at the end, and disturb other runs meanwhile.
        if free < needed:
            raise OSError(f"{needed / 2**30:.2f} GiB are needed, and {free / 2**30:.2f} GiB are free in {part.parent}")

    def _write_files(self, part: Path, files: dict[str, Any]) -> dict[str, SavedFile]:
        part.mkdir(exist_ok=True)  # where another host's view of the folder is late
        saved = {name: save_file(state, part / name, self._rank) for name, state in files.items()}
        flush(part)
        return saved

    def _read_back(self, part: Path) -> None:
        if problems := problems_of(part, self._rank, self._stage.world):
            raise OSError(f"the files read back differ from those written: {problems[0]}")

    def _commit(self, part: Path, folder: Path, step: int, losses: Mapping[int, float]) -> None:
        if self._rank:
            return
        # Atomic: a reader sees no checkpoint of this step or a whole one.
        part.rename(folder)
        flush(folder.parent)
        try:
            self.complete(step, losses)
        except OSError as error:  # the checkpoint itself is whole
            self._say(f"WARNING: step {step} is saved, but a later part of saving failed: {_words(error)}")

    def complete(self, step: int, losses: Mapping[int, float]) -> None:
        """Name the newest whole checkpoint, of `step`, the latest and delete older ones. For rank 0 alone.

        A resumed run does so first, for a kill may have come between a checkpoint and this.
        """
        train = self._stage.train
        copy_recovery_scripts(self._engine, self._stage.run_dir / CHECKPOINTS)
        # For DeepSpeed's tools; before anything older is deleted: at no moment does it name a folder that is gone.
        write_atomically(self._stage.run_dir / CHECKPOINTS / "latest", f"step_{step}")
        best = checkpoints.best_step(self._stage.run_dir, losses) if train.keep_best else None
        checkpoints.prune(self._stage.run_dir, train.keep_last, (best,))


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(_tensor_bytes, inner))


def _words(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"
