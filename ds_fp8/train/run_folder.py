"""A run's folder: names in it, the lock of the one run in it, and what a rerun may change.

run_dir/config.json                      the stage as it was started
run_dir/checkpoints/step_N/              DeepSpeed's checkpoint after N steps, with its manifest (checkpoints.py)
run_dir/checkpoints/step_N.part/         one that is being written (saving.py)
run_dir/metrics.jsonl, result.json, model/, adapter/
run_dir/run.lock                         locked by the run in the folder
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_fp8.config.deepspeed_json import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.files import check_plain, flat
from ds_fp8.config.files import write_atomically as write_atomically
from ds_fp8.config.log import logger
from ds_fp8.train.processes import on_first_rank
from ds_fp8.train.stage import Stage

CHECKPOINTS, CONFIG, METRICS, MODEL, RESULT = "checkpoints", "config.json", "metrics.jsonl", "model", "result.json"
ADAPTER = "adapter"
LOCK = "run.lock"

# What a rerun may change: how long, where, and what is measured and written. All else would make it another run.
FREE = {
    *("wandb", "tensorboard", "csv_monitor", "comet", "steps_per_print", "log_level"),
    *("data.workers", "data.cache_dir"),
    *("train.run_dir", "train.steps", "train.epochs", "train.log_every", "train.eval_every", "train.eval_batches"),
    *("train.save_every", "train.keep_last", "train.keep_best", "train.async_save", "train.max_failed_saves"),
    *("train.spike", "train.spike_threshold", "train.exact_match_problems", "train.max_new_tokens", "train.timeout"),
}
# Keys that also may change on another number of ranks: the batch is compared as a whole then
BATCH_KEYS = (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)


class Invalid(Exception):
    """Raised for a file whose content is not what such a file holds; the message says in what way."""


@contextmanager
def warn_unwritten(what: str | Path) -> Iterator[None]:
    """Go on, with a warning, where the disk takes nothing of `what`, which training does not need."""
    try:
        yield
    except OSError as error:
        logger.warning(f"WARNING: {what} could not be written: {error.strerror or error}")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        FileNotFoundError: there is no file.
        Invalid: it cannot be read, is damaged, is no object, or is nested too deeply.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a named pipe would be waited for
            raise Invalid("is not a regular file")
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise Invalid("holds no JSON object")
        check_plain(content)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Invalid(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Invalid(f"is not valid JSON: {clipped(str(error), 100)}") from None
    except UserError as error:
        raise Invalid(f"is damaged: {error.problem}") from None
    return content


@contextmanager
def only_run_in(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock on `run_dir` by the first rank. Collective."""
    held: list[int] = []
    on_first_rank(lambda: held.append(lock(run_dir, say)))
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def lock(run_dir: Path, say: Callable[[str], None]) -> int:
    """Lock run_dir/run.lock, which names the holder; returns the descriptor that holds the lock until it is closed.

    The kernel releases a POSIX lock when its process ends, however it ends, and NFS carries it to other hosts.
    """
    file = run_dir / LOCK
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        # Not what a link leads to, which may be anybody's; O_NONBLOCK: a pipe of this name is not waited for.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise UserError(f"{file} cannot be locked: {error.strerror}", key="train.run_dir", remedy="remove it") from None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            say(f"WARNING: {run_dir} has no locks ({error.strerror}): do not start this run a second time")
            return descriptor
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "which has not written its name yet"
        os.close(descriptor)
        problem = f"{run_dir} is in use by another run: {clipped(holder, 300)}"
        raise UserError(
            problem, key="train.run_dir", remedy="wait for that run, stop it, or choose another run_dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}: {' '.join(sys.argv)}".encode(), 0)
    return descriptor


def check_same_run(stage: Stage, stored: dict[str, Any], free: Sequence[str]) -> None:
    """Raise UserError where the stage is not that of a run with the JSON `stored`, but for the keys `free`."""
    before, now = _fixed(stored, {*FREE, *free}), _fixed(stage.raw, {*FREE, *free})
    paths = stage.paths()
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and not (key in paths and _same_place(before.get(key), now[key]))
    )
    if changed:
        key = changed[0]
        more = f" (also {clipped(', '.join(changed[1:]), 300)})" if changed[1:] else ""
        raise UserError(
            f"{stage.run_dir} holds a run with {key} = {clipped(json.dumps(before.get(key)))}, "
            f"not {clipped(json.dumps(now.get(key)))}{more}",
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


def _fixed(raw: dict[str, Any], free: set[str]) -> dict[str, Any]:
    found = {key: value for key, value in flat(raw) if value != {}}
    for number, source in enumerate(found.pop("data.sources", None) or ()):
        found |= flat(source, f"data.sources[{number}].")
    return {key: value for key, value in found.items() if not any(f"{key}.".startswith(f"{name}.") for name in free)}
