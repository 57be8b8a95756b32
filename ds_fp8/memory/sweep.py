"""A sweep: points of a stage (report/compare.py), checked before the first run, and measured one by one, each once.

A point is a run of `ds-fp8 train`, which is killed after the steps that are measured: the end of a run would write a
checkpoint of the whole model. Out of memory, a failure and a time limit are results. sweep.jsonl has one line for every
finished point, which survives a kill of its writer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console

from ds_fp8.cluster.launcher import TRAIN
from ds_fp8.config.errors import EXIT_USER_ERROR, UserError
from ds_fp8.config.schema import parse_section
from ds_fp8.memory.estimate import Estimate, estimate
from ds_fp8.memory.shapes import Device
from ds_fp8.report.compare import Point, run_each
from ds_fp8.report.verdict import RAN
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.run_folder import METRICS
from ds_fp8.train.stage import Schedule, load_stage

# Changes of every run besides: as little evaluation as there may be, and a record of every step
MEASURING = (
    *("train.eval_batches=1", "train.exact_match_problems=0", "train.eval_every=null", "train.keep_best=false"),
    "train.log_every=1",
)


def check_points(points: Sequence[Point], stage_file: str | os.PathLike) -> None:
    """Refuse points with which the stage cannot be loaded."""
    for point in points:
        try:
            load_stage(stage_file, [*point.changes(), *MEASURING], point.gpus)
        except UserError as error:
            problem = f'the point "{point.name}": {error.problem}'
            raise UserError(problem, key=error.key, file=error.file, remedy=error.remedy) from None


def estimate_of(point: Point, raw: Mapping[str, Any], device: Device | None = None) -> Estimate:
    """Return the estimate of the point, on `device`, or else on that of this machine."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    return estimate(point.applied(raw), gpus=point.gpus, device=device or here)


# ---------------------------------------------------------------- one run

FILE, POINTS, OUTPUT, RUN = "sweep.jsonl", "points", "output.log", "run"
OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED = RAN, "out of memory", "failed", "timeout", "refused"
# Status of a point that was ended from outside: neither a result nor the point's fault, so that it runs again
KILLED = "killed"

PROGRAM = (sys.executable, "-m", TRAIN)
_POLL = 0.2
# Lets glibc give every tensor that is freed back to the system: on a CPU its resident memory is what is measured
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)
_REASONS = (_OUT_OF_MEMORY, re.compile(r"^error: "), re.compile(r"(Error|Exception)\b.*:"))

Record = dict[str, Any]


def run_point(
    stage_file: Path,
    overrides: Sequence[str],
    *,
    gpus: int,
    steps: int,
    folder: Path,
    timeout: float,
) -> Record:
    """Measure some steps of a stage with KEY=VALUE changes; return status, reason, seconds, and figures if it is OK.

    An earlier run in the same folder is ended and forgotten. The run is ended after `timeout` seconds.
    """
    run_dir = f"train.run_dir={json.dumps(str((folder / RUN).resolve()))}"
    _end_leftover(run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    changes = [part for change in (*overrides, run_dir) for part in ("--set", change)]
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [*PROGRAM, "--gpus", str(gpus), "--deepspeed_config", str(stage_file), *changes],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **_RETURN_MEMORY},
        )
    try:
        ended, records = False, []
        while len(records) < steps and not ended and time.monotonic() - started <= timeout:
            time.sleep(_POLL)
            ended = process.poll() is not None
            records = [record for record in read_metrics(folder / RUN / METRICS) if "loss" in record]
    finally:
        _end(process.pid)
        process.wait()
    result = {"seconds": round(time.monotonic() - started, 1)}
    shutil.rmtree(folder / RUN, ignore_errors=True)
    if len(records) >= steps:
        return {"status": OK, "reason": "", **result, **_figures(records[:steps])}
    if not ended:
        return {"status": TIMEOUT, "reason": f"not done after {timeout:g} s", **result}
    text = (folder / OUTPUT).read_text(errors="replace")
    return {"status": _how_it_ended(process.returncode, text), "reason": _reason(text), **result}


def _end_leftover(run_dir: str) -> None:
    """End the run that a killed driver left, if it still is there: it has this KEY=VALUE among its arguments."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if run_dir in process.cmdline():
                _end(os.getpgid(process.pid))


def _end(group: int) -> None:
    """Kill the processes of a group, and what its leader has started besides."""
    members: set[psutil.Process] = set()
    with suppress(psutil.Error):
        members.update(psutil.Process(group).children(recursive=True))
    for process in psutil.process_iter():
        with suppress(OSError):
            members |= {process} if os.getpgid(process.pid) == group else set()
    for process in members:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs([process for process in members if process.pid != group], timeout=30)


def _how_it_ended(code: int, output: str) -> str:
    if _OUT_OF_MEMORY.search(output):
        return OUT_OF_MEMORY
    if code == -9 or "its process was ended by SIGKILL" in output:
        return KILLED
    return REFUSED if code == EXIT_USER_ERROR else FAILED


def _reason(output: str) -> str:
    """Return the line of a run's output that says why it ended."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = (line for pattern in _REASONS for line in lines if pattern.search(line))
    return next(found, lines[-1] if lines else "(no output)")[:300]


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


# ---------------------------------------------------------------- all runs


@contextmanager
def only_driver(folder: Path) -> Iterator[None]:
    """Hold the folder of a sweep; a process that is killed lets it go."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another sweep is running in {folder}", remedy="wait for it, or give another --out"
            ) from None
        yield


@dataclass(frozen=True)
class Sweep:
    """Runs points of a stage and keeps their results, by key, in a folder."""

    stage_file: Path
    raw: Mapping[str, Any]
    folder: Path
    steps: int
    timeout: float
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))

    def run(self, points: list[Point]) -> list[Record]:
        """Return the records of all points, measured or found."""
        by_name, known = {point.name: point for point in points}, {record["key"] for record in self.known(points)}
        finished = [name for name, point in by_name.items() if self._key(point) in known]
        run_each(list(by_name), finished, lambda name: self._measure(by_name[name]), self._say)
        return self.known(points)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def known(self, points: list[Point]) -> list[Record]:
        """Return the records there are of `points`."""
        file, by_key = self.folder / FILE, {}
        for line in file.read_text().splitlines() if file.exists() else []:
            with suppress(json.JSONDecodeError):  # cut off by a kill: that point runs again
                record = json.loads(line)
                by_key[record["key"]] = record
        return [by_key[key] for key in map(self._key, points) if key in by_key]

    def _measure(self, point: Point) -> None:
        """Run one point and keep the result, unless it was killed from outside."""
        expected = None
        try:
            expected = estimate_of(point, self.raw).as_json()
        except UserError as error:  # a model of which there is none is measured all the same
            self._say(f"{point.name}: no estimate: {error.problem}")
        measured = run_point(
            self.stage_file,
            [*point.changes(), *MEASURING, *self._long_enough(point)],
            gpus=point.gpus,
            steps=self.steps,
            folder=self.folder / POINTS / self._key(point),
            timeout=self.timeout,
        )
        self._say(f"{point.name}: {measured['status']} {measured['reason']}".rstrip())
        if measured["status"] == KILLED:
            self._say(f"  {point.name} was killed from outside: it counts as not run")
            return
        record = {
            "key": self._key(point),
            "name": point.name,
            **measured,
            "settings": point.settings,
            "gpus": point.gpus,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "estimate": expected,
        }
        with (self.folder / FILE).open("a") as stream:
            # On a line of its own, also behind one that was cut off.
            stream.write(f"\n{json.dumps(record)}\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _long_enough(self, point: Point) -> list[str]:
        """Return changes with which the run will not end, and save itself, before it is measured."""
        train, steps = point.applied(self.raw).get("train", {}), self.steps + 1
        if train.get("epochs") is not None:
            schedule = parse_section(Schedule, train.get("schedule", {}), key="train.schedule")
            return ["train.epochs=null", f"train.steps={max(steps, schedule.shortest)}"]
        return [f"train.steps={steps}"] if train.get("steps", steps) < steps else []

    def _key(self, point: Point) -> str:
        """Return a name for what is measured: equal settings, stage and steps have the same."""
        content = point.applied(self.raw)
        content.get("train", {}).pop("run_dir", None)
        text = json.dumps([content, point.gpus, self.steps], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
