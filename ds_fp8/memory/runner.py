"""One point of a sweep: a training run in separate processes, ended once it has been measured; and where results lie.

The run is `deepspeed --module ds_fp8.commands.train`, as a user would start it. It is killed after the steps that are
measured: the end of a run would write a checkpoint of the whole model. Out of memory, a failure and a time limit are
results. sweep.jsonl has one line for every finished point, which survives a kill of its writer.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ds_fp8.cluster.local_launch import deepspeed_command
from ds_fp8.config.errors import EXIT_USER_ERROR, UserError
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.run_folder import METRICS

FILE = "sweep.jsonl"
OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED = "ok", "out of memory", "failed", "timeout", "refused"
DONE = (OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED)
"""Ways for a point to end that a rerun does not repeat. A point that was killed is in none of them."""
KILLED = "killed"
"""Status of a point that was ended from outside: neither a result nor the point's fault."""

OUTPUT, RUN = "output.log", "run"
_POLL = 0.2
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Lets glibc give every tensor that is freed back to the system: on a CPU its resident memory is what is measured."""
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)
_SIGKILLED = re.compile(r"return code = -9\b|exitcode\s*:?\s*-9\b")

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run. Figures are None unless it was measured."""

    status: str
    reason: str
    seconds: float
    measured: Record | None = None


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
    run_dir = f"train.run_dir={json.dumps(str((folder / RUN).resolve()))}"
    end_leftover(run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    metrics = folder / RUN / METRICS
    started = time.monotonic()
    changes = [part for change in (*overrides, run_dir) for part in ("--set", change)]
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [*deepspeed_command(gpus), *program, "--deepspeed_config", str(stage_file), *changes],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **_RETURN_MEMORY},
        )
    try:
        records: list[Record] = []
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
        end_session(process.pid)
        process.wait()
    seconds = time.monotonic() - started
    shutil.rmtree(folder / RUN, ignore_errors=True)
    if status == OK:
        return Outcome(OK, "", seconds, _figures(records[:steps]))
    text = (folder / OUTPUT).read_text(errors="replace")
    reason = f"not done after {timeout:g} s" if status == TIMEOUT else _reason(text)
    return Outcome(status, reason, seconds)


def end_leftover(run_dir: str) -> None:
    """End the run that a killed driver left, if it still is there: it has this KEY=VALUE among its arguments."""
    found: dict[int, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if run_dir in process.cmdline():
                found[process.pid] = os.getsid(process.pid)
    for session in set(found.values()):
        # That of a point is its launcher's, which may be gone, and not that of a shell in which somebody trains.
        if session in found or not psutil.pid_exists(session):
            end_session(session)


def end_session(number: int) -> None:
    """Kill all processes of a POSIX session, and what its leader has started besides."""
    members: dict[int, psutil.Process] = {}
    with suppress(psutil.Error):
        members = {each.pid: each for each in psutil.Process(number).children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == number:
                members[process.pid] = process
    for process in members.values():
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs([process for process in members.values() if process.pid != number], timeout=30)


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


def _figures(records: list[Record]) -> Record:
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


class Results:
    """The finished points of a folder, by key."""

    def __init__(self, folder: Path):
        self.file = folder / FILE
        self.by_key: dict[str, Record] = {record["key"]: record for record in self._read()}

    def _read(self) -> Iterator[Record]:
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by a kill: that point runs again
            if isinstance(record, dict) and record.get("status") in DONE:
                yield record

    def append(self, record: Record) -> None:
        """Add a finished point; on the disk when this returns. A later record of the same key replaces it."""
        with self.file.open("ab") as stream:
            # A line that was cut off ends here; an empty one is read as nothing.
            stream.write(f"\n{json.dumps(record)}\n".encode() if stream.tell() else f"{json.dumps(record)}\n".encode())
            stream.flush()
            os.fsync(stream.fileno())
        self.by_key[record["key"]] = record


@contextmanager
def only_driver(folder: Path) -> Iterator[None]:
    """Hold the folder of a sweep; a process that is killed lets it go.

    Raises:
        UserError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another sweep is running in {folder}", remedy="wait for it, or give another --out"
            ) from None
        yield
