"""The options with which a script starts itself on many hosts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from ds_fp8.cluster.launcher import Launch, launch


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `launch_as` reads."""
    group = parser.add_argument_group("many hosts")
    group.add_argument("--hostfile", metavar="FILE", help="start on these hosts over ssh: lines of NAME slots=GPUS")
    group.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="start again N times after a host or a rank was lost"
    )
    group.add_argument(
        "--min-hosts", type=int, metavar="N", help="start again with fewer hosts, but not fewer than N (default: all)"
    )
    group.add_argument(
        "--launcher-options",
        default="",
        metavar="TEXT",
        help='more for the deepspeed command, such as "--master_addr 10.0.0.1 --ssh_port 2222"',
    )


def launch_as(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Start `command` on the hosts that the options name and return its exit code.

    Args:
        arguments: parsed with `add_launch_options`.
        command: a script, or "--module" and a module's name, and its arguments.
    """
    script = command[0] if command[0].startswith("--") else str(Path(command[0]).resolve())
    options = shlex.split(arguments.launcher_options)
    job = Launch([script, *command[1:]], options, arguments.max_restarts, arguments.min_hosts)
    return launch(arguments.hostfile, job)
