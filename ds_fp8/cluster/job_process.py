"""The process that runs a job: signals are passed on to it, its exit code is read, a lost job is started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ds_fp8.cluster.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST, EXIT_USER_ERROR
from ds_fp8.config.errors import UserError


def run_job(
    command: Sequence[str],
    *,
    stop: Callable[[subprocess.Popen], None] = subprocess.Popen.terminate,
    wait: Callable[[subprocess.Popen], int] = subprocess.Popen.wait,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a command until it has ended, and pass SIGTERM and SIGINT on to it. From the main thread alone.

    Args:
        command: a program and its arguments.
        stop: asks the process to stop; called at every signal.
        wait: returns the exit code once nothing of the job is left.
        environment: of the process, this one's by default.

    Returns:
        One of cluster.exit_codes; EXIT_INTERRUPTED after a signal, but for a job that was done in spite of it.
    """
    process: subprocess.Popen | None = None
    asked = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        if process is not None:
            stop(process)

    # A signal that is ignored stays so: a shell starts background jobs with SIGINT ignored.
    ours = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in ours}
    try:
        process = subprocess.Popen(command, env=environment)
        if asked:  # while it was started
            stop(process)
        code = wait(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return EXIT_INTERRUPTED if asked and code != EXIT_DONE else meaning(code)


def meaning(code: int) -> int:
    """Return the exit code of a run for deepspeed's, which is the largest of all ranks' and hosts', or ssh's own."""
    if code in (EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED):
        return code
    # 126 and 127: no such program on a host. Above: a signal, or ssh without a host.
    return EXIT_LOST if code == EXIT_LOST or code < 0 or code > 127 else EXIT_FAILED


def with_restarts(start: Callable[[int], int], max_restarts: int, settle: float = 0.0) -> int:
    """Run a job, and again after a loss.

    Args:
        start: runs the attempt of this number, from 0, and returns one of cluster.exit_codes.
        max_restarts: how often to start it again.
        settle: seconds to wait before.

    Returns:
        What the last attempt returned.

    Raises:
        UserError: max_restarts is below 0.
    """
    if max_restarts < 0:
        raise UserError(
            f"--max-restarts must be at least 0, got {max_restarts}",
            key="--max-restarts",
            remedy="0 for none, or a number",
        )
    for attempt in range(max_restarts + 1):
        if attempt:
            time.sleep(settle)
            say(f"restart {attempt} of {max_restarts}, from the last checkpoint")
        code = start(attempt)
        # Only losses are worth another start: errors and mistakes would come again.
        if code != EXIT_LOST:
            break
    return code


def say(line: str) -> None:
    """Print what the launcher does to stderr."""
    print(f"launcher: {line}", file=sys.stderr, flush=True)
