"""The figures of a report: what summary.json holds and what the page's tables show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ds_fp8.monitor.cast_monitor import LABELS
from ds_fp8.monitor.records import health_matrix, health_sites
from ds_fp8.report.runs import Comparison, RunRecord
from ds_fp8.report.verdict import TRAINED, WEIGHTS, Verdict, concerns, exact_match_of, gap_of, share_error

SENT = ("all_gather_bytes", "grad_bytes", "exchange_bytes")
RATIOS = ("all_gather_bytes", "grad_bytes", "peak_memory_bytes", "tokens_per_second")


def summarise(comparisons: Sequence[Comparison], verdict: Verdict) -> dict[str, Any]:
    """Return the figures of all comparisons, ready for JSON: nats per token, bytes per step and rank, tokens/s."""
    first = comparisons[0].run.result
    return {
        "verdict": str(verdict),
        "passed": verdict.passed,
        **{key: first.get(key) for key in ("device", "ranks", "parameters", "versions", "made")},
        "stages": {comparison.name: stage_figures(comparison) for comparison in comparisons},
    }


def run_figures(run: RunRecord) -> dict[str, Any]:
    """Return the figures of one run; a figure that was not measured is None."""
    result = run.result
    answers = result["exact_match"]
    routing = run.routing[-1] if run.routing else None
    return {
        "steps": result["steps"],
        "first_loss": result["first_loss"],
        "last_loss": result["last_train_loss"],
        "first_validation_loss": result["first_validation_loss"],
        "final_validation_loss": result[TRAINED],
        "final_validation_loss_bf16": result.get(WEIGHTS),
        "exact_match_before": answers["before"],
        "exact_match": answers["after"],
        "exact_match_problems": answers["problems"],
        "exact_match_standard_error": share_error(answers["after"], answers["problems"]),
        # One rank alone sends nothing.
        **{key: result["bytes_per_step"].get(key) or None for key in SENT},
        **{key: result[key] for key in ("tokens_per_second", "peak_memory_bytes", "skipped_steps")},
        "routing": routing and {**routing["routing"]["mean"], "auxiliary_loss": routing.get("auxiliary_loss")},
        "spikes": run.spikes,
        "concerns": concerns(run),
    }


def stage_figures(comparison: Comparison) -> dict[str, Any]:
    """Return the figures of each run of a comparison by its label, with gap and ratios where there are two."""
    entry: dict[str, Any] = {label.lower(): run_figures(run) for label, run in comparison.columns.items()}
    if comparison.twin is not None:
        ours, theirs = entry.values()
        entry["final_loss_gap"] = gap_of(comparison)
        entry["final_loss_bf16_gap"] = gap_of(comparison, WEIGHTS)
        answers = exact_match_of([comparison])
        entry["exact_match_difference"] = None if answers is None else answers.difference
        entry["exact_match_difference_standard_error"] = None if answers is None else answers.error
        for key in RATIOS:
            entry[f"{key}_ratio"] = ours[key] / theirs[key] if ours[key] is not None and theirs[key] else None
    return entry


@dataclass(frozen=True)
class HealthTable:
    """The worst value of one figure by decoder layer and tensor class, over all measured steps."""

    title: str
    digits: int
    """Digits after the point that are shown."""
    columns: list[str]
    rows: list[tuple[str, list[tuple[float | None, float]]]]
    """Names of the layers; of each value also how alarming it is, from 0 to 1."""
    all_clear: str
    """What can be said where every value is 0; else empty."""


class _Figure(NamedTuple):
    title: str
    digits: int
    worst: Callable[[np.ndarray], float]
    heat: Callable[[float], float]
    """How alarming a value is."""
    all_clear: str = ""


_FIGURES = {
    "flushed": _Figure(
        "Underflow: flushed to zero, most, %",
        2,
        np.max,
        lambda percent: (percent / 10) ** 0.5,
        "Nothing flushed to zero in any layer.",
    ),
    "saturated": _Figure(
        "Saturated, most, %", 3, np.max, lambda percent: percent**0.5, "Nothing saturated in any layer."
    ),
    "snr_db": _Figure("Signal-to-noise ratio, least, dB", 1, np.min, lambda decibels: (30 - decibels) / 10),
}


def health_tables(run: RunRecord) -> list[HealthTable]:
    """Return a table of each figure of the casts' health."""
    measured, tables = run.measurements, []
    sites = health_sites(measured)
    layers = [_layer_of(site) for site in sites]
    classes = [name for name in LABELS if any(name in record["health"] for record in measured)]
    for key, figure in _FIGURES.items():
        rows: dict[str, list[tuple[float | None, float]]] = {layer: [] for layer in layers}
        for tensor_class in classes:
            matrix = health_matrix(measured, tensor_class, key, sites)
            for layer, cells in rows.items():
                known = matrix[[index for index, name in enumerate(layers) if name == layer]]
                known = known[np.isfinite(known)]
                value = float(figure.worst(known)) if known.size else None
                cells.append((value, 0.0 if value is None else float(np.clip(figure.heat(value), 0, 1))))
        clear = "" if any(value for cells in rows.values() for value, _ in cells) else figure.all_clear
        names = [LABELS[name] for name in classes]
        tables.append(HealthTable(figure.title, figure.digits, names, list(rows.items()), clear))
    return tables


def _layer_of(site: str) -> str:
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", site)
    return f"layer {found.group(1)}" if found else site
