"""Announce kernels that DeepSpeed compiles for an optimizer at first use, and detect abandoned locks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
from torch.utils import cpp_extension

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.config.log import logger
from ds_fp8.engine.optimizer_section import compiled_operation

_SETTLED = 60.0
"""Seconds after which a lock that no process has open is not one that is just being taken."""


def announce_compilation(configuration: Configuration) -> None:
    """Say that DeepSpeed is going to compile the optimizer's kernel, which takes minutes, where it is not there yet.

    Args:
        configuration: the one whose "optimizer" section DeepSpeed is going to use.

    Raises:
        UserError: torch would wait for a lock that a killed process has left.
    """
    operation = compiled_operation(configuration)
    if operation is None:
        return
    folder = Path(cpp_extension._get_build_directory(operation, False))
    lock = folder / "lock"
    if _is_left_behind(lock):
        raise UserError(
            f"{lock} was left by a process that ended while it compiled {operation}, and torch would wait for ever",
            key="optimizer",
            remedy=f"remove {lock}, unless another host or container is compiling there now",
        )
    if lock.exists():
        logger.info("%s: another process compiles it, or was killed: waiting until %s is gone", operation, lock)
    elif not (folder / f"{operation}.so").exists():
        logger.info(
            '%s: compiled once, for minutes, in %s (an Adam with "torch_adam": true needs none)', operation, folder
        )


def _is_left_behind(lock: Path) -> bool:
    """Return whether a lock of torch's is open in no process, where all that may hold it can be seen."""
    try:
        before = lock.stat()
    except OSError:
        return False
    # A fresh lock may belong to a process that has created but not yet opened it; another user's cannot be judged.
    if time.time() - before.st_mtime < _SETTLED or before.st_uid != os.geteuid():
        return False
    for process in psutil.process_iter():
        try:
            if any(file.path == os.path.realpath(lock) for file in process.open_files()):
                return False
        except psutil.NoSuchProcess:
            continue
        except psutil.Error:  # another user's, who could not have made the file
            continue
    try:
        # The holder may have finished during the scan, and another process may have taken the lock: then it is another
        # file.
        return os.path.samestat(before, lock.stat())
    except OSError:
        return False
