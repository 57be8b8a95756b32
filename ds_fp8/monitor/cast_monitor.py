"""Quantization statistics by tensor class and layer in every N-th optimizer step, and thresholds for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.monitor.statistics import PEAKS, SUMS, Rows, add_cast_statistics

LABELS = {"input": "input", "weight": "weight", "grad_output": "output gradient", "grad_weight": "weight gradient"}
TENSOR_CLASSES = tuple(LABELS)
# A layer degrades at this share of elements flushed to zero, in so many measurements in a row
MAX_FLUSHED, PATIENCE = 0.5, 3


@dataclass(frozen=True)
class CastFigures:
    """Statistics of one tensor class of one layer in a measured step."""

    amax: float | None  # None if not finite
    saturated: float  # share of elements beyond the largest value of the format times the scale
    flushed: float  # share of elements that became zero
    # Signal-to-noise ratio, 10 log10(sum x² / sum (x - dequantized)²); None if exact or not finite
    snr_db: float | None
    scale_min: float | None  # of groups that are not zero; None if there is none, or not finite
    scale_max: float | None


Measurement = dict[str, dict[str, CastFigures]]  # tensor class -> name -> figures


class CastMonitor:
    """Collects statistics in one optimizer step out of `every`; no cost in the others.

    Counters are one buffer on the device, read by the host once per measured step. Names are of linears, or of fused
    ones such as qkv_proj (LinearRecipe.name).
    """

    def __init__(self, every: int):
        self.every = every
        self.steps = 0
        # Shares {"saturated", "underflow"} of all elements of the last measured step
        self.last: dict[str, float] | None = None
        self._columns: dict[tuple[str, str], int] = {}
        self._buffer: torch.Tensor | None = None
        self._reduce: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self._model: torch.nn.Module | None = None

    def attach(
        self,
        model: torch.nn.Module,
        names: Iterable[str],
        device: torch.device,
        reduce: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Measure `model` in training mode; `reduce(sums, peaks)` all-reduces by SUM and MAX.

        `names` are equal, in the same order, on all ranks.
        """
        self._model, self._reduce = model, reduce
        self._columns = {}
        for name in names:
            for tensor_class in TENSOR_CLASSES:
                self._columns.setdefault((name, tensor_class), len(self._columns))
        self._buffer = _empty(len(self._columns), device)

    def __getstate__(self) -> dict:
        # A copied model has no engine, and must not copy another model.
        return vars(self) if self._model is None else vars(CastMonitor(0))

    @property
    def due(self) -> bool:
        return self.every > 0 and self.steps % self.every == 0

    @property
    def active(self) -> bool:
        return self.due and (self._model is None or self._model.training)

    def observe(
        self,
        tensor_class: str,
        x: torch.Tensor | Rows,
        quantized: QuantizedTensor,
        name: str = "",
        elements: int | None = None,
    ) -> None:
        """Add a quantized matrix x [M, K], or a function of its rows, to the statistics of a class and name.

        elements: number of elements of x without its zero padding.
        """
        if not self.active:
            return
        column = self._column(name, tensor_class, quantized.data.device)
        if not quantized.data.numel():
            return
        sums, peaks = (part[:, column] for part in _parts(self._buffer))
        add_cast_statistics(x, quantized, sums, peaks, elements)

    def end_step(self) -> Measurement | None:
        """End an optimizer step; return the measurement of a measured one. Collective once attached."""
        measurement = None
        if self.due and self._buffer is not None:
            if self._reduce is not None:
                self._reduce(*_parts(self._buffer))
            figures = self._buffer.t().tolist()
            measurement = {tensor_class: {} for tensor_class in TENSOR_CLASSES}
            for (name, tensor_class), column in self._columns.items():
                if figures[column][0]:
                    measurement[tensor_class][name] = _figures(figures[column])
            count, saturated, flushed = (math.fsum(column[i] for column in figures) for i in range(3))
            self.last = {"saturated": saturated / max(count, 1), "underflow": flushed / max(count, 1)}
            self._buffer = _empty(len(self._columns), self._buffer.device)
        self.steps += 1
        return measurement

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.last = state.get("steps", 0), state.get("last")

    def _column(self, name: str, tensor_class: str, device: torch.device) -> int:
        key = (name, tensor_class)
        if key not in self._columns:
            self._columns[key] = len(self._columns)
            with torch.inference_mode(False):  # training updates it in place
                new = _empty(1, device)
                self._buffer = new if self._buffer is None else torch.cat([self._buffer, new], 1)
        return self._columns[key]


@dataclass(frozen=True)
class Degradation:
    """A tensor class of a layer beyond a threshold in PATIENCE measurements in a row."""

    name: str
    tensor_class: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}, {LABELS[self.tensor_class]}: {self.reason}"


class Thresholds:
    """Compares measurements with thresholds; reports every layer and class once."""

    def __init__(self, min_snr_db: float):
        self._min_snr_db = min_snr_db
        self._in_a_row: dict[tuple[str, str], int] = defaultdict(int)
        self._named: set[tuple[str, str]] = set()

    def check(self, measurement: Measurement) -> list[Degradation]:
        """Return the newly degraded layers of a measurement."""
        found = []
        for tensor_class, by_name in measurement.items():
            for name, figures in by_name.items():
                key, reason = (name, tensor_class), self._reason(figures)
                self._in_a_row[key] = self._in_a_row[key] + 1 if reason else 0
                if self._in_a_row[key] >= PATIENCE and key not in self._named:
                    self._named.add(key)
                    found.append(Degradation(name, tensor_class, f"{reason}, {PATIENCE} measurements in a row"))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "in_a_row": [[*key, count] for key, count in self._in_a_row.items() if count],
            "named": [list(key) for key in sorted(self._named)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row = defaultdict(int, {(name, kind): count for name, kind, count in state.get("in_a_row", ())})
        self._named = {(name, kind) for name, kind in state.get("named", ())}

    def _reason(self, figures: CastFigures) -> str | None:
        if figures.snr_db is not None and figures.snr_db < self._min_snr_db:
            return f"signal-to-noise ratio {figures.snr_db:.1f} dB, below {self._min_snr_db:g}"
        if figures.flushed > MAX_FLUSHED:
            return f"{figures.flushed:.1%} flushed to zero, above {MAX_FLUSHED:.0%}"
        return None


def _empty(columns: int, device: torch.device) -> torch.Tensor:
    buffer = torch.zeros(len(SUMS) + len(PEAKS), columns, dtype=torch.float64, device=device)
    _parts(buffer)[1].fill_(-torch.inf)
    return buffer


def _parts(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return buffer[: len(SUMS)], buffer[len(SUMS) :]


def _figures(column: list[float]) -> CastFigures:
    elements, saturated, flushed, signal, noise, amax, scale_max, negative_scale_min = column  # SUMS, PEAKS
    ratio = signal / noise if noise else math.inf
    known = math.isfinite(ratio) and ratio > 0
    return CastFigures(
        _finite(amax),
        saturated / elements,
        flushed / elements,
        10 * math.log10(ratio) if known else None,
        _finite(-negative_scale_min),
        _finite(scale_max),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
