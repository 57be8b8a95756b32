"""One run at a time in a run folder.

The first rank holds a POSIX lock on run_dir/run.lock, which the kernel releases when the process ends, however it ends,
and which NFS carries between hosts. The file names the holder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from ds_fp8.config.errors import UserError
from ds_fp8.train.processes import on_first_rank

NAME = "run.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LOCAL_LOCKS = {"nolock", "local_lock=posix", "local_lock=all"}


@contextmanager
def only_run_in(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock on `run_dir` by the first rank. Collective.

    Raises:
        UserError: on all ranks, where another run is in the folder.
    """
    lock = RunLock(run_dir)
    warning = on_first_rank(lock.acquire)
    if warning:
        say(f"WARNING: {warning}")
    try:
        yield
    finally:
        lock.release()


class RunLock:
    """The lock on a run folder, held from `acquire` to the end of the process or `release`."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NAME
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock, making the folder where there is none.

        Returns:
            What the user should know where locks do not reach other hosts, otherwise None.

        Raises:
            UserError: another run is in the folder, or may be.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()
        warning = None
        try:
            # lockf and not flock: POSIX locks are those that NFS carries to other hosts.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(self._file) or not os.path.samestat(os.stat(self._file), os.fstat(self._descriptor)):
                os.close(self._descriptor)  # the holder left and took the file along, between our two calls
                return self.acquire()
            if _locks_are_local(self._file):
                warning = f"the file system of {self._file.parent} does not share locks between hosts"
        except OSError as error:
            if error.errno in _HELD:
                raise self._refused("is in use by another run", "wait for that run, stop it, or") from None
            if error.errno not in _WITHOUT_LOCKS:
                raise
            warning = f"the file system of {self._file.parent} has no locks"
        if warning and _may_be_running(self._record(), warning.endswith("no locks")):
            raise self._refused("may be in use by another run", f"if that run has ended delete {self._file}, or")
        # Only once the lock is held: until then the record is another's.
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(_this_process()).encode(), 0)
        return f"{warning}: do not start this run on another host as well" if warning else None

    def release(self) -> None:
        """Give the lock back, and remove the folder where nothing else was written into it."""
        if self._descriptor is None:
            return
        # While the lock is still held: another process that opened the file before notices it in `acquire`.
        self._file.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        if not any(self._file.parent.iterdir()):
            self._file.parent.rmdir()

    def _open(self) -> int:
        """Open the file, which is made where there is none; not what a link leads to, which may be anybody's."""
        try:
            # O_NONBLOCK: a pipe or device of this name must not make the run wait; it is refused below.
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        raise UserError(
            f"{self._file} is not a regular file, as the lock of a run is", key="train.run_dir", remedy="remove it"
        )

    def _record(self) -> dict[str, Any]:
        try:
            record = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    def _refused(self, what: str, remedy: str) -> UserError:
        record = self._record()
        os.close(self._descriptor)
        self._descriptor = None
        holder = (
            f"process {record.get('pid')} on {record.get('host')}, started {record.get('started')}: "
            f"{record.get('command')}"
            if record
            else "which has not written its name yet"
        )
        return UserError(
            f"{self._file.parent} {what}: {holder}", key="train.run_dir", remedy=f"{remedy} choose another run_dir"
        )


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
    }


def _may_be_running(record: dict[str, Any], without_locks: bool) -> bool:
    """Return whether the process that left this record, which a released lock does not have, may still run."""
    if not record:
        return False
    if record.get("host") != socket.gethostname():
        return True
    if not without_locks or record.get("boot") != _boot():
        return False  # on this host the lock says it, and a process does not outlive a boot
    try:
        return psutil.Process(record["pid"]).create_time() == record["created"]
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False


def _boot() -> str:
    """Return an identifier of this start of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def _locks_are_local(file: Path) -> bool:
    """Return whether `file` lies on NFS that is mounted with locks which other hosts do not see."""
    mounts = [
        (partition.mountpoint, set(partition.opts.split(",")))
        for partition in psutil.disk_partitions(all=True)
        if partition.fstype.startswith("nfs")
    ]
    # The innermost mount that contains the file is the one it lies on.
    inside = [mount for mount in mounts if file.resolve().is_relative_to(mount[0])]
    return bool(inside) and bool(max(inside, key=lambda mount: len(mount[0]))[1] & _LOCAL_LOCKS)
