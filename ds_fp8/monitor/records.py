"""Measurements as records of metrics.jsonl and as curves of DeepSpeed's monitors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from ds_fp8.monitor import routing
from ds_fp8.monitor.cast_monitor import CastFigures, Measurement
from ds_fp8.monitor.routing import RoutingMeasurement

Record = dict[str, Any]  # one line of metrics.jsonl

FIGURES = tuple(field.name for field in fields(CastFigures))
CURVES = ("snr_db", "flushed", "saturated")  # figures by layer for DeepSpeed's monitors; metrics.jsonl has all
DIGITS = 4

FALLBACK = "fallback"  # event; its `layers` are all layers in BF16 from then on


def health_record(step: int, measurement: Measurement) -> Record:
    """Return a record of metrics.jsonl: names of layers in `sites`, and lists of each figure in their order by class.

    null: unknown. Classes that were not quantized are left out.
    """
    names = list(dict.fromkeys(name for by_name in measurement.values() for name in by_name))
    health: Record = {"sites": names}
    for tensor_class, by_name in measurement.items():
        if by_name:
            health[tensor_class] = {
                figure: [_rounded(getattr(by_name.get(name), figure, None)) for name in names] for figure in FIGURES
            }
    return {"step": step, "health": health}


def health_curves(measurement: Measurement) -> dict[str, float]:
    return {
        f"FP8/{tensor_class}/{figure}/{name}": value
        for tensor_class, by_name in measurement.items()
        for name, figures in by_name.items()
        for figure in CURVES
        if (value := getattr(figures, figure)) is not None
    }


def routing_record(step: int, measurement: RoutingMeasurement) -> Record:
    """Return router statistics as a record of metrics.jsonl: names of layers, and a list of each figure in their order.

    `mean`: over the layers. `auxiliary_loss` is left out if the model returns none.
    """
    content: Record = {"layers": list(measurement.layers)}
    for figure in routing.FIGURES:
        content[figure] = [_rounded(getattr(layer, figure)) for layer in measurement.layers.values()]
    content["mean"] = {figure: _rounded(getattr(measurement.mean, figure)) for figure in routing.FIGURES}
    record = {"step": step, "routing": content}
    return record if measurement.auxiliary_loss is None else {**record, "auxiliary_loss": measurement.auxiliary_loss}


def routing_curves(measurement: RoutingMeasurement) -> dict[str, float]:
    """Return router statistics for DeepSpeed's monitors, by layer and as their mean."""
    layers = {"mean": measurement.mean, **measurement.layers}
    curves = {
        f"Routing/{figure}/{name}": getattr(figures, figure)
        for figure in routing.FIGURES
        for name, figures in layers.items()
    }
    if measurement.auxiliary_loss is not None:
        curves["Routing/auxiliary_loss"] = measurement.auxiliary_loss
    return curves


def layers_in_bf16(records: Iterable[Record]) -> list[str]:
    """Return the layers in BF16 at the end of these records."""
    return next((r["layers"] for r in reversed(list(records)) if r.get("event") == FALLBACK), [])


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
