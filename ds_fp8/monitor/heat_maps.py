"""The health of FP8 over a run as one picture: for every tensor class and figure a heat map, layers x steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ds_fp8.monitor.records import Record
from ds_fp8.monitor.thresholds import LABELS

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
    """Return the range of the colours: that of the values, but never empty."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    return (low, high) if high > low else (low, low + max(abs(low), 1.0) * 1e-3)


def _spaced(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, math.ceil(count / most))))


def short_name(site: str) -> str:
    """Return a module's name without what all layers share."""
    return site.removeprefix("model.").removeprefix("layers.")
