"""Measurements as lines of metrics.jsonl, as curves of DeepSpeed's monitors, and as one picture of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ds_fp8.monitor import routing
from ds_fp8.monitor.cast_monitor import LABELS, CastFigures, Measurement
from ds_fp8.monitor.routing import RoutingMeasurement

Record = dict[str, Any]
"""One line of metrics.jsonl."""

FIGURES = tuple(field.name for field in fields(CastFigures))
CURVES = ("snr_db", "flushed", "saturated")
"""Figures by layer for DeepSpeed's monitors; metrics.jsonl has all."""
DIGITS = 4

FALLBACK = "fallback"
"""The event after which `layers`, all those moved so far, are in BF16."""


def health_record(step: int, measurement: Measurement) -> Record:
    """Return one line of metrics.jsonl: names of sites and, by tensor class, a list of each figure in their order.

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
    """Return named figures for DeepSpeed's monitors."""
    return {
        f"FP8/{tensor_class}/{figure}/{site}": value
        for tensor_class, sites in measurement.items()
        for site, figures in sites.items()
        for figure in CURVES
        if (value := getattr(figures, figure)) is not None
    }


def routing_record(step: int, measurement: RoutingMeasurement) -> Record:
    """Return router statistics as one line of metrics.jsonl: names of layers, and a list of each figure in their order.

    `mean` has the means over the layers. `auxiliary_loss`, beside them, is left out of models that return none.
    """
    content: Record = {"layers": list(measurement.layers)}
    for figure in routing.FIGURES:
        content[figure] = [_rounded(getattr(layer, figure)) for layer in measurement.layers.values()]
    content["mean"] = {figure: _rounded(getattr(measurement.mean, figure)) for figure in routing.FIGURES}
    record = {"step": step, "routing": content}
    return record if measurement.auxiliary_loss is None else {**record, "auxiliary_loss": measurement.auxiliary_loss}


def routing_curves(measurement: RoutingMeasurement) -> dict[str, float]:
    """Return named figures for DeepSpeed's monitors, by layer and as their mean."""
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
    """Return the layers that the run of these records has moved to BF16 by their end."""
    return next((r["layers"] for r in reversed(list(records)) if r.get("event") == FALLBACK), [])


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


PANELS = {
    "snr_db": ("signal-to-noise ratio, dB", "viridis"),
    "flushed": ("flushed to zero, %", "magma_r"),
    "saturated": ("saturated, %", "magma_r"),
    "amax": ("amax, power of two", "cividis"),
}
MOST_COLUMNS = 400
"""Measurements in a picture; of more, some evenly spaced ones are shown."""
MOST_LABELS = 24


def write_heat_maps(file: Path, records: Sequence[Record]) -> bool:
    """Draw all measurements among the records of metrics.jsonl as a PNG; without any, write nothing and say so."""
    measured = [record for record in records if record.get("health")]
    if not measured:
        return False
    from matplotlib.figure import Figure

    measured = measured[:: -(-len(measured) // MOST_COLUMNS)]
    steps = [record["step"] for record in measured]
    classes = [name for name in LABELS if any(name in record["health"] for record in measured)]
    sites = health_sites(measured)
    size = (4.6 * len(PANELS), min(2.0 + 0.12 * len(sites), 9.0) * len(classes))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(classes), len(PANELS), squeeze=False)
    for row, tensor_class in zip(axes, classes, strict=True):
        for axis, (name, (title, colours)) in zip(row, PANELS.items(), strict=True):
            values = health_matrix(measured, tensor_class, name, sites)
            image = axis.imshow(values, aspect="auto", interpolation="nearest", cmap=colours)
            image.set_clim(*_range(values))
            figure.colorbar(image, ax=axis, pad=0.02)
            axis.set_title(f"{LABELS[tensor_class]}: {title}", fontsize=9)
            shown = _spaced(len(steps), 6)
            axis.set_xticks(shown, [steps[i] for i in shown], fontsize=7)
            axis.set_yticks([])
        shown = _spaced(len(sites), MOST_LABELS)
        row[0].set_yticks(shown, [short_name(sites[i]) for i in shown], fontsize=6)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=8)
    part = file.with_name(f"{file.name}.part")
    figure.savefig(part, format="png", dpi=110)
    part.replace(file)
    return True


def health_sites(measured: Sequence[Record]) -> list[str]:
    """Return all sites in the order of the model; those that moved to BF16 on the way are among them."""
    names = [record["health"]["sites"] for record in measured]
    return list(dict.fromkeys(site for sites in sorted(names, key=len, reverse=True) for site in sites))


def health_matrix(measured: Sequence[Record], tensor_class: str, figure: str, sites: Sequence[str]) -> np.ndarray:
    """Return [sites, measurements] of a figure, in the unit of its panel; NaN where there is none."""
    place = {site: index for index, site in enumerate(sites)}
    result = np.full((len(sites), len(measured)), np.nan)
    for column, record in enumerate(measured):
        health = record["health"]
        if tensor_class in health:
            for site, value in zip(health["sites"], health[tensor_class][figure], strict=True):
                result[place[site], column] = np.nan if value is None else value
    if figure == "amax":
        return np.log2(result, where=result > 0, out=np.full_like(result, np.nan))
    return result if figure == "snr_db" else 100 * result


def _range(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    return (low, high) if high > low else (low, low + max(abs(low), 1.0) * 1e-3)


def _spaced(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, math.ceil(count / most))))


def short_name(site: str) -> str:
    """Return a module's name without what all layers share."""
    return site.removeprefix("model.").removeprefix("layers.")
