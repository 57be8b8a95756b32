"""Write a report: summary.json, and report.html as one file with its charts inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ds_fp8.report import charts
from ds_fp8.report.exact_match import exact_match_of
from ds_fp8.report.runs import Comparison, RunRecord, seeds
from ds_fp8.report.summary import health_tables, run_figures, stage_figures, summarise
from ds_fp8.report.verdict import ONE_SEED, TOLERANCE, TRAINED, WEIGHTS, Verdict, concerns, gaps_of, seed_noise
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.metrics import ANSWERS

HTML, JSON = "report.html", "summary.json"
NOT_MEASURED = "–"
ALL_CLEAR = {"flushed": "Nothing flushed to zero in any layer.", "saturated": "Nothing saturated in any layer."}
ROUTING_ROWS = (
    ("entropy of tokens per expert, end", "entropy", "{:.3f}", 1.0),
    ("largest expert's share, %, end", "largest_share", "{:.1f}", 0.01),
    ("experts without tokens a layer, end", "experts_without_tokens", "{:.1f}", 1.0),
    ("auxiliary loss, end", "auxiliary_loss", "{:.4f}", 1.0),
)
"""Figures of a mixture of experts: name, key, how it is shown and in which unit; means over the layers."""
OPEN_ANSWERS = 3
"""Answers that are shown before the fold."""


@dataclass(frozen=True)
class Row:
    """One figure of a stage: its values by run, and the first over the second, or less it."""

    name: str
    values: list[str]
    ratio: str


def write_report(
    comparisons: Sequence[Comparison], verdict: Verdict, folder: Path, title: str, tolerance: float = TOLERANCE
) -> tuple[Path, Path]:
    """Write folder/summary.json and folder/report.html; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(comparisons, verdict)
    write_atomically(folder / JSON, json.dumps(summary, indent=2) + "\n")
    write_atomically(folder / HTML, render(comparisons, verdict, title, tolerance))
    return folder / JSON, folder / HTML


def render(comparisons: Sequence[Comparison], verdict: Verdict, title: str, tolerance: float = TOLERANCE) -> str:
    """Return the page."""
    first, several = comparisons[0], seeds(comparisons) is not None
    judgement, _, reason = verdict.words.partition(": ")
    reason, caution, _ = reason.partition(f"; {ONE_SEED}")
    fp8 = [run for run in first.columns.values() if run.kind == "fp8"]
    return (
        environment()
        .get_template("report.html")
        .render(
            title=title,
            judgement=judgement[0].upper() + judgement[1:],
            reason=reason,
            level=verdict.level,
            caution=f"{ONE_SEED[0].upper()}{ONE_SEED[1:]}." if caution else None,
            result=first.run.result,
            on_cpu=first.run.result["device"] == "cpu",
            overview=Markup(charts.gaps_of_seeds(comparisons, seed_noise(comparisons), tolerance)) if several else None,
            tiles=_tiles(comparisons),
            stages=[_stage(comparison, tolerance) for comparison in comparisons],
            open_answers=OPEN_ANSWERS,
            start_report=_start_report(fp8[0]) if fp8 else [],
            notes=fp8[0].result["fp8"].get("notes", []) if fp8 else [],
        )
    )


def environment() -> Environment:
    """Return the Jinja environment that loads the templates of pages."""
    return Environment(
        loader=PackageLoader("ds_fp8.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _stage(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    """Return the template's values for one comparison."""
    pictures = [
        charts.losses(comparison),
        charts.gap(comparison, tolerance),
        charts.learning_rate(comparison),
        charts.gradient_norm(comparison),
        charts.speed(comparison),
        *charts.routing(comparison),
    ]
    return {
        "name": comparison.name.replace("_", " "),
        "labels": list(comparison.columns),
        "steps": comparison.run.result["steps"],
        "folders": [(label, str(run.folder)) for label, run in comparison.columns.items()],
        "rows": _rows(comparison),
        "charts": [Markup(picture) for picture in pictures if picture],
        "answers": _answers(comparison),
        "concerns": [(label, line) for label, run in comparison.columns.items() for line in concerns(run)],
        "health": [
            _health(comparison.name, label, run) for label, run in comparison.columns.items() if run.measurements
        ],
        "differences": [(key, *map(_shown, values)) for key, *values in comparison.differences()],
    }


def _health(name: str, label: str, run: RunRecord) -> dict[str, Any]:
    tables = health_tables(run)
    alarming = [figure for figure, table in tables.items() if not table.all_clear]
    return {
        "label": label,
        "tables": [tables[figure] for figure in alarming],
        "all_clear": [words for figure, words in ALL_CLEAR.items() if figure not in alarming],
        "maps": [Markup(picture) for picture in charts.health_maps(f"{name}, {label}", run, alarming)],
    }


def _answers(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the problems that every run of the comparison has an answer kept for, with the last answers to them."""
    by_run: dict[str, dict[str, Any]] = {}
    for label, run in comparison.columns.items():
        events = run.events(ANSWERS)
        by_run[label] = {answer["prompt"]: answer for answer in events[-1]["answers"]} if events else {}
    first, *rest = by_run.values()
    return [
        {"prompt": prompt, "expected": sample["expected"], "by_run": {label: a[prompt] for label, a in by_run.items()}}
        for prompt, sample in first.items()
        if all(prompt in answers for answers in rest)
    ]


def _tiles(comparisons: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """Return (figure, what it is, remark) for the head of the page; of several stages the least favourable."""
    if comparisons[0].twin is None:
        return []
    stages = [stage_figures(comparison) for comparison in comparisons]
    of = "" if len(stages) == 1 else f"largest of {len(stages)}"
    tiles = []
    for key, what in ((TRAINED, "final loss"), (WEIGHTS, "final loss, weights in BF16")):
        gaps = [gap for gap in gaps_of(comparisons, key) if gap is not None]
        tiles += [(f"{max(gaps):+.2%}", what, of)] if gaps else []
    words = {"all_gather_bytes": "bytes of parameter gathers", "grad_bytes": "bytes of gradients"}
    if comparisons[0].run.result["device"] != "cpu":
        words |= {"peak_memory_bytes": "peak memory", "tokens_per_second": "tokens per second"}
    for key, what in words.items():
        ratios = [stage[f"{key}_ratio"] for stage in stages if stage[f"{key}_ratio"] is not None]
        if ratios:
            worst = min(ratios) if key == "tokens_per_second" else max(ratios)
            tiles.append((f"{worst:.2f}×", what, of.replace("largest", "least") if key == "tokens_per_second" else of))
    return tiles


def _rows(comparison: Comparison) -> list[Row]:
    figures = [run_figures(run) for run in comparison.columns.values()]

    def row(name: str, key: str, shape: str, unit: float = 1.0, ratio: str = "") -> Row:
        values = [entry[key] for entry in figures]
        shown = [_number(value, shape, unit) for value in values]
        known = len(values) == 2 and values[0] is not None and values[1]
        compared = ""
        if ratio and known:
            compared = ratio.format(values[0] / values[1] - 1 if "%" in ratio else values[0] / values[1])
        return Row(name, shown, compared)

    rows = [
        row("validation loss before", "first_validation_loss", "{:.4f}"),
        row("validation loss after", "final_validation_loss", "{:.4f}", ratio="{:+.2%}"),
        row("the same, weights in BF16", "final_validation_loss_bf16", "{:.4f}", ratio="{:+.2%}"),
        row("training loss, end", "last_loss", "{:.4f}", ratio="{:+.2%}"),
        row("exact match before", "exact_match_before", "{:.0%}"),
        _exact_match(comparison, figures),
        row("gathers, MB a step", "all_gather_bytes", "{:,.2f}", 1e6, "{:.2f}×"),
        row("gradients, MB a step", "grad_bytes", "{:,.2f}", 1e6, "{:.2f}×"),
        row("attention's exchange, MB a step", "exchange_bytes", "{:,.2f}", 1e6, "{:.2f}×"),
    ]
    if comparison.run.result["device"] == "cpu":  # no ratios of what says nothing about FP8 there
        rows += [
            row("process, peak GiB", "peak_memory_bytes", "{:,.2f}", 2**30),
            row("tokens per second", "tokens_per_second", "{:,.0f}"),
        ]
    else:
        rows += [
            row("peak memory, GiB", "peak_memory_bytes", "{:,.2f}", 2**30, "{:.2f}×"),
            row("tokens per second", "tokens_per_second", "{:,.0f}", ratio="{:.2f}×"),
        ]
    rows.append(row("skipped steps", "skipped_steps", "{:,.0f}"))
    rows += [
        Row(
            name,
            [_number(values and values[key], shape, unit) for values in (entry["routing"] for entry in figures)],
            "",
        )
        for name, key, shape, unit in ROUTING_ROWS
    ]
    return [each for each in rows if set(each.values) != {NOT_MEASURED}]


def _number(value: float | None, shape: str, unit: float) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value / unit:,.0f}" if abs(value / unit) >= 1000 else shape.format(value / unit)


def _exact_match(comparison: Comparison, figures: Sequence[Mapping[str, Any]]) -> Row:
    shares = [(entry["exact_match"], entry["exact_match_standard_error"] or 0) for entry in figures]
    shown = [NOT_MEASURED if share is None else f"{share:.0%} ± {error:.0%}" for share, error in shares]
    both = exact_match_of([comparison])
    difference = "" if both is None else f"{100 * both.difference:+.0f} ± {100 * both.error:.0f} pt"
    return Row("exact match after", shown, difference)


def _start_report(run: RunRecord) -> list[tuple[str, str]]:
    """Return the start report as names and values, without those that are empty or shown elsewhere."""
    hidden = ("enabled", "notes", "torch", "deepspeed", "ranks", "parameters", "left_in_bf16", "kept_in_bf16")
    report = {key: value for key, value in run.result["fp8"].items() if key not in hidden}
    return [(key.replace("_", " "), _shown(value)) for key, value in report.items() if value not in (None, [], {}, "")]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return NOT_MEASURED if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
