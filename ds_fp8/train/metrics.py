"""What a run logs and shows: metrics.jsonl, loss spikes, the health of FP8, memory, bars, the summary of a run."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ds_fp8.cluster import watchdog
from ds_fp8.config.log import is_first_rank, logger
from ds_fp8.engine.health import Health
from ds_fp8.monitor.records import (
    FALLBACK,
    Record,
    health_curves,
    health_record,
    layers_in_bf16,
    routing_curves,
    routing_record,
)
from ds_fp8.train.checkpoints import RunState
from ds_fp8.train.run_folder import write_atomically
from ds_fp8.zero.collectives import allocated_bytes

ANSWERS = "answers"  # The event with the first answers of an evaluation, as text
# Validation loss, after the last step, of the BF16 weights without casts; in a run that casts
BF16_LOSS = "validation_loss_bf16"
BYTES = ("all_gather_bytes", "grad_bytes", "exchange_bytes")
LAST_LOSSES = 10
LOST = "records lost"  # The event of a resume that found fewer records than were written before its checkpoint
LINES = 20  # Lines about steps that a run prints where its output is not a terminal
SECONDS_BETWEEN_LINES = 10.0
LEAST_HISTORY = 20  # Losses to have seen before one can stand out
NORMAL_MAD = 1.4826  # Standard deviation over median absolute deviation, for normally distributed values
LEAST_SPREAD = 1e-3  # Part of the median below which the spread of losses is not believed


def read_metrics(file: Path, last_step: int = sys.maxsize) -> list[Record]:
    """Return the records of `file` up to `last_step`, without lines that are damaged or that a kill cut off."""
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and type(record.get("step")) is int and record["step"] <= last_step:
                records.append(record)
    return records


class MetricsLog:
    """Appends to `file` on the rank that writes (rank 0), which alone keeps the records of training steps in memory."""

    def __init__(self, file: Path, records: list[Record], writes: bool) -> None:
        # Evaluations, saves, health and the like, on every rank
        self.events = [record for record in records if "loss" not in record]
        self.records = list(records) if writes else self.events
        self._file = None
        if writes:
            # Without the lines after the checkpoint and without damaged ones.
            self._write_anew(file)

    def _write_anew(self, file: Path) -> None:
        try:
            write_atomically(file, "".join(json.dumps(record) + "\n" for record in self.records))
        finally:
            # By lines: a kill cuts off one line at most, which reading leaves out.
            self._file = file.open("a", buffering=1)

    def append(self, record: Record) -> None:
        record = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        if "loss" not in record:
            self.events.append(record)
        if self._file:
            self.records.append(record)
            try:
                self._file.write(json.dumps(record) + "\n")
            except OSError as error:  # what could not be written stays in the file's buffer
                logger.warning("WARNING: %s could not be written: %s", self._file.name, error.strerror)

    def go_back(self, step: int) -> None:
        self.events[:] = [record for record in self.events if record["step"] <= step]
        if self._file:
            self.records = [record for record in self.records if record["step"] <= step]
            # Closed before the file is replaced: lines appended to the old one would be lost with it.
            self._file.close()
            try:
                self._write_anew(Path(self._file.name))
            except OSError as error:
                name = self._file.name
                logger.warning("WARNING: %s still has what came after step %s: %s", name, step, error.strerror)

    def by_step(self, key: str) -> dict[int, Any]:
        return {record["step"]: record[key] for record in self.events if record.get(key) is not None}

    def has(self, step: int, key: str) -> bool:
        return any(record["step"] == step and key in record for record in self.events)

    def value(self, step: int, key: str) -> Any:
        found = [record[key] for record in self.events if record["step"] == step and key in record]
        return found[-1] if found else None

    def before(self, step: int) -> int:
        """Return the number of records before a step, on the rank that writes."""
        return sum(record["step"] < step for record in self.records)

    def check(self, state: RunState) -> None:
        """Say how many of the records that were there when `state` was saved are missing."""
        if (missing := state.records - self.before(state.step)) > 0:
            logger.warning("WARNING: %s of the records of %s are missing", missing, self._file.name)
            self.append({"step": state.step, "event": LOST, "records": missing})


class SpikeDetector:
    """Compares each loss with the `window` before it."""

    def __init__(self, window: int, threshold: float, losses: Iterable[float] = ()):
        self._threshold = threshold
        self._losses: deque[float] = deque(losses, maxlen=window)

    def observe(self, loss: float) -> float | None:
        """Return the standard deviations by which `loss` exceeds the losses before, if above the threshold."""
        if not math.isfinite(loss):  # its step is skipped anyway
            return None
        score = 0.0
        # Of a few losses the median deviation may be almost zero, and anything would stand out.
        if len(self._losses) >= min(LEAST_HISTORY, self._losses.maxlen):
            # Median and its deviation, not mean and standard deviation: one spike among the losses hardly moves them.
            centre = median(self._losses)
            spread = NORMAL_MAD * median(abs(other - centre) for other in self._losses)
            score = (loss - centre) / max(spread, LEAST_SPREAD * abs(centre))
        self._losses.append(loss)
        return score if score > self._threshold else None

    def losses(self) -> list[float]:
        return list(self._losses)


class RunHealth:
    """Writes down what the measured steps of a run showed; does nothing for a run without FP8."""

    def __init__(self, health: Health | None, log: MetricsLog, send: Callable[[Record], None]):
        self._health, self._log, self._send = health, log, send

    def log_step(self, step: int) -> None:
        """Log and send what step `step`, the last one done, showed if it was a measured one."""
        if self._health is None or self._health.last is None:
            return
        report, self._health.last = self._health.last, None
        self._log.append(health_record(step, report.measurement))
        self._send(health_curves(report.measurement))
        if report.routing is not None:
            self._log.append(routing_record(step, report.routing))
            self._send(routing_curves(report.routing))
        for found in report.degraded:
            self._log.append(
                {
                    "step": step,
                    "event": "degraded",
                    "site": found.name,
                    "tensor_class": found.tensor_class,
                    "reason": found.reason,
                }
            )
        if report.moved:
            self._log_layers(step)

    def go_to(self, step: int) -> None:
        """Log the layers in BF16 where the records up to step `step`, whose checkpoint is loaded, name others.

        They do after a rollback, which leaves moved layers in BF16, and in a run that begins with another's state.
        """
        if self._health is not None and self._health.layers_in_bf16 != layers_in_bf16(self._log.events):
            self._log_layers(step)

    def _log_layers(self, step: int) -> None:
        self._log.append({"step": step, "event": FALLBACK, "layers": list(self._health.layers_in_bf16)})


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process had so far: allocated on the accelerator, or resident on a CPU."""
    if device.type != "cpu":
        return get_accelerator().max_memory_allocated() + allocated_bytes()
    # Not getrusage: its peak begins at what the process that started this one held.
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def begin_peak_memory() -> int:
    """On a CPU let peak_memory_bytes begin anew, and return what the process holds beside its tensors; else 0."""
    if get_accelerator().device_name() != "cpu":
        return 0
    with contextlib.suppress(OSError):
        # 5 resets the peak of resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    gc.collect()
    # By storage: views of one storage share its bytes, which are counted once.
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu"
    }
    return psutil.Process().memory_info().rss - sum(storages.values())


def reserved_memory_bytes(device: torch.device) -> int:
    """Return the most memory that the allocator held so far, in use or not; on a CPU as peak_memory_bytes."""
    if device.type == "cpu":
        return peak_memory_bytes(device)
    return get_accelerator().max_memory_reserved() + allocated_bytes()


def summarise(log: MetricsLog, steps: int) -> Record:
    """Return the figures of a run of `steps` steps.

    Losses are in nats per token, bytes per step and rank, durations in seconds, speed in tokens/s.

    `final_loss` is the validation loss after the last step, computed as in training; `final_loss_bf16` that of the BF16
    weights which the run writes, without casts: of a run without casts the same. `last_train_loss` is the mean of the
    last ten logged ones. Losses of records that were lost are None.
    """
    logged = [record for record in log.records if "loss" in record]
    lost = max((place for place, record in enumerate(log.records) if record.get("event") == LOST), default=-1)
    last = [record["loss"] for record in log.records[lost + 1 :] if record.get("loss") is not None][-LAST_LOSSES:]
    losses, speed, seconds, memory, skipped = (
        [record[key] for record in logged if record.get(key) is not None]
        for key in ("loss", "tokens_per_second", "step_seconds", "memory_bytes", "skipped_steps")
    )
    return {
        "steps": steps,
        "first_loss": losses[0] if losses and lost < 0 else None,
        "last_train_loss": fmean(last) if last and (lost < 0 or len(last) == LAST_LOSSES) else None,
        "first_validation_loss": log.value(0, "validation_loss"),
        "final_loss": log.value(steps, "validation_loss"),
        "final_loss_bf16": log.value(steps, BF16_LOSS if log.has(steps, BF16_LOSS) else "validation_loss"),
        "test_loss": log.value(steps, "test_loss"),
        "exact_match": {
            "before": log.value(0, "exact_match"),
            "after": log.value(steps, "exact_match"),
            "problems": log.value(steps, "problems") or 0,
        },
        "tokens_per_step": _mean(logged, "tokens"),
        "bytes_per_step": {key: _mean(logged, key) for key in BYTES},
        # The median: the first step compiles, and a save or an evaluation may fall between two readings.
        "tokens_per_second": median(speed) if speed else None,
        "step_seconds": median(seconds) if seconds else None,
        "peak_memory_bytes": max(memory, default=None),
        "skipped_steps": skipped[-1] if skipped else 0,
        "rollbacks": sum(record.get("event") == "rollback" for record in log.records),
    }


def _mean(records: list[Record], key: str) -> int | None:
    """Return the mean of what was counted, None where it was not counted in all records."""
    counted = [record[key] for record in records if record.get(key) is not None]
    return round(fmean(counted)) if counted and len(counted) == len(records) else None


# ---------------------------------------------------------------- what a run shows


class RunProgress:
    """Shows training steps on the first rank: a bar on a terminal, anywhere else a line every few steps."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._every, self._line_due = total, max(1, total // LINES), 1
        self._bar, console = None, Console(highlight=False, soft_wrap=True)
        if is_first_rank() and console.is_terminal:
            columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=console)
            self._task = self._bar.add_task("", total=total, completed=done, figures="")

    def step(self, record: Record) -> None:
        """Show a training step's record."""
        step = record["step"]
        if self._bar:
            self._bar.start()
            self._bar.update(self._task, completed=step, figures=_figures(record))
        elif step >= self._line_due or step == self._total:
            left = timedelta(seconds=round((self._total - step) * record["step_seconds"]))
            # The first step compiles, and the last leaves nothing.
            left = f"  {left} left" if 1 < step < self._total else ""
            logger.info("step %s/%s  %s%s", step, self._total, _figures(record), left)
            self._line_due = (step // self._every + 1) * self._every

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()


class TokeniserProgress:
    """Says every few seconds how far the tokenising of a source has come."""

    def __init__(self) -> None:
        self._said = time.monotonic()
        self._first: dict[str, tuple[int, float]] = {}

    def __call__(self, path: str, examples: int, tokens: int, complete: bool) -> None:
        watchdog.beat(f"tokenising {path}", slow=True)
        now = time.monotonic()
        # From the first report on: the processes that tokenise take seconds to start.
        first, started = self._first.setdefault(path, (tokens, now))
        if complete:
            logger.info("tokenised %s: %s examples, %s tokens", path, f"{examples:,}", f"{tokens:,}")
        elif now - self._said > SECONDS_BETWEEN_LINES:
            self._said, rate = now, (tokens - first) / max(now - started, 1e-3)
            logger.info(f"tokenising {path}: {examples:,} examples, {tokens:,} tokens, {rate:,.0f} tokens/s")


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
