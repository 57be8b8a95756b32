"""Launching a job on the hosts of a hostfile, and again after it lost one of them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ds_fp8.cluster.hostfile import Host, read_hostfile
from ds_fp8.cluster.job_process import run_job, say, with_restarts
from ds_fp8.config.errors import UserError

_CONNECT = 10
"""Seconds in which a host must answer ssh."""
_DEAD_LINK = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
"""ssh ends by itself 20 s after a host falls silent; by default it waits for ever, and pdsh and deepspeed with it."""
_SSH = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}")
_SETTLE = 15.0
"""Seconds before a restart: guardians on a host that was cut off end their ranks after 30 s, ssh after 20."""
_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """A job to start, and how often to start it again."""

    command: Sequence[str]
    """The script and its arguments, the same on all hosts."""
    options: Sequence[str] = ()
    """Further options of the deepspeed command, such as `--master_port 29501`."""
    max_restarts: int = 0
    """Times that it is started again after a loss."""
    min_hosts: int | None = None
    """Hosts that must be left for that; None for all of them."""


def launch(hostfile: str | os.PathLike, job: Launch) -> int:
    """Run a job on the hosts of a hostfile until it is done, has failed, or was lost too often.

    Returns:
        One of cluster.exit_codes.

    Raises:
        UserError: for a mistake in the hostfile or in the numbers of `job`, a missing program, or hosts that do not
            answer.
    """
    hosts = read_hostfile(hostfile)
    for program in ("pdsh", "ssh"):
        if shutil.which(program) is None:
            raise UserError(
                f"{program} is not installed on this host", remedy=f"install {program} (Debian: apt install pdsh)"
            )
    fewest = len(hosts) if job.min_hosts is None else job.min_hosts
    if not 1 <= fewest <= len(hosts):
        raise UserError(
            f"--min-hosts {fewest} is not possible with {len(hosts)} hosts",
            key="--min-hosts",
            remedy=f"a number from 1 to {len(hosts)}",
        )

    def start(attempt: int) -> int:
        # Asked before every attempt: a host may have come back.
        silent = unreachable(hosts)
        there = [host for host in hosts if host.name not in silent]
        # The first start is on all hosts: one that is missing then is a mistake, not a loss.
        if silent and (attempt == 0 or len(there) < fewest):
            raise UserError(
                "no ssh to " + ", ".join(f"{name} ({reason})" for name, reason in silent.items()),
                file=hostfile,
                remedy="make `ssh HOST true` work without a password, or take the host out"
                + (f"; {fewest} hosts are needed (--min-hosts)" if attempt else ""),
            )
        if silent:
            say(f"continuing with {len(there)} of {len(hosts)} hosts, without {', '.join(silent)}")
        return _run(there, job, attempt, first_is_there=there[0] == hosts[0])

    return with_restarts(start, job.max_restarts, _SETTLE)


def unreachable(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the reason, in ssh's words, for every host on which ssh cannot run a command."""

    def ask(host: Host) -> str | None:
        # BatchMode: a host that asks for a password counts as silent, and does not wait for a terminal.
        command = ["ssh", *_SSH, host.name, "true"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * _CONNECT)
        except subprocess.TimeoutExpired:
            return "no answer"
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return None if done.returncode == 0 else (words[-1] if words else f"exit code {done.returncode}")

    # All hosts at once: silent ones cost ten seconds each.
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = dict(zip([host.name for host in hosts], pool.map(ask, hosts), strict=True))
    return {name: reason for name, reason in answers.items() if reason is not None}


def _run(hosts: Sequence[Host], job: Launch, attempt: int, first_is_there: bool) -> int:
    """Run one attempt on these hosts; returns one of cluster.exit_codes."""
    append = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    environment = {**os.environ, "PDSH_SSH_ARGS_APPEND": f"{append} {shlex.join([*_SSH, *_DEAD_LINK])}".strip()}
    with tempfile.NamedTemporaryFile("w", prefix="hostfile-") as hostfile:
        hostfile.writelines(f"{host.name} slots={host.slots}\n" for host in hosts)
        # Flushed, for the child opens the file by its name.
        hostfile.flush()
        # --force_multi: a single host that is left is not necessarily this one.
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile.name, "--force_multi"]
        command += attempt_options(job.options, attempt, first_is_there)
        return run_job([*command, *job.command], environment=environment)


def attempt_options(options: Sequence[str], attempt: int, first_is_there: bool) -> list[str]:
    """Return the options of the deepspeed command for one attempt.

    Args:
        options: the user's, as "--master_port 29501" or "--master_port=29501".
        attempt: its number, from 0.
        first_is_there: whether the first host, whose address --master_addr may give, takes part.
    """
    kept = list(options)
    place = _place("--master_addr", kept)
    if place is not None and not first_is_there:
        # deepspeed then takes the first host that is left.
        del kept[place : place + (1 if "=" in kept[place] else 2)]
    if _place("--master_port", kept) is None:
        kept += ["--master_port", str(_PORT + attempt)]  # the last attempt's port may still be taken
    return kept


def _place(name: str, options: Sequence[str]) -> int | None:
    return next((place for place, option in enumerate(options) if option.split("=")[0] == name), None)
