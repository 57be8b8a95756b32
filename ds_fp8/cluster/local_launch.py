"""Start `deepspeed` on this host alone, for commands that start training themselves."""

from __future__ import annotations

import os
import socket
import sys

from deepspeed.accelerator import get_accelerator

from ds_fp8.config.errors import UserError

TRAIN = ("--module", "ds_fp8.commands.train")
"""What follows `deepspeed_command` to train a stage."""


def deepspeed_command(ranks: int) -> list[str]:
    """Return the command that a script's path and arguments are appended to: `deepspeed` with `ranks` local processes.

    They take a port that is free and the first of the GPUs that CUDA_VISIBLE_DEVICES numbers, which `deepspeed
    --num_gpus` would ignore. Raises UserError where that variable has fewer, or names that `deepspeed` cannot read.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible or get_accelerator().device_name() != "cuda":
        return [*command, "--num_gpus", str(ranks)]
    names = visible.split(",")
    if not all(name.isdecimal() for name in names):
        raise UserError(
            f"the deepspeed command reads numbers, and CUDA_VISIBLE_DEVICES is {visible}",
            remedy="give the GPUs' numbers, as nvidia-smi lists them",
        )
    if len(names) < ranks:
        raise UserError(
            f"{ranks} GPUs are asked for, and CUDA_VISIBLE_DEVICES={visible} names {len(names)}",
            remedy="ask for fewer, or name more",
        )
    return [*command, "--include", "localhost:" + ",".join(names[:ranks])]
