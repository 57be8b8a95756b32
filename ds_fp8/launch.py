"""The `deepspeed` command, for scripts that start training themselves."""

from __future__ import annotations

import os
import socket
import sys

from ds_fp8.errors import UserError


def deepspeed_command(ranks: int) -> list[str]:
    """What a script's path and arguments are appended to: `deepspeed` on this host with `ranks` processes.

    They take the first of the GPUs that CUDA_VISIBLE_DEVICES names, which `deepspeed --num_gpus` would ignore, and a
    port that is free. Raises UserError where that variable names fewer GPUs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return [*command, "--num_gpus", str(ranks)]
    names = visible.split(",")
    if len(names) < ranks:
        raise UserError(
            f"{ranks} GPUs are asked for, and CUDA_VISIBLE_DEVICES={visible} names {len(names)}",
            remedy="ask for fewer, or name more",
        )
    return [*command, "--include", "localhost:" + ",".join(names[:ranks])]
