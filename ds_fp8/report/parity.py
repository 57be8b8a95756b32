"""FP8 against BF16 on one stage: the gap of their final losses beside what another seed changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_fp8.report.exact_match import exact_match_of
from ds_fp8.report.runs import KINDS, Comparison, RunRecord, seeds
from ds_fp8.report.verdict import LOSSES, TOLERANCE, gaps_of, judge_seeds, mean_gap, seed_noise
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.stage import Stage

JSON = "parity.json"


def twin_overrides(stage: Stage, kind: str, seed: int, steps: int, folder: Path) -> list[str]:
    """Return the values of `--set` for one run of `steps` steps: the stage's schedule is shortened in proportion."""
    schedule = stage.train.schedule
    overrides = [
        f"fp8.enabled={'true' if kind == 'fp8' else 'false'}",
        f"train.seed={seed}",
        f"train.steps={steps}",
        "train.epochs=null",
        f"train.run_dir={run_folder(folder, kind, seed)}",
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


def run_folder(folder: Path, kind: str, seed: int) -> Path:
    """Return the folder of the run of one kind and seed."""
    return folder / kind / f"seed_{seed}"


def comparisons_in(folder: Path, seeds: Sequence[int]) -> list[Comparison]:
    """Return the finished twins of every seed.

    Raises:
        UserError: One is missing.
    """
    return [
        Comparison(f"seed_{seed}", *(RunRecord(run_folder(folder, kind, seed)) for kind in KINDS)) for seed in seeds
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
        "tokens_per_second": {kind: fmean(run.result["tokens_per_second"] for run in runs[kind]) for kind in KINDS},
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


def _curves(run: RunRecord) -> dict[str, dict[int, float]]:
    return {key: run.by_step(key) for key in ("loss", "validation_loss")}
