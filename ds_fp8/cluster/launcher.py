"""Start a job on this host or on those of a hostfile, pass signals on, restart it after a loss."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ds_fp8.cluster.hosts import free_port, read_hostfile
from ds_fp8.config.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST, EXIT_USER_ERROR, UserError

TRAIN = "ds_fp8.commands.train"
STARTED_BY = "DS_FP8_STARTED_BY"  # environment of a rank: the pid of its launcher, whose end asks the rank to stop
_OTHERS_END = 40.0  # seconds for guardians to end the other ranks after a failure; then they are killed
_ENDS_WELL = (EXIT_DONE, EXIT_INTERRUPTED)
_SSH = "-o BatchMode=yes -o ConnectTimeout=10"
# ssh ends 20 s after the last answer of a host; by default it waits for ever, and pdsh and deepspeed with it.
_DEAD_LINK = "-o ServerAliveInterval=5 -o ServerAliveCountMax=4"
# Seconds before a restart: guardians on an unreachable host end their ranks after 30 s, ssh ends after 20.
_SETTLE = 15.0
_PORT = 29500
_OPTIONS = ("--hostfile", "--max-restarts", "--launcher-options")


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
        kill_at = float("inf")
        while None in [process.poll() for process in processes]:
            if kill_at == float("inf") and any(p.returncode not in (None, *_ENDS_WELL) for p in processes):
                kill_at = time.monotonic() + _OTHERS_END
            for process in processes if time.monotonic() > kill_at else ():
                process.kill()
            time.sleep(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = {meaning(process.returncode) for process in processes}
    order = (EXIT_USER_ERROR, EXIT_FAILED, EXIT_LOST, EXIT_INTERRUPTED, EXIT_DONE)
    return EXIT_INTERRUPTED if asked and codes != {EXIT_DONE} else next(code for code in order if code in codes)


def meaning(code: int) -> int:
    """Return a run's exit code for that of a process, of deepspeed (the largest of all ranks), or of ssh."""
    if code in (EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED):
        return code
    # 126, 127: the program is missing there, and a restart does not help. Above: a signal, or ssh without a host.
    return EXIT_LOST if code == EXIT_LOST or code < 0 or code > 127 else EXIT_FAILED


def with_restarts(start: Callable[[int], int], max_restarts: int, settle: float = 0.0) -> int:
    """Run a job, `start(attempt)`; restart it up to `max_restarts` times, after `settle` seconds, if it was lost."""
    if max_restarts < 0:
        problem = f"--max-restarts must be at least 0, got {max_restarts}"
        raise UserError(problem, key="--max-restarts", remedy="0 for none, or a number")
    for attempt in range(max_restarts + 1):
        if attempt:
            time.sleep(settle)
            line = f"launcher: restart {attempt} of {max_restarts}, from the last checkpoint"
            print(line, file=sys.stderr, flush=True)
        code = start(attempt)
        if code != EXIT_LOST:  # errors and mistakes would come again
            break
    return code


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
    own = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {_SSH}".strip()
    of_ssh = argparse.ArgumentParser(add_help=False)
    of_ssh.add_argument("--ssh_port")
    port = of_ssh.parse_known_args(options)[0].ssh_port
    probe = f"{own} -p {port}" if port else own  # as the runner calls it

    def start(attempt: int) -> int:
        # All hosts at once; BatchMode: a host that asks for a password counts as unreachable.
        ask = ["pdsh", "-S", "-R", "ssh", "-f", "64", "-u", "20", "-w", ",".join(hosts), "true"]
        environment = {**os.environ, "PDSH_SSH_ARGS_APPEND": probe}
        answer = subprocess.run(ask, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if answer.returncode:
            lines = answer.stderr.strip().splitlines()  # "HOST: reason" by ssh, "pdsh@here: HOST: ..." by pdsh
            reasons = [line for line in lines if not line.startswith("pdsh@")] or lines
            remedy = f"make `ssh {probe} HOST true` work without a password, or take the host out"
            raise UserError("no ssh to " + ", ".join(reasons), file=hostfile, remedy=remedy)
        # --force_multi: a single host may be another one. A new port each attempt: the last may still be in use; a port
        # in the user's options comes later and wins. --no_ssh_check: it would call ssh without the user's arguments.
        runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--force_multi"]
        runner += ["--no_ssh_check", "--master_port", str(_PORT + attempt), *options, script, *command[1:]]
        return run_job([(runner, {**os.environ, "PDSH_SSH_ARGS_APPEND": f"{own} {_DEAD_LINK}"})])

    return with_restarts(start, max_restarts, _SETTLE)


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
    given = [option for option in _OPTIONS if getattr(arguments, option[2:].replace("-", "_"))]
    if "RANK" in os.environ:
        why = "another launcher has started this rank (RANK is set)"
        remedy = "give the option to that launcher instead; or unset RANK"
    else:
        why, remedy = "--hostfile is not given", "give --hostfile FILE, or remove this option"
        if arguments.hostfile is not None or (local_restarts and given == ["--max-restarts"]):
            return
    for option in given:
        raise UserError(f"{option} has no effect here: {why}", key=option, remedy=remedy)
