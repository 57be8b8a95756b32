"""The shares of right answers of FP8 runs and their BF16 twins, and how far chance alone moves their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ds_fp8.report.runs import Comparison

SIGMAS = 2.0
"""Standard errors up to which a difference counts as chance."""


@dataclass(frozen=True)
class ExactMatch:
    """Exact match of FP8 and BF16 after the last step, means over seeds."""

    fp8: float
    bf16: float
    error: float
    """Standard error of the difference: of the problems that were drawn and, over several seeds, of the seed."""

    @property
    def difference(self) -> float:
        """Return FP8's share less BF16's."""
        return self.fp8 - self.bf16

    @property
    def worse(self) -> bool:
        """Return whether FP8 answers fewer problems than chance explains."""
        return self.difference < 0 and -self.difference > SIGMAS * self.error

    def __str__(self) -> str:
        return (
            f"exact match {self.fp8:.1%} against {self.bf16:.1%} "
            f"({100 * self.difference:+.1f} points, standard error {100 * self.error:.1f})"
        )


def exact_match_of(comparisons: Sequence[Comparison]) -> ExactMatch | None:
    """Return exact match over twins that differ by their seed alone, None where it was not measured in all runs."""
    pairs, variances = [], []
    for comparison in comparisons:
        measured = [run.result["exact_match"] for run in (comparison.run, comparison.twin) if run is not None]
        shares = [answers["after"] for answers in measured]
        if len(measured) < 2 or None in shares or not all(answers["problems"] for answers in measured):
            return None
        pairs.append(shares)
        errors = (share_error(answers["after"], answers["problems"]) or 0.0 for answers in measured)
        variances.append(sum(error**2 for error in errors))
    if not pairs:
        return None
    fp8, bf16 = (fmean(shares) for shares in zip(*pairs, strict=True))
    # The mean of independent estimates; seeds that answer the same problems differ by more than that, or by less.
    error = (fmean(variances) / len(pairs)) ** 0.5
    if len(pairs) > 1:
        error = max(error, stdev(ours - theirs for ours, theirs in pairs) / len(pairs) ** 0.5)
    return ExactMatch(fp8, bf16, error)


def share_error(share: float | None, problems: int) -> float | None:
    """Return the standard error of a share of right answers among `problems`, None where it is not known."""
    return None if share is None or not problems else (share * (1 - share) / problems) ** 0.5
