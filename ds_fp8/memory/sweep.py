"""A sweep: settings of a stage, checked in full before the first run, and measured one after the other, each once.

    {
      "set":    {"data.sequence_length": 8192},                      for every point
      "points": [{"name": "BF16", "set": {"fp8.enabled": false}}, ...],
      "grid":   {"train_micro_batch_size_per_gpu": [1, 2, 4], "gpus": [1, 4]}
    }

Keys are dotted paths into the stage's JSON, and "gpus" for the number of GPUs. `points` and `grid` may stand alone;
together every named point is tried with every combination of the grid. On the command line --grid KEY=VALUE,VALUE adds
to the grid.

A point is a run of `ds-fp8 train`, which is killed after the steps that are measured: the end of a run would write a
checkpoint of the whole model. Out of memory, a failure and a time limit are results. sweep.jsonl has one line for every
finished point, which survives a kill of its writer.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ds_fp8.cluster.launcher import TRAIN
from ds_fp8.config.errors import EXIT_USER_ERROR, UserError
from ds_fp8.config.files import apply_override, read_json
from ds_fp8.config.schema import Section, clipped_repr, parse_section
from ds_fp8.memory.estimate import Estimate, estimate
from ds_fp8.memory.shapes import Device
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.run_folder import METRICS
from ds_fp8.train.stage import Schedule, load_stage

MOST_POINTS = 200
GPUS = "gpus"
# Changes of every run besides: as little evaluation as there may be, and a record of every step
MEASURING = {
    "train.eval_batches": 1,
    "train.exact_match_problems": 0,
    "train.eval_every": None,
    "train.keep_best": False,
    "train.log_every": 1,
}


class PointConfig(Section):
    """A named point."""

    name: str = Field(min_length=1, max_length=80)
    set: dict[str, Any] = Field(default_factory=dict)


class SweepConfig(Section):
    """A sweep file."""

    description: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    points: tuple[PointConfig, ...] = ()
    grid: dict[str, list[Any]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """Settings to be measured."""

    name: str
    settings: dict[str, Any]  # Dotted key -> value
    gpus: int

    def overrides(self, *, measuring: bool = True) -> list[str]:
        """Return the settings as KEY=VALUE for train.py's --set; with `measuring` those of the measurement too."""
        values = {**self.settings, **(MEASURING if measuring else {})}
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]

    def applied(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a stage's JSON with the settings in place."""
        result = copy.deepcopy(dict(raw))
        for override in self.overrides(measuring=False):
            apply_override(result, override)
        return result


def read_sweep(
    file: str | os.PathLike | None, gpus: int, grid: Sequence[str] = (), changes: Sequence[str] = ()
) -> tuple[SweepConfig, list[Point]]:
    """Return the sweep and its points, which have `gpus` GPUs where they do not say how many.

    From the command line KEY=VALUE,VALUE add to the grid, and KEY=VALUE are changes of every point.
    """
    try:
        config = parse_section(SweepConfig, read_json(file), key="sweep", file=file) if file else SweepConfig()
        added = {"grid": {**config.grid, **dict(map(_grid_values, grid))}, "set": {**config.set, **_settings(changes)}}
        config = config.model_copy(update=added)
        return config, _points(config, gpus)
    except UserError as error:
        raise (error.located(file) if file else error) from None


def _grid_values(word: str) -> tuple[str, list[Any]]:
    """Return key and values, JSON or text, of KEY=VALUE,VALUE."""
    key, _, text = word.partition("=")
    if not key.strip() or not text.strip():
        raise UserError(f"--grid {clipped_repr(word)} is not KEY=VALUE,VALUE", remedy="--grid fp8.preset=infir2,coat")
    values = _settings([f"values=[{text}]"])["values"]
    if not isinstance(values, list):  # text that is not quoted
        values = [_settings([f"value={part.strip()}"])["value"] for part in text.split(",")]
    return key.strip(), values


def _settings(changes: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for change in changes:
        value: Any = {}
        apply_override(value, change)
        key = change.partition("=")[0].strip()
        for part in key.split("."):
            value = value[part]
        result[key] = value
    return result


def _points(config: SweepConfig, gpus: int) -> list[Point]:
    if not (config.points or config.grid) or not all(config.grid.values()):
        remedy = 'give "points" or "grid", or --grid fp8.preset=infir2,coat'
        raise UserError("the sweep has no points", key="sweep.points", remedy=remedy)
    count = max(1, len(config.points)) * math.prod(map(len, config.grid.values()))
    if count > MOST_POINTS:
        sizes = " x ".join(str(len(values)) for values in config.grid.values())
        problem = f"the sweep has {count:,} points ({len(config.points) or 1} named x {sizes}), and every one is a run"
        raise UserError(problem, key="sweep.grid", remedy=f"at most {MOST_POINTS}: fewer values, or several sweeps")
    points: dict[str, Point] = {}
    for named, values in itertools.product(config.points or [None], itertools.product(*config.grid.values())):
        chosen = dict(zip(config.grid, values, strict=True))
        name = ", ".join([*([named.name] if named else []), *(_label(*item) for item in chosen.items())])
        settings = {**config.set, **(named.set if named else {}), **chosen}
        if name in points:
            raise UserError(f'two points are called "{name}"', key="sweep.points", remedy="give each its own name")
        points[name] = Point(name, settings, _gpus(settings.pop(GPUS, gpus)))
    return list(points.values())


def _gpus(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"gpus must be a whole number of at least 1, got {value!r}", key=GPUS, remedy='"gpus": 4')
    return value


def _label(key: str, value: Any) -> str:
    return f"{key.rpartition('.')[2]} {value if isinstance(value, str) else json.dumps(value)}"


def check_points(points: Sequence[Point], stage_file: str | os.PathLike) -> None:
    """Refuse points with which the stage cannot be loaded."""
    for point in points:
        try:
            load_stage(stage_file, point.overrides(), point.gpus)
        except UserError as error:
            problem = f'the point "{point.name}": {error.problem}'
            raise UserError(problem, key=error.key, file=error.file, remedy=error.remedy) from None


def estimate_of(point: Point, raw: Mapping[str, Any], device: Device | None = None) -> Estimate:
    """Return the estimate of the point, on `device`, or else on that of this machine."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    return estimate(point.applied(raw), gpus=point.gpus, device=device or here)


# ---------------------------------------------------------------- one run

FILE, POINTS, OUTPUT, RUN = "sweep.jsonl", "points", "output.log", "run"
OK, OUT_OF_MEMORY, FAILED, TIMEOUT, REFUSED = "ok", "out of memory", "failed", "timeout", "refused"
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
    tick: Callable[[int], None] = lambda step: None,
) -> Record:
    """Measure some steps of a stage with KEY=VALUE changes; return status, reason, seconds, and figures if it is OK.

    An earlier run in the same folder is ended and forgotten. The run is ended after `timeout` seconds; `tick` is called
    with the number of steps done.
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
            tick(min(len(records), steps))
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
    # Shows a bar and a line for each point
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))

    def run(self, points: list[Point]) -> list[Record]:
        """Return the records of all points, measured or found."""
        known = {record["key"] for record in self.known(points)}
        waiting = [point for point in points if self._key(point) not in known]
        if len(waiting) < len(points):
            self.console.print(f"{len(points) - len(waiting)} of {len(points)} points are measured already")
        columns = (TextColumn("sweep"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[point]}", markup=False), console=self.console) as progress:
            task = progress.add_task("points", total=len(waiting), point="")
            for point in waiting:
                progress.update(task, point=point.name)
                self._measure(point, lambda step, name=point.name: progress.update(task, point=f"{name}, step {step}"))
                progress.advance(task)
        return self.known(points)

    def known(self, points: list[Point]) -> list[Record]:
        """Return the records there are of `points`."""
        file, by_key = self.folder / FILE, {}
        for line in file.read_text().splitlines() if file.exists() else []:
            with suppress(json.JSONDecodeError):  # cut off by a kill: that point runs again
                record = json.loads(line)
                by_key[record["key"]] = record
        return [by_key[key] for key in map(self._key, points) if key in by_key]

    def _measure(self, point: Point, tick: Callable[[int], None]) -> None:
        """Run one point and keep the result, unless it was killed from outside."""
        expected = None
        try:
            expected = estimate_of(point, self.raw).as_json()
        except UserError as error:  # a model of which there is none is measured all the same
            self.console.print(f"{point.name}: no estimate: {error.problem}", markup=False)
        measured = run_point(
            self.stage_file,
            [*point.overrides(), *self._long_enough(point)],
            gpus=point.gpus,
            steps=self.steps,
            folder=self.folder / POINTS / self._key(point),
            timeout=self.timeout,
            tick=tick,
        )
        self.console.print(f"{point.name}: {measured['status']} {measured['reason']}".rstrip(), markup=False)
        if measured["status"] == KILLED:
            self.console.print(f"  {point.name} was killed from outside: it counts as not run", markup=False)
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
