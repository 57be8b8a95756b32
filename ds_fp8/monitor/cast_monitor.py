"""Statistics of all casts, by tensor class and site, on every N-th optimizer step, and which of them are bad."""

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
# Share of a cast's elements flushed to zero, and measurements in a row past a threshold, before a layer degrades
MAX_FLUSHED, PATIENCE = 0.5, 3


@dataclass(frozen=True)
class CastFigures:
    """Figures of the casts of one tensor class at one site in a measured step."""

    amax: float | None  # largest magnitude; None where something was not finite
    saturated: float  # share of the elements beyond the largest number of their group's scale
    flushed: float  # share of the elements that were not zero and became it
    # Signal-to-noise ratio, 10 log10(sum x² / sum (x - cast(x))²); None where nothing was lost, or not finite
    snr_db: float | None
    scale_min: float | None  # smallest scale of a group; None where all are zero, or not finite
    scale_max: float | None


Measurement = dict[str, dict[str, CastFigures]]  # tensor class -> site -> figures; only what was cast


class CastMonitor:
    """Collects statistics over one optimizer step out of `every`; costs nothing on the others.

    Counters lie in one buffer on the device of the tensors; the host reads it once per measured step. A site is the
    name of what multiplies the tensors: a linear, or several stacked as one.
    """

    def __init__(self, every: int):
        self.every = every
        self.steps = 0
        # Shares {"saturated", "underflow"} of the last measured step, over all sites and classes together
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
        """Measure `model` while it is in training mode; `reduce(sums, peaks)` adds up and maximises over all ranks.

        Sites are the same in the same order on all ranks.
        """
        self._model, self._reduce = model, reduce
        self._columns = {}
        for name in names:
            for tensor_class in TENSOR_CLASSES:
                self._columns.setdefault((name, tensor_class), len(self._columns))
        self._buffer = _empty(len(self._columns), device)

    def __getstate__(self) -> dict:
        # A copy of a model under training has no engine that would read its figures, and takes no other model along.
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
        """Add the cast of a matrix x [M, K], or of what gives its rows, to the statistics of a class at a site.

        `elements` are those of x, where it has zeros that do not belong to the tensor.
        """
        if not self.active:
            return
        column = self._column(name, tensor_class, quantized.data.device)
        if not quantized.data.numel():
            return
        sums, peaks = (part[:, column] for part in _parts(self._buffer))
        add_cast_statistics(x, quantized, sums, peaks, elements)

    def end_step(self) -> Measurement | None:
        """Close an optimizer step; its figures when it was a measured one. Collective once attached."""
        measurement = None
        if self.due and self._buffer is not None:
            if self._reduce is not None:
                self._reduce(*_parts(self._buffer))
            figures = self._buffer.t().tolist()
            measurement = {tensor_class: {} for tensor_class in TENSOR_CLASSES}
            for (name, tensor_class), column in self._columns.items():
                if figures[column][0]:
                    measurement[tensor_class][name] = _figures(*figures[column])
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
            with torch.inference_mode(False):  # training writes it in place
                new = _empty(1, device)
                self._buffer = new if self._buffer is None else torch.cat([self._buffer, new], 1)
        return self._columns[key]


@dataclass(frozen=True)
class Degradation:
    """A tensor class of a layer that has been past a threshold for several measurements in a row."""

    name: str
    tensor_class: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}, {LABELS[self.tensor_class]}: {self.reason}"


class Thresholds:
    """Compares measurements with the least signal-to-noise ratio; names every layer and class once."""

    def __init__(self, min_snr_db: float):
        self._min_snr_db = min_snr_db
        self._in_a_row: dict[tuple[str, str], int] = defaultdict(int)
        self._named: set[tuple[str, str]] = set()

    def check(self, measurement: Measurement) -> list[Degradation]:
        """Return the layers that this measurement shows to be newly degraded."""
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


def _figures(
    elements: float,
    saturated: float,
    flushed: float,
    signal: float,
    noise: float,
    amax: float,
    scale_max: float,
    negative_scale_min: float,
) -> CastFigures:
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
