"""Checkpoints of a run: each is whole, by the sizes and hashes in its manifest, or does not count.

A checkpoint is a folder `step_N` with DeepSpeed's files and `manifest.json`, which ends in a checksum of itself. It has
no random states: every step seeds torch's generators anew (steps.py).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import TypeAdapter, ValidationError

from ds_fp8.config.files import remove, write_atomically
from ds_fp8.train.run_folder import CHECKPOINTS, RESULT, Invalid, read_object
from ds_fp8.zero.deepspeed.checkpoints import load_tensors

MANIFEST = "manifest.json"
FORMAT = 2
_CHUNK_BYTES = 16 * 2**20
_MAX_THREADS = 8
_STEP = re.compile(r"step_([0-9]{1,18})")
_LEFTOVER = re.compile(r"step_[0-9]+\.(part|deleted)|universal")


class Damaged(Exception):
    """Raised for a checkpoint that is not whole; the message says in what way."""


@dataclass(frozen=True)
class RunState:
    """Position at which a run begins or resumes."""

    step: int = 0  # Steps of this stage that are done and saved
    data_step: int = 0  # Batches of training data that are used up or left out
    losses: tuple[float, ...] = ()  # The last losses, for the detection of spikes
    checkpoint: Path | None = None  # Checkpoint to load: one of this run, or of the run that `train.resume` names
    other_shards: bool = False  # Whether ranks hold other parts of the optimizer's state than those that wrote it
    data: list[dict[str, Any]] | None = None  # Of each source of data what the run read (`StageData.identity`)
    # Files of the frozen weights that the checkpoint leaves out (`Manifest.base`)
    base: Mapping[str, str] = field(default_factory=dict)
    result: dict[str, Any] | None = None  # Result of a run that has finished
    records: int = 0  # Records in metrics.jsonl of the steps before `step`, known to rank 0


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint."""

    bytes: int
    hash: str  # XXH3, 128 bits, in hexadecimal digits
    rank: int  # The rank that wrote it


@dataclass(frozen=True)
class Manifest:
    """Identity and files of a checkpoint."""

    step: int  # Optimizer steps of the stage that are done
    ranks: int  # Number of ranks that wrote it
    global_batch: int
    data_step: int
    losses: tuple[float, ...]
    config: dict[str, Any]  # The stage's JSON
    versions: dict[str, str]
    files: dict[str, SavedFile]
    data: list[dict[str, Any]] = field(default_factory=list)
    # Hashes of the files that frozen weights are read from again, by name; empty where the checkpoint holds them
    base: dict[str, str] = field(default_factory=dict)
    records: int = 0

    @property
    def in_shards(self) -> bool:
        """Return whether each rank wrote a part of the optimizer: in ZeRO stage 0 every rank has, and loads, all."""
        return any(name.endswith("_optim_states.pt") for name in self.files)

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, **asdict(self)}
        write_atomically(folder / MANIFEST, json.dumps({**content, "checksum": checksum(content)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        try:
            content = read_object(folder / MANIFEST)
            # Before anything is read from it: an altered step or position in the data would be used without notice.
            if content.pop("checksum", None) != checksum(content):
                raise Damaged(f"{MANIFEST} was altered: its checksum differs")
            if (version := content.pop("format")) != FORMAT:
                raise Damaged(f"{MANIFEST} has format {version!r}, and this version reads {FORMAT}")
            manifest = _MANIFEST.validate_python(content)
        except FileNotFoundError:
            raise Damaged(f"{MANIFEST} is missing") from None
        except Invalid as error:
            raise Damaged(f"{MANIFEST} {error}") from None
        except (LookupError, ValidationError):
            raise Damaged(f"{MANIFEST} is not the manifest of a checkpoint") from None
        if folder.name.removesuffix(".part") != f"step_{manifest.step}":
            raise Damaged(f"{MANIFEST} belongs to step {manifest.step}")
        # DeepSpeed loads by patterns of names: a file beside the listed ones would be read without being checked.
        unlisted = {path.name for path in folder.glob("*.pt")} - manifest.files.keys()
        if unlisted:
            raise Damaged(f"{min(unlisted)} is not in {MANIFEST}")
        return manifest


_MANIFEST = TypeAdapter(Manifest)


def checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def problems_of(folder: Path, rank: int, world: int) -> list[str]:
    """Read this rank's part of a checkpoint and return what is wrong with it; saving and resuming ask the same."""
    try:
        files = Manifest.read(folder).files
    except Damaged as error:
        return [str(error)]
    mine = [name for name, saved in files.items() if saved.rank % world == rank]
    # Threads, for reading and hashing release the interpreter's lock.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda name: _problem(folder / name, files[name]), mine)
        return [f"{name} {problem}" for name, problem in zip(mine, found, strict=True) if problem]


def hash_of(file: Path) -> str:
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def hashes_of(files: Sequence[Path]) -> dict[str, str]:
    """Return the hashes of files by name."""
    # Threads, for reading and hashing release the interpreter's lock.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip((file.name for file in files), threads.map(hash_of, files), strict=True))


def _problem(file: Path, saved: SavedFile) -> str | None:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != saved.bytes:
            return f"has {status.st_size:,} bytes instead of {saved.bytes:,}"
        if hash_of(file) != saved.hash:
            return "has other content than was saved: its hash differs"
        # Hash right, and still read: a file may have been saved with something that the loader refuses.
        load_tensors(file)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        return str(error)
    return None


class _HashingStream:
    """A file that hashes what is meant to be written to it, which need not be what the disk then holds."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.hash = xxhash.xxh3_128()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._raw.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        self._raw.flush()


def save_file(state: Any, file: Path, rank: int) -> SavedFile:
    """Write `state` with torch.save, flushed to the disk. Returns size and hash of what was meant to be written."""
    with file.open("wb") as raw:
        stream = _HashingStream(raw)
        try:
            torch.save(state, stream)
        except RuntimeError:
            # torch's writer reports a failed write as another error.
            if stream.error is not None:
                raise stream.error from None
            raise
        raw.flush()
        # The rename of the folder must not reach the disk before the content does.
        os.fsync(raw.fileno())
        # Clean pages are dropped: the next reading shows what the disk holds.
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return SavedFile(stream.bytes, stream.hash.hexdigest(), rank)


def steps_in(run_dir: Path) -> list[int]:
    """Return the steps that a run has checkpoints of, from the oldest: a folder gets its name once it is whole."""
    try:
        named = [_STEP.fullmatch(path.name) for path in (run_dir / CHECKPOINTS).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in named if match)


def step_beyond_result(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint where a run that was made longer went on behind its result, or None."""
    try:
        done = read_object(run_dir / RESULT).get("steps")
    except (Invalid, OSError):
        return None
    newest = max(steps_in(run_dir), default=0)
    return newest if isinstance(done, int) and newest > done else None


def best_step(run_dir: Path, losses: Mapping[int, float]) -> int | None:
    known = [step for step in steps_in(run_dir) if losses.get(step) is not None]
    return min(known, key=lambda step: (losses[step], step), default=None)


def prune(run_dir: Path, keep_last: int, keep: Collection[int | None] = ()) -> None:
    """Delete all checkpoints but the `keep_last` newest and those of steps `keep`, and what a kill left behind."""
    steps = steps_in(run_dir)
    for step in set(steps) - {*steps[-keep_last:], *keep}:
        # Renamed first: a checkpoint that is half deleted must not count.
        folder = folder_of(run_dir, step)
        folder.rename(folder.with_name(f"{folder.name}.deleted"))
    for leftover in (run_dir / CHECKPOINTS).iterdir():
        if _LEFTOVER.fullmatch(leftover.name):
            remove(leftover)


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step}"


def move_in_data(state: RunState) -> None:
    # Only the manifest is written again; the tensors beside it stay as they were verified.
    manifest = Manifest.read(state.checkpoint)
    replace(manifest, data_step=state.data_step, losses=state.losses).write(state.checkpoint)
