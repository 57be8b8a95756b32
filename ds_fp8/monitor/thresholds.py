"""Judge whether the casts of a layer are worse than FP8's rounding explains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_fp8.config.fp8 import MonitorConfig
from ds_fp8.monitor.cast_monitor import CastFigures, Measurement

MAX_FLUSHED, PATIENCE = 0.5, 3
"""Share of a cast's elements flushed to zero, and measurements in a row past a threshold, before a layer degrades."""
LABELS = {"input": "input", "weight": "weight", "grad_output": "output gradient", "grad_weight": "weight gradient"}


@dataclass(frozen=True)
class Degradation:
    """A tensor class of a layer that has been past a threshold for several measurements in a row."""

    site: str
    tensor_class: str
    reason: str

    def __str__(self) -> str:
        return f"{self.site}, {LABELS[self.tensor_class]}: {self.reason}"


class Thresholds:
    """Compares measurements with the thresholds of the configuration; names every layer and class once."""

    def __init__(self, config: MonitorConfig):
        self._config = config
        self._in_a_row: dict[tuple[str, str], int] = defaultdict(int)
        self._named: set[tuple[str, str]] = set()

    def check(self, measurement: Measurement) -> list[Degradation]:
        """Return the layers that this measurement shows to be newly degraded."""
        found = []
        for tensor_class, sites in measurement.items():
            for site, figures in sites.items():
                key, reason = (site, tensor_class), self._reason(figures)
                self._in_a_row[key] = self._in_a_row[key] + 1 if reason else 0
                if self._in_a_row[key] >= PATIENCE and key not in self._named:
                    self._named.add(key)
                    found.append(Degradation(site, tensor_class, f"{reason}, {PATIENCE} measurements in a row"))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of measurements in a row, and what has been named, in plain values."""
        return {
            "in_a_row": [[*key, count] for key, count in self._in_a_row.items() if count],
            "named": [list(key) for key in sorted(self._named)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, what state_dict() returned; what it lacks starts afresh."""
        self._in_a_row = defaultdict(int, {(site, kind): count for site, kind, count in state.get("in_a_row", ())})
        self._named = {(site, kind) for site, kind in state.get("named", ())}

    def _reason(self, figures: CastFigures) -> str | None:
        """Return which threshold these figures are past, or None."""
        if figures.snr_db is not None and figures.snr_db < self._config.min_snr_db:
            return f"signal-to-noise ratio {figures.snr_db:.1f} dB, below {self._config.min_snr_db:g}"
        if figures.flushed > MAX_FLUSHED:
            return f"{figures.flushed:.1%} flushed to zero, above {MAX_FLUSHED:.0%}"
        return None
