"""The options with which a script starts itself on many hosts."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ds_fp8.cluster.launcher import Launch, launch
from ds_fp8.config.errors import UserError


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `launch_as` reads."""
    group = parser.add_argument_group("many hosts")
    group.add_argument(
        "--hostfile", metavar="FILE", help="start on the hosts of this file over ssh; its lines are NAME slots=GPUS"
    )
    group.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restart up to N times after a host or a rank is lost"
    )
    group.add_argument(
        "--min-hosts",
        type=int,
        metavar="N",
        help="restart with the hosts that are left, if these are N or more (default: all)",
    )
    group.add_argument(
        "--launcher-options",
        default="",
        metavar="TEXT",
        help='further options of the deepspeed command, such as "--master_addr 10.0.0.1 --ssh_port 2222"',
    )


def check_launch_options(arguments: argparse.Namespace, local_restarts: bool = False) -> None:
    """Refuse options that go with --hostfile alone, where there is none, and all of them on a rank.

    Args:
        arguments: parsed with `add_launch_options`.
        local_restarts: whether --max-restarts also goes without --hostfile.
    """
    needs_hosts = {"--min-hosts": arguments.min_hosts is not None, "--launcher-options": arguments.launcher_options}
    restarts = {"--max-restarts": arguments.max_restarts != 0}
    hostfile = {"--hostfile": arguments.hostfile}
    if "RANK" in os.environ:
        refused, why = hostfile | restarts | needs_hosts, "another launcher has started this rank (RANK is set)"
        remedy = "give the option to that launcher instead; or unset RANK"
    elif arguments.hostfile is None:
        refused, why = needs_hosts | ({} if local_restarts else restarts), "--hostfile is not given"
        remedy = "give --hostfile FILE, or remove this option"
    else:
        return
    for option, given in refused.items():
        if given:
            raise UserError(f"{option} has no effect here: {why}", key=option, remedy=remedy)


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
