"""Reports on finished runs: a verdict, figures as JSON, and one HTML file that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_fp8.config.errors import UserError
from ds_fp8.monitor.cast_monitor import LABELS
from ds_fp8.report import charts
from ds_fp8.report.charts import Html, tag
from ds_fp8.report.runs import KINDS, Comparison, RunRecord, by_point, find
from ds_fp8.report.verdict import (
    TOLERANCE,
    TRAINED,
    WEIGHTS,
    Points,
    Verdict,
    best_of,
    concerns,
    diverged,
    exact_match,
    healthy,
    judge,
    mean_gap,
    runs,
    seed_noise,
    share_error,
)
from ds_fp8.train.metrics import ANSWERS
from ds_fp8.train.run_folder import METRICS, RESULT, write_atomically

HTML, JSON = "report.html", "summary.json"
NOT_MEASURED = "–"
EMULATED = (
    "Measured on a CPU, where FP8 is emulated: losses, answers and bytes are those of FP8, memory and speed say "
    "nothing about a GPU."
)
DIVERGED = (
    "A run diverged when its final validation loss is not finite, or nearer to the loss before the first step than to "
    "the best of the grid. A spike is a training loss above those before it, by train.spike_threshold and "
    "train.spike_window. Gaps are means over the seeds at which neither run diverged, ± their standard errors."
)
OPEN_ANSWERS = 3  # Answers before the fold
SENT = ("all_gather_bytes", "grad_bytes", "exchange_bytes")
RATIOS = ("all_gather_bytes", "grad_bytes", "peak_memory_bytes", "tokens_per_second")
# Rows of a stage's table: name, key of its figures, format, unit, and format of the ratio of two runs
ROWS = (
    ("validation loss before", "first_validation_loss", "{:.4f}", 1.0, ""),
    ("validation loss after", "final_validation_loss", "{:.4f}", 1.0, "{:+.2%}"),
    ("the same, weights in BF16", "final_validation_loss_bf16", "{:.4f}", 1.0, "{:+.2%}"),
    ("training loss, end", "last_loss", "{:.4f}", 1.0, "{:+.2%}"),
    ("exact match before", "exact_match_before", "{:.0%}", 1.0, ""),
    ("exact match after", "exact_match", "{:.0%}", 1.0, "points"),
    ("all-gather, MB a step", "all_gather_bytes", "{:,.2f}", 1e6, "{:.2f}×"),
    ("gradients, MB a step", "grad_bytes", "{:,.2f}", 1e6, "{:.2f}×"),
    ("attention's exchange, MB a step", "exchange_bytes", "{:,.2f}", 1e6, "{:.2f}×"),
    ("peak memory, GiB", "peak_memory_bytes", "{:,.2f}", 2.0**30, "{:.2f}×"),
    ("tokens per second", "tokens_per_second", "{:,.0f}", 1.0, "{:.2f}×"),
    ("mJ per token", "millijoules_per_token", "{:,.1f}", 1.0, "{:.2f}×"),
    ("skipped steps", "skipped_steps", "{:,.0f}", 1.0, ""),
    ("entropy of tokens per expert, end", "entropy", "{:.3f}", 1.0, ""),
    ("largest expert's share, %, end", "largest_share", "{:.1f}", 0.01, ""),
    ("experts without tokens a layer, end", "experts_without_tokens", "{:.1f}", 1.0, ""),
    ("auxiliary loss, end", "auxiliary_loss", "{:.4f}", 1.0, ""),
)
# Health of casts, worst of all measured steps: title, digits, unit, worst, how alarming it is, and words where all is 0
HEALTH: dict[str, tuple[str, int, float, Callable[..., float], Callable[[float], float], str]] = {
    "flushed": ("Underflow: flushed to zero, most, %", 2, 100, max, lambda percent: (percent / 10) ** 0.5,
                "Nothing flushed to zero in any layer."),
    "saturated": ("Saturated, most, %", 3, 100, max, lambda percent: percent**0.5, "Nothing saturated in any layer."),
    "snr_db": ("Signal-to-noise ratio, least, dB", 1, 1, min, lambda decibels: (30 - decibels) / 10, ""),
}  # fmt: skip


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> tuple[Path, Path, Verdict]:
    """Write out/summary.json and out/report.html on the runs in `folders`, as `find` takes them; return their paths."""
    title = title or " against ".join(folder.resolve().name for folder in folders)
    try:
        points = by_point(find(folders))
        verdict, _ = judge(points)
        pairs = [each for found in points.values() for each in found]
        made = {key: pairs[0].run.result.get(key) for key in ("device", "ranks", "parameters", "versions", "made")}
        summary = {**verdict.as_json(), **made, "stages": {pair.name: pair_figures(pair) for pair in pairs}}
        html = page(points, verdict, title)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Files of a run are trusted to be as it wrote them, not checked value by value.
        raise UserError(
            f"{RESULT} or {METRICS} in {title} was changed since its run ended ({type(error).__name__}: {error})",
            remedy="restore the files, or train again",
        ) from error
    return *write(out, JSON, summary, html), verdict


def write(out: Path, name: str, figures: Mapping[str, Any], html: str) -> tuple[Path, Path]:
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / name, json.dumps(figures, indent=2) + "\n")
    write_atomically(out / HTML, html)
    return out / name, out / HTML


# ---------------------------------------------------------------- figures


def run_figures(run: RunRecord) -> dict[str, Any]:
    result, answers = run.result, run.result["exact_match"]
    routing = next(reversed(run.with_key("routing")), None)
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
        "millijoules_per_token": result.get("millijoules_per_token"),
        "routing": routing and {**routing["routing"]["mean"], "auxiliary_loss": routing.get("auxiliary_loss")},
        "spikes": run.spikes,
        "concerns": concerns(run),
    }


def pair_figures(pair: Comparison) -> dict[str, Any]:
    """Return the figures of each run of a comparison by its label, with gap and ratios where there are two."""
    entry: dict[str, Any] = {label.lower(): run_figures(run) for label, run in pair.columns.items()}
    if pair.other is not None:
        ours, theirs = entry.values()
        answers = exact_match([pair])
        entry |= {f"{key}_gap": pair.gap(key) for key in (TRAINED, WEIGHTS)}
        entry |= {"exact_match_difference": answers and answers.mean}
        entry |= {"exact_match_difference_standard_error": answers and answers.error}
        entry |= {f"{key}_ratio": ours[key] / theirs[key] if ours[key] is not None and theirs[key] else None
                  for key in RATIOS}  # fmt: skip
    return entry


# ---------------------------------------------------------------- the page


def page(points: Points, verdict: Verdict, title: str, tolerance: float = TOLERANCE) -> str:
    """Return a page: verdict, one table over everything, then charts and each stage or seed.

    Of a grid of several seeds or points the table and its chart alone.
    """
    pairs = [each for found in points.values() for each in found]
    grid = len(points) > 1 and any(len(found) > 1 or found[0].name != point for point, found in points.items())
    pictures = []
    if grid:
        losses = {kind: [_finite(found, kind) for found in points.values()] for kind in KINDS}
        pictures = [charts.over_points("Final validation loss", list(points), losses)]
    elif len(pairs) > 1 and len(points) == 1:
        pictures = [charts.gaps_of_seeds(pairs, seed_noise(pairs), tolerance)]
    (line, *rest), kind = str(verdict).split("\n"), verdict.word.replace(" ", "-")
    fp8 = next((run for run in pairs[0].columns.values() if run.kind == "fp8"), None)
    body = tag(
        "body",
        tag("h1", title),
        tag("p", tag("b", verdict.word), line.removeprefix(verdict.word), class_=f"verdict {kind}"),
        _overview(points, grid) if pairs[0].other else None,
        [tag("p", line, class_="muted") for line in rest],
        tag("p", EMULATED, class_="note") if pairs[0].run.result["device"] == "cpu" else None,
        _facts(pairs),
        tag("div", pictures, class_="columns"),
        tag("p", DIVERGED, class_="muted") if grid else [_stage(pair, tolerance) for pair in pairs],
        _what_ran(fp8) if fp8 and not grid else None,
    )
    css = Html((Path(__file__).parent / "report.css").read_text(encoding="utf-8"))
    head = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
                '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">')  # fmt: skip
    head = tag("head", head, tag("title", title), tag("style", css))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str | None = None, kind: str = "") -> Html:
    """Return a table; cells that are Html are its <td>."""
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in columns]))
    body = [
        tag("tr", tag("th", name, scope="row"), [c if isinstance(c, Html) else tag("td", c) for c in cells])
        for name, *cells in rows
    ]
    above = caption and tag("caption", caption)
    return tag("div", tag("table", above, head, tag("tbody", body), class_=kind or None), class_="scroll")


def number(value: float | None, shape: str, unit: float = 1.0) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value / unit:,.0f}" if abs(value / unit) >= 1000 else shape.format(value / unit)


def _finite(found: Sequence[Comparison], kind: str) -> list[float]:
    return [run.result[TRAINED] for run in runs(found, kind) if run.result[TRAINED] is not None]


def _overview(points: Points, grid: bool) -> Html:
    """Return a row for each point of a grid, or for each stage or seed, and the means over seeds."""
    best = best_of(points) if grid else None
    rows = dict(points) if grid else {each.name: [each] for found in points.values() for each in found}
    if not grid and len(points) == 1 and len(rows) > 1:
        rows["mean"] = points[""]
    first = next(iter(points.values()))[0]
    labels = list(first.columns) if first.run.kind == first.other.kind else ["FP8", "BF16"]
    columns = ["", "steps", f"validation loss {labels[0]}", labels[1], "gap"]
    more = ("diverged", "spikes") if grid else ("exact match",)
    columns += [name for each in more for name in (f"{each} {labels[0]}", labels[1])]
    cells = []
    for name, found in rows.items():
        both, kept = [runs(found, kind) for kind in KINDS], healthy(found, best)
        row = [name, f"{both[0][0].result['steps']:,}"]
        row += [f"{fmean(losses):.4f}" if (losses := _finite(found, kind)) else NOT_MEASURED for kind in KINDS]
        row.append(str((kept and mean_gap(kept)) or NOT_MEASURED))
        if grid:
            row += [f"{sum(diverged(run, best) for run in each)} of {len(each)}" for each in both]
            row += [f"{sum(run.spikes for run in each)}" for each in both]
        else:
            shares = [[run.result["exact_match"]["after"] for run in each] for each in both]
            row += [NOT_MEASURED if None in each else f"{fmean(each):.0%}" for each in shares]
        cells.append(row)
    if all(cell == NOT_MEASURED for row in cells for cell in row[5:]):
        columns, cells = columns[:5], [row[:5] for row in cells]
    return table(columns, cells, kind="over")


def _facts(pairs: Sequence[Comparison]) -> Html:
    """Return when, where and how the runs were made."""
    found = [run for pair in pairs for run in pair.columns.values()]
    result, made = found[0].result, [run.result["made"] for run in found if run.result.get("made")]
    facts = {"model": f"{result['parameters']:,} parameters, {result['ranks']} rank{'s' * (result['ranks'] > 1)}"}
    if made:
        minutes, seconds = divmod(round(sum(each["seconds"] for each in made)), 60)
        facts["begun"] = min(each["started"] for each in made)
        facts["took"] = f"{minutes:,} min {seconds} s in {len(made)} run{'s' * (len(made) > 1)}" + (
            ", the last start of each alone" if any(each["first_step"] for each in made) else "")  # fmt: skip
        for name, key in {"host": "host", "hardware": "processor", "seed": "seed", "commit": "commit"}.items():
            facts[name] = ", ".join(dict.fromkeys(str(each[key] or "installed package") for each in made))
        facts["command"] = made[0]["command"]
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()), class_="facts")


def _stage(pair: Comparison, tolerance: float) -> Html:
    columns, differences = pair.columns, [[key, *map(_words, values)] for key, *values in pair.differences()]
    worries = [tag("li", f"{label}: {line}") for label, run in columns.items() for line in concerns(run)]
    folders = ", ".join(f"{label}: {run.folder}" for label, run in columns.items())
    pictures = [charts.losses(pair), charts.gap(pair, tolerance), *charts.over_steps(pair)]
    summary = f"Differences between the configurations: {len(differences)}"
    return tag(
        "section",
        tag("h2", pair.name),
        tag("p", f"{folders} (model/, metrics.jsonl, checkpoints/)", class_="muted"),
        tag("ul", worries, class_="note") if worries else None,
        tag("div", _figures(pair), pictures, class_="columns"),
        _answers(pair),
        [part for label, run in columns.items() for part in _health(label, run)],
        _fold(summary, table(["key", *columns], differences, kind="words")) if differences else None,
    )


def _fold(summary: str, *content: Any) -> Html:
    return tag("details", tag("summary", summary), *content)


def _figures(pair: Comparison) -> Html:
    """Return the table of a stage: its figures by run, and their ratio or difference."""
    figures = [{**(entry := run_figures(run)), **(entry["routing"] or {})} for run in pair.columns.values()]
    on_gpu, rows = pair.run.result["device"] != "cpu", []
    for name, key, shape, unit, ratio in ROWS:
        values = [entry.get(key) for entry in figures]
        if set(values) == {None} or (key in ("peak_memory_bytes", "tokens_per_second") and not on_gpu):
            continue  # on a CPU memory and speed say nothing about FP8
        cells, compared = [number(value, shape, unit) for value in values], ""
        if ratio == "points":
            errors = [entry["exact_match_standard_error"] for entry in figures]
            cells = [cell if e is None else f"{cell} ± {e:.0%}" for cell, e in zip(cells, errors, strict=True)]
            answers = exact_match([pair])
            compared = f"{100 * answers.mean:+.0f} ± {100 * answers.error:.0f} pt" if answers else ""
        elif ratio and len(values) == 2 and values[0] is not None and values[1]:
            compared = ratio.format(values[0] / values[1] - ("%" in ratio))
        rows.append([name, *cells, *([compared] if len(figures) == 2 else [])])
    return table(["", *pair.columns, *["ratio"] * (len(figures) == 2)], rows, f"{pair.run.result['steps']:,} steps")


def _answers(pair: Comparison) -> list[Html]:
    """Return the problems of which every run keeps its last answer."""
    events = {label: run.events(ANSWERS) for label, run in pair.columns.items()}
    by_run = {label: {a["prompt"]: a for a in each[-1]["answers"]} if each else {} for label, each in events.items()}
    first, *others = by_run.values()
    found = []
    for prompt, sample in first.items():
        if all(prompt in answers for answers in others):
            given = []
            for label, answers in by_run.items():
                right = answers[prompt]["right"]
                mark = tag("span", "✓ right" if right else "✗ wrong", class_="right" if right else "wrong")
                given.append(tag("div", tag("dt", f"{label} ", mark), tag("dd", answers[prompt]["generated"].strip())))
            expected = tag("p", f"expected: {sample['expected']}", class_="muted")
            found.append(tag("article", tag("p", prompt.strip()), expected, tag("dl", *given), class_="answer"))
    opened, more = found[:OPEN_ANSWERS], found[OPEN_ANSWERS:]
    return [tag("h3", "Answers"), *opened, *([_fold(f"{len(more)} more", more)] if more else [])] if found else []


def _health(label: str, run: RunRecord) -> list[Html]:
    """Return the worst health of casts over all measured steps, by decoder layer and tensor class."""
    measured = [record["health"] for record in run.with_key("health")]
    if not measured:
        return []
    classes = [name for name in LABELS if any(name in health for health in measured)]
    # In the order of the model; layers that moved to BF16 on the way are in the longer lists alone.
    sites = sorted((health["sites"] for health in measured), key=len, reverse=True)
    layers = list(dict.fromkeys(_layer_of(site) for each in sites for site in each))
    clear, tables = [], []
    for key, (title, digits, unit, worst, heat, all_clear) in HEALTH.items():
        values: dict[tuple[str, str], float] = {}
        for health in measured:
            for name in health.keys() & set(classes):
                for site, value in zip(health["sites"], health[name][key], strict=True):
                    if value is not None:
                        cell = _layer_of(site), name
                        values[cell] = worst(unit * value, values.get(cell, unit * value))
        if all_clear and not any(values.values()):
            clear.append(tag("p", f"✓ {all_clear}", class_="right"))
            continue
        rows = []
        for layer in layers:
            cells = []
            for value in (values.get((layer, name)) for name in classes):
                share = 0.0 if value is None else min(max(heat(value), 0.0), 1.0)
                text = NOT_MEASURED if value is None else f"{value:.{digits}f}" if value else "0"
                cells.append(tag("td", text, style=f"--heat:{60 * share:.0f}%"))
            rows.append([layer, *cells])
        tables.append(table(["", *(LABELS[name] for name in classes)], rows, title, "heat"))
    return [tag("h3", f"Health of the casts, {label}"), *clear, tag("div", *tables, class_="columns")]


def _layer_of(site: str) -> str:
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", site)
    return f"layer {found.group(1)}" if found else site


def _what_ran(run: RunRecord) -> Html:
    hidden = ("enabled", "notes", "torch", "deepspeed", "ranks", "parameters", "left_in_bf16", "kept_in_bf16")
    report = {key: value for key, value in run.result["fp8"].items() if key not in hidden}
    rows = [[key.replace("_", " "), _words(value)] for key, value in report.items() if value not in (None, [], {}, "")]
    notes = [tag("li", f"{note[:1].upper()}{note[1:]}.") for note in run.result["fp8"].get("notes", [])]
    fold = _fold(f"Start report of {run.folder.name}", table(["", "value"], rows, kind="words"))
    return tag("section", tag("h2", "What ran in FP8"), tag("ul", notes), fold)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return NOT_MEASURED if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
