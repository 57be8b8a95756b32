"""Time that the parts of a run's start take, for one line before its first step."""

from __future__ import annotations

import time

import psutil


class StartTimes:
    """Seconds of each part of a start, in their order."""

    def __init__(self, since: float | None = None) -> None:
        """Begin to count now, or from `since`, in seconds since the epoch."""
        self._last = time.time() if since is None else since
        self._seconds: dict[str, float] = {}

    @classmethod
    def of_process(cls) -> StartTimes:
        """Return the times of a start that began with this process: the first part is what it has imported."""
        return cls(psutil.Process().create_time())

    def end(self, part: str) -> None:
        """Count the time since the last call as that of `part`."""
        now = time.time()
        self._seconds[part] = self._seconds.get(part, 0.0) + max(0.0, now - self._last)
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._seconds.items())
        return f"ready after {sum(self._seconds.values()):.1f} s ({parts})"
