"""Robustness of FP8 beside BF16: outcomes over a grid of seeds and learning rates, and their summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ds_fp8.report.parity import twin_overrides
from ds_fp8.report.runs import KINDS, RunRecord
from ds_fp8.train.spikes import SpikeDetector
from ds_fp8.train.stage import Stage

SHARPNESS = "sharpness.json"
"""File of a cell's run folder, beside its result."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    kind: str
    """One of KINDS."""
    rate: float
    """Learning rate."""
    seed: int

    def folder(self, out: Path) -> Path:
        """Return its run folder."""
        return out / self.kind / f"rate_{self.rate:g}" / f"seed_{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run. Losses in nats per token; None for one that is not finite or was not measured."""

    kind: str
    rate: float
    seed: int
    first_loss: float | None
    """On the validation data, before the first step."""
    final_loss: float | None
    """After the last."""
    spikes: int
    """Training losses that stand out from those before, by train.spike_threshold and train.spike_window."""
    skipped_steps: int
    sharpness: float | None
    """In the logits, percent (train/sharpness.py); of a run without a finite loss it is not measured."""
    diverged: bool = False


def grid(rates: Sequence[float], seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield the cells, twins one after the other."""
    return (Cell(kind, rate, seed) for rate in rates for seed in seeds for kind in KINDS)


def cell_overrides(stage: Stage, cell: Cell, steps: int, out: Path) -> list[str]:
    """Return the values of `--set` for the run of a cell."""
    return [
        *twin_overrides(stage, cell.kind, cell.seed, steps, out),
        f"train.run_dir={cell.folder(out)}",
        f"optimizer.params.lr={cell.rate!r}",
        "train.log_every=1",
        "train.eval_every=null",
        "train.exact_match_problems=0",
    ]


def outcomes(stage: Stage, cells: Sequence[Cell], out: Path) -> list[Outcome]:
    """Return the outcomes of all cells, whose runs have finished and whose sharpness is measured."""
    found = [_outcome(stage, cell, cell.folder(out)) for cell in cells]
    return [Outcome(**{**asdict(each), "diverged": diverged(each, found)}) for each in found]


def diverged(outcome: Outcome, grid: Sequence[Outcome]) -> bool:
    """Return whether a run failed to train beside the others of its grid.

    So it is when its final loss is not finite, or nearer to the loss before the first step than to the best final loss
    of the grid.
    """
    if outcome.final_loss is None or outcome.first_loss is None:
        return True
    best = min(other.final_loss for other in grid if other.final_loss is not None)  # this one's at least
    return outcome.final_loss > (best + outcome.first_loss) / 2


def _outcome(stage: Stage, cell: Cell, folder: Path) -> Outcome:
    run = RunRecord(folder)
    detector = SpikeDetector(stage.train.spike_window, stage.train.spike_threshold)
    losses = run.series("loss")[1]
    measured = folder / SHARPNESS
    sharpness = json.loads(measured.read_text())["sharpness"] if measured.is_file() else None
    return Outcome(
        cell.kind,
        cell.rate,
        cell.seed,
        _finite(run.result["first_validation_loss"]),
        _finite(run.result["final_loss"]),
        sum(detector.observe(loss) is not None for loss in losses),
        run.result["skipped_steps"],
        None if sharpness is None else _finite(sharpness),
    )


def summarise(found: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind: runs, diverged runs and their share, spikes, mean loss and sharpness.

    Means are over the cells that diverged in neither kind.
    """
    healthy = _healthy_in_both(found)
    result = {}
    for kind in KINDS:
        runs = [each for each in found if each.kind == kind]
        kept = [each for each in runs if (each.rate, each.seed) in healthy]
        sharp = [each.sharpness for each in kept if each.sharpness is not None]
        result[kind] = {
            "runs": len(runs),
            "diverged": sum(each.diverged for each in runs),
            "diverged_share": fmean(each.diverged for each in runs),
            "spikes": sum(each.spikes for each in runs),
            "skipped_steps": sum(each.skipped_steps for each in runs),
            "mean_final_loss": fmean(each.final_loss for each in kept) if kept else None,
            "mean_sharpness": fmean(sharp) if sharp else None,
        }
    return result


def gaps(found: Sequence[Outcome]) -> dict[tuple[float, int], float]:
    """Return FP8 / BF16 - 1 of the final losses by rate and seed, of the cells that diverged in neither kind."""
    loss = {(each.kind, each.rate, each.seed): each.final_loss for each in found}
    fp8, bf16 = KINDS
    return {cell: loss[(fp8, *cell)] / loss[(bf16, *cell)] - 1 for cell in sorted(_healthy_in_both(found))}


def words(summary: dict[str, dict[str, Any]], gaps: dict[tuple[float, int], float]) -> tuple[str, str]:
    """Return (level, sentence): "good" where FP8 diverged and spiked no more often than BF16, else "bad".

    The sentence also says how the final losses of the other runs compare: a run may end far behind and not diverge.
    """
    fp8, bf16 = (summary[kind] for kind in KINDS)
    level = "good" if fp8["diverged"] <= bf16["diverged"] and fp8["spikes"] <= bf16["spikes"] else "bad"
    sentence = (
        f"{fp8['diverged']} of {fp8['runs']} FP8 runs diverged and {bf16['diverged']} of {bf16['runs']} BF16 runs; "
        f"{fp8['spikes']} and {bf16['spikes']} loss spikes"
    )
    if gaps:
        least, most = min(gaps.values()), max(gaps.values())
        sentence += f"; final loss of FP8 {median(gaps.values()):+.1%} in the median, {least:+.1%} to {most:+.1%}"
    return level, sentence


def _healthy_in_both(found: Sequence[Outcome]) -> set[tuple[float, int]]:
    return {(each.rate, each.seed) for each in found} - {(each.rate, each.seed) for each in found if each.diverged}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
