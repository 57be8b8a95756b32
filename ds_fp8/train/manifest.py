"""The manifest of a checkpoint: what was saved, and by which sizes and hashes it is recognised as whole.

A checkpoint is a folder `step_N` with files and `manifest.json`, which ends in a checksum of itself. It is written in
`step_N.part` and renamed when the manifest and every file are on the disk.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import torch
import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from ds_fp8.config.errors import UserError
from ds_fp8.config.files import check_plain
from ds_fp8.config.fp8 import section_of
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.run_files import CHECKED, Count, Invalid, Loss, Ranks, Step, first_mistake, read_regular
from ds_fp8.zero.safe_load import load_tensors

NAME = "manifest.json"
FORMAT = 1
_MAX_BYTES = 1 << 28
"""Largest size of a manifest: a million files."""
_CHUNK_BYTES = 16 * 2**20
_MAX_THREADS = 8


class Damaged(Exception):
    """Raised for a checkpoint that is not whole; the message says in what way."""


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint."""

    __pydantic_config__ = CHECKED

    bytes: Count
    hash: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    """XXH3, 128 bits, in hexadecimal digits."""
    rank: Annotated[int, Field(ge=0)]
    """The rank that wrote it."""


@dataclass(frozen=True)
class Manifest:
    """Identity and files of a checkpoint."""

    __pydantic_config__ = CHECKED

    step: Annotated[Step, Field(gt=0)]
    """Optimizer steps of the stage that are done."""
    ranks: Ranks
    """Number of ranks that wrote it."""
    global_batch: Annotated[Count, Field(gt=0)]
    data_step: Step
    """Batches of training data that are used up or left out."""
    losses: tuple[Loss, ...]
    """The last losses, for the detection of spikes."""
    config: dict[str, Any]
    """The stage's JSON."""
    versions: dict[str, str]
    files: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], SavedFile]

    def write(self, folder: Path) -> None:
        """Write the manifest of the checkpoint in `folder`, flushed to the disk."""
        content = {"format": FORMAT, **asdict(self)}
        write_atomically(folder / NAME, json.dumps({**content, "checksum": checksum(content)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of the checkpoint in `folder`.

        Raises:
            Damaged: it is missing, unreadable, altered, or of another step than the folder's name says.
        """
        try:
            content = json.loads(read_regular(folder / NAME, _MAX_BYTES))
            stored, version = content.pop("checksum"), content.pop("format")
            if version != FORMAT:
                raise Damaged(f"{NAME} has format {version!r}, and this version reads {FORMAT}")
            # Before anything is read from it: an altered step or position in the data would be used without notice.
            if stored != checksum({"format": version, **content}):
                raise Damaged(f"{NAME} was altered: its checksum differs")
            # As JSON again: pydantic's strict mode takes lists for tuples from JSON only.
            manifest = _MANIFEST.validate_json(json.dumps(content), strict=True)
            check_plain(manifest.config)
        except FileNotFoundError:
            raise Damaged(f"{NAME} is missing") from None
        except OSError as error:
            raise Damaged(f"{NAME} cannot be read: {error.strerror or error}") from None
        except ValidationError as error:
            raise Damaged(f"{NAME} {first_mistake(error)}") from None
        except Invalid as error:
            raise Damaged(f"{NAME} {error}") from None
        except UserError as error:
            raise Damaged(f"{NAME}: {error.problem}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Damaged(f"{NAME} is not the manifest of a checkpoint") from None
        if folder.name not in (f"step_{manifest.step}", f"step_{manifest.step}.part"):
            raise Damaged(f"{NAME} belongs to step {manifest.step}")
        if manifest.data_step < manifest.step:
            raise Damaged(f"{NAME} has {manifest.data_step} batches of data for {manifest.step} steps")
        # DeepSpeed loads by patterns of names: a file beside the listed ones would be read without being checked.
        unlisted = {path.name for path in folder.glob("*.pt")} - manifest.files.keys()
        if unlisted:
            raise Damaged(f"{min(unlisted)} is not in {NAME}")
        return manifest

    @property
    def bytes(self) -> int:
        """Return the size of all files together."""
        return sum(saved.bytes for saved in self.files.values())

    def names_for(self, rank: int, world: int) -> list[str]:
        """Return the files that this rank of `world` checks: those that it will load, where it wrote them."""
        return [name for name, saved in self.files.items() if saved.rank % world == rank]

    def missing_files(self) -> list[str]:
        """Return in words which files are not listed that so many ranks write, or are of a rank that there was not."""
        sharded = section_of(self.config, "zero_optimization").get("stage") == 3
        expected = {
            "random_rank_*.pt": self.ranks,
            "*_optim_states.pt": self.ranks,
            "*_model_states.pt": self.ranks if sharded else 1,
        }
        found = {pattern: sum(fnmatch(name, pattern) for name in self.files) for pattern in expected}
        lacking = [
            f"{NAME} lists {found[pattern]} files {pattern}, and {self.ranks} ranks write {number}"
            for pattern, number in expected.items()
            if found[pattern] != number
        ]
        strange = [
            f"{NAME} says that rank {file.rank} of {self.ranks} wrote {name}"
            for name, file in self.files.items()
            if file.rank >= self.ranks
        ]
        return lacking + strange

    def problems(self, folder: Path, names: Iterable[str]) -> list[str]:
        """Read these files of the checkpoint in `folder`, several at a time, and return what is wrong with them."""
        names = list(names)
        # Threads, for reading and hashing release the interpreter's lock.
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            found = threads.map(lambda name: _problem(folder / name, self.files[name]), names)
            return [f"{name} {problem}" for name, problem in zip(names, found, strict=True) if problem]


_MANIFEST = TypeAdapter(Manifest)


def save_file(state: Any, file: Path, rank: int) -> SavedFile:
    """Write `state` with torch.save, flushed to the disk. Returns size and hash of what was meant to be written.

    Raises OSError where that fails.
    """
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
    return SavedFile(stream.bytes, stream.hash.hexdigest(), rank)


def forget_cached(file: Path) -> None:
    """Let the next reading of `file` come from the disk, where the system allows that."""
    # Only clean pages are dropped: the file was flushed before, so all of them are.
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class _HashingStream:
    """A file that hashes what is written to it."""

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
        # What was meant to be written, not what is on the disk: reading back compares the two.
        self.hash.update(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        self._raw.flush()


def _problem(file: Path, saved: SavedFile) -> str | None:
    """Return the damage of a file of a checkpoint, None if it is as it was saved."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_size != saved.bytes:
            return f"has {status.st_size:,} bytes instead of {saved.bytes:,}"
        if _hash(file) != saved.hash:
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


def _hash(file: Path) -> str:
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def checksum(content: dict[str, Any]) -> str:
    """Return the checksum of what a manifest holds, without it."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
