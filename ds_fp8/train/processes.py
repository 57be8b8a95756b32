"""The processes of a run: how they find each other, and who started them."""

from __future__ import annotations

import os
import socket

import deepspeed
import psutil
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fp8.zero.seams import spare_shared_memory_op


def stand_alone() -> None:
    """Started without a launcher, describe a world of one in the environment."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def join() -> None:
    """Meet the other ranks. Collective."""
    spare_shared_memory_op()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    dist.barrier()


def deepspeed_command() -> psutil.Process | None:
    """The `deepspeed` command that this rank comes from, None when another launcher, or another node, started it."""
    launcher = psutil.Process().parent()
    command = launcher.parent() if launcher and _runs(launcher, "deepspeed.launcher.launch") else None
    return command if command and _runs(command, "deepspeed", "deepspeed.launcher.runner") else None


def _runs(process: psutil.Process, *names: str) -> bool:
    try:
        return any(part.endswith(names) for part in process.cmdline())
    except psutil.Error:
        return False


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
