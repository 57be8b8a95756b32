"""Variants of a stage: read from the command line and a file, trained one after the other, and compared.

    {
      "set":    {"data.sequence_length": 8192},                      for every point
      "points": [{"name": "BF16", "set": {"fp8.enabled": false}}, ...],
      "grid":   {"train_micro_batch_size_per_gpu": [1, 2, 4], "gpus": [1, 4]}
    }

Keys are dotted paths into the stage's JSON, and "gpus" for the number of GPUs. `points` and `grid` may stand alone;
together every named point is tried with every combination of the grid. On the command line --grid KEY=VALUE,VALUE adds
to the grid. `ds-fp8 parity` trains each point in FP8 and in BF16, `ds-fp8 sweep` measures some steps of each
(memory/sweep.py), `ds-fp8 sensitivity` quantizes one part of a model at a time (train/sensitivity.py).
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override, read_json
from ds_fp8.config.schema import Section, clipped_repr, parse_section
from ds_fp8.report import page
from ds_fp8.report.runs import BF16, FP8, KINDS, Comparison, RunRecord
from ds_fp8.report.verdict import (
    LOSSES,
    TOLERANCE,
    Points,
    Verdict,
    best_of,
    diverged,
    exact_match,
    judge,
    mean_gap,
    runs,
    seed_noise,
)
from ds_fp8.train.run_folder import CONFIG
from ds_fp8.train.stage import Stage, load_stage

MOST_POINTS, GPUS = 200, "gpus"
JSON = "parity.json"
SAVED_ONCE = "leave it out: runs of a comparison are saved at their end alone"
# Keys that `changes_of` sets whatever a point says, and what to give instead
SET_HERE = {
    "train.seed": "--seeds 3, and --set train.seed=1 for the first of them",
    "train.steps": "--steps 500; for every other length another --out",
    "train.epochs": "--steps 500: the length of every run",
    "train.run_dir": "--out FOLDER",
    "train.eval_every": "--evaluations 10: so many in every run",
    "train.save_every": SAVED_ONCE,
    "train.keep_best": SAVED_ONCE,
}


# ---------------------------------------------------------------- the points of a grid


class PointConfig(Section):
    """A named point."""

    name: str = Field(min_length=1, max_length=80)
    set: dict[str, Any] = Field(default_factory=dict)


class GridConfig(Section):
    """A file for --sweep."""

    description: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    points: tuple[PointConfig, ...] = ()
    grid: dict[str, list[Any]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """A variant of a stage."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # Dotted key -> value
    gpus: int = 1

    def changes(self) -> list[str]:
        """Return the settings as KEY=VALUE for --set."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]

    def applied(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a stage's JSON with the settings in place."""
        result = copy.deepcopy(dict(raw))
        for change in self.changes():
            apply_override(result, change)
        return result


def read_points(
    file: str | os.PathLike | None, gpus: int = 1, grid: Sequence[str] = (), changes: Sequence[str] = ()
) -> list[Point]:
    """Return the points, which have `gpus` GPUs where they do not say how many.

    From the command line KEY=VALUE,VALUE add to the grid, and KEY=VALUE are changes of every point.
    """
    try:
        config = parse_section(GridConfig, read_json(file), key="sweep", file=file) if file else GridConfig()
        values = {**config.grid, **dict(map(_grid_values, grid))}
        return _points(config, values, {**config.set, **_settings(changes)}, gpus)
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


def _points(config: GridConfig, grid: Mapping[str, list[Any]], shared: Mapping[str, Any], gpus: int) -> list[Point]:
    if not (config.points or grid) or not all(grid.values()):
        remedy = 'give "points" or "grid", or --grid fp8.preset=infir2,coat'
        raise UserError("the sweep has no points", key="sweep.points", remedy=remedy)
    count = max(1, len(config.points)) * math.prod(map(len, grid.values()))
    if count > MOST_POINTS:
        sizes = " x ".join(str(len(values)) for values in grid.values())
        problem = f"the sweep has {count:,} points ({len(config.points) or 1} named x {sizes}), and every one is a run"
        raise UserError(problem, key="sweep.grid", remedy=f"at most {MOST_POINTS}: fewer values, or several sweeps")
    points: dict[str, Point] = {}
    for named, values in itertools.product(config.points or [None], itertools.product(*grid.values())):
        chosen = dict(zip(grid, values, strict=True))
        name = ", ".join([*([named.name] if named else []), *(_label(*item) for item in chosen.items())])
        settings = {**shared, **(named.set if named else {}), **chosen}
        if name in points:
            raise UserError(f'two points are called "{name}"', key="sweep.points", remedy="give each its own name")
        ranks = settings.get(GPUS, 1)
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            problem = f"gpus must be a whole number of at least 1, got {ranks!r}"
            raise UserError(problem, key=GPUS, remedy='"gpus": 4')
        points[name] = Point(name, settings, settings.pop(GPUS, gpus))
    return list(points.values())


def _label(key: str, value: Any) -> str:
    return f"{key.rpartition('.')[2]} {value if isinstance(value, str) else json.dumps(value)}"


def folder_of(point: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", point).strip("._")[:100]


def check_folders(points: Iterable[str]) -> None:
    """Refuse points whose names make the same folder."""
    owners: dict[str, str] = {}
    for point in points:
        other = owners.setdefault(folder_of(point), point)
        if other != point:
            raise UserError(
                f'"{other}" and "{point}" have the same folder',
                remedy="names that differ in their first 100 letters and digits, or another --out for one of them",
            )


def run_each(
    names: Sequence[str], finished: Container[str], run: Callable[[str], None], say: Callable[[str], None]
) -> None:
    """Call `run` with the name of each variant that has not finished; of the stage as it is that is empty."""
    for number, name in enumerate(names, 1):
        done = name in finished
        if name:
            say(f"\n== {number} of {len(names)}: {name}{', finished before' if done else ''}")
        if not done:
            run(name)


# ---------------------------------------------------------------- FP8 runs and their BF16 runs


@dataclass(frozen=True)
class Run:
    """One run of a comparison."""

    kind: str  # One of KINDS
    seed: int
    point: str = ""
    changes: tuple[str, ...] = ()  # KEY=VALUE of the point

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.kind, self.point, f"seed {self.seed}")))

    def folder(self, out: Path) -> Path:
        return out / self.kind / folder_of(self.point) / f"seed_{self.seed}"


Pairs = Sequence[tuple[Run, Run]]


def pairs_of(points: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> Pairs:
    """Return the FP8 run of every point (its changes KEY=VALUE by its name) and seed, and its BF16 run.

    Points that differ in "fp8" keys alone share the BF16 run; names of runs that make the same folder are refused.
    """
    result = []
    for point, changes in points.items():
        plain = tuple(change for change in changes if not change.startswith("fp8."))
        in_bf16 = point if plain and len(plain) == len(changes) else ", ".join(plain)
        result += [(Run(FP8, seed, point, tuple(changes)), Run(BF16, seed, in_bf16, plain)) for seed in seeds]
    for of_one_kind in zip(*result, strict=True):
        check_folders(run.point for run in of_one_kind)
    return result


def changes_of(stage: Stage, run: Run, steps: int, evaluations: int, out: Path) -> list[str]:
    """Return the values of `--set` for one run of `steps` steps: the stage's schedule is stretched in proportion."""
    schedule = stage.train.schedule
    changes = [
        *run.changes,
        f"fp8.enabled={'false' if run.kind == BF16 else 'true'}",
        f"train.seed={run.seed}",
        f"train.steps={steps}",
        "train.epochs=null",
        f"train.run_dir={run.folder(out)}",
        f"train.eval_every={-(-steps // evaluations)}",
        "train.save_every=null",
        "train.keep_best=false",
        f"train.spike={'warn' if stage.train.spike == 'rollback' else stage.train.spike}",
    ]
    for name in ("warmup", "decay"):
        length = getattr(schedule, name)
        if length >= 1 and stage.train.steps:
            length = length / stage.train.steps
            changes.append(f"train.schedule.{name}={length if length < 1 else steps}")
    return changes


def train_all(
    runs: Mapping[str, list[str]],
    file: Path,
    ranks: int,
    train: Callable[[list[str]], None],
    say: Callable[[str], None],
) -> None:
    """Train the runs, given as KEY=VALUE by name, that have not finished; refuse folders that hold other runs."""
    from ds_fp8.config.fp8 import section_of
    from ds_fp8.train.resume import inspect_run

    finished = set()
    # All of them first: a mistake in the last run is found before the first has taken hours.
    stages = {name: load_stage(file, changes, ranks) for name, changes in runs.items()}
    for name, stage in stages.items():
        there = stage.run_dir / CONFIG
        steps = section_of(read_json(there), "train").get("steps") if there.is_file() else stage.train.steps
        if steps != stage.train.steps:
            # It would go on, and end with weights of two schedules one after the other.
            raise UserError(
                f"{stage.run_dir} holds a run of {steps} steps, and one of {stage.train.steps} has another schedule",
                key="--steps",
                remedy="another --out, or as many steps",
            )
        if inspect_run(stage).result is not None:
            finished.add(name)
    run_each(list(runs), finished, lambda name: train(runs[name]), say)


def comparisons_in(out: Path, pairs: Pairs) -> dict[str, list[Comparison]]:
    records = {run: RunRecord(run.folder(out)) for pair in pairs for run in pair}
    found: dict[str, list[Comparison]] = {}
    for fp8, bf16 in pairs:
        found.setdefault(fp8.point, []).append(Comparison(f"seed_{fp8.seed}", records[fp8], records[bf16]))
    return found


def figures_of(points: Points, tolerance: float = TOLERANCE) -> tuple[Verdict, dict[str, Any]]:
    """Return the verdict and all figures, ready for JSON: gaps ("_bf16": weights in BF16), and those of every run.

    The noise is the standard deviation of BF16's final losses over seeds, relative to their mean. It and standard
    errors are None for one seed.
    """
    (verdict, verdicts), best, figures = judge(points, tolerance, grid=True), best_of(points), {}
    for point, found in points.items():
        answers = exact_match(found)
        figures[point] = entry = {
            **verdicts[point].as_json(),
            "seed_noise": seed_noise(found),
            "exact_match_difference": answers and answers.mean,
            "exact_match_difference_standard_error": answers and answers.error,
            "diverged": {kind: sum(diverged(run, best) for run in runs(found, kind)) for kind in KINDS},
            "seeds": {each.name.removeprefix("seed_"): page.pair_figures(each) for each in found},
        }
        for key, suffix in zip(LOSSES, ("", "_bf16"), strict=True):
            mean = mean_gap(found, key)
            entry |= {f"gap{suffix}": mean and mean.mean, f"gap_standard_error{suffix}": mean and mean.error}
    first = next(iter(points.values()))[0].run.result
    shared = {key: first.get(key) for key in ("steps", "device", "versions", "made")}
    return verdict, {**verdict.as_json(), "tolerance": tolerance, **shared, "points": figures}


def write_parity(points: Points, out: Path, title: str, tolerance: float = TOLERANCE) -> tuple[Path, Path, Verdict]:
    """Write parity.json and report.html."""
    verdict, figures = figures_of(points, tolerance)
    return *page.write(out, JSON, figures, page.page(points, verdict, title, tolerance)), verdict
