"""Loss spikes: a loss far above those of the last steps, by a z-score that the spikes themselves do not spoil."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

LEAST_HISTORY = 20
"""Losses to have seen before one can stand out."""
NORMAL_MAD = 1.4826
"""Standard deviation over median absolute deviation, for normally distributed values."""
LEAST_SPREAD = 1e-3
"""Part of the median below which the spread of losses is not believed."""


class SpikeDetector:
    """Compares each loss with the `window` before it."""

    def __init__(self, window: int, threshold: float, losses: Iterable[float] = ()):
        self._threshold = threshold
        self._losses: deque[float] = deque(losses, maxlen=window)

    def observe(self, loss: float) -> float | None:
        """Return the standard deviations by which `loss` exceeds the losses before, if above the threshold.

        A loss that is not finite does not count as a spike, and is not remembered: its step is skipped anyway.
        """
        if not math.isfinite(loss):
            return None
        score = self._score(loss)
        self._losses.append(loss)
        return score if score > self._threshold else None

    def losses(self) -> list[float]:
        """Return the losses it remembers, oldest first."""
        return list(self._losses)

    def _score(self, loss: float) -> float:
        # Of a few losses the median deviation may be almost zero, and anything would stand out.
        if len(self._losses) < min(LEAST_HISTORY, self._losses.maxlen):
            return 0.0
        # Median and its deviation, not mean and standard deviation: one spike among the losses hardly moves them.
        centre = median(self._losses)
        spread = NORMAL_MAD * median(abs(other - centre) for other in self._losses)
        return (loss - centre) / max(spread, LEAST_SPREAD * abs(centre))
