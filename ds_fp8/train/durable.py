"""Files that survive a power loss: written beside, flushed to the disk, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """Write `file` so that a reader, also one after a power loss, sees the old content or the new, never a part."""
    part = file.with_name(file.name + ".part")
    with part.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    flush(file.parent)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder: without it a power loss may undo renames and new files in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush every file and folder in `folder`, and itself, to the disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)
