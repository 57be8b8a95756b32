"""FP8 against BF16 over seeds and the points of a grid: the runs, their figures, and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_fp8.config.errors import UserError
from ds_fp8.report import charts
from ds_fp8.report.figures import stage_figures
from ds_fp8.report.page import EMULATED, HTML, NOT_MEASURED, Page, Table, facts_of, number, page_of_runs
from ds_fp8.report.runs import KINDS, Comparison, RunRecord
from ds_fp8.report.verdict import (
    LEVELS,
    LOSSES,
    NO_TWINS,
    TOLERANCE,
    TRAINED,
    WEIGHTS,
    Verdict,
    diverged,
    exact_match_of,
    gap_of,
    healthy,
    judge_point,
    mean_gap,
    none_trained,
    runs_of,
    seed_noise,
)
from ds_fp8.train.metrics import BF16_LOSS
from ds_fp8.train.run_folder import RESULT, write_atomically
from ds_fp8.train.stage import Stage

JSON = "parity.json"
LONGER = "fp8_longer"  # Folder of the runs in FP8 that were made again, with more steps
LOSSES_ALONG = {TRAINED: "validation_loss", WEIGHTS: BF16_LOSS}
REACHED = (
    "DeepSpeed's BF16 trains to its own final validation loss, FP8 until it is there. Each length is a run of its own, "
    "the schedule stretched over it; between two lengths the loss is taken to fall on a line, and fewer steps than "
    "BF16's are not tried. Seconds: steps by the median step, without start, evaluation and saving. BF16 better: how "
    "often, of the evaluations at the same steps, and p of a sign test (those of one run are not independent)."
)
TEXT = (
    "A run diverged when its final validation loss is not finite, or nearer to the loss before the first step than to "
    "the best of the grid. A spike is a training loss that stands out from those before it, as train.spike_threshold "
    "and train.spike_window say.",
    "Gap is FP8's final validation loss against BF16's of the same seed, a mean over seeds ± its standard error, of "
    "the seeds at which neither diverged.",
)
# The twins of each point of a grid, one a seed; the stage as it is has the name ""
Points = Mapping[str, Sequence[Comparison]]


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    kind: str  # One of KINDS, or LONGER
    seed: int
    point: str = ""
    changes: tuple[str, ...] = ()  # KEY=VALUE of the point

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.kind, self.point, f"seed {self.seed}")))

    def folder(self, out: Path) -> Path:
        return out / self.kind / point_folder(self.point) / f"seed_{self.seed}"


def point_folder(point: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", point).strip("._")[:100]


def point_folders(points: Iterable[str]) -> dict[str, str]:
    """Return the folder's name of every point; points whose names make the same folder are refused."""
    owners: dict[str, str] = {}
    for point in points:
        other = owners.setdefault(point_folder(point), point)
        if other != point:
            raise UserError(
                f'"{other}" and "{point}" have the same folder',
                remedy="names that differ in their first 100 letters and digits, or another --out for one of them",
            )
    return {point: folder for folder, point in owners.items()}


def twins_of(points: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[tuple[Cell, Cell]]:
    """Return the run in FP8 of every point (its changes KEY=VALUE by its name) and seed, and its twin in BF16.

    Points that differ in "fp8" keys alone have the same twin; names of runs that make the same folder are refused.
    """
    result = []
    for point, changes in points.items():
        plain = tuple(change for change in changes if not change.startswith("fp8."))
        in_bf16 = point if plain and len(plain) == len(changes) else ", ".join(plain)
        result += [
            (Cell(KINDS[0], seed, point, tuple(changes)), Cell(KINDS[1], seed, in_bf16, plain)) for seed in seeds
        ]
    for of_one_kind in zip(*result, strict=True):
        point_folders(cell.point for cell in of_one_kind)
    return result


def run_overrides(stage: Stage, cell: Cell, steps: int, evaluations: int, out: Path) -> list[str]:
    """Return the values of `--set` for one run of `steps` steps: the stage's schedule is stretched in proportion."""
    schedule = stage.train.schedule
    overrides = [
        *cell.changes,
        f"fp8.enabled={'false' if cell.kind == 'bf16' else 'true'}",
        f"train.seed={cell.seed}",
        f"train.steps={steps}",
        "train.epochs=null",
        f"train.run_dir={cell.folder(out)}",
        f"train.eval_every={-(-steps // evaluations)}",
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


def comparisons_in(out: Path, twins: Sequence[tuple[Cell, Cell]]) -> dict[str, list[Comparison]]:
    records = {cell: RunRecord(cell.folder(out)) for pair in twins for cell in pair}
    found: dict[str, list[Comparison]] = {}
    for fp8, bf16 in twins:
        again = replace(fp8, kind=LONGER).folder(out)
        longer = RunRecord(again) if (again / RESULT).is_file() else None
        found.setdefault(fp8.point, []).append(Comparison(f"seed_{fp8.seed}", records[fp8], records[bf16], longer))
    return found


def longer_runs(out: Path, twins: Sequence[tuple[Cell, Cell]]) -> list[Cell]:
    """Return the runs to make again with more steps: those in FP8 that have finished above BF16, by either loss."""
    found = [each for some in comparisons_in(out, twins).values() for each in some]
    behind = [any((gap_of(each, key) or 0) > 0 for key in LOSSES) for each in found]
    return [replace(fp8, kind=LONGER) for (fp8, _), again in zip(twins, behind, strict=True) if again]


def steps_to_loss(each: Comparison, key: str = TRAINED) -> float | None:
    """Return the steps in which FP8 has BF16's final loss, as REACHED says; None where it has not got there."""
    goal, short, longer = each.twin.result[key], each.run.result, (each.longer or each.run).result
    if goal is None or short[key] is None:
        return None
    if short[key] <= goal:
        return short["steps"]
    if longer[key] is None or longer[key] > goal:
        return None
    share = (short[key] - goal) / (short[key] - longer[key])
    return short["steps"] + share * (longer["steps"] - short["steps"])


def sign_test(more: int, less: int) -> float:
    """Return the probability that a fair coin falls so unevenly, or more, to either side."""
    count = more + less
    return min(1.0, 2 * sum(comb(count, n) for n in range(max(more, less), count + 1)) / 2**count)


def to_loss(found: Sequence[Comparison], key: str = TRAINED) -> dict[str, Any]:
    """Return the figures on the way to BF16's final loss, over the seeds; None where one does not get there."""
    needed = [steps_to_loss(each, key) for each in found]
    steps, ours = None if None in needed else fmean(needed), fmean(each.run.result["step_seconds"] for each in found)
    bf16_steps, theirs = found[0].twin.result["steps"], fmean(each.twin.result["step_seconds"] for each in found)
    gaps = [each.gaps(LOSSES_ALONG[key], first=1)[1] for each in found]
    signs = [[sum(sign * gap > 0 for gap in some) for sign in (1, -1)] for some in gaps]
    return {
        "steps_by_seed": needed,
        "steps_tried": max((each.longer or each.run).result["steps"] for each in found),
        "steps": steps,
        "steps_ratio": steps and steps / bf16_steps,
        "step_seconds": ours,
        "seconds": steps and steps * ours,
        "seconds_ratio": steps and steps * ours / (bf16_steps * theirs),
        "gap_along": fmean(gap for some in gaps for gap in some) if any(gaps) else None,
        "bf16_better": [
            {"of": len(some), "times": more, "p": sign_test(more, less)}
            for some, (more, less) in zip(gaps, signs, strict=True)
        ],
    }


def table_to_loss(points: Points) -> Table:
    """Return a row for DeepSpeed's BF16, and two for each point: by its losses as trained, and in BF16."""
    own = {point: found for point, found in points.items() if found[0].run.kind == "bf16"}
    rows = []
    for point, found in points.items():
        bf16 = [Comparison(each.name, each.twin, each.twin) for each in found]
        for name, losses, some, key in (
            ("DeepSpeed's BF16", "", bf16, TRAINED),
            (point or "FP8", "as trained", found, TRAINED),
            (point or "FP8", "in BF16", found, WEIGHTS),
        ):
            way = to_loss(some, key)
            steps = f"not within {way['steps_tried']:,} ({way['steps_by_seed'].count(None)} of {len(some)} seeds)"
            row = [name, losses, number(way["steps"], "{:.0f}") if way["steps"] else steps]
            row += [number(way["steps_ratio"], "{:.3f}"), number(way["step_seconds"], "{:.1f}", 1e-3)]
            row += [number(way["seconds"], "{:.1f}"), number(way["seconds_ratio"], "{:.3f}")]
            row += [number(way["seconds"] and way["seconds"] / _seconds(others), "{:.3f}") for others in own.values()]
            row.append(number(way["gap_along"], "{:+.3%}"))
            row.append(", ".join("{times} of {of} (p {p:.2g})".format(**seed) for seed in way["bf16_better"]))
            if row not in rows:
                rows.append(row)
    columns = ["run", "losses", "steps", "/ BF16", "ms a step", "seconds", "/ BF16", *(f"/ {point}" for point in own)]
    return Table([*columns, "mean gap along", "BF16 better"], rows, REACHED)


def _seconds(found: Sequence[Comparison]) -> float:
    return fmean(each.run.result["steps"] * each.run.result["step_seconds"] for each in found)


def grid_of(points: Points) -> list[Comparison]:
    """Return what runs may have diverged beside: those of all points, where there are several."""
    return [each for found in points.values() for each in found] if len(points) > 1 else []


def judge_grid(points: Points, tolerance: float = TOLERANCE) -> tuple[Verdict, dict[str, Verdict]]:
    """Return the verdict on all points together, which is that of the worst at which a run trained, and on each."""
    grid = grid_of(points)
    verdicts = {point: judge_point(found, grid, tolerance) for point, found in points.items()}
    if len(verdicts) == 1:
        return next(iter(verdicts.values())), verdicts
    # A setting with which neither trains says nothing about FP8, and leaves the verdict to the others.
    idle = [point for point, found in points.items() if none_trained(found, grid)]
    counted = {point: verdict for point, verdict in verdicts.items() if point not in idle}
    if not counted:
        return Verdict("undecided", NO_TWINS), verdicts
    level = max((verdict.level for verdict in counted.values()), key=LEVELS.index)
    those = [point for point, verdict in counted.items() if verdict.level == level]
    where = f"all {len(verdicts)} points" if len(those) == len(verdicts) else f"{len(those)} of {len(verdicts)} points"
    words = {
        "good": f"FP8 is no worse than BF16 at {where}",
        "undecided": f"Undecided at {where}, which more seeds or steps decide",
        "bad": f"FP8 is worse than BF16 at {where}",
    }[level]
    named = "" if level == "good" else f": {'; '.join(those)}"
    untrained = f" No run trained at {'; '.join(idle)}." if idle else ""
    return Verdict(level, f"{words}{named}.{untrained}"), verdicts


def compare(points: Points, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Return all figures, ready for JSON: gaps (those of the weights in BF16 with "_bf16"), and those of every run.

    The noise is the standard deviation of BF16's final losses over seeds, relative to their mean. It and standard
    errors are None for one seed.
    """
    verdict, verdicts = judge_grid(points, tolerance)
    grid, figures = grid_of(points), {}
    for point, found in points.items():
        answers = exact_match_of(found)
        figures[point] = entry = {
            "passed": verdicts[point].passed,
            "verdict": str(verdicts[point]),
            "seed_noise": seed_noise(found),
            "exact_match_difference": answers and answers.difference,
            "exact_match_difference_standard_error": answers and answers.error,
            "diverged": {kind: sum(diverged(run, grid) for run in runs_of(found, kind)) for kind in KINDS},
            "seeds": {each.name.removeprefix("seed_"): stage_figures(each) for each in found},
        }
        for key, suffix in zip(LOSSES, ("", "_bf16"), strict=True):
            mean = mean_gap(found, key)
            entry |= {f"gap{suffix}": mean and mean.mean, f"gap_standard_error{suffix}": mean and mean.error}
            entry[f"to_bf16_loss{suffix}"] = to_loss(found, key)
    first = next(iter(points.values()))[0].run.result
    shared = {key: first.get(key) for key in ("steps", "device", "versions", "made")}
    return {"passed": verdict.passed, "verdict": str(verdict), "tolerance": tolerance, **shared, "points": figures}


def write_parity(points: Points, folder: Path, title: str, tolerance: float = TOLERANCE) -> tuple[Path, Path, Verdict]:
    verdict, _ = judge_grid(points, tolerance)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / JSON, json.dumps(compare(points, tolerance), indent=2) + "\n")
    if len(points) == 1:
        page = page_of_runs(next(iter(points.values())), verdict, title, tolerance)
    else:
        page = _page_of_points(points, verdict, title)
    page.tables = [*page.tables, table_to_loss(points)]
    write_atomically(folder / HTML, page.html())
    return folder / JSON, folder / HTML, verdict


def _page_of_points(points: Points, verdict: Verdict, title: str) -> Page:
    grid = grid_of(points)
    columns = ["point", "loss FP8", "BF16", "gap", "diverged FP8", "BF16", "spikes FP8", "BF16"]
    rows, losses = [], {kind: [] for kind in KINDS}
    for point, found in points.items():
        runs = [runs_of(found, kind) for kind in KINDS]
        kept = healthy(found, grid)
        gap = mean_gap(kept) if kept else None
        for kind, those in zip(KINDS, runs, strict=True):
            losses[kind].append([loss for run in those if (loss := run.result[TRAINED]) is not None])
        row = [point, *(f"{fmean(losses[kind][-1]):.4f}" if losses[kind][-1] else NOT_MEASURED for kind in KINDS)]
        row.append(str(gap or NOT_MEASURED))
        row += [f"{sum(diverged(run, grid) for run in those)} of {len(those)}" for those in runs]
        rows.append(row + [f"{sum(run.spikes for run in those)}" for those in runs])
    return Page(
        title,
        verdict,
        tables=[Table(columns, rows)],
        notes=[EMULATED] if grid[0].run.result["device"] == "cpu" else [],
        charts=[charts.over_points("Final validation loss", "nats per token", list(points), losses)],
        facts=facts_of(grid),
        text=TEXT,
    )
