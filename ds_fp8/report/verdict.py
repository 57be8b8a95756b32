"""Verdicts on finished runs in four words, the same on the terminal, on the page, in JSON and in the docs.

ran         nothing is compared with BF16: one run, or two runs of one kind
undecided   fewer than MIN_STEPS steps, a gap that may be chance, one seed that shows no failure, other differences
as good     over several seeds the losses are at most TOLERANCE above BF16's, and as many answers are right
worse       a loss or exact match worse beyond chance, or more diverged runs than in BF16
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from ds_fp8.config.errors import clipped
from ds_fp8.monitor.records import FALLBACK
from ds_fp8.report.runs import BF16, FP8, KINDS, Comparison, RunRecord

Word = Literal["ran", "as good", "undecided", "worse"]
RAN, AS_GOOD, UNDECIDED, WORSE = WORDS = ("ran", "as good", "undecided", "worse")  # The best first
MIN_STEPS = 200  # A comparison of runs with fewer steps is undecided
# Relative gap of the final losses up to which FP8 counts as equal, as DeepSeek-V3 (arXiv 2412.19437) reports it
TOLERANCE = 0.0025
SIGMAS = 2.0  # Standard errors up to which a difference counts as chance
# Steps of a short run, and the relative gap that chance may make with one seed: of the quickstart's stages seeds and
# presets differ by 3% in both directions (docs/log/quickstart.md)
SHORT, ONE_SHORT_RUN = 1000, 0.05
# Keys of result.json: validation loss as trained, with quantization, and of the exported BF16 weights, without
LOSSES = TRAINED, WEIGHTS = ("final_loss", "final_loss_bf16")
NAMES = {"final loss": TRAINED, "weights in BF16": WEIGHTS}
MORE_SEEDS = "ds-fp8 parity --seeds 3"
MOST_KEYS, LONGEST_VALUE = 5, 40  # Keys that a reason names, and characters of their values
# The comparisons at each point of a grid, one a seed; the stage as it is has the name ""
Points = Mapping[str, Sequence[Comparison]]


@dataclass(frozen=True)
class Verdict:
    """One of WORDS and its reason in one line, with the figures behind it."""

    word: Word
    reason: str
    figures: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}\n{self.figures}".strip()

    def as_json(self) -> dict[str, str]:
        return {"verdict": self.word, "reason": self.reason, "figures": self.figures}


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, with its standard error, None where one seed does not give it."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.mean:+.2%}" if self.error is None else f"{self.mean:+.2%} ± {self.error:.2%}"


def judge(points: Points, tolerance: float = TOLERANCE, *, grid: bool = False) -> tuple[Verdict, dict[str, Verdict]]:
    """Return the verdict on all points, which is that of the worst, and on each; of a grid points share one stage."""
    best = best_of(points) if grid else None
    each = {point: judge_seeds(found, tolerance, best) for point, found in points.items()}
    if len(each) == 1:
        return next(iter(each.values())), each
    # A setting with which neither trains says nothing about FP8.
    idle = [p for p, found in points.items() if all(diverged(run, best) for kind in KINDS for run in runs(found, kind))]
    counted = {point: verdict for point, verdict in each.items() if point not in idle} or each
    word = max((verdict.word for verdict in counted.values()), key=WORDS.index)
    those = [point for point, verdict in counted.items() if verdict.word == word]
    reasons = "; ".join(dict.fromkeys(counted[point].reason for point in those))
    untrained = f"; no run trained: {', '.join(idle)}" if idle else ""
    figures = "\n".join(f"{point}: {verdict.figures}" for point, verdict in each.items())
    kind = f"{len(each)} {'points' if grid else 'stages'}"
    where = f"all {kind}" if len(those) == len(each) else f"{len(those)} of {kind} ({', '.join(those)})"
    return Verdict(word, f"at {where}, {reasons}{untrained}", figures), each


def judge_seeds(found: Sequence[Comparison], tolerance: float = TOLERANCE, best: float | None = None) -> Verdict:
    """Judge FP8 runs and BF16 runs of several seeds, which differ in nothing else; runs of one kind are not judged."""
    if found[0].other is None:
        return _judge_run(found[0].run)
    if found[0].run.kind == found[0].other.kind:
        return _of_one_kind(found[0])
    steps = min(run.result["steps"] for each in found for run in each.columns.values())
    lost = {kind: sum(diverged(run, best) for run in runs(found, kind)) for kind in KINDS}
    kept = healthy(found, best)
    count, answers = len(kept), exact_match(kept)
    gaps = {name: gap for name, key in NAMES.items() if kept and (gap := mean_gap(kept, key))}
    words = [word_of(gap, tolerance, ONE_SHORT_RUN if steps < SHORT else 0.0) for gap in gaps.values()]
    fewer = count > 1 and answers is not None and -answers.mean > SIGMAS * answers.error
    after = f"after {steps:,} steps" + (f" with {count} seeds" if count > 1 else "")
    confounded = next((each for each in found if each.confounds()), None)
    if confounded is not None:
        word, reason = UNDECIDED, f"the runs of {confounded.name} also differ in {_named(confounded.confounds())}"
    elif steps < MIN_STEPS:
        word, reason = UNDECIDED, f"{steps:,} steps decide nothing, {MIN_STEPS} may"
    elif lost[FP8] > lost[BF16]:
        word, reason = WORSE, "FP8 diverges more often than BF16"
    elif not gaps:
        word, reason = UNDECIDED, "no pair of runs is left to compare"
    elif WORSE in words or fewer:
        word, reason = WORSE, f"FP8 {'has a higher final loss' if WORSE in words else 'answers less'} {after}"
    elif count == 1:
        word, reason = UNDECIDED, f"one seed of {steps:,} steps decides nothing, {MORE_SEEDS} can"
    elif UNDECIDED in words:
        word, reason = UNDECIDED, f"the gap {after} may be chance, more steps or seeds decide"
    else:
        word, reason = AS_GOOD, f"FP8's final loss{' and exact match' if answers else ''} {after}"
    figures = [f"{', '.join(f'{name} {gap}' for name, gap in gaps.items())} ({tolerance:.2%} allowed)"] if gaps else []
    figures += [f"exact match {100 * answers.mean:+.1f} ± {100 * answers.error:.1f} points"] if answers else []
    figures += [f"diverged {lost[FP8]} of {len(found)} in FP8, {lost[BF16]} in BF16"] if any(lost.values()) else []
    return Verdict(word, reason, f"FP8 against BF16: {'; '.join(figures)}")


def word_of(gap: Mean, tolerance: float = TOLERANCE, chance: float = 0.0) -> Word:
    """Return the word for a relative gap of losses; `chance` is what another seed may change where there is one."""
    if gap.mean <= tolerance:
        return AS_GOOD
    return UNDECIDED if gap.mean <= (chance if gap.error is None else SIGMAS * gap.error) else WORSE


def _named(differences: Sequence[tuple[str, Any, Any]]) -> str:
    named = (
        f"{key} ({', '.join(clipped(json.dumps(value), LONGEST_VALUE) for value in values)})"
        for key, *values in differences[:MOST_KEYS]
    )
    more = f" and {len(differences) - MOST_KEYS} more" if len(differences) > MOST_KEYS else ""
    return f"{', '.join(named)}{more}"


def best_of(points: Points) -> float | None:
    """Return the best final loss of a grid; None for one point: seeds of fine-tuning differ as much as it gains."""
    finals = [run.result[TRAINED] for found in points.values() for each in found for run in each.columns.values()]
    return min(filter(None, finals), default=None) if len(points) > 1 else None


def diverged(run: RunRecord, best: float | None) -> bool:
    """Return whether a final loss is not finite, or nearer to the loss before the first step than to the best."""
    first, last = run.result["first_validation_loss"], run.result[TRAINED]
    if None in (first, last, run.result.get(WEIGHTS, last)):
        return True
    return best is not None and last > (best + first) / 2


def healthy(found: Sequence[Comparison], best: float | None) -> list[Comparison]:
    return [each for each in found if not any(diverged(run, best) for run in each.columns.values())]


def runs(found: Sequence[Comparison], kind: str) -> list[RunRecord]:
    """Return the runs of one of KINDS; one that several comparisons share is there once."""
    each = [one.run if kind == FP8 else one.other for one in found]
    return list({run.folder: run for run in each if run is not None}.values())


def mean_gap(found: Sequence[Comparison], key: str = TRAINED) -> Mean | None:
    gaps = [each.gap(key) for each in found]
    return None if None in gaps else Mean(fmean(gaps), _standard_error(gaps))


def seed_noise(found: Sequence[Comparison]) -> float | None:
    """Return the standard deviation of BF16's final losses over seeds, relative to their mean; None for one seed."""
    losses = [run.result[TRAINED] for run in runs(found, BF16)]
    return stdev(losses) / fmean(losses) if len(losses) > 1 and all(losses) else None


def _standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def exact_match(found: Sequence[Comparison]) -> Mean | None:
    """Return FP8 - BF16 of exact match over seeds, None where it was not measured in all runs.

    The error is that of the problems that were drawn and, over several seeds, of the seed.
    """
    differences, variances = [], []
    for each in found:
        answers = [run.result["exact_match"] for run in each.columns.values()]
        if len(answers) < 2 or any(a["after"] is None or not a["problems"] for a in answers):
            return None
        differences.append(answers[0]["after"] - answers[1]["after"])
        variances.append(sum(share_error(a["after"], a["problems"]) ** 2 for a in answers))
    if not found:
        return None
    # The mean of independent estimates; seeds that answer the same problems differ by more than that, or by less.
    drawn = (fmean(variances) / len(found)) ** 0.5
    return Mean(fmean(differences), max(drawn, _standard_error(differences) or 0.0))


def share_error(share: float | None, problems: int) -> float | None:
    return None if share is None or not problems else (share * (1 - share) / problems) ** 0.5


def concerns(run: RunRecord) -> list[str]:
    result, found = run.result, []
    if result["final_loss"] is None:
        found.append("the final validation loss is not finite")
    if result["skipped_steps"]:
        found.append(f"{result['skipped_steps']} of {result['steps']} steps were skipped: gradients were not finite")
    if rollbacks := result.get("rollbacks"):
        found.append(f"{rollbacks} times it went back to a checkpoint after a spike of the loss")
    if moved := run.events(FALLBACK):
        found.append(f"{len(moved[-1]['layers'])} layers moved to BF16: {', '.join(moved[-1]['layers'][:3])}")
    return found + [f"{event['site']}, {event['tensor_class']}: {event['reason']}" for event in run.events("degraded")]


def _of_one_kind(each: Comparison) -> Verdict:
    gap, (first, second) = each.gap(TRAINED), each.columns
    difference = "not known" if gap is None else f"{gap:+.3%}"
    return Verdict(RAN, f"both runs are in {each.run.label}; final loss of {first} against {second} {difference}")


def _judge_run(run: RunRecord) -> Verdict:
    found, losses = concerns(run), [run.result[key] for key in ("first_validation_loss", TRAINED)]
    measured = ", no layer degraded" if run.with_key("health") else ""
    reason = f"no step skipped{measured}"
    if found:
        reason = f"needs a look, {found[0]}{' and more' if len(found) > 1 else ''}"
    before, after = ("unknown" if loss is None else f"{loss:.4f}" for loss in losses)
    figures = f"validation loss {before} to {after} in {run.result['steps']:,} steps of {run.label}"
    if run.kind == FP8 and (in_bf16 := run.result.get(WEIGHTS)):
        figures += f" ({in_bf16:.4f} by its weights in BF16)"
    return Verdict(RAN, reason, figures)
