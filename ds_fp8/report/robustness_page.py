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
from ds_fp8.report.robustness import Outcome, Twins, gaps, summarise, words
from ds_fp8.report.runs import KINDS
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.spikes import LEAST_HISTORY

HTML, JSON = "robustness.html", "robustness.json"
STYLES = {"fp8": (svg.FP8, "o", "-"), "bf16": (svg.BF16, "s", "--")}
"""Colour, marker and line by kind."""
LEVELS = {"good": "No less stable", "bad": "Less stable"}


def write_robustness(found: Sequence[Twins], facts: dict[str, Any], folder: Path, title: str) -> tuple[Path, Path, str]:
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
    compared = [{"point": point, "seed": seed, "gap": value} for (point, seed), value in gap.items()]
    runs = [asdict(each) for each in dict.fromkeys(each for pair in found for each in pair)]
    figures = {**facts, "verdict": sentence, "summary": summary, "gaps": compared, "runs": runs}
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
        charts=[Markup(picture) for picture in (_by_point(found, "final_loss"), _by_point(found, "sharpness"))],
        cells=[(_cell(pair), [_row(each, gap.get((pair[0].point, each.seed))) for each in pair]) for pair in found],
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


def _cell(twins: Twins) -> str:
    """Return the words over the lines of two runs."""
    failed = " and ".join(each.kind.upper() for each in twins if each.diverged)
    place = f"{twins[0].point}, seed {twins[0].seed}".removeprefix(", ")
    return place + (f": {failed} diverged" if failed else "")


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
def _by_point(found: Sequence[Twins], name: str) -> str:
    """Draw a figure of all runs over the points, with a line through the means of the runs that have it."""
    title, label = {
        "final_loss": ("Final validation loss", "nats per token"),
        "sharpness": ("Sharpness in the logits", "percent"),
    }[name]
    points = list(dict.fromkeys(fp8.point for fp8, _ in found))
    figure, axes = svg.chart()
    for number, kind in enumerate(KINDS):
        colour, marker, line = STYLES[kind]
        values: dict[int, list[float]] = {}
        for pair in found:
            if (value := getattr(pair[number], name)) is not None:
                values.setdefault(points.index(pair[0].point), []).append(value)
        for place, those in values.items():
            axes.plot([place] * len(those), those, marker, color=colour, fillstyle="none", markersize=5)
        means = [sum(those) / len(those) for those in values.values()]
        axes.plot(list(values), means, color=colour, linestyle=line, linewidth=1.3, label=f"{kind.upper()}, mean")
    axes.set_xticks(range(len(points)), points, rotation=0 if max(map(len, points)) < 12 else 30, ha="center")
    axes.set(ylabel=label, title=title)
    axes.legend()
    return svg.as_svg(figure, f"{title} over the points, FP8 beside BF16")
