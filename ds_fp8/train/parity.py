"""FP8 against BF16 on one stage: the gap of their final losses beside what another seed changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ds_fp8.train.stage import Stage
from ds_fp8.train.twin_report import KINDS, RunRecord

TOLERANCE = 0.0025
"""Relative gap of the final losses up to which FP8 counts as equal, as DeepSeek-V3 (arXiv 2412.19437) reports it."""
SIGMAS = 2.0
"""Standard errors up to which a gap counts as noise of the seed."""

Runs = dict[str, list[RunRecord]]
""""fp8" and "bf16" -> one finished run a seed, in the same order."""


@dataclass(frozen=True)
class Verdict:
    """What the figures say."""

    passed: bool
    words: str


def twin_overrides(stage: Stage, kind: str, seed: int, steps: int, folder: Path) -> list[str]:
    """What to `--set` for one run of `steps` steps: the stage's schedule is shortened in proportion."""
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
    """Where the run of one kind and seed lies."""
    return folder / kind / f"seed_{seed}"


def compare(runs: Runs, seeds: Sequence[int], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Final validation losses (nats per token), their relative gaps, the noise of the seed and the verdict.

    The noise is the standard deviation of BF16's final losses over seeds, relative to their mean; None for one seed.
    """
    final = {kind: [run.result["final_loss"] for run in runs[kind]] for kind in KINDS}
    gaps = [fp8 / bf16 - 1 for fp8, bf16 in zip(final["fp8"], final["bf16"], strict=True)]
    noise = stdev(final["bf16"]) / fmean(final["bf16"]) if len(seeds) > 1 else None
    gap, gap_error = fmean(gaps), stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    verdict = judge(gap, gap_error, tolerance)
    return {
        "seeds": list(seeds),
        "steps": runs["fp8"][0].result["steps"],
        "final_loss": final,
        "gaps": gaps,
        "gap": gap,
        "gap_standard_error": gap_error,
        "seed_noise": noise,
        "tolerance": tolerance,
        "exact_match": {kind: [run.result["exact_match"]["after"] for run in runs[kind]] for kind in KINDS},
        "tokens_per_second": {kind: fmean(run.result["tokens_per_second"] for run in runs[kind]) for kind in KINDS},
        "skipped_steps": {kind: [run.result["skipped_steps"] for run in runs[kind]] for kind in KINDS},
        "curves": {kind: [curve(run) for run in runs[kind]] for kind in KINDS},
        "passed": verdict.passed,
        "verdict": verdict.words,
        "device": runs["fp8"][0].result["device"],
        "versions": runs["fp8"][0].result["versions"],
    }


def judge(gap: float, gap_error: float | None, tolerance: float) -> Verdict:
    """Whether a mean relative gap with its standard error (None for one seed) is small enough.

    It is when it lies within the tolerance, or below 0. A gap within SIGMAS standard errors is called noise, but one
    beyond the tolerance does not pass for being noisy: more seeds or steps have to decide.
    """
    shown = f"the final loss of FP8 is {gap:+.3%} from BF16's"
    if gap_error is not None:
        shown += f" (standard error {gap_error:.3%})"
    noisy = gap_error is not None and abs(gap) <= SIGMAS * gap_error
    if gap <= tolerance:
        how = "no more than the seed's noise" if noisy else "better" if gap < 0 else "within the tolerance"
        return Verdict(True, f"equal: {shown}, {how} ({tolerance:.2%} allowed)")
    if noisy:
        return Verdict(
            False, f"undecided: {shown}, beyond {tolerance:.2%} but within its noise; use more seeds or steps"
        )
    return Verdict(False, f"worse: {shown}, beyond the {tolerance:.2%} allowed")


def curve(run: RunRecord) -> dict[str, dict[int, float]]:
    """Training and validation loss by step."""
    return {key: dict(zip(*run.series(key), strict=True)) for key in ("loss", "validation_loss")}


def write(comparison: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write folder/parity.json and folder/parity.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, picture = folder / "parity.json", folder / "parity.png"
    numbers.write_text(json.dumps(comparison, indent=2) + "\n")
    _draw(comparison, picture)
    return numbers, picture


def _draw(comparison: dict[str, Any], file: Path) -> None:
    """Left the losses of every run; right the relative gap of the validation losses by seed, with the seed's noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (losses, gaps) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    curves = comparison["curves"]
    for kind, colour, line in (("bf16", "#30638e", "--"), ("fp8", "#d1495b", "-")):
        for index, run in enumerate(curves[kind]):
            label = kind.upper() if index == 0 else None
            losses.plot(*_points(run["loss"]), line, color=colour, alpha=0.4, linewidth=0.8)
            losses.plot(*_points(run["validation_loss"]), line, color=colour, marker="o", markersize=3, label=label)
    losses.set(xlabel="step", ylabel="loss (nats per token)", yscale="log", title="training and validation (points)")
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    losses.legend(frameon=False)
    for seed, fp8, bf16 in zip(comparison["seeds"], curves["fp8"], curves["bf16"], strict=True):
        theirs = bf16["validation_loss"]
        gap = {step: loss / theirs[step] - 1 for step, loss in fp8["validation_loss"].items() if step in theirs}
        gaps.plot(*_points(gap), marker="o", markersize=3, label=f"seed {seed}")
    if comparison["seed_noise"] is not None:
        gaps.axhspan(-comparison["seed_noise"], comparison["seed_noise"], alpha=0.15, color="grey", label="seed noise")
    gaps.axhline(0, color="black", linewidth=0.8)
    gaps.axhline(comparison["tolerance"], color="black", linewidth=0.8, linestyle=":", label="tolerance")
    gaps.yaxis.set_major_formatter(PercentFormatter(1.0))
    gaps.set(xlabel="step", title="validation loss of FP8 against BF16")
    gaps.legend(frameon=False, fontsize=8)
    for axis in (losses, gaps):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())
