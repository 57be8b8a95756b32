"""The page of a grid of runs, and its figures as JSON: robustness.html and robustness.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from ds_fp8.report import svg
from ds_fp8.report.page import NOT_MEASURED, environment
from ds_fp8.report.robustness import Outcome, gaps, summarise, words
from ds_fp8.report.runs import KINDS
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.spikes import LEAST_HISTORY

HTML, JSON = "robustness.html", "robustness.json"
STYLES = {"fp8": (svg.FP8, "o", "-"), "bf16": (svg.BF16, "s", "--")}
"""Colour, marker and line by kind."""
LEVELS = {"good": "No less stable", "bad": "Less stable"}


def write_robustness(
    found: Sequence[Outcome], facts: dict[str, Any], folder: Path, title: str
) -> tuple[Path, Path, str]:
    """Write folder/robustness.json and folder/robustness.html.

    Args:
        found: What came of all runs.
        facts: What they have in common: "steps", "device", "relative" (size of the box of the sharpness), "versions".
        folder: Where to write.
        title: Title of the page.

    Returns:
        Both paths, and the sentence that the page begins with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary, gap = summarise(found), gaps(found)
    level, sentence = words(summary, gap)
    compared = [{"rate": rate, "seed": seed, "gap": value} for (rate, seed), value in gap.items()]
    figures = {**facts, "verdict": sentence, "summary": summary, "gaps": compared, "runs": [*map(asdict, found)]}
    write_atomically(folder / JSON, json.dumps(figures, indent=2) + "\n")
    page = environment().get_template("robustness.html").render(
        title=title,
        level=level,
        judgement=LEVELS[level],
        reason=sentence,
        facts=facts,
        on_cpu=facts["device"] == "cpu",
        tiles=_tiles(summary, list(gap.values())),
        least_history=LEAST_HISTORY,
        charts=[Markup(picture) for picture in (_by_rate(found, "final_loss"), _by_rate(found, "sharpness"))],
        cells=[
            (_cell(rate, seed, twins), [_row(each, gap.get((rate, seed))) for each in twins])
            for (rate, seed), twins in _twins(found).items()
        ],
    )  # fmt: skip
    write_atomically(folder / HTML, page)
    return folder / JSON, folder / HTML, sentence


def _tiles(summary: dict[str, dict[str, Any]], gaps: Sequence[float]) -> list[tuple[str, str]]:
    """Return (figure of FP8 beside BF16, what it is)."""
    fp8, bf16 = (summary[kind] for kind in KINDS)
    tiles = [
        (f"{fp8['diverged']} | {bf16['diverged']}", f"of {fp8['runs']} runs each diverged"),
        (f"{fp8['spikes']} | {bf16['spikes']}", "loss spikes"),
    ]
    if gaps:
        tiles.append((f"{median(gaps):+.2%}", "final loss, FP8 to BF16, median"))
    if fp8["mean_sharpness"] is not None and bf16["mean_sharpness"] is not None:
        tiles.append((f"{fp8['mean_sharpness']:.1f} | {bf16['mean_sharpness']:.1f}", "mean sharpness, %"))
    return tiles


def _twins(found: Sequence[Outcome]) -> dict[tuple[float, int], list[Outcome]]:
    """Return the runs of each learning rate and seed, in the order of KINDS."""
    result: dict[tuple[float, int], list[Outcome]] = {}
    for each in sorted(found, key=lambda each: (each.rate, each.seed, KINDS.index(each.kind))):
        result.setdefault((each.rate, each.seed), []).append(each)
    return result


def _cell(rate: float, seed: int, twins: Sequence[Outcome]) -> str:
    """Return the words over the lines of a cell's runs."""
    failed = " and ".join(each.kind.upper() for each in twins if each.diverged)
    return f"learning rate {rate:g}, seed {seed}" + (f": {failed} diverged" if failed else "")


def _row(each: Outcome, gap: float | None) -> dict[str, str]:
    """Return the cells of a run's line; `gap` is told in that of FP8."""
    return {
        "name": each.kind.upper(),
        "gap": "" if each.kind == "bf16" else NOT_MEASURED if gap is None else f"{gap:+.1%}",
        "loss": NOT_MEASURED if each.final_loss is None else f"{each.final_loss:.4f}",
        "spikes": str(each.spikes),
        "sharpness": NOT_MEASURED if each.sharpness is None else f"{each.sharpness:.3f}",
    }


@svg.styled
def _by_rate(found: Sequence[Outcome], name: str) -> str:
    """Draw a figure of all runs over the learning rate, with a line through the means of the runs that have it."""
    title, label = {
        "final_loss": ("Final validation loss", "nats per token"),
        "sharpness": ("Sharpness in the logits", "percent"),
    }[name]
    figure, axes = svg.chart()
    for kind in KINDS:
        colour, marker, line = STYLES[kind]
        points = [(each.rate, getattr(each, name)) for each in found if each.kind == kind]
        points = [(rate, value) for rate, value in points if value is not None]
        by_rate: dict[float, list[float]] = {}
        for rate, value in points:
            by_rate.setdefault(rate, []).append(value)
        axes.plot(*zip(*points, strict=True), marker, color=colour, fillstyle="none", markersize=5) if points else None
        means = [sum(values) / len(values) for values in by_rate.values()]
        axes.plot(list(by_rate), means, color=colour, linestyle=line, linewidth=1.3, label=f"{kind.upper()}, mean")
    rates = sorted({each.rate for each in found})
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="learning rate", ylabel=label, title=title)
    axes.legend()
    return svg.as_svg(figure, f"{title} over the learning rate, FP8 beside BF16")
