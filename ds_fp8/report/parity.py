"""FP8 against BF16 on a stage: the runs, and the gap of their final losses beside what another seed changes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_fp8.config.errors import UserError
from ds_fp8.report.exact_match import exact_match_of
from ds_fp8.report.runs import KINDS, Comparison, RunRecord, seeds
from ds_fp8.report.verdict import LOSSES, TOLERANCE, gaps_of, judge_seeds, mean_gap, seed_noise
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.stage import Stage

JSON = "parity.json"


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    kind: str
    """One of KINDS."""
    seed: int
    point: str = ""
    """Name of the point of the grid; "" is the stage as it is."""
    changes: tuple[str, ...] = ()
    """KEY=VALUE of the point."""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.kind, self.point, f"seed {self.seed}")))

    def folder(self, out: Path) -> Path:
        """Return the run's folder."""
        return out / self.kind / point_folder(self.point) / f"seed_{self.seed}"


def point_folder(point: str) -> str:
    """Return the name of a point as that of a folder."""
    return re.sub(r"[^\w.+-]+", "_", point).strip("._")[:100]


def twins_of(points: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[tuple[Cell, Cell]]:
    """Return the run in FP8 of every point and seed, and its twin in BF16.

    Points that differ in "fp8" keys alone have the same twin.

    Args:
        points: Changes KEY=VALUE by the point's name.
        seeds: Seeds.

    Raises:
        UserError: The names of two points make the same folder.
    """
    result, folders = [], {}
    for point, changes in points.items():
        other = folders.setdefault(point_folder(point), point)
        if other != point:
            raise UserError(f'the points "{other}" and "{point}" have the same folder', remedy="give each its own name")
        plain = tuple(change for change in changes if not change.startswith("fp8."))
        in_bf16 = point if len(plain) == len(changes) else ", ".join(plain)
        result += [
            (Cell(KINDS[0], seed, point, tuple(changes)), Cell(KINDS[1], seed, in_bf16, plain)) for seed in seeds
        ]
    return result


def run_overrides(stage: Stage, cell: Cell, steps: int, out: Path) -> list[str]:
    """Return the values of `--set` for one run of `steps` steps: the stage's schedule is shortened in proportion."""
    schedule = stage.train.schedule
    overrides = [
        *cell.changes,
        f"fp8.enabled={'true' if cell.kind == 'fp8' else 'false'}",
        f"train.seed={cell.seed}",
        f"train.steps={steps}",
        "train.epochs=null",
        f"train.run_dir={cell.folder(out)}",
        f"train.eval_every={max(1, steps // 10)}",
        "train.save_every=null",
        "train.keep_best=false",
        f"train.spike={'warn' if stage.train.spike == 'rollback' else stage.train.spike}",
    ]
    for name in ("warmup", "decay"):
        length = getattr(schedule, name)
        if length >= 1 and stage.train.steps:
            length = length / stage.train.steps
            overrides.append(f"train.schedule.{name}={length if length < 1 else steps}")
    return overrides


def comparisons_in(out: Path, twins: Sequence[tuple[Cell, Cell]]) -> list[Comparison]:
    """Return the finished twins.

    Raises:
        UserError: One is missing.
    """
    return [
        Comparison(f"seed_{fp8.seed}", RunRecord(fp8.folder(out)), RunRecord(bf16.folder(out))) for fp8, bf16 in twins
    ]


def compare(twins: Sequence[Comparison], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Return final validation losses (nats per token), their relative gaps, the noise of the seed and the verdict.

    Losses and gaps are those as trained and, under the same keys with "_bf16", those of the weights evaluated in BF16.
    The noise is the standard deviation of BF16's final losses over seeds, relative to their mean. It and the standard
    errors of the losses are None for one seed.
    """
    runs = {"fp8": [twin.run for twin in twins], "bf16": [twin.twin for twin in twins]}
    verdict = judge_seeds(twins, tolerance)
    answers = exact_match_of(twins)
    return {
        "seeds": seeds(twins),
        "steps": twins[0].run.result["steps"],
        **{key: {kind: [run.result.get(key) for run in runs[kind]] for kind in KINDS} for key in LOSSES},
        **_gaps(twins, LOSSES[0], ""),
        **_gaps(twins, LOSSES[1], "_bf16"),
        "seed_noise": seed_noise(twins),
        "tolerance": tolerance,
        "exact_match": {kind: [run.result["exact_match"]["after"] for run in runs[kind]] for kind in KINDS},
        "exact_match_difference": None if answers is None else answers.difference,
        "exact_match_difference_standard_error": None if answers is None else answers.error,
        "tokens_per_second": {kind: _mean_speed(runs[kind]) for kind in KINDS},
        "skipped_steps": {kind: [run.result["skipped_steps"] for run in runs[kind]] for kind in KINDS},
        "curves": {kind: [_curves(run) for run in runs[kind]] for kind in KINDS},
        "passed": verdict.passed,
        "verdict": verdict.words,
        "device": twins[0].run.result["device"],
        "versions": twins[0].run.result["versions"],
    }


def _gaps(twins: Sequence[Comparison], key: str, suffix: str) -> dict[str, Any]:
    """Return the gaps of one of the losses, their mean and its standard error."""
    mean = mean_gap(twins, key)
    return {
        f"gaps{suffix}": gaps_of(twins, key),
        f"gap{suffix}": None if mean is None else mean.mean,
        f"gap_standard_error{suffix}": None if mean is None else mean.error,
    }


def write(comparison: dict[str, Any], folder: Path) -> Path:
    """Write folder/parity.json; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / JSON, json.dumps(comparison, indent=2) + "\n")
    return folder / JSON


def _mean_speed(runs: Sequence[RunRecord]) -> float | None:
    """Return the mean of the runs' tokens/s; None where that of one is lost with the lines of its steps."""
    speeds = [run.result["tokens_per_second"] for run in runs]
    return None if None in speeds else fmean(speeds)


def _curves(run: RunRecord) -> dict[str, dict[int, float]]:
    return {key: run.by_step(key) for key in ("loss", "validation_loss")}
