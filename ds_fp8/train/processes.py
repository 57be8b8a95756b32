"""The processes of a run: process group, environment, launcher, and their orderly stop.

On one node DeepSpeed passes no signal on: `deepspeed` itself just ends. That it, or `ds-fp8 train`, has ended is a
request to stop, too. The launcher below `deepspeed` gives its ranks 30 seconds from SIGTERM to SIGKILL, in which step
and checkpoint must fit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import deepspeed
import psutil
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_fp8.cluster import watchdog
from ds_fp8.cluster.hosts import free_port
from ds_fp8.cluster.launcher import STARTED_BY
from ds_fp8.config.errors import UserError
from ds_fp8.export.on_all_ranks import on_all_ranks
from ds_fp8.zero.deepspeed.patches import disable_shm_build

T = TypeVar("T")


def set_single_process_env() -> None:
    """Describe a world of one in the environment, if no launcher has described another."""
    if "RANK" in os.environ:
        return
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def init_distributed() -> None:
    """Meet the other ranks. Collective."""
    timeout = watchdog.slowest()
    watchdog.wait_for_all()  # a host may have prepared more of the data
    disable_shm_build()
    # Before the process group: NCCL binds a communicator to the device that is current.
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(**({"timeout": timedelta(seconds=timeout)} if timeout else {}))
    # The first collective makes NCCL's connections: a rank that cannot connect fails here and not inside
    # the first step.
    dist.barrier()


def on_first_rank(work: Callable[[], T]) -> T:
    """Do `work` on the first rank and return its result on all of them, or raise on all of them. Collective."""
    return on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)[0]


def check_same_everywhere(what: str, facts: dict[str, Any], *, key: str, remedy: str) -> None:
    """Raise UserError, on all ranks alike, where `what` a rank has (its facts) is not rank 0's. Collective."""
    # Every rank gets all facts and finds the same difference: all raise, and none waits for another.
    everywhere = on_all_ranks(lambda: (socket.gethostname(), json.dumps(facts, sort_keys=True, default=str)))
    first_host, expected = everywhere[0]
    for rank, (host, found) in enumerate(everywhere):
        if found != expected:
            theirs, ours = json.loads(found), json.loads(expected)
            name = next(name for name in [*ours, *theirs] if theirs.get(name) != ours.get(name))
            raise UserError(
                f"on {host} (rank {rank}) {what} differs from that on {first_host} (rank 0): "
                f"{name} is {theirs.get(name)}, not {ours.get(name)}",
                key=key,
                remedy=remedy,
            )


def command_of_rank() -> psutil.Process | None:
    """Return the `ds-fp8 train` or `deepspeed` that started this rank, or None if another launcher or node did."""
    launcher = psutil.Process().parent()
    if launcher is None or str(launcher.pid) == os.environ.get(STARTED_BY):
        return launcher
    command = launcher.parent() if _runs(launcher, "deepspeed.launcher.launch") else None
    return command if command and _runs(command, "deepspeed", "deepspeed.launcher.runner") else None


def _runs(process: psutil.Process, *names: str) -> bool:
    try:
        return any(part.endswith(names) for part in process.cmdline())
    except psutil.Error:
        return False


class Interrupted(Exception):
    """Raised on all ranks at once after one of them was asked to stop."""


class Interrupt:
    """Remembers the signals of this rank; `check` shares them. The handlers are installed on creation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = False
        self._command = command_of_rank()
        self._before: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            # Under nohup the end of a terminal is ignored. SIGINT is, too, in what a script starts in the background,
            # and is asked for by hand then.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """Give the signals back to the program."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: object) -> None:
        # Nothing more in a handler: it runs between any two bytecodes, also inside a collective.
        self._asked = True

    def check(self, slow: bool = False) -> None:
        """Raise Interrupted on all ranks if any was asked to stop. Collective. `slow`: what comes next takes long."""
        watchdog.beat("training or evaluation", slow)
        # Ranks get a signal, or see the command end, at different times: what any of them knows counts for all of them.
        asked = self._asked
        if self._command is not None:
            with suppress(psutil.NoSuchProcess):  # between the two questions: the next check finds it
                asked |= not self._command.is_running() or self._command.status() == psutil.STATUS_ZOMBIE
        # On the device, for NCCL takes no tensors of the host.
        flag = torch.tensor([int(asked)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            raise Interrupted
