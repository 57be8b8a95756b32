"""Verdicts on finished runs: one line with what can be concluded about FP8, and the figures behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from ds_fp8.config.errors import clipped
from ds_fp8.monitor.records import FALLBACK
from ds_fp8.report.runs import KINDS, Comparison, RunRecord, seeds

# Relative gap of the final losses up to which FP8 counts as equal, as DeepSeek-V3 (arXiv 2412.19437) reports it
TOLERANCE = 0.0025
SIGMAS = 2.0  # Standard errors up to which a difference counts as chance
# Steps of a short run, and the relative gap of one seed of it up to which it may be chance: of the quickstart's stages
# seeds and presets differ by 3% in both directions (docs/log/quickstart.md)
SHORT, ONE_SHORT_RUN = 1000, 0.05
TRAINED, WEIGHTS = "final_loss", "final_loss_bf16"
# Keys of result.json: validation loss as trained, with casts, and of the exported BF16 weights, without
LOSSES = (TRAINED, WEIGHTS)
Level = Literal["good", "undecided", "look", "bad"]
# Levels, from the best to the worst. Undecided is neither: more seeds decide.
WORDS: dict[Level, str] = {"good": "passed", "undecided": "undecided", "look": "needs a look", "bad": "failed"}
LEVELS = tuple(WORDS)
MOST_KEYS, LONGEST_VALUE = 5, 40  # Keys that are named in a headline, and characters of their values
MORE_SEEDS = "ds-fp8 parity --seeds 3"


@dataclass(frozen=True)
class Verdict:
    """A conclusion and its reasons."""

    level: Level
    headline: str  # What a stranger can conclude, in one line
    figures: str = ""  # What it rests on

    @property
    def passed(self) -> bool:
        return self.level == "good"

    def __str__(self) -> str:
        return f"{self.headline}\n{self.figures}".strip()


NO_COMPARISON = Verdict("bad", "No comparison: a final loss is missing or not finite.")
NO_TWINS = "Undecided: FP8 diverges no more often than BF16, and no twins are left to compare."


@dataclass(frozen=True)
class Gap:
    """FP8 / BF16 - 1 of a final loss, over seeds."""

    mean: float
    error: float | None  # Standard error of the mean, None for one seed
    chance: float = 0.0  # The difference of one seed that chance may make

    def level(self, tolerance: float) -> Level:
        if self.mean <= tolerance:
            return "good"
        by_chance = self.chance if self.error is None else SIGMAS * self.error
        return "undecided" if self.mean <= by_chance else "bad"

    def __str__(self) -> str:
        return f"{self.mean:+.2%}" if self.error is None else f"{self.mean:+.2%} ± {self.error:.2%}"


@dataclass(frozen=True)
class ExactMatch:
    """Exact match of FP8 and BF16 after the last step, means over seeds."""

    fp8: float
    bf16: float
    # Standard error of the difference: of the problems that were drawn and, over several seeds, of the seed
    error: float

    @property
    def difference(self) -> float:
        return self.fp8 - self.bf16

    @property
    def worse(self) -> bool:
        return self.difference < 0 and -self.difference > SIGMAS * self.error


def judge(trained: Gap, weights: Gap, tolerance: float, answers: ExactMatch | None = None) -> Level:
    """Judge by the worse of the gaps of the losses as trained and of the weights in BF16, and by the answers.

    The error of exact match over one seed leaves out what another seed changes: one seed decides nothing.
    """
    levels = [trained.level(tolerance), weights.level(tolerance)]
    if answers is not None and answers.worse:
        levels.append("undecided" if trained.error is None else "bad")
    return max(levels, key=LEVELS.index)


def judge_seeds(comparisons: Sequence[Comparison], tolerance: float = TOLERANCE) -> Verdict:
    """Judge twins of several seeds, which differ in nothing else, by the means of their gaps."""
    gaps = [mean_gap(comparisons, key) for key in LOSSES]
    if None in gaps:
        return NO_COMPARISON
    answers = exact_match_of(comparisons)
    level = judge(*gaps, tolerance, answers)
    figures = f"final loss of FP8 against BF16 {gaps[0]}, of its weights in BF16 {gaps[1]} ({tolerance:.2%} allowed)"
    if answers is not None:
        figures += (
            f"; exact match {answers.fp8:.1%} against {answers.bf16:.1%} ({100 * answers.difference:+.1f} points, "
        )
        figures += f"standard error {100 * answers.error:.1f})"
    count = len(comparisons)
    if count == 1:
        headline = _of_one_seed(level, "this run")
    else:
        headline = {
            "good": f"FP8 is as good as BF16 over {count} seeds.",
            "undecided": f"Undecided after {count} seeds: the gap may be noise, and more seeds or steps decide.",
            "bad": f"FP8 is worse than BF16 over {count} seeds.",
        }[level]
    return Verdict(level, headline, figures)


def _of_one_seed(level: Level, runs: str, where: str = "") -> str:
    """Return what can be concluded where one seed was trained; `where` names the stages that are apart."""
    if level == "bad":
        return f"FP8 ends worse than BF16 in {runs}."
    if level == "good":
        return f"FP8 ends no worse than BF16 in {runs}. One seed cannot say more; {MORE_SEEDS} can."
    return f"One seed decides nothing: what is between FP8 and BF16{where} may be chance. {MORE_SEEDS} can tell."


def judge_all(comparisons: Sequence[Comparison]) -> Verdict:
    """Judge one run by its own health, seeds by their mean, and stages, one seed each, by the worst.

    Runs that differ in more than FP8 are not judged.
    """
    if comparisons[0].twin is None:
        return _judge_run(comparisons[0].run)
    for comparison in comparisons:
        if len({run.kind for run in comparison.columns.values()}) == 1:
            return _compare(comparison)
        if comparison.differences_of_no_twins():
            return _no_twins(comparison)
    if len(comparisons) == 1 or seeds(comparisons) is not None:
        return judge_seeds(comparisons)
    found = {comparison.name: judge_seeds([comparison]) for comparison in comparisons}
    if NO_COMPARISON in found.values():
        return NO_COMPARISON
    level = max((verdict.level for verdict in found.values()), key=LEVELS.index)
    worst = " and ".join(name for name, verdict in found.items() if verdict.level == level)
    runs = worst if level == "bad" else f"all {len(found)} stages"
    figures = [", ".join(f"{gap_of(each, key):+.2%}" for each in comparisons) for key in LOSSES]
    words = f"final losses of FP8 against BF16 {'; of its weights in BF16 '.join(figures)} ({TOLERANCE:.2%} allowed)"
    return Verdict(level, _of_one_seed(level, runs, f" in {worst}"), words)


def judge_point(comparisons: Sequence[Comparison], grid: Sequence[Comparison], tolerance: float = TOLERANCE) -> Verdict:
    """Judge the seeds of one point of a grid: first how many runs diverged, then the losses of the others."""
    lost = {kind: sum(diverged(run, grid) for run in runs_of(comparisons, kind)) for kind in KINDS}
    counts = f"diverged: {lost['fp8']} of {len(comparisons)} runs in FP8, {lost['bf16']} in BF16"
    if lost["fp8"] > lost["bf16"]:
        return Verdict("bad", "FP8 diverges more often than BF16.", counts)
    kept = healthy(comparisons, grid)
    if not kept:
        return Verdict("undecided", NO_TWINS, counts)
    verdict = judge_seeds(kept, tolerance)
    return verdict if len(kept) == len(comparisons) else replace(verdict, figures=f"{verdict.figures}; {counts}")


def healthy(comparisons: Sequence[Comparison], grid: Sequence[Comparison]) -> list[Comparison]:
    return [each for each in comparisons if not any(diverged(run, grid) for run in each.columns.values())]


def none_trained(comparisons: Sequence[Comparison], grid: Sequence[Comparison]) -> bool:
    """Return whether all runs failed to train, in FP8 and in BF16."""
    return all(diverged(run, grid) for each in comparisons for run in each.columns.values())


def diverged(run: RunRecord, grid: Sequence[Comparison]) -> bool:
    """Return whether a run failed to train.

    So it is when its final loss is not finite, or nearer to the loss before the first step than to the best final loss
    of the grid, which is empty where there is one point alone: seeds of a fine-tuning differ as much as it gains.
    """
    first, last = run.result["first_validation_loss"], run.result[TRAINED]
    if first is None or last is None:
        return True
    finals = [other.result[TRAINED] for each in grid for other in each.columns.values()]
    return bool(finals) and last > (min(loss for loss in finals if loss is not None) + first) / 2


def runs_of(comparisons: Sequence[Comparison], kind: str) -> list[RunRecord]:
    """Return the runs of one of KINDS; one that several comparisons share is there once."""
    found = [each.run if kind == KINDS[0] else each.twin for each in comparisons]
    return list({run.folder: run for run in found}.values())


def gap_of(comparison: Comparison, key: str = TRAINED) -> float | None:
    """Return FP8 / BF16 - 1 of one of the final validation LOSSES, None where one of them is not known."""
    losses = [run.result.get(key) for run in (comparison.run, comparison.twin) if run is not None]
    return losses[0] / losses[1] - 1 if len(losses) == 2 and all(losses) else None


def mean_gap(comparisons: Sequence[Comparison], key: str = TRAINED) -> Gap | None:
    gaps = [gap_of(each, key) for each in comparisons]
    short = all(run.result["steps"] < SHORT for kind in KINDS for run in runs_of(comparisons, kind) if run is not None)
    return None if None in gaps else Gap(fmean(gaps), _standard_error(gaps), ONE_SHORT_RUN if short else 0.0)


def seed_noise(comparisons: Sequence[Comparison]) -> float | None:
    """Return the standard deviation of BF16's final losses over seeds, relative to their mean; None for one seed."""
    losses = [comparison.twin.result[TRAINED] for comparison in comparisons if comparison.twin is not None]
    return stdev(losses) / fmean(losses) if len(losses) > 1 and all(losses) else None


def _standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def exact_match_of(comparisons: Sequence[Comparison]) -> ExactMatch | None:
    """Return exact match over twins that differ by their seed alone, None where it was not measured in all runs."""
    pairs, variances = [], []
    for comparison in comparisons:
        answers = [run.result["exact_match"] for run in (comparison.run, comparison.twin) if run is not None]
        shares = [each["after"] for each in answers]
        if len(answers) < 2 or None in shares or not all(each["problems"] for each in answers):
            return None
        pairs.append(shares)
        errors = (share_error(each["after"], each["problems"]) or 0.0 for each in answers)
        variances.append(sum(error**2 for error in errors))
    if not pairs:
        return None
    fp8, bf16 = (fmean(shares) for shares in zip(*pairs, strict=True))
    # The mean of independent estimates; seeds that answer the same problems differ by more than that, or by less.
    error = (fmean(variances) / len(pairs)) ** 0.5
    return ExactMatch(fp8, bf16, max(error, _standard_error([ours - theirs for ours, theirs in pairs]) or 0.0))


def share_error(share: float | None, problems: int) -> float | None:
    return None if share is None or not problems else (share * (1 - share) / problems) ** 0.5


def concerns(run: RunRecord) -> list[str]:
    result, found = run.result, []
    if result["skipped_steps"]:
        found.append(f"{result['skipped_steps']} of {result['steps']} steps were skipped: gradients were not finite")
    if rollbacks := result.get("rollbacks"):
        found.append(f"{rollbacks} times it went back to a checkpoint after a spike of the loss")
    moved = run.events(FALLBACK)
    if moved:
        found.append(f"{len(moved[-1]['layers'])} layers moved to BF16: {', '.join(moved[-1]['layers'][:3])}")
    found += [f"{event['site']}, {event['tensor_class']}: {event['reason']}" for event in run.events("degraded")]
    return found


def _compare(comparison: Comparison) -> Verdict:
    """Return the difference of two runs of one kind, which is no verdict on FP8."""
    gap = gap_of(comparison)
    if gap is None:
        return NO_COMPARISON
    first, second = comparison.columns
    return Verdict("undecided", f"The final loss of {first} is {gap:+.3%} from that of {second}, with one seed each.")


def _no_twins(comparison: Comparison) -> Verdict:
    """Return the difference of two runs that differ in more than FP8, with the keys."""
    found = [
        f"{key} ({', '.join(clipped(json.dumps(value), LONGEST_VALUE) for value in values)})"
        for key, *values in comparison.differences_of_no_twins()
    ]
    more = f" and {len(found) - MOST_KEYS} more" if len(found) > MOST_KEYS else ""
    keys = ", ".join(found[:MOST_KEYS])
    gap = gap_of(comparison)
    figures = "" if gap is None else f"final loss of {' against '.join(comparison.columns)} {gap:+.2%}"
    return Verdict(
        "undecided", f"No verdict on FP8: the runs of {comparison.name} also differ in {keys}{more}.", figures
    )


def _judge_run(run: RunRecord) -> Verdict:
    before, after = run.result["first_validation_loss"], run.result[TRAINED]
    if after is None:
        return Verdict("bad", f"Failed: after {run.result['steps']} steps the validation loss is not finite.")
    loss = f"validation loss {_loss(before)} to {_loss(after)} in {run.result['steps']:,} steps of {run.label}"
    if run.kind == "fp8" and WEIGHTS in run.result:
        loss += f" ({_loss(run.result[WEIGHTS])} by its weights in BF16)"
    found = concerns(run)
    if found:
        return Verdict("look", f"Needs a look: {found[0]}{' and more' if len(found) > 1 else ''}.", loss)
    return Verdict("good", f"Healthy: no step skipped{', no layer degraded' if run.measurements else ''}.", loss)


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
