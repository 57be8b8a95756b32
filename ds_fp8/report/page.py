"""Pages of reports: one HTML file with its charts inside. Of runs also summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from ds_fp8.config.errors import UserError
from ds_fp8.report import charts
from ds_fp8.report.figures import health_tables, run_figures, summarise
from ds_fp8.report.runs import Comparison, RunRecord, find, seeds
from ds_fp8.report.verdict import (
    TOLERANCE,
    TRAINED,
    WORDS,
    Verdict,
    concerns,
    exact_match_of,
    gap_of,
    judge_all,
    mean_gap,
    seed_noise,
)
from ds_fp8.train.metrics import ANSWERS
from ds_fp8.train.run_folder import METRICS, RESULT, write_atomically

HTML, JSON = "report.html", "summary.json"
NOT_MEASURED = "–"
EMULATED = (
    "Measured on a CPU, where FP8 is emulated: losses, answers and bytes are those of FP8, memory and speed say "
    "nothing about a GPU."
)
# Figures of a mixture of experts: name, key, how it is shown and in which unit; means over the layers
ROUTING_ROWS = (
    ("entropy of tokens per expert, end", "entropy", "{:.3f}", 1.0),
    ("largest expert's share, %, end", "largest_share", "{:.1f}", 0.01),
    ("experts without tokens a layer, end", "experts_without_tokens", "{:.1f}", 1.0),
    ("auxiliary loss, end", "auxiliary_loss", "{:.4f}", 1.0),
)
OPEN_ANSWERS = 3  # Answers that are shown before the fold


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column names them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass
class Page:
    """A page: what can be concluded first, then one table over everything, then pictures."""

    title: str
    verdict: Verdict | None = None
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # When, where and how it was measured
    text: Sequence[str] = ()  # Paragraphs after everything else: what the figures mean
    stages: Sequence[Mapping[str, Any]] = ()
    start_report: Mapping[str, Any] = field(default_factory=dict)

    def html(self) -> str:
        environment = Environment(
            loader=PackageLoader("ds_fp8.report", "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        environment.filters["svg"] = Markup
        return environment.get_template("report.html").render(page=self, words=WORDS, open_answers=OPEN_ANSWERS)


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> tuple[Path, Path, Verdict]:
    """Write out/summary.json and out/report.html on the runs in `folders`, as `find` takes them; return their paths."""
    title = title or " against ".join(folder.resolve().name for folder in folders)
    try:
        comparisons = find(folders)
        verdict = judge_all(comparisons)
        summary, page = summarise(comparisons, verdict), page_of_runs(comparisons, verdict, title).html()
    except (AttributeError, LookupError, TemplateError, TypeError, ValueError) as error:
        # Files of a run are trusted to be as it wrote them, not checked value by value.
        raise UserError(
            f"{RESULT} or {METRICS} in {title} was changed since its run ended ({type(error).__name__}: {error})",
            remedy="restore the files, or train again",
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / JSON, json.dumps(summary, indent=2) + "\n")
    write_atomically(out / HTML, page)
    return out / JSON, out / HTML, verdict


def page_of_runs(comparisons: Sequence[Comparison], verdict: Verdict, title: str, tolerance: float = TOLERANCE) -> Page:
    first, several = comparisons[0], seeds(comparisons) is not None
    fp8 = next((run for run in first.columns.values() if run.kind == "fp8"), None)
    return Page(
        title,
        verdict,
        notes=[EMULATED] if first.run.result["device"] == "cpu" else [],
        tables=[_overview(comparisons)] if first.twin is not None else [],
        charts=[charts.gaps_of_seeds(comparisons, seed_noise(comparisons), tolerance)] if several else [],
        facts=facts_of(comparisons),
        stages=[_stage(comparison, tolerance) for comparison in comparisons],
        start_report=_start_report(fp8) if fp8 else {},
    )


def facts_of(comparisons: Sequence[Comparison]) -> dict[str, str]:
    runs = [run for comparison in comparisons for run in comparison.columns.values()]
    result, made = runs[0].result, [run.result["made"] for run in runs if run.result.get("made")]
    facts = {"model": f"{result['parameters']:,} parameters, {result['ranks']} rank{'s' * (result['ranks'] > 1)}"}
    if made:
        whole = sum(each["seconds"] for each in made)
        facts |= {
            "begun": min(each["started"] for each in made),
            "took": f"{_duration(whole)} in {len(made)} run{'s' * (len(made) > 1)}"
            + (", the last start of each alone" if any(each["first_step"] for each in made) else ""),
        }
        for name, key in {"host": "host", "hardware": "processor", "seed": "seed", "commit": "commit"}.items():
            facts[name] = ", ".join(dict.fromkeys(str(each[key] or "installed package") for each in made))
        facts["command"] = made[0]["command"]
    facts["versions"] = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return facts


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _overview(comparisons: Sequence[Comparison]) -> Table:
    labels = ["FP8", "BF16"] if all(set(each.columns) == {"FP8", "BF16"} for each in comparisons) else None
    of = labels or [run.label for run in comparisons[0].columns.values()]
    columns = ["seed" if seeds(comparisons) else "stage", "steps", f"validation loss {of[0]}", *of[1:]]
    columns += ["gap", f"exact match {of[0]}", *of[1:]] if len(of) > 1 else [f"exact match {of[0]}"]
    rows = []
    for comparison in comparisons:
        figures = [run_figures(run) for run in comparison.columns.values()]
        row = [comparison.name, f"{figures[0]['steps']:,}"]
        row += [number(entry["final_validation_loss"], "{:.4f}") for entry in figures]
        row += [number(gap_of(comparison), "{:+.2%}")] if len(figures) > 1 else []
        rows.append(row + [number(entry["exact_match"], "{:.0%}") for entry in figures])
    if seeds(comparisons) and len(comparisons) > 1 and (gap := mean_gap(comparisons)):
        losses = [
            fmean(run.result[TRAINED] for run in kind)
            for kind in zip(*(c.columns.values() for c in comparisons), strict=True)
        ]
        rows.append(["mean", "", *(f"{loss:.4f}" for loss in losses), str(gap), "", ""])
    if not any(cell not in (NOT_MEASURED, "") for row in rows for cell in row[-len(of) :]):
        columns, rows = columns[: -len(of)], [row[: -len(of)] for row in rows]
    return Table(columns, rows)


def _stage(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    pictures = [charts.losses(comparison), charts.gap(comparison, tolerance), *charts.over_steps(comparison)]
    runs = comparison.columns
    return {
        "name": comparison.name,
        "labels": list(runs),
        "folders": [(label, str(run.folder)) for label, run in runs.items()],
        "table": _figures(comparison),
        "charts": [picture for picture in pictures if picture],
        "answers": _answers(comparison),
        "concerns": [(label, line) for label, run in runs.items() for line in concerns(run)],
        "health": [(label, health_tables(run)) for label, run in runs.items() if run.measurements],
        "differences": Table(
            ["key", *runs], [[key, *map(_shown, values)] for key, *values in comparison.differences()]
        ),
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


def _figures(comparison: Comparison) -> Table:
    """Return the table of a stage: its figures by run, and the first over the second, or less it."""
    figures = [run_figures(run) for run in comparison.columns.values()]
    on_gpu = comparison.run.result["device"] != "cpu"  # on a CPU memory and speed say nothing about FP8

    def row(name: str, key: str, shape: str, unit: float = 1.0, ratio: str = "") -> list[str]:
        values = [entry[key] for entry in figures]
        compared = ""
        if ratio and len(values) == 2 and values[0] is not None and values[1]:
            compared = ratio.format(values[0] / values[1] - 1 if "%" in ratio else values[0] / values[1])
        return [name, *(number(value, shape, unit) for value in values), compared]

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
    if on_gpu:
        rows.append(row("peak memory, GiB", "peak_memory_bytes", "{:,.2f}", 2**30, "{:.2f}×"))
        rows.append(row("tokens per second", "tokens_per_second", "{:,.0f}", ratio="{:.2f}×"))
    rows.append(row("skipped steps", "skipped_steps", "{:,.0f}"))
    for name, key, shape, unit in ROUTING_ROWS:
        values = [entry["routing"] and entry["routing"][key] for entry in figures]
        rows.append([name, *(number(value, shape, unit) for value in values), ""])
    rows = [each for each in rows if set(each[1:-1]) != {NOT_MEASURED}]
    if len(figures) == 1:
        rows = [each[:-1] for each in rows]
    columns = ["", *comparison.columns, *["ratio"] * (len(figures) == 2)]
    return Table(columns, rows, f"{comparison.run.result['steps']:,} steps")


def number(value: float | None, shape: str, unit: float = 1.0) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value / unit:,.0f}" if abs(value / unit) >= 1000 else shape.format(value / unit)


def _exact_match(comparison: Comparison, figures: Sequence[Mapping[str, Any]]) -> list[str]:
    shares = [(entry["exact_match"], entry["exact_match_standard_error"] or 0) for entry in figures]
    shown = [NOT_MEASURED if share is None else f"{share:.0%} ± {error:.0%}" for share, error in shares]
    both = exact_match_of([comparison])
    difference = "" if both is None else f"{100 * both.difference:+.0f} ± {100 * both.error:.0f} pt"
    return ["exact match after", *shown, difference]


def _start_report(run: RunRecord) -> dict[str, Any]:
    hidden = ("enabled", "notes", "torch", "deepspeed", "ranks", "parameters", "left_in_bf16", "kept_in_bf16")
    report = {key: value for key, value in run.result["fp8"].items() if key not in hidden}
    rows = [[key.replace("_", " "), _shown(value)] for key, value in report.items() if value not in (None, [], {}, "")]
    return {"of": run.folder.name, "notes": run.result["fp8"].get("notes", []), "table": Table(["", "value"], rows)}


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
