"""Sum up in one sentence what finished runs show about FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from ds_fp8.monitor.records import FALLBACK
from ds_fp8.report.runs import Comparison, RunRecord, seeds

TOLERANCE = 0.0025
"""Relative gap of the final losses up to which FP8 counts as equal, as DeepSeek-V3 (arXiv 2412.19437) reports it."""
SIGMAS = 2.0
"""Standard errors up to which a gap counts as noise of the seed."""


@dataclass(frozen=True)
class Verdict:
    """A judgement and its reasons."""

    level: Literal["good", "undecided", "bad"]
    words: str
    """One line: the judgement, a colon, the figures."""

    @property
    def passed(self) -> bool:
        """Return whether nothing speaks against FP8."""
        return self.level == "good"


NO_COMPARISON = Verdict("bad", "no comparison: a final loss is missing or not finite")


def judge(gap: float, gap_error: float | None, tolerance: float) -> Verdict:
    """Judge how far FP8's final loss is from BF16's.

    Args:
        gap: mean of FP8 / BF16 - 1.
        gap_error: its standard error, None for one seed.
        tolerance: the gap that is allowed. One beyond it does not pass for being noisy: more seeds or steps decide.
    """
    shown = f"the final loss of FP8 is {gap:+.3%} from BF16's"
    if gap_error is not None:
        shown += f" (standard error {gap_error:.3%})"
    noisy = gap_error is not None and abs(gap) <= SIGMAS * gap_error
    if gap <= tolerance:
        how = "no more than the seed's noise" if noisy else "better" if gap < 0 else "within the tolerance"
        return Verdict("good", f"equal: {shown}, {how} ({tolerance:.2%} allowed)")
    if noisy:
        return Verdict(
            "undecided", f"undecided: {shown}, beyond {tolerance:.2%} but within its noise; use more seeds or steps"
        )
    return Verdict("bad", f"worse: {shown}, beyond the {tolerance:.2%} allowed")


def judge_seeds(comparisons: Sequence[Comparison], tolerance: float = TOLERANCE) -> Verdict:
    """Judge twins of several seeds, which differ in nothing else, by the mean of their gaps."""
    gaps = [gap_of(comparison) for comparison in comparisons]
    if any(gap is None for gap in gaps):
        return NO_COMPARISON
    return judge(fmean(gaps), standard_error(gaps), tolerance)


def judge_all(comparisons: Sequence[Comparison], tolerance: float = TOLERANCE) -> Verdict:
    """Judge one run by its own health, seeds by their mean, and stages, one seed each, by the largest gap."""
    if comparisons[0].twin is None:
        return _judge_run(comparisons[0].run)
    if seeds(comparisons) is not None:
        return judge_seeds(comparisons, tolerance)
    gaps = {comparison.name: gap_of(comparison) for comparison in comparisons}
    if any(gap is None for gap in gaps.values()):
        return NO_COMPARISON
    worst = max(gaps, key=gaps.__getitem__)
    if any(len({run.kind for run in comparison.columns.values()}) == 1 for comparison in comparisons):
        first, second = comparisons[0].columns
        return Verdict("undecided", f"compared: the final loss of {first} is {gaps[worst]:+.3%} from that of {second}")
    verdict = judge(gaps[worst], None, tolerance)
    if len(gaps) == 1:
        return verdict
    if verdict.passed:
        listed = ", ".join(f"{gap:+.2%} ({name})" for name, gap in gaps.items())
        return Verdict("good", f"not worse: in {len(gaps)} stages, final losses of FP8 against BF16 {listed}")
    far = sum(gap > tolerance for gap in gaps.values())
    return Verdict("bad", f"worse: in {far} of {len(gaps)} stages; in {worst} {verdict.words.partition(': ')[2]}")


def gap_of(comparison: Comparison) -> float | None:
    """Return FP8 / BF16 - 1 of the final validation losses, None where one of them is not known."""
    losses = [run.result["final_loss"] for run in (comparison.run, comparison.twin) if run is not None]
    return losses[0] / losses[1] - 1 if len(losses) == 2 and all(losses) else None


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
    found = concerns(run)
    if found:
        return Verdict("undecided", f"needs a look: {loss}; {found[0]}{' and more' if len(found) > 1 else ''}")
    healthy = "no step skipped" + (", no layer degraded" if run.measurements else "")
    return Verdict("good", f"healthy: {loss}; {healthy}")


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
