"""The sweep file: settings of a stage to measure, checked in full before the first run.

    {
      "description": "what is compared",
      "set":    {"data.sequence_length": 8192},                      for every point
      "points": [{"name": "BF16", "set": {"fp8.enabled": false}}, ...],
      "grid":   {"train_micro_batch_size_per_gpu": [1, 2, 4], "gpus": [1, 4]}
    }

Keys are dotted paths into the stage's JSON, and "gpus" for the number of GPUs. `points` and `grid` may stand alone;
together every named point is tried with every combination of the grid. On the command line --grid KEY=VALUE,VALUE adds
to the grid.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override, read_json
from ds_fp8.config.schema import Section, parse_section, shown
from ds_fp8.train.stage import load_stage

MOST_POINTS = 200
GPUS = "gpus"

MEASURING = {
    "train.eval_batches": 1,
    "train.exact_match_problems": 0,
    "train.eval_every": None,
    "train.keep_best": False,
    "train.log_every": 1,
}
"""Changes of every run besides: as little evaluation as there may be, and a record of every step."""


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
    settings: dict[str, Any]
    """Dotted key -> value."""
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

    def key(self, raw: Mapping[str, Any], steps: int) -> str:
        """Return a name for what a run of this point measures: the same settings, stage and steps have the same."""
        content = self.applied(raw)
        content.get("train", {}).pop("run_dir", None)
        text = json.dumps([content, self.gpus, steps], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_sweep(
    file: str | os.PathLike | None, gpus: int, grid: Sequence[str] = (), changes: Sequence[str] = ()
) -> tuple[SweepConfig, list[Point]]:
    """Return the sweep and its points.

    Args:
        file: The sweep file, if there is one.
        gpus: GPUs of the points that do not say how many.
        grid: KEY=VALUE,VALUE of the command line, for the grid.
        changes: KEY=VALUE of the command line, for every point.

    Raises:
        UserError: The file or a word is malformed, there is no point or too many, or two points have one name.
    """
    try:
        config = parse_section(SweepConfig, read_json(file), key="sweep", file=file) if file else SweepConfig()
        added = {"grid": {**config.grid, **dict(map(grid_values, grid))}, "set": {**config.set, **_settings(changes)}}
        config = config.model_copy(update=added)
        return config, _points(config, gpus)
    except UserError as error:
        raise (error.located(file) if file else error) from None


def grid_values(word: str) -> tuple[str, list[Any]]:
    """Return (key, values) of KEY=VALUE,VALUE, where the values are JSON or text.

    Raises:
        UserError: The word is not of this form.
    """
    key, _, text = word.partition("=")
    if not key.strip() or not text.strip():
        raise UserError(f"--grid {shown(word)} is not KEY=VALUE,VALUE", remedy="--grid fp8.preset=infir2,coat")
    values = _settings([f"values=[{text}]"])["values"]
    if not isinstance(values, list):  # text that is not quoted
        values = [_settings([f"value={part.strip()}"])["value"] for part in text.split(",")]
    return key.strip(), values


def _settings(changes: Sequence[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE by dotted key."""
    result: dict[str, Any] = {}
    for change in changes:
        value: dict[str, Any] = {}
        apply_override(value, change)
        key = change.partition("=")[0].strip()
        for part in key.split("."):
            value = value[part]
        result[key] = value
    return result


def check_points(points: Sequence[Point], stage_file: str | os.PathLike) -> None:
    """Load the stage as every point changes it.

    Raises:
        UserError: A point is wrong; named, with what is wrong.
    """
    for point in points:
        try:
            with _world(point.gpus):
                load_stage(stage_file, point.overrides())
        except UserError as error:
            raise UserError(
                f'the point "{point.name}": {error.problem}',
                key=error.key,
                file=error.file,
                remedy=error.remedy,
            ) from None


@contextmanager
def _world(gpus: int) -> Iterator[None]:
    """Return the number of ranks as load_stage takes it."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def _points(config: SweepConfig, gpus: int) -> list[Point]:
    if not config.points and not config.grid:
        remedy = 'give "points" or "grid", or --grid fp8.preset=infir2,coat'
        raise UserError("the sweep has no points", key="sweep.points", remedy=remedy)
    for key, values in config.grid.items():
        if not values:
            raise UserError(f'"{key}" has no values', key=f"sweep.grid.{key}", remedy=f'"{key}": [1, 2]')
    count = max(1, len(config.points)) * math.prod(map(len, config.grid.values()))
    if count > MOST_POINTS:
        sizes = " x ".join(str(len(values)) for values in config.grid.values())
        raise UserError(
            f"the sweep has {count:,} points ({len(config.points) or 1} named x {sizes}), and every one is a run",
            key="sweep.grid",
            remedy=f"at most {MOST_POINTS}: fewer values, or several sweeps",
        )
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
    shown = value if isinstance(value, str) else json.dumps(value)
    return f"{Path(key.replace('.', '/')).name} {shown}"
