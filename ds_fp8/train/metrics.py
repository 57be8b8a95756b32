"""Log and show a run: metrics.jsonl, monitors, the health of FP8, progress, the summary of a run."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ds_fp8.cluster import watchdog
from ds_fp8.config.files import write_atomically
from ds_fp8.config.log import is_first_rank, logger
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
from ds_fp8.train.loop import Callback, Run
from ds_fp8.train.run_folder import warn_unwritten
from ds_fp8.train.steps import Reading, begin_peak_memory

ANSWERS = "answers"  # The event with the first answers of an evaluation, as text
# Validation loss, after the last step, of the BF16 weights without casts; in a run that casts
BF16_LOSS = "validation_loss_bf16"
SERVED_LOSS = "validation_loss_served"  # likewise, as a server computes with the FP8 export; with outlier channels
BYTES = ("all_gather_bytes", "grad_bytes", "exchange_bytes")
LAST_LOSSES = 10
LOST = "records lost"  # The event of a resume that found fewer records than were written before its checkpoint
LINES = 20  # Lines about steps that a run prints where its output is not a terminal
SECONDS_BETWEEN_LINES = 10.0


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
    """The records of a run. Rank 0 `writes` them to `file`, and alone keeps those of training steps."""

    def __init__(self, file: Path, records: list[Record], writes: bool) -> None:
        self.records = [record for record in records if writes or "loss" not in record]
        self._path, self._writes, self._file = file, writes, None

    def open(self) -> None:
        """Write the file anew, without the lines after the checkpoint and without damaged ones."""
        if self._writes:
            try:
                write_atomically(self._path, "".join(json.dumps(record) + "\n" for record in self.records))
            finally:
                # By lines: a kill cuts off one line at most, which reading leaves out.
                self._file = self._path.open("a", buffering=1)

    def append(self, record: Record) -> None:
        if "loss" in record and not self._writes:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.records.append(finite)
        if self._file:
            with warn_unwritten(self._path):  # what could not be written stays in the file's buffer
                self._file.write(json.dumps(finite) + "\n")

    def go_back(self, step: int) -> None:
        self.records = [record for record in self.records if record["step"] <= step]
        if self._file:
            # Closed before the file is replaced: lines appended to the old one would be lost with it.
            self._file.close()
            with warn_unwritten(f"{self._path} without what came after step {step}"):
                self.open()

    def by_step(self, key: str) -> dict[int, Any]:
        return {record["step"]: record[key] for record in self.records if record.get(key) is not None}

    def has(self, step: int, key: str) -> bool:
        return any(record["step"] == step and key in record for record in self.records)

    def value(self, step: int, key: str) -> Any:
        found = [record[key] for record in self.records if record["step"] == step and key in record]
        return found[-1] if found else None

    def before(self, step: int) -> int:
        """Return the number of records before a step, on the rank that writes."""
        return sum(record["step"] < step for record in self.records)

    def check(self, state: RunState) -> None:
        """Say how many of the records that were there when `state` was saved are missing."""
        if self._writes and (missing := state.records - self.before(state.step)) > 0:
            logger.warning("WARNING: %s of the records of %s are missing", missing, self._path)
            self.append({"step": state.step, "event": LOST, "records": missing})


def send(run: Run, values: Record) -> None:
    """Send values to the monitors (TensorBoard and the like)."""
    if run.engine.monitor.enabled:
        with warn_unwritten("the monitors' figures"):
            run.engine.monitor.write_events([(key, value, run.engine.global_samples) for key, value in values.items()])


def report(run: Run, key: str, value: float, line: str, **more: Any) -> None:
    """Log, say and send what was measured after the last step done."""
    run.log.append({"step": run.step, key: value, **more})
    logger.info(f"step {run.step}: {line}")
    send(run, {f"Train/{key}": value})


class Metrics(Callback):
    """Logs, sends and shows the figures of steps."""

    def __init__(self) -> None:
        self._progress: RunProgress | None = None

    def on_start(self, run: Run) -> None:
        run.log.open()
        run.log.check(run.saved)
        self._process_bytes = begin_peak_memory()
        self._progress = RunProgress(run.stage.train.steps, run.step)

    def state(self, run: Run) -> dict[str, Any]:
        return {"records": run.log.before(run.step)}

    def on_read(self, run: Run, reading: Reading) -> None:
        record = {"step": run.step, **reading.record, "process_bytes": self._process_bytes}
        self._progress.step(record)
        if run.step == 1 or run.is_due(run.stage.train.log_every):
            run.log.append(record)
            send(run, {f"Train/{key}": value for key, value in record.items() if key != "step" and value is not None})

    def close(self) -> None:
        if self._progress:
            self._progress.stop()


class Health(Callback):
    """Logs what the measured steps of a run showed of FP8, and layers that moved to BF16."""

    def on_start(self, run: Run) -> None:
        """Log the layers in BF16 where the records up to the checkpoint that is loaded name others.

        They do after a rollback, which leaves moved layers in BF16, and in a run that begins with another's state.
        """
        health = run.engine.fp8.health
        if health is not None and health.layers_in_bf16 != layers_in_bf16(run.log.records):
            self._log_layers(run)

    on_rollback = on_start

    def on_step(self, run: Run) -> None:
        health = run.engine.fp8.health
        if health is None or health.last is None:
            return
        found, health.last = health.last, None
        run.log.append(health_record(run.step, found.measurement))
        send(run, health_curves(found.measurement))
        if found.routing is not None:
            run.log.append(routing_record(run.step, found.routing))
            send(run, routing_curves(found.routing))
        for layer in found.degraded:
            names = {"site": layer.name, "tensor_class": layer.tensor_class, "reason": layer.reason}
            run.log.append({"step": run.step, "event": "degraded", **names})
        if found.moved:
            self._log_layers(run)

    def _log_layers(self, run: Run) -> None:
        run.log.append({"step": run.step, "event": FALLBACK, "layers": list(run.engine.fp8.health.layers_in_bf16)})


def summarise(log: MetricsLog, steps: int) -> Record:
    """Return the figures of a run of `steps` steps.

    Losses are in nats per token, bytes per step and rank, durations in seconds, speed in tokens/s, energy in mJ of
    the GPUs of all ranks.

    `final_loss` is the validation loss after the last step, computed as in training; `final_loss_bf16` that of the BF16
    weights which the run writes, without casts: of a run without casts the same. `final_loss_served` is that of the FP8
    export, None where it computes as training. `last_train_loss` is the mean of the last ten logged ones. Losses of
    records that were lost are None.
    """
    logged = [record for record in log.records if "loss" in record]
    lost = max((place for place, record in enumerate(log.records) if record.get("event") == LOST), default=-1)
    last = [record["loss"] for record in log.records[lost + 1 :] if record.get("loss") is not None][-LAST_LOSSES:]
    losses, speed, energy, seconds, memory, skipped = (
        [record[key] for record in logged if record.get(key) is not None]
        for key in (
            "loss", "tokens_per_second", "millijoules_per_token", "step_seconds", "memory_bytes", "skipped_steps"
        )
    )  # fmt: skip
    return {
        "steps": steps,
        "first_loss": losses[0] if losses and lost < 0 else None,
        "last_train_loss": fmean(last) if last and (lost < 0 or len(last) == LAST_LOSSES) else None,
        "first_validation_loss": log.value(0, "validation_loss"),
        "final_loss": log.value(steps, "validation_loss"),
        "final_loss_bf16": log.value(steps, BF16_LOSS if log.has(steps, BF16_LOSS) else "validation_loss"),
        "final_loss_served": log.value(steps, SERVED_LOSS),
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
        # The mean: the counter moves a few times a second, and short steps get too many of its joules or none.
        "millijoules_per_token": fmean(energy[1:] or energy) if energy else None,
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
    if "millijoules_per_token" in record:
        parts.insert(-1, f"{record['millijoules_per_token']:.1f} mJ/token")
    if "saturated" in record:
        parts.append(f"FP8 saturated {record['saturated']:.2%} flushed {record['underflow']:.2%}")
    if record["skipped_steps"]:
        parts.append(f"{record['skipped_steps']} skipped")
    return "  ".join(parts)
