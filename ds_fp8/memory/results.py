"""sweep.jsonl: one line for every finished point, which survives a kill of its writer."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_fp8.config.errors import UserError

FILE = "sweep.jsonl"

OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED = "ok", "out of memory", "failed", "timeout", "refused"
DONE = (OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED)
"""Ways for a point to end that a rerun does not repeat. A point that was killed is in none of them."""

Record = dict[str, Any]


class Results:
    """The finished points of a folder, by key."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / FILE
        self.by_key: dict[str, Record] = {record["key"]: record for record in self._read()}

    def _read(self) -> Iterator[Record]:
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by a kill: that point runs again
            if isinstance(record, dict) and record.get("status") in DONE:
                yield record

    def append(self, record: Record) -> None:
        """Add a finished point; on the disk when this returns. A later record of the same key replaces it."""
        text = json.dumps(record) + "\n"
        with self.file.open("ab+") as stream:
            if stream.tell() and _last_byte(stream) != b"\n":
                text = "\n" + text
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
        self.by_key[record["key"]] = record


def _last_byte(stream: Any) -> bytes:
    stream.seek(-1, os.SEEK_END)
    return stream.read(1)


@contextmanager
def only_driver(folder: Path) -> Iterator[None]:
    """Hold the folder of a sweep; a process that is killed lets it go.

    Raises:
        UserError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another sweep is running in {folder}", remedy="wait for it, or give another --out"
            ) from None
        yield
