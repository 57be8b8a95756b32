"""One point of a sweep: a training run in separate processes, ended once it has been measured.

The run is `deepspeed --module ds_fp8.commands.train`, as a user would start it. It is killed after the steps that are
measured: the end of a run would write a checkpoint of the whole model. Out of memory, a failure and a time limit are
results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ds_fp8.cluster.local_launch import deepspeed_command
from ds_fp8.config.errors import EXIT_USER_ERROR
from ds_fp8.memory.results import FAILED, OK, OUT_OF_MEMORY, REFUSED, TIMEOUT
from ds_fp8.train.checkpoints import METRICS
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.metrics import read_metrics

KILLED = "killed"
"""Status of a point that was ended from outside: neither a result nor the point's fault."""

PROCESS, OUTPUT, RUN = "process.json", "output.log", "run"
_POLL = 0.2
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Lets glibc give every tensor that is freed back to the system: on a CPU its resident memory is what is measured."""
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)
_SIGKILLED = re.compile(r"return code = -9\b|exitcode\s*:?\s*-9\b")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run. Figures are None unless it was measured."""

    status: str
    reason: str
    seconds: float
    measured: dict[str, Any] | None = None


def run_point(
    program: Sequence[str],
    stage_file: Path,
    overrides: Sequence[str],
    *,
    gpus: int,
    steps: int,
    folder: Path,
    timeout: float,
    tick: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Measure some steps of a stage. An earlier run in the same folder is ended and forgotten.

    Args:
        program: What the deepspeed launcher starts on every rank.
        stage_file: The stage's JSON.
        overrides: KEY=VALUE changes of the stage.
        gpus: Number of ranks.
        steps: Steps to measure.
        folder: Where the run writes.
        timeout: Seconds after which the run is ended.
        tick: Called with the number of steps done.
    """
    end_leftover(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    metrics = folder / RUN / METRICS
    overrides = [*overrides, f"train.run_dir={json.dumps(str((folder / RUN).resolve()))}"]
    started = time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [*deepspeed_command(gpus), *program, "--deepspeed_config", str(stage_file)]
            + [part for override in overrides for part in ("--set", override)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **_RETURN_MEMORY},
        )
    try:
        about = {"pid": process.pid, "started": _seconds_after_boot(psutil.Process(process.pid))}
        write_atomically(folder / PROCESS, json.dumps(about))
        records: list[dict[str, Any]] = []
        status = None
        while status is None:
            time.sleep(_POLL)
            ended = process.poll() is not None
            records = [record for record in read_metrics(metrics, sys.maxsize) if "loss" in record]
            tick(min(len(records), steps))
            if len(records) >= steps:
                status = OK
            elif ended:
                status = _how_it_ended(process.returncode, (folder / OUTPUT).read_text(errors="replace"))
            elif time.monotonic() - started > timeout:
                status = TIMEOUT
    finally:
        end_tree(process.pid)
        process.wait()
    seconds = time.monotonic() - started
    (folder / PROCESS).unlink(missing_ok=True)
    shutil.rmtree(folder / RUN, ignore_errors=True)
    if status == OK:
        return Outcome(OK, "", seconds, _figures(records[:steps]))
    text = (folder / OUTPUT).read_text(errors="replace")
    reason = f"not done after {timeout:g} s" if status == TIMEOUT else _reason(text)
    return Outcome(status, reason, seconds)


def end_leftover(folder: Path) -> None:
    """End the run that a killed driver left in `folder`, if it still is there."""
    try:
        about = json.loads((folder / PROCESS).read_text())
        pid, started = about["pid"], about["started"]
    except (OSError, ValueError, KeyError):
        return
    try:
        ours = abs(_seconds_after_boot(psutil.Process(pid)) - started) < 1
    except psutil.Error:
        ours = True  # the launcher is gone; what it started still is in the POSIX session of that number
    if ours:
        end_tree(pid)


def _seconds_after_boot(process: psutil.Process) -> float:
    """Return the start of a process in seconds since boot: create_time() alone moves when the time of day is set."""
    return process.create_time() - psutil.boot_time()


def end_tree(pid: int) -> None:
    """Kill a process, which leads a POSIX session, with all that it started and all in that session."""
    members: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid:
                members.append(process)
        except (OSError, psutil.Error):
            continue
    try:
        parent = psutil.Process(pid)
        if os.getsid(pid) == pid:
            members += [*parent.children(recursive=True), parent]
    except (OSError, psutil.Error):
        pass
    for process in members:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs([process for process in members if process.pid != pid], timeout=30)


def _how_it_ended(code: int, output: str) -> str:
    if _OUT_OF_MEMORY.search(output):
        return OUT_OF_MEMORY
    if code == -9 or _SIGKILLED.search(output):
        return KILLED
    return REFUSED if re.search(rf"return code = {EXIT_USER_ERROR}\b", output) or code == EXIT_USER_ERROR else FAILED


def _reason(output: str) -> str:
    """Return the line of a run's output that says why it ended."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern in (_OUT_OF_MEMORY, re.compile(r"^error: "), re.compile(r"(Error|Exception)\b.*:")):
        found = [line for line in lines if pattern.search(line)]
        if found:
            return found[0][:300]
    return lines[-1][:300] if lines else "(no output)"


def _figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the memory in bytes, the most over ranks and steps; speed as the median of the steps but the first."""
    timed = records[1:] or records
    return {
        "peak_bytes": max(record["memory_bytes"] for record in records),
        "reserved_bytes": max(record["reserved_bytes"] for record in records),
        "process_bytes": records[0]["process_bytes"],
        "tokens_per_second": median(record["tokens_per_second"] for record in timed),
        "step_seconds": median(record["step_seconds"] for record in timed),
        "loss": records[-1]["loss"],
        "steps": len(records),
    }
