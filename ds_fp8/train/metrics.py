"""Metrics of a run: one line of metrics.jsonl per event, and the summary that result.json is made of."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import resource
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from ds_fp8.config.log import logger
from ds_fp8.monitor.records import Record
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.run_files import read_lines
from ds_fp8.zero.peer_memory import allocated_bytes

ANSWERS = "answers"
"""The event with the first answers of an evaluation, as text."""
BF16_LOSS = "validation_loss_bf16"
"""Validation loss, after the last step, of the BF16 weights without casts; in a run that casts."""
BYTES = ("all_gather_bytes", "grad_bytes", "exchange_bytes")
LAST_LOSSES = 10


def read_metrics(file: Path, last_step: int) -> list[Record]:
    """Return the records of `file` up to `last_step`; none if there is no file.

    Lines that a kill cut off, or that are damaged, are left out.
    """
    return [record for record in read_lines(file)[0] if record["step"] <= last_step]


class MetricsLog:
    """Appends to `file` on the rank that writes (rank 0) and keeps all records of the run in memory on every rank."""

    def __init__(self, file: Path, records: list[Record], writes: bool) -> None:
        self.records = list(records)
        self._file = None
        if writes:
            # Written anew, without the lines after the checkpoint and without damaged ones.
            write_atomically(file, "".join(json.dumps(record) + "\n" for record in self.records))
            # By lines: a kill cuts off one line at most, which reading leaves out.
            self._file = file.open("a", buffering=1)

    def append(self, record: Record) -> None:
        """Add one record; numbers that are not finite become null."""
        record = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self.records.append(record)
        if self._file:
            try:
                self._file.write(json.dumps(record) + "\n")
            except OSError as error:  # what could not be written stays in the file's buffer
                logger.warning("WARNING: %s could not be written: %s", self._file.name, error.strerror)

    def go_back(self, step: int) -> None:
        """Remove all records after `step`, in the file as well."""
        self.records = [record for record in self.records if record["step"] <= step]
        if self._file:
            # Closed before the file is replaced: lines appended to the old one would be lost with it.
            self._file.close()
            name = Path(self._file.name)
            try:
                write_atomically(name, "".join(json.dumps(record) + "\n" for record in self.records))
            except OSError as error:
                logger.warning("WARNING: %s still has what came after step %s: %s", name, step, error.strerror)
            finally:
                self._file = name.open("a", buffering=1)

    def by_step(self, key: str) -> dict[int, Any]:
        """Return the last value of `key` at each step that has one."""
        return {record["step"]: record[key] for record in self.records if record.get(key) is not None}

    def has(self, step: int, key: str) -> bool:
        """Return whether a record of `step` has `key`, be its value finite or not."""
        return any(record["step"] == step and key in record for record in self.records)

    def value(self, step: int, key: str) -> Any:
        """Return the value of `key` in the last record of `step` that has it, None if there is none."""
        found = [record[key] for record in self.records if record["step"] == step and key in record]
        return found[-1] if found else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process had so far: allocated on the accelerator, or resident on a CPU."""
    if device.type != "cpu":
        return get_accelerator().max_memory_allocated() + allocated_bytes()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def begin_peak_memory() -> int:
    """On a CPU let peak_memory_bytes count from now on, and return what the process holds beside its tensors; else 0.

    Only Linux lets a process forget its peak: elsewhere that of its start stays in.
    """
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
    """Return the most memory that the accelerator's allocator held so far, in use or not.

    On a CPU as peak_memory_bytes.
    """
    if device.type == "cpu":
        return peak_memory_bytes(device)
    return get_accelerator().max_memory_reserved() + allocated_bytes()


def summarise(log: MetricsLog, steps: int) -> Record:
    """Return the figures of a run of `steps` steps.

    Losses are in nats per token, bytes per step and rank, durations in seconds, speed in tokens/s.

    `final_loss` is the validation loss after the last step, computed as in training; `final_loss_bf16` that of the BF16
    weights which the run writes, without casts: of a run without casts the same. `last_train_loss` is the mean of the
    last ten logged ones.
    """
    logged = [record for record in log.records if "loss" in record]
    losses, speed, seconds, memory, skipped = (
        [record[key] for record in logged if record.get(key) is not None]
        for key in ("loss", "tokens_per_second", "step_seconds", "memory_bytes", "skipped_steps")
    )
    return {
        "steps": steps,
        "first_loss": losses[0] if losses else None,
        "last_train_loss": fmean(losses[-LAST_LOSSES:]) if losses else None,
        "first_validation_loss": log.value(0, "validation_loss"),
        "final_loss": log.value(steps, "validation_loss"),
        "final_loss_bf16": log.value(steps, BF16_LOSS if log.has(steps, BF16_LOSS) else "validation_loss"),
        "test_loss": log.value(steps, "test_loss"),
        "exact_match": {
            "before": log.value(0, "exact_match"),
            "after": log.value(steps, "exact_match"),
            "problems": log.value(steps, "problems") or 0,
        },
        "bytes_per_step": {key: _mean(logged, key) for key in BYTES},
        # Nothing is known of steps whose lines were lost.
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
