"""Start a job on this host or on those of a hostfile, pass signals on, restart it after a loss."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds_fp8.cluster.hosts import free_port, read_hostfile
from ds_fp8.config.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST, EXIT_USER_ERROR, UserError

TRAIN = "ds_fp8.commands.train"
STARTED_BY = "DS_FP8_STARTED_BY"  # environment of a rank: the pid of its launcher, whose end asks the rank to stop
_OTHERS_END = 40.0  # seconds for guardians to end the other ranks after a failure; then they are killed
_CONNECT = 10  # seconds for a host to answer ssh
# ssh ends 20 s after the last answer of a host; by default it waits for ever, and pdsh and deepspeed with it.
_DEAD_LINK = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
_SSH = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}")
# Seconds before a restart: guardians on an unreachable host end their ranks after 30 s, ssh ends after 20.
_SETTLE = 15.0
_PORT = 29500


# ---------------------------------------------------------------- processes of a job


def run_job(jobs: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> int:
    """Run processes, each with its environment, to their end; pass SIGTERM, SIGINT and SIGHUP on.

    From the main thread alone. Returns an exit code of config.errors: EXIT_INTERRUPTED after a signal, unless the job
    was done.
    """
    processes: list[subprocess.Popen] = []
    asked = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        for process in processes:
            process.terminate()

    # Ignored signals stay ignored: shells start background jobs with SIGINT ignored.
    asking = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ours = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in ours}
    try:
        for command, environment in jobs:
            processes.append(subprocess.Popen(command, env=environment))
        if asked:  # while they were started
            pass_on(0, None)
        codes = {meaning(code) for code in _wait(processes)}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked and codes != {EXIT_DONE}:
        return EXIT_INTERRUPTED
    order = (EXIT_USER_ERROR, EXIT_FAILED, EXIT_LOST, EXIT_INTERRUPTED, EXIT_DONE)
    return next(code for code in order if code in codes)


def _wait(processes: Sequence[subprocess.Popen]) -> list[int]:
    """Return the exit codes of all processes; _OTHERS_END seconds after a failure the others are killed."""
    failed_at = None
    while None in [process.poll() for process in processes]:
        failed = any(process.returncode not in (None, EXIT_DONE, EXIT_INTERRUPTED) for process in processes)
        failed_at = failed_at or (time.monotonic() if failed else None)
        if failed_at is not None and time.monotonic() - failed_at > _OTHERS_END:
            for process in processes:
                process.kill()
        time.sleep(0.1)
    return [process.returncode for process in processes]


def meaning(code: int) -> int:
    """Return a run's exit code for that of a process, of deepspeed (the largest of all ranks), or of ssh."""
    if code in (EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED):
        return code
    # 126, 127: no such program on a host. Above: a signal, or ssh without a host.
    return EXIT_LOST if code == EXIT_LOST or code < 0 or code > 127 else EXIT_FAILED


def with_restarts(start: Callable[[int], int], max_restarts: int, settle: float = 0.0) -> int:
    """Run a job, `start(attempt)`; restart it up to `max_restarts` times, after `settle` seconds, if it was lost."""
    if max_restarts < 0:
        problem = f"--max-restarts must be at least 0, got {max_restarts}"
        raise UserError(problem, key="--max-restarts", remedy="0 for none, or a number")
    for attempt in range(max_restarts + 1):
        if attempt:
            time.sleep(settle)
            _say(f"restart {attempt} of {max_restarts}, from the last checkpoint")
        code = start(attempt)
        if code != EXIT_LOST:  # errors and mistakes would come again
            break
    return code


def _say(line: str) -> None:
    print(f"launcher: {line}", file=sys.stderr, flush=True)


def train_here(arguments: Sequence[str], ranks: int, max_restarts: int = 0) -> int:
    """Train a stage on local ranks, with arguments of ds_fp8.commands.train; returns an exit code of config.errors."""

    def start(attempt: int) -> int:
        job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        own = ({**job, "RANK": rank, "LOCAL_RANK": rank, STARTED_BY: os.getpid()} for rank in range(ranks))
        environments = [{**os.environ, **{name: str(value) for name, value in each.items()}} for each in own]
        return run_job([([sys.executable, "-m", TRAIN, *arguments], environment) for environment in environments])

    return with_restarts(start, max_restarts)


# ---------------------------------------------------------------- many hosts


def launch(
    hostfile: str | os.PathLike, command: Sequence[str], options: Sequence[str] = (), max_restarts: int = 0
) -> int:
    """Run a script, or "--module" and a name, with its arguments on the hosts of a hostfile; returns an exit code.

    options: of the deepspeed command.
    """
    hosts = list(read_hostfile(hostfile))
    for program in ("pdsh", "ssh"):
        if shutil.which(program) is None:
            raise UserError(
                f"{program} is not installed on this host", remedy=f"install {program} (Debian: apt install pdsh)"
            )
    script = command[0] if command[0].startswith("--") else str(Path(command[0]).resolve())
    append = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    of_ssh = argparse.ArgumentParser(add_help=False)
    of_ssh.add_argument("--ssh_port")
    port = of_ssh.parse_known_args(options)[0].ssh_port
    ssh = ["ssh", *shlex.split(append), *_SSH, *(["-p", port] if port else [])]  # as pdsh calls it
    environment = {**os.environ, "PDSH_SSH_ARGS_APPEND": f"{append} {shlex.join([*_SSH, *_DEAD_LINK])}".strip()}

    def start(attempt: int) -> int:
        if silent := _unreachable(hosts, ssh):
            raise UserError(
                "no ssh to " + ", ".join(f"{name} ({reason})" for name, reason in silent.items()),
                file=hostfile,
                remedy=f"make `{shlex.join(ssh)} HOST true` work without a password, or take the host out",
            )
        # --force_multi: a single host may be another one. A new port each attempt: the last may still be in use; a port
        # in the user's options comes later and wins.
        runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--force_multi"]
        runner += ["--no_ssh_check"]  # it would call ssh without the user's arguments
        runner += ["--master_port", str(_PORT + attempt), *options, script, *command[1:]]
        return run_job([(runner, environment)])

    return with_restarts(start, max_restarts, _SETTLE)


def _unreachable(hosts: Sequence[str], ssh: Sequence[str]) -> dict[str, str]:
    def ask(host: str) -> str | None:
        # BatchMode: a host that asks for a password counts as unreachable.
        command = [*ssh, host, "true"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * _CONNECT)
        except subprocess.TimeoutExpired:
            return "no answer"
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return None if done.returncode == 0 else (words[-1] if words else f"exit code {done.returncode}")

    # All hosts at once: an unreachable one takes ten seconds.
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = dict(zip(hosts, pool.map(ask, hosts), strict=True))
    return {name: reason for name, reason in answers.items() if reason is not None}


# ---------------------------------------------------------------- options of a script


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("many hosts").add_argument
    words = "start on the hosts of this file over ssh; its lines are NAME slots=GPUS"
    add("--hostfile", metavar="FILE", help=words)
    words = "restart up to N times after a host or a rank is lost"
    add("--max-restarts", type=int, default=0, metavar="N", help=words)
    words = 'further options of the deepspeed command, such as "--master_addr 10.0.0.1 --ssh_port 2222"'
    add("--launcher-options", default="", metavar="TEXT", help=words)


def check_launch_options(arguments: argparse.Namespace, local_restarts: bool = False) -> None:
    """Raise UserError for options that need --hostfile without it, and for any of them on a rank.

    local_restarts: --max-restarts needs no --hostfile.
    """
    needs_hosts = {"--launcher-options": arguments.launcher_options}
    restarts = {"--max-restarts": arguments.max_restarts != 0}
    if "RANK" in os.environ:
        refused = {"--hostfile": arguments.hostfile} | restarts | needs_hosts
        why = "another launcher has started this rank (RANK is set)"
        remedy = "give the option to that launcher instead; or unset RANK"
    elif arguments.hostfile is None:
        refused, why = needs_hosts | ({} if local_restarts else restarts), "--hostfile is not given"
        remedy = "give --hostfile FILE, or remove this option"
    else:
        return
    for option, given in refused.items():
        if given:
            raise UserError(f"{option} has no effect here: {why}", key=option, remedy=remedy)
