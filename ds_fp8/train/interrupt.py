"""Orderly stop at SIGTERM, SIGINT and SIGUSR1: all ranks agree on a signal at the same point of the run.

On one node DeepSpeed passes no signal on: `deepspeed` itself just ends. That it has ended is a request to stop, too.
The launcher below it gives its ranks 30 seconds from SIGTERM to SIGKILL, in which step and checkpoint must fit.
"""

from __future__ import annotations

import signal

import torch
from deepspeed import comm as dist

from ds_fp8.cluster import watchdog
from ds_fp8.train.processes import deepspeed_command, has_ended

EXIT_INTERRUPTED = 143  # 128 + SIGTERM, as a shell reports it


class Interrupted(Exception):
    """Raised on all ranks at once after one of them was asked to stop."""


class Interrupt:
    """Remembers the signals of this rank; `check` shares them. The handlers are installed on creation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = False
        self._command = deepspeed_command()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        # Nothing more in a handler: it runs between any two bytecodes, also inside a collective.
        self._asked = True

    def check(self, slow: bool = False) -> None:
        """Raise Interrupted on all ranks if any was asked to stop. Collective.

        Args:
            slow: whether what comes next may take long, such as many generated tokens.
        """
        watchdog.beat("training or evaluation", slow)
        # Ranks get a signal, or see the command end, at different times: what any of them knows counts for all of them.
        asked = self._asked or (self._command is not None and has_ended(self._command))
        # On the device, for NCCL takes no tensors of the host.
        flag = torch.tensor([int(asked)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            raise Interrupted
