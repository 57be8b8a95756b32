"""Write the health of FP8 to metrics.jsonl, to the curves of DeepSpeed's monitors, and as a picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from deepspeed import comm as dist

from ds_fp8.engine.health import Health
from ds_fp8.monitor.heat_maps import write_heat_maps
from ds_fp8.monitor.records import FALLBACK, health_curves, health_record, routing_curves, routing_record
from ds_fp8.train.metrics import MetricsLog, Record

PICTURE = "health.png"
PICTURE_SECONDS = 600.0
"""At least between two pictures of a run that goes on: all ranks wait a second or more while one is drawn."""


class RunHealth:
    """Writes down what the measured steps of a run showed; does nothing for a run without FP8."""

    def __init__(
        self,
        health: Health | None,
        run_dir: Path,
        log: MetricsLog,
        send: Callable[[Record], None],
    ):
        self._health, self._log, self._send = health, log, send
        self._picture = run_dir / PICTURE
        self._drawn = time.monotonic()

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
            self._log.append({"step": step, "event": "degraded", **asdict(found)})
        if report.moved:
            self._log_layers(step)

    def rolled_back(self, step: int) -> None:
        """Log again, in a log that has gone back to `step`, which layers stay in BF16."""
        if self._health is not None and self._health.layers_in_bf16:
            self._log_layers(step)

    def draw(self, now: bool = True) -> None:
        """Draw all measurements of the run, on rank 0; unless `now`, only where PICTURE_SECONDS have passed."""
        if dist.get_rank() == 0 and (now or time.monotonic() - self._drawn >= PICTURE_SECONDS):
            write_heat_maps(self._picture, self._log.records)
            self._drawn = time.monotonic()

    def _log_layers(self, step: int) -> None:
        self._log.append({"step": step, "event": FALLBACK, "layers": list(self._health.layers_in_bf16)})
