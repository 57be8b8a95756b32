"""Robustness of FP8 beside BF16: outcomes over seeds and the points of a grid, and their summary."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ds_fp8.report.parity import Cell, run_overrides
from ds_fp8.report.runs import KINDS, RunRecord
from ds_fp8.train.spikes import SpikeDetector
from ds_fp8.train.stage import Stage

SHARPNESS = "sharpness.json"
"""File of a cell's run folder, beside its result."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run. Losses in nats per token; None for one that is not finite or was not measured."""

    kind: str
    point: str
    seed: int
    first_loss: float | None
    """On the validation data, before the first step."""
    final_loss: float | None
    """After the last."""
    spikes: int
    """Training losses that stand out from those before, by train.spike_threshold and train.spike_window."""
    skipped_steps: int
    sharpness: float | None
    """Sharpness in the logits, percent (train/sharpness.py); of a run without a finite loss it is not measured."""
    diverged: bool = False


Twins = tuple[Outcome, Outcome]
"""Outcomes in FP8 and in BF16; the same outcome in BF16 may have several twins."""


def cell_overrides(stage: Stage, cell: Cell, steps: int, out: Path) -> list[str]:
    """Return the values of `--set` for the run of a cell."""
    return [
        *run_overrides(stage, cell, steps, out),
        "train.log_every=1",
        "train.eval_every=null",
        "train.exact_match_problems=0",
    ]


def outcomes(stage: Stage, twins: Sequence[tuple[Cell, Cell]], out: Path) -> list[Twins]:
    """Return the outcomes of all twins, whose runs have finished and whose sharpness is measured."""
    found = {cell: _outcome(stage, cell, cell.folder(out)) for pair in twins for cell in pair}
    judged = {cell: replace(each, diverged=diverged(each, [*found.values()])) for cell, each in found.items()}
    return [(judged[fp8], judged[bf16]) for fp8, bf16 in twins]


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
        cell.point,
        cell.seed,
        _finite(run.result["first_validation_loss"]),
        _finite(run.result["final_loss"]),
        sum(detector.observe(loss) is not None for loss in losses),
        run.result["skipped_steps"],
        None if sharpness is None else _finite(sharpness),
    )


def summarise(twins: Sequence[Twins]) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind: runs, diverged runs and their share, spikes, mean loss and sharpness.

    Means are over the twins of which neither diverged.
    """
    result = {}
    for number, kind in enumerate(KINDS):
        runs = list(dict.fromkeys(pair[number] for pair in twins))
        kept = list(dict.fromkeys(pair[number] for pair in _healthy(twins)))
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


def gaps(twins: Sequence[Twins]) -> dict[tuple[str, int], float]:
    """Return FP8 / BF16 - 1 of the final losses by point and seed, of the twins of which neither diverged."""
    return {(fp8.point, fp8.seed): fp8.final_loss / bf16.final_loss - 1 for fp8, bf16 in _healthy(twins)}


def words(summary: dict[str, dict[str, Any]], gaps: dict[tuple[str, int], float]) -> tuple[str, str]:
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


def _healthy(twins: Sequence[Twins]) -> list[Twins]:
    return [pair for pair in twins if not any(each.diverged for each in pair)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
