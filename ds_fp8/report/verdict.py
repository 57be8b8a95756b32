"""Sum up in one sentence what finished runs show about FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, get_args

from ds_fp8.monitor.records import FALLBACK
from ds_fp8.report.exact_match import SIGMAS, ExactMatch, exact_match_of
from ds_fp8.report.runs import Comparison, RunRecord, seeds

TOLERANCE = 0.0025
"""Relative gap of the final losses up to which FP8 counts as equal, as DeepSeek-V3 (arXiv 2412.19437) reports it."""

TRAINED, WEIGHTS = "final_loss", "final_loss_bf16"
LOSSES = (TRAINED, WEIGHTS)
"""Keys of result.json: validation loss as trained, with casts, and of the exported BF16 weights, without."""
Level = Literal["good", "undecided", "bad"]
LEVELS: tuple[str, ...] = get_args(Level)
JUDGEMENTS = {"good": "equal", "undecided": "undecided", "bad": "worse"}
NOT_WORSE = "not worse"
"""Verdict in place of "equal" where one seed alone was trained."""
ONE_SEED = (
    "one seed can show a failure, neither that both are equal nor which is better: another seed moves losses and "
    "answers as well, and ds-fp8 parity --seeds 3 says how much"
)


@dataclass(frozen=True)
class Verdict:
    """A judgement and its reasons."""

    level: Level
    words: str
    """One line: the judgement, a colon, the figures."""

    @property
    def passed(self) -> bool:
        """Return whether nothing speaks against FP8."""
        return self.level == "good"


@dataclass(frozen=True)
class Gap:
    """FP8 / BF16 - 1 of a final loss, over seeds."""

    mean: float
    error: float | None
    """Standard error of the mean, None for one seed."""

    def level(self, tolerance: float) -> Level:
        """Return what the gap says where so much is allowed."""
        if self.mean <= tolerance:
            return "good"
        return "undecided" if self._noisy else "bad"

    def reason(self, tolerance: float) -> str:
        """Return the same in a few words."""
        if self.mean > tolerance:
            return "beyond the tolerance" + (" but within its noise" if self._noisy else "")
        if self.error is None:
            return "not beyond the tolerance"
        return "no more than the seed's noise" if self._noisy else "better" if self.mean < 0 else "within the tolerance"

    @property
    def _noisy(self) -> bool:
        return self.error is not None and abs(self.mean) <= SIGMAS * self.error

    def __str__(self) -> str:
        shown = f"{self.mean:+.3%} from BF16's"
        return shown if self.error is None else f"{shown} (standard error {self.error:.3%})"


NO_COMPARISON = Verdict("bad", "no comparison: a final loss is missing or not finite")


def judge(trained: Gap, weights: Gap | None, tolerance: float, answers: ExactMatch | None = None) -> Verdict:
    """Judge how far FP8's final losses are from BF16's, by the worse of the two, and whether it answers as well.

    Args:
        trained: gap of the loss computed as in training, with casts.
        weights: gap of the loss of the exported BF16 weights, without casts; None where it was not measured.
        tolerance: the gap that is allowed. One beyond it does not pass for being noisy: more seeds or steps decide.
        answers: exact match, where it was measured. A share that is lower by more than its standard errors explain
            does not pass; its error over one seed leaves out what another seed changes, so that one seed decides
            nothing.
    """
    one_seed = trained.error is None
    shown = f"the final loss of FP8 is {trained}, {trained.reason(tolerance)}"
    if weights is not None:
        shown += f"; that of its weights in BF16 {weights}, {weights.reason(tolerance)}"
    shown += f" ({tolerance:.2%} allowed)"
    levels = [gap.level(tolerance) for gap in (trained, weights) if gap is not None]
    if answers is not None:
        shown += f"; {answers}, {'lower by more than' if answers.worse else 'within'} {SIGMAS:g} standard errors"
        levels.append(("undecided" if one_seed else "bad") if answers.worse else "good")
    level = max(levels, key=LEVELS.index)
    if level == "undecided":
        shown += "; use more seeds or steps"
    if one_seed:
        shown += f"; {ONE_SEED}"
    return Verdict(level, f"{NOT_WORSE if one_seed and level == 'good' else JUDGEMENTS[level]}: {shown}")


def judge_seeds(comparisons: Sequence[Comparison], tolerance: float = TOLERANCE) -> Verdict:
    """Judge twins of several seeds, which differ in nothing else, by the means of their gaps."""
    if any(gap is None for key in measured(comparisons) for gap in gaps_of(comparisons, key)):
        return NO_COMPARISON
    trained, weights = (mean_gap(comparisons, key) for key in LOSSES)
    return judge(trained, weights, tolerance, exact_match_of(comparisons))


def judge_all(comparisons: Sequence[Comparison]) -> Verdict:
    """Judge one run by its own health, seeds by their mean, and stages, one seed each, by the largest gap."""
    if comparisons[0].twin is None:
        return _judge_run(comparisons[0].run)
    if seeds(comparisons) is not None:
        return judge_seeds(comparisons)
    if any(gap is None for key in measured(comparisons) for gap in gaps_of(comparisons, key)):
        return NO_COMPARISON
    names = [comparison.name for comparison in comparisons]
    gaps = {key: dict(zip(names, gaps_of(comparisons, key), strict=True)) for key in measured(comparisons)}
    largest = {name: max(of_stage[name] for of_stage in gaps.values()) for name in names}
    worst = max(largest, key=largest.__getitem__)
    if any(len({run.kind for run in comparison.columns.values()}) == 1 for comparison in comparisons):
        first, second = comparisons[0].columns
        trained = gaps[TRAINED][worst]
        words = f"compared: the final loss of {first} is {trained:+.3%} from that of {second}"
        return Verdict("undecided", f"{words}; {ONE_SEED}")
    verdict = judge_seeds([comparisons[names.index(worst)]])
    if len(names) == 1:
        return verdict
    answers = {name: exact_match_of([comparison]) for name, comparison in zip(names, comparisons, strict=True)}
    failing = [f"in {name} {found}" for name, found in answers.items() if found is not None and found.worse]
    if max(largest.values()) <= TOLERANCE:
        listed = [", ".join(f"{gap:+.2%} ({name})" for name, gap in of_stage.items()) for of_stage in gaps.values()]
        words = f"in {len(names)} stages, final losses of FP8 against BF16 {'; of its weights in BF16 '.join(listed)}"
        if failing:
            return Verdict("undecided", f"{JUDGEMENTS['undecided']}: {'; '.join([*failing, words, ONE_SEED])}")
        return Verdict("good", f"{NOT_WORSE}: {words}; {ONE_SEED}")
    far = sum(gap > TOLERANCE for gap in largest.values())
    return Verdict("bad", f"worse: in {far} of {len(names)} stages; in {worst} {verdict.words.partition(': ')[2]}")


def measured(comparisons: Sequence[Comparison]) -> list[str]:
    """Return those of LOSSES that all runs measured: runs of earlier versions have no loss of BF16 weights."""
    runs = [run for comparison in comparisons for run in (comparison.run, comparison.twin) if run is not None]
    return [key for key in LOSSES if all(key in run.result for run in runs)]


def gap_of(comparison: Comparison, key: str = TRAINED) -> float | None:
    """Return FP8 / BF16 - 1 of one of the final validation LOSSES, None where one of them is not known."""
    losses = [run.result.get(key) for run in (comparison.run, comparison.twin) if run is not None]
    return losses[0] / losses[1] - 1 if len(losses) == 2 and all(losses) else None


def gaps_of(comparisons: Sequence[Comparison], key: str = TRAINED) -> list[float | None]:
    """Return `gap_of` every comparison."""
    return [gap_of(comparison, key) for comparison in comparisons]


def mean_gap(comparisons: Sequence[Comparison], key: str = TRAINED) -> Gap | None:
    """Return the mean of the gaps over seeds with its standard error, None where one of them is not known."""
    gaps = gaps_of(comparisons, key)
    return None if None in gaps else Gap(fmean(gaps), standard_error(gaps))


def seed_noise(comparisons: Sequence[Comparison]) -> float | None:
    """Return the standard deviation of BF16's final losses over seeds, relative to their mean; None for one seed."""
    losses = [comparison.twin.result["final_loss"] for comparison in comparisons if comparison.twin is not None]
    return stdev(losses) / fmean(losses) if len(losses) > 1 and all(losses) else None


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of `values`, None for a single one."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def concerns(run: RunRecord) -> list[str]:
    """Return the peculiarities of a run that deserve a look, each in a few words."""
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


def _judge_run(run: RunRecord) -> Verdict:
    before, after = run.result["first_validation_loss"], run.result["final_loss"]
    if after is None:
        return Verdict("bad", f"failed: after {run.result['steps']} steps the validation loss is not finite")
    loss = f"{run.label}, {run.result['steps']:,} steps, validation loss {_loss(before)} to {_loss(after)}"
    if run.kind == "fp8" and WEIGHTS in run.result:
        loss += f" ({_loss(run.result[WEIGHTS])} by its weights in BF16)"
    found = concerns(run)
    if found:
        return Verdict("undecided", f"needs a look: {loss}; {found[0]}{' and more' if len(found) > 1 else ''}")
    healthy = "no step skipped" + (", no layer degraded" if run.measurements else "")
    return Verdict("good", f"healthy: {loss}; {healthy}")


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
