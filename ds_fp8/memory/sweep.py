"""Measuring the points of a sweep one after the other, each once, however often it is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import parse_section
from ds_fp8.memory.estimate import Estimate, estimate
from ds_fp8.memory.fit import MULTIPLE, Size, largest_that_fits, search
from ds_fp8.memory.grid import Point
from ds_fp8.memory.results import FAILED, OK, OUT_OF_MEMORY, Record, Results
from ds_fp8.memory.runner import KILLED, run_point
from ds_fp8.memory.workload import Device
from ds_fp8.train.schedules import Schedule

SIZE_KEYS = {"micro_batch": "train_micro_batch_size_per_gpu", "sequence_length": "data.sequence_length"}
A_GPU = 80 << 30
"""Memory of a GPU where there is none to ask."""
MOST_TRIED = {"micro_batch": 1024, "sequence_length": 1 << 20}


@dataclass(frozen=True)
class Setting:
    """Settings that all points of a sweep share."""

    program: Sequence[str]
    """Program that the launcher starts: launch.TRAIN."""
    stage_file: Path
    raw: Mapping[str, Any]
    folder: Path
    steps: int
    timeout: float
    limit: int | None = None
    """Bytes from which on a point counts as out of memory."""


def device_name() -> str:
    """Return the GPU that points are measured on, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def estimate_of(point: Point, raw: Mapping[str, Any], device: Device | None = None) -> Estimate:
    """Return the estimate of the point, on `device`, or else on that of this machine."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    return estimate(point.applied(raw), gpus=point.gpus, device=device or here)


class Sweep:
    """Runs points and keeps their results. `console` shows a bar and a line for each."""

    def __init__(self, setting: Setting, console: Console | None = None):
        self.setting, self.console = setting, console or Console(highlight=False, soft_wrap=True)
        self.results = Results(setting.folder)

    def run(self, points: list[Point], rerun: frozenset[str] = frozenset()) -> list[Record]:
        """Return the records of all points, measured or found; points with a status in `rerun` are measured again."""
        waiting = [point for point in points if not self._has(point, rerun)]
        if len(waiting) < len(points):
            self.console.print(f"{len(points) - len(waiting)} of {len(points)} points are measured already")
        with self._progress() as progress:
            task = progress.add_task("points", total=len(waiting), point="")
            for point in waiting:
                progress.update(task, point=point.name)
                self.measure(point, lambda step, name=point.name: progress.update(task, point=f"{name}, step {step}"))
                progress.advance(task)
        return self.known(points)

    def known(self, points: list[Point]) -> list[Record]:
        """Return the records there are of `points`, and of the searches that started from them."""
        names, keys = {point.name for point in points}, [self._key(point) for point in points]
        records = [self.results.by_key[key] for key in keys if key in self.results.by_key]
        return records + [record for record in self.results.by_key.values() if record.get("of") in names]

    def find_max(self, point: Point, what: Size, memory_bytes: int) -> Record | None:
        """Return the record of `point` with the largest micro-batch, or sequence, that runs.

        The search begins at what the estimate says fits. Every try is a result, too.

        Raises:
            UserError: A try fails for another reason than memory.
        """
        unit, best = MULTIPLE[what], None

        def runs(units: int) -> bool:
            nonlocal best
            tried = self._sized(point, what, units * unit)
            found = self.results.by_key.get(self._key(tried))
            record = found or self.measure(tried, about={"search": what, "of": point.name, "tried": units * unit})
            if record["status"] == OK:
                best = record if best is None or units * unit > best["tried"] else best
            elif record["status"] != OUT_OF_MEMORY:
                raise UserError(
                    f'"{tried.name}" ended otherwise than for lack of memory: {record["reason"]}',
                    remedy=f"see {self._folder(tried) / 'output.log'}",
                )
            return record["status"] == OK

        workload = estimate_of(point, self.setting.raw).workload
        start = largest_that_fits(workload, what, memory_bytes) // unit
        limit = MOST_TRIED[what]
        if what == "sequence_length":
            limit = min(limit, workload.model.longest or limit)
        search(runs, limit // unit, max(1, start))
        return best

    def measure(
        self, point: Point, tick: Callable[[int], None] = lambda step: None, about: Mapping[str, Any] | None = None
    ) -> Record:
        """Run one point and keep the result, unless it was killed from outside; `about` adds to the record."""
        setting = self.setting
        expected = estimate_of(point, setting.raw)
        outcome = run_point(
            setting.program,
            setting.stage_file,
            [*point.overrides(), *self._long_enough(point)],
            gpus=point.gpus,
            steps=setting.steps,
            folder=self._folder(point),
            timeout=setting.timeout,
            tick=tick,
        )
        status, reason, measured = outcome.status, outcome.reason, outcome.measured or {}
        if status == OK and setting.limit is not None and measured["peak_bytes"] > setting.limit:
            status, reason = OUT_OF_MEMORY, f"{measured['peak_bytes']:,} bytes, and the limit is {setting.limit:,}"
        record = {
            "key": self._key(point),
            "name": point.name,
            "status": status,
            "reason": reason,
            "settings": point.settings,
            "gpus": point.gpus,
            "device": device_name(),
            "seconds": round(outcome.seconds, 1),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S"),
            **measured,
            **(about or {}),
            "estimate": expected.as_json(),
            "fits": {"memory_bytes": self.gpu_memory, "micro_batch": self._largest(point)},
        }
        self.console.print(describe(record), markup=False)
        if status == KILLED:
            self.console.print(f"  {point.name} was killed from outside: it counts as not run", markup=False)
        else:
            self.results.append(record)
        return record

    @property
    def gpu_memory(self) -> int:
        """Return the bytes of the GPU that the largest micro-batch is estimated for.

        The limit's, this machine's or A_GPU's.
        """
        return self.setting.limit or (gpu_bytes(None) if torch.cuda.is_available() else A_GPU)

    def _largest(self, point: Point) -> int:
        workload = estimate_of(point, self.setting.raw, "cuda").workload
        return largest_that_fits(workload, "micro_batch", self.gpu_memory)

    def _sized(self, point: Point, what: Size, value: int) -> Point:
        settings = {**point.settings, SIZE_KEYS[what]: value}
        if what == "micro_batch":  # the number of GPUs and rows gives the global batch
            settings |= {"train_batch_size": None, "gradient_accumulation_steps": 1}
        return Point(f"{point.name} @ {what} {value}", settings, point.gpus)

    def _long_enough(self, point: Point) -> list[str]:
        """Check that the run will not end, and save itself, before it is measured."""
        train, steps = point.applied(self.setting.raw).get("train", {}), self.setting.steps + 1
        if train.get("epochs") is not None:
            schedule = parse_section(Schedule, train.get("schedule", {}), key="train.schedule")
            return ["train.epochs=null", f"train.steps={max(steps, schedule.shortest)}"]
        return [f"train.steps={steps}"] if train.get("steps", steps) < steps else []

    def _has(self, point: Point, rerun: frozenset[str]) -> bool:
        record = self.results.by_key.get(self._key(point))
        return record is not None and record["status"] not in rerun

    def _key(self, point: Point) -> str:
        return point.key(self.setting.raw, self.setting.steps)

    def _folder(self, point: Point) -> Path:
        return self.setting.folder / "points" / self._key(point)

    def _progress(self) -> Progress:
        columns = (TextColumn("sweep"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, TextColumn("{task.fields[point]}", markup=False), console=self.console)


def expected_bytes(record: Record) -> int:
    """Return the measurement that the estimate predicts.

    That is tensors, and on a CPU also what the process held before them.
    """
    return record["estimate"]["peak_bytes"] + record.get("process_bytes", 0)


def describe(record: Record) -> str:
    """Return a line about a finished point."""
    expected = expected_bytes(record)
    if record["status"] not in (OK, OUT_OF_MEMORY, FAILED) or "peak_bytes" not in record:
        return f"{record['name']}: {record['status']} ({record['reason']}); estimate {expected / 2**30:.2f} GiB"
    deviation = expected / record["peak_bytes"] - 1
    return (
        f"{record['name']}: {record['status']}, peak {record['peak_bytes'] / 2**30:.2f} GiB, estimate "
        f"{expected / 2**30:.2f} GiB ({deviation:+.1%}), {record['tokens_per_second']:,.0f} tokens/s"
    )


def gpu_bytes(gigabytes: float | None) -> int:
    """Return the memory of a GPU in bytes: what is given, in GiB, or else this machine's.

    Raises:
        UserError: None is given, and this machine has no GPU.
    """
    if gigabytes is not None:
        return round(gigabytes * 2**30)
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here to ask for its memory", remedy="--memory 80 (GiB)")
    return torch.cuda.mem_get_info()[1]
