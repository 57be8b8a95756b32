"""What a run shows: seconds of its start, and a bar on a terminal or a line every few steps anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ds_fp8.cluster import watchdog
from ds_fp8.config.log import logger
from ds_fp8.train.metrics import Record

LINES = 20
SECONDS_BETWEEN_LINES = 30.0
"""Interval of lines where the output is not a terminal and the number of steps is not known."""


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


class RunProgress:
    """Shows training steps on rank 0 and nothing elsewhere. A context manager."""

    def __init__(self, name: str, total: int, done: int, shown: bool) -> None:
        self._total = total
        self._every = max(1, total // LINES)
        self._line_due = 1
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = None
        if shown and self._console.is_terminal:
            self._bar = Progress(
                TextColumn(name),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(name, total=total, completed=done, figures="")

    def __enter__(self) -> RunProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, record: Record) -> None:
        """Show a training step's record."""
        step = record["step"]
        if self._bar:
            self._bar.update(self._task, completed=step, figures=_figures(record))
        elif step >= self._line_due or step == self._total:
            logger.info("step %s/%s  %s", step, self._total, _figures(record))
            self._line_due = (step // self._every + 1) * self._every


class TokeniserProgress:
    """Shows how far the tokenising of a source has come, in the one process that does it.

    A context manager that gives the function to report to.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._started = self._said = time.monotonic()
        self._first_tokens: dict[str, int] = {}

    def __enter__(self) -> Callable[[str, int, int, bool], None]:
        return self._report

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def _report(self, path: str, examples: int, tokens: int, complete: bool) -> None:
        watchdog.beat(f"tokenising {path}", slow=True)
        now = time.monotonic()
        if path not in self._first_tokens:
            self._first_tokens[path] = 0 if complete else tokens
            self._started = self._started if complete else now
        # From the first report on: what an earlier, killed process had tokenised took no time here.
        rate = (tokens - self._first_tokens[path]) / max(now - self._started, 1e-3)
        line = f"tokenising {path}: {examples:,} examples, {tokens:,} tokens"
        if complete:
            logger.info("tokenised %s: %s examples, %s tokens", path, f"{examples:,}", f"{tokens:,}")
        elif self._console.is_terminal:
            if self._bar is None:
                columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
                self._bar = Progress(*columns, console=self._console, transient=True)
                self._bar.add_task("")
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], description=f"{line}, {rate:,.0f} tokens/s")
        elif now - self._said > SECONDS_BETWEEN_LINES:
            self._said = now
            logger.info("%s, %s tokens/s", line, f"{rate:,.0f}")


def _figures(record: Record) -> str:
    parts = [
        f"loss {record['loss']:.4f}",
        f"lr {record['learning_rate']:.2e}",
        f"norm {record['gradient_norm']:.3f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"{record['memory_bytes'] / 2**30:.2f} GiB",
    ]
    if "saturated" in record:
        parts.append(f"FP8 saturated {record['saturated']:.2%} flushed {record['underflow']:.2%}")
    if record["skipped_steps"]:
        parts.append(f"{record['skipped_steps']} skipped")
    return "  ".join(parts)
