"""Schedule of the checks of CUDA graphs: frequent at first, then at long intervals."""

from __future__ import annotations

MAX_INTERVAL = 512
"""Replays after which a graph is checked at the latest."""


class CheckSchedule:
    """Schedule of the checks of a graph: before its first replay, after 1, 2, 4, 8, ..., and every MAX_INTERVAL."""

    def __init__(self) -> None:
        self.replays = 0
        self._next = 0

    @property
    def due(self) -> bool:
        """Return whether the next micro-step checks the graph."""
        return self.replays >= self._next

    def checked(self) -> None:
        """Note that the graph has been checked."""
        # Doubling: most values that go stale (warm-up of a schedule, a flag set after the first steps) do so early, and
        # the total cost of checks stays logarithmic until the interval reaches its limit.
        self._next = self.replays + min(max(self.replays, 1), MAX_INTERVAL)
