"""Training on this host alone, for commands that start it themselves: started, stopped, and started again."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil
from deepspeed.accelerator import get_accelerator

from ds_fp8.cluster.hosts import free_port
from ds_fp8.cluster.job_process import run_job, with_restarts
from ds_fp8.config.errors import UserError

TRAIN = ("--module", "ds_fp8.commands.train")
"""Arguments that follow `deepspeed_command` to train a stage."""
_LAUNCH = "deepspeed.launcher.launch"
"""Between `deepspeed` and its ranks."""
_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2)."""


def train_here(arguments: Sequence[str], ranks: int, max_restarts: int = 0) -> int:
    """Train a stage on local processes until it is done, has failed, was stopped, or was lost too often.

    Args:
        arguments: of ds_fp8.commands.train.
        ranks: how many processes.
        max_restarts: how often to start it again after a rank was lost.

    Returns:
        One of cluster.exit_codes.
    """
    _adopt_orphans()

    def start(attempt: int) -> int:
        # One rank needs no launcher: it is this process's child, without seconds of imports before it.
        command = [*deepspeed_command(ranks), *TRAIN] if ranks > 1 else [sys.executable, "-m", TRAIN[-1], "--gpus", "1"]
        return run_job([*command, *arguments], stop=_stop_ranks, wait=_wait_for_all)

    return with_restarts(start, max_restarts)


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own has ended: `deepspeed` ends at once at a signal, its ranks save."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stop_ranks(process: subprocess.Popen) -> None:
    """Ask the ranks below `process` to stop, or what is there while there are none.

    Not `deepspeed`, which would leave before they have saved, and not the launcher below it, which would kill them
    after 30 seconds.
    """
    launchers = _descendants(_LAUNCH)
    ranks = [rank for launcher in launchers for rank in _children(launcher)]
    if not ranks:
        # No ranks yet, as while the launcher imports: the command itself is asked.
        process.terminate()
    for each in ranks or launchers:
        with suppress(psutil.NoSuchProcess):
            each.terminate()


def _wait_for_all(process: subprocess.Popen) -> int:
    """Return the exit code of `process` once it, its launcher and the ranks have ended."""
    code = process.wait()
    # Polled: adopted ranks are not children that `Popen.wait` knows.
    while _descendants(TRAIN[-1]):
        time.sleep(0.2)
    return code


def _descendants(name: str) -> list[psutil.Process]:
    """Return the descendants of this process, adopted ones too, in whose command is `name`; no zombies."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [each] if name in each.cmdline() else []
    return found


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children()
    return []


def deepspeed_command(ranks: int) -> list[str]:
    """Return the command that a script's path and arguments are appended to: `deepspeed` with `ranks` local processes.

    They take a port that is free and the first of the GPUs that CUDA_VISIBLE_DEVICES numbers, which `deepspeed
    --num_gpus` would ignore.

    Raises:
        UserError: That variable has fewer GPUs, or names that `deepspeed` cannot read.
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(free_port())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible or get_accelerator().device_name() != "cuda":
        return [*command, "--num_gpus", str(ranks)]
    names = visible.split(",")
    if not all(name.isdecimal() for name in names):
        raise UserError(
            f"the deepspeed command needs GPU numbers, but CUDA_VISIBLE_DEVICES is {visible}",
            remedy="give the GPUs' numbers, as nvidia-smi lists them",
        )
    if len(names) < ranks:
        raise UserError(
            f"{ranks} GPUs are requested, but CUDA_VISIBLE_DEVICES={visible} lists {len(names)}",
            remedy="request fewer GPUs, or list more",
        )
    # --num_gpus counts from GPU 0 and ignores CUDA_VISIBLE_DEVICES.
    return [*command, "--include", "localhost:" + ",".join(names[:ranks])]
