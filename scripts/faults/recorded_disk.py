"""A disk that remembers the order of its writes, so that what a power loss would have left can be made at any moment.

A loop device lies on the only file of a FUSE file system, which keeps every write and every flush that the kernel
sends. An image of a moment holds all writes before the last flush; of those after it, which a disk may hold in its
cache, it holds some that are chosen at random. Needs root, /dev/fuse, loop devices, libfuse 2 and the package fusepy.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_HEADER = struct.Struct("<qq")
FLUSH = -1
"""Offset of a flush in the log."""


class RecordedDisk:
    """A file system of one kind on a recorded disk, mounted at `mount`."""

    def __init__(self, folder: Path, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.mount, self._fuse, self._log = folder / "mount", folder / "fuse", folder / "log"
        self._device = ""

    @contextlib.contextmanager
    def mounted(self) -> Iterator[RecordedDisk]:
        """Make the file system and mount it; everything is unmounted afterwards."""
        self.mount.mkdir(parents=True)
        self._fuse.mkdir()
        self._log.touch()
        server = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(str(self._fuse), str(self._log), self.size)
        )
        server.start()
        try:
            while not (self._fuse / "disk").exists():
                time.sleep(0.05)
            self._device = _run("losetup", "--find", "--show", str(self._fuse / "disk"))
            _run(f"mkfs.{self.kind}", "-q", self._device)
            _run("mount", self._device, str(self.mount))
            yield self
        finally:
            for command in (["umount", str(self.mount)], ["losetup", "--detach", self._device]):
                subprocess.run(command, check=False, capture_output=True)
            subprocess.run(["umount", "--lazy", str(self._fuse)], check=False, capture_output=True)
            server.join(20)
            server.kill()

    @property
    def position(self) -> int:
        """Return the length of the log in bytes."""
        return self._log.stat().st_size

    def images(self, positions: list[int], folder: Path, rng: random.Random) -> Iterator[tuple[int, Path]]:
        """Yield (position, image) for each of these places in the log, in order; an image is gone after its turn."""
        flushed, image = folder / "flushed", folder / "image"
        pending: list[tuple[int, bytes]] = []
        left = sorted(positions)
        with flushed.open("w+b") as disk, self._log.open("rb") as log:
            disk.truncate(self.size)
            while left:
                while left and log.tell() >= left[0]:
                    disk.flush()
                    _run("cp", "--sparse=always", str(flushed), str(image))
                    with image.open("r+b") as torn:
                        for offset, data in pending:
                            if rng.random() < 0.5:
                                torn.seek(offset)
                                torn.write(data)
                    yield left.pop(0), image
                    image.unlink()
                header = log.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    return
                offset, length = _HEADER.unpack(header)
                if offset == FLUSH:
                    for place, data in pending:
                        disk.seek(place)
                        disk.write(data)
                    pending = []
                else:
                    pending.append((offset, log.read(length)))


@contextlib.contextmanager
def mounted_image(image: Path, kind: str, folder: Path) -> Iterator[Path]:
    """Mount an image as after a restart: the file system recovers by its journal."""
    folder.mkdir(exist_ok=True)
    device = _run("losetup", "--find", "--show", str(image))
    try:
        _run("mount", *(["-o", "nouuid"] if kind == "xfs" else []), device, str(folder))
        try:
            yield folder
        finally:
            _run("umount", str(folder))
    finally:
        _run("losetup", "--detach", device)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _serve(folder: str, log: str, size: int) -> None:
    """Serve the file `disk` in `folder`; keep what is written to it in `log`: (offset, length, data), or a flush."""
    from fuse import FUSE, FuseOSError, Operations

    class Disk(Operations):
        def __init__(self) -> None:
            self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
            self._content = os.memfd_create("disk")
            os.ftruncate(self._content, size)

        def getattr(self, path, handle=None):
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if path == "/disk":
                return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size}
            raise FuseOSError(errno.ENOENT)

        def readdir(self, path, handle):
            return [".", "..", "disk"]

        def open(self, path, flags):
            return 1

        def read(self, path, length, offset, handle):
            return os.pread(self._content, length, offset)

        def write(self, path, data, offset, handle):
            os.write(self._log, _HEADER.pack(offset, len(data)) + data)
            return os.pwrite(self._content, data, offset)

        def fsync(self, path, data_only, handle):
            os.write(self._log, _HEADER.pack(FLUSH, 0))
            return 0

        def flush(self, path, handle):
            return 0

    FUSE(Disk(), folder, foreground=True, nothreads=True, big_writes=True)
