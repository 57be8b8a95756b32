"""Files that survive a power loss: written beside, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """Write `file` so that a reader, also one after a power loss, sees the old content or the new, never a part."""
    part = file.with_name(file.name + ".part")
    remove(part)  # a named pipe would be waited for, and a link followed
    with part.open("x") as stream:
        stream.write(text)
        # Python's buffer first, then the system's: after the rename the content must be on the disk.
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    # The rename is an entry of the folder, which the disk may write later than the file.
    flush(file.parent)


def remove(path: Path) -> None:
    """Delete a file, a link (not what it leads to) or a folder with all that is in it; nothing where there is none.

    Raises:
        OSError: it cannot be deleted.
    """
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


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
