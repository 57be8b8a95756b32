"""The health of FP8 in what a run leaves: metrics.jsonl, the curves of DeepSpeed's monitors, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path

from deepspeed import comm as dist

from ds_fp8.health import Health
from ds_fp8.modules.monitor import CastFigures, Measurement
from ds_fp8.train.heat_maps import write_heat_maps
from ds_fp8.train.metrics import MetricsLog, Record

PICTURE = "health.png"

FIGURES = tuple(field.name for field in fields(CastFigures))
CURVES = ("snr_db", "flushed", "saturated")
"""What DeepSpeed's monitors get by layer; metrics.jsonl has all."""
DIGITS = 4

FALLBACK = "fallback"
"""The event after which `layers`, all those moved so far, are in BF16."""


class RunHealth:
    """Writes down what the measured steps of a run showed; does nothing for a run without FP8."""

    def __init__(
        self,
        health: Health | None,
        run_dir: Path,
        log: MetricsLog,
        say: Callable[[str], None],
        send: Callable[[Record], None],
    ):
        self._health, self._log, self._send = health, log, send
        self._picture = run_dir / PICTURE
        if health is not None:
            health.say = say

    def log_step(self, step: int) -> None:
        """Log and send what step `step`, the last one done, showed if it was a measured one."""
        if self._health is None or self._health.last is None:
            return
        report, self._health.last = self._health.last, None
        self._log.append(health_record(step, report.measurement))
        self._send(health_curves(report.measurement))
        for found in report.degraded:
            self._log.append({"step": step, "event": "degraded", **asdict(found)})
        if report.moved:
            self._log_layers(step)

    def rolled_back(self, step: int) -> None:
        """Log again, in a log that has gone back to `step`, which layers stay in BF16."""
        if self._health is not None and self._health.layers_in_bf16:
            self._log_layers(step)

    def draw(self) -> None:
        """Draw all measurements of the run, on rank 0."""
        if dist.get_rank() == 0:
            write_heat_maps(self._picture, self._log.records)

    def _log_layers(self, step: int) -> None:
        self._log.append({"step": step, "event": FALLBACK, "layers": list(self._health.layers_in_bf16)})


def health_record(step: int, measurement: Measurement) -> Record:
    """One line of metrics.jsonl: names of sites and, by tensor class, a list of each figure in their order.

    null stands for what is not known; classes that were not cast at all are left out.
    """
    names = list(dict.fromkeys(site for sites in measurement.values() for site in sites))
    health: Record = {"sites": names}
    for tensor_class, sites in measurement.items():
        if sites:
            health[tensor_class] = {
                figure: [_rounded(getattr(sites.get(name), figure, None)) for name in names] for figure in FIGURES
            }
    return {"step": step, "health": health}


def health_curves(measurement: Measurement) -> dict[str, float]:
    """Named figures for DeepSpeed's monitors, by tensor class and site."""
    return {
        f"FP8/{tensor_class}/{figure}/{site}": value
        for tensor_class, sites in measurement.items()
        for site, figures in sites.items()
        for figure in CURVES
        if (value := getattr(figures, figure)) is not None
    }


def layers_in_bf16(records: Iterable[Record]) -> list[str]:
    """The layers that the run of these records has moved to BF16 by their end."""
    return next((r["layers"] for r in reversed(list(records)) if r.get("event") == FALLBACK), [])


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
