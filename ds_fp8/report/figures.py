"""The figures of a report: what summary.json holds and what the page's tables show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_fp8.monitor.cast_monitor import LABELS
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
    digits: int  # Digits after the point that are shown
    columns: list[str]
    # Names of the layers; of each value also how alarming it is, from 0 to 1
    rows: list[tuple[str, list[tuple[float | None, float]]]]
    all_clear: str  # What can be said where every value is 0; else empty


class _Figure(NamedTuple):
    title: str
    digits: int
    unit: float
    worst: Callable[[list[float]], float]
    heat: Callable[[float], float]  # How alarming a value is
    all_clear: str = ""


_FIGURES = {
    "flushed": _Figure(
        "Underflow: flushed to zero, most, %",
        2,
        100,
        max,
        lambda percent: (percent / 10) ** 0.5,
        "Nothing flushed to zero in any layer.",
    ),
    "saturated": _Figure(
        "Saturated, most, %", 3, 100, max, lambda percent: percent**0.5, "Nothing saturated in any layer."
    ),
    "snr_db": _Figure("Signal-to-noise ratio, least, dB", 1, 1, min, lambda decibels: (30 - decibels) / 10),
}


def health_tables(run: RunRecord) -> list[HealthTable]:
    measured = [record["health"] for record in run.measurements]
    classes = [name for name in LABELS if any(name in health for health in measured)]
    # In the order of the model; layers that moved to BF16 on the way are in the longer lists alone.
    sites = sorted((health["sites"] for health in measured), key=len, reverse=True)
    layers = list(dict.fromkeys(_layer_of(site) for each in sites for site in each))
    tables = []
    for key, figure in _FIGURES.items():
        values: dict[tuple[str, str], list[float]] = {}
        for health in measured:
            for name in health.keys() & set(classes):
                for site, value in zip(health["sites"], health[name][key], strict=True):
                    if value is not None:
                        values.setdefault((_layer_of(site), name), []).append(figure.unit * value)
        worst = {cell: figure.worst(found) for cell, found in values.items()}
        heat = {cell: min(max(figure.heat(value), 0.0), 1.0) for cell, value in worst.items()}
        rows = [
            (layer, [(worst.get((layer, name)), heat.get((layer, name), 0.0)) for name in classes]) for layer in layers
        ]
        clear = "" if any(worst.values()) else figure.all_clear
        tables.append(HealthTable(figure.title, figure.digits, [LABELS[name] for name in classes], rows, clear))
    return tables


def _layer_of(site: str) -> str:
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", site)
    return f"layer {found.group(1)}" if found else site
