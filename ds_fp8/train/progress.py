"""What the user sees while a run goes on: a bar on a terminal, a line every few steps anywhere else."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ds_fp8.train.metrics import Record

LINES = 20


class RunProgress:
    """Shows training steps on rank 0 and nothing elsewhere. A context manager."""

    def __init__(self, name: str, total: int, done: int, shown: bool) -> None:
        self._shown = shown
        self._total = total
        self._every = max(1, total // LINES)
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
        elif step == 1 or step % self._every == 0 or step == self._total:
            self.say(f"step {step}/{self._total}  {_figures(record)}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            self._console.print(line, markup=False)


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
