"""Charts as SVG elements whose text and lines take their colours from the page, light or dark."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from ds_fp8.report.runs import KINDS, Comparison
from ds_fp8.train.metrics import BF16_LOSS

INK, MUTED, GRID = "#000001", "#000002", "#000003"
SERIES = tuple(f"#0000{number}" for number in range(11, 19))
"""Stand-ins, as INK, that `as_svg` replaces by the page's variables; no chart may use these as colours."""
FP8, BF16 = SERIES[:2]
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line"} | {c: f"--c{n}" for n, c in enumerate(SERIES, 1)}
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.8,
    "svg.fonttype": "none",  # text as text: sharp, small, in the page's font
}
WIDTH = 4.8  # Inches of a chart, 346 CSS pixels: about as wide as a phone, so that its text is not scaled down there
MAX_POINTS = 300  # Points of a curve; of more, means of neighbours are drawn
GAP_POINTS = 25  # Points of the gap of the training losses, each a mean of as many steps
EARLY = 0.2  # Share of the steps, from the first, that does not set the range of an axis: it is far off, or mere noise
LEAST_CURVE = 4  # Points of a validation loss that are joined by a line; a line through fewer would look like a trend
# Figures of routing that are drawn: title, the layer drawn beside the mean, and its name
ROUTING = {
    "entropy": ("Entropy of tokens per expert, 1 = even", min, "lowest layer"),
    "largest_share": ("Largest expert's share of a layer's tokens", max, "highest layer"),
}

# Decorator of functions that draw: matplotlib takes its style when each part is made
styled = matplotlib.rc_context(_STYLE)


def chart(title: str, unit: str = "", height: float = 2.9) -> tuple[Figure, Any]:
    """Return an empty figure and its axes, `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set(ylabel=unit, title=title)
    return figure, axes


def as_svg(figure: Figure, description: str) -> str:
    """Return the figure as an <svg> element; `description` is what screen readers say."""
    labels = [axes.get_legend_handles_labels() for axes in figure.axes]
    if count := sum(len(names) for _, names in labels):
        # Below the axes: nowhere inside is it sure to cover no line.
        figure.legend(loc="outside lower left", ncols=2 if count == 4 else 3, columnspacing=1.2, handletextpad=0.5)
    stream = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": description}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    # Names of groups, the same in every chart: ids must be unique in a page. Those that are referred to have a hash.
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"font:\s*([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


@styled
def losses(comparison: Comparison) -> str:
    figure, axes = chart("Loss", "nats per token")
    late = []
    for (label, run), (line, marker) in zip(comparison.columns.items(), _styles(comparison), strict=False):
        late += _draw(axes, *run.series("loss"), label=f"{label} training", **line)
        points = {"marker": marker, "color": line["color"], "linestyle": "", "fillstyle": "none", "markersize": 6}
        late += _draw(axes, *run.series("validation_loss"), label=f"{label} validation", **points)
    return _over_steps(figure, axes, late, f"Loss over the steps, {comparison.name}")


@styled
def gap(comparison: Comparison, tolerance: float) -> str | None:
    """Draw FP8 / BF16 - 1 of the losses over the steps, or return None where no step has both."""
    if comparison.twin is None:
        return None
    kinds = {run.kind for run in comparison.columns.values()}
    title = "FP8 against BF16" if kinds == set(KINDS) else "the first against the second"
    figure, axes = chart(f"Loss: {title}")
    axes.axhspan(-tolerance, tolerance, color=GRID, linewidth=0, label=f"±{tolerance:.2%}")
    axes.axhline(0, color=MUTED, linewidth=0.8)
    # Without those before the first step, where both are the same model.
    training, validation = (comparison.gaps(key, first=1) for key in ("loss", "validation_loss"))
    if not (training[0] or validation[0]):
        return None
    late = [tolerance, -tolerance]
    if training[0]:
        late += _draw(axes, *training, GAP_POINTS, color=MUTED, linewidth=1, label="training, means")
    late += _draw(axes, *validation, color=FP8, marker="o", linestyle=_joined(validation[0]), label="validation")
    in_bf16 = comparison.gaps(BF16_LOSS, first=1)
    if len(in_bf16[0]) > 1:
        line = {"color": BF16, "marker": "s", "fillstyle": "none", "linestyle": _joined(in_bf16[0])}
        late += _draw(axes, *in_bf16, label="weights in BF16", **line)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _over_steps(figure, axes, late, f"Relative gap of the losses over the steps, {comparison.name}")


@styled
def gaps_of_seeds(comparisons: Sequence[Comparison], noise: float | None, tolerance: float) -> str:
    """Draw FP8 / BF16 - 1 of the validation losses, one line a seed, and how far BF16's own seeds are apart."""
    figure, axes = chart("Validation loss: FP8 against BF16")
    if noise is not None:
        axes.axhspan(-noise, noise, color=GRID, linewidth=0, label="BF16's own seeds")
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.axhline(tolerance, color=MUTED, linewidth=0.8, linestyle=":", label=f"{tolerance:.2%}")
    late = [tolerance, -(noise or 0)]
    for each, colour, marker in zip(comparisons, itertools.cycle(SERIES), itertools.cycle("osD^v"), strict=False):
        steps, gaps = each.gaps("validation_loss")
        line = {"color": colour, "marker": marker, "markersize": 4, "linestyle": _joined(steps)}
        late += _draw(axes, steps, gaps, label=each.name, **line)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _over_steps(figure, axes, late, "Relative gap of the validation losses over the steps, one line a seed")


@styled
def over_points(title: str, unit: str, points: Sequence[str], values: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Draw what the runs of each kind have at each point of a grid, and a line through their means."""
    figure, axes = chart(title, unit)
    for (kind, found), colour, marker, line in zip(values.items(), (FP8, BF16), "os", ("-", "--"), strict=True):
        for place, those in enumerate(found):
            axes.plot([place] * len(those), those, marker, color=colour, fillstyle="none", markersize=5)
        means = {place: sum(those) / len(those) for place, those in enumerate(found) if those}
        axes.plot(list(means), list(means.values()), color=colour, linestyle=line, linewidth=1.3, label=kind.upper())
    axes.set_xticks(range(len(points)), points, rotation=0 if max(map(len, points)) < 12 else 30, ha="center")
    return as_svg(figure, f"{title} over the points, FP8 beside BF16")


def over_steps(comparison: Comparison) -> list[str]:
    """Draw what the runs recorded at their steps: learning rate, gradient norm, speed on a GPU, routing of experts."""
    keys = {"learning_rate": "Learning rate", "gradient_norm": "Gradient norm, before clipping"}
    if comparison.run.result["device"] != "cpu":
        keys["tokens_per_second"] = "Tokens per second"
    keys["auxiliary_loss"] = "Auxiliary loss"
    pictures = [_series(comparison, key, title) for key, title in keys.items()]
    pictures += [_routing(comparison, figure) for figure in ROUTING]
    return [picture for picture in pictures if picture is not None]


@styled
def _routing(comparison: Comparison, key: str) -> str | None:
    title, worst, name = ROUTING[key]
    figure, axes = chart(title, height=2.6)
    for (label, run), (line, _) in zip(comparison.columns.items(), _styles(comparison), strict=False):
        steps = [record["step"] for record in run.routing]
        mean = [record["routing"]["mean"][key] for record in run.routing]
        layer = [worst(record["routing"][key]) for record in run.routing]
        if steps:
            _draw(axes, steps, mean, label=f"{label} mean", **line)
            _draw(axes, steps, layer, label=f"{label} {name}", **{**line, "linewidth": 0.8, "alpha": 0.6})
    return _over_steps(figure, axes, (), f"{title}, over the steps, {comparison.name}") if axes.lines else None


@styled
def _series(comparison: Comparison, key: str, title: str) -> str | None:
    curves = {label: run.series(key) for label, run in comparison.columns.items()}
    values = [value for _, series in curves.values() for value in series]
    if not values:
        return None
    figure, axes = chart(title, height=2.6)
    for (label, series), (line, _) in zip(curves.items(), _styles(comparison), strict=False):
        _draw(axes, *series, label=label, **line)
    if key == "gradient_norm" and min(values) > 0:
        axes.set_yscale("log")  # in every stage: which one has a spike must not change how the others look
        low, high = min(values) / 1.2, max(values) * 1.2
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    return _over_steps(figure, axes, (), f"{title} over the steps, {comparison.name}")


def _draw(axes: Any, steps: Sequence[int], values: Sequence[float], most: int = MAX_POINTS, **line: Any) -> list[float]:
    """Draw a curve, and return its values after the first steps: those say nothing about what a run comes to."""
    late = [value for step, value in zip(steps, values, strict=True) if step > EARLY * steps[-1]]
    if len(steps) > most:
        steps, values = (
            [part.mean() for part in np.array_split(np.array(each, dtype=float), most)] for each in (steps, values)
        )
    axes.plot(steps, values, **{"linewidth": 1.3, "markersize": 5, **line})
    return late


def _over_steps(figure: Figure, axes: Any, late: Sequence[float], description: str) -> str:
    """Return the chart, whose axis shows the `late` values; curves may leave it upwards and downwards."""
    if late:
        low, high = min(late), max(late)
        room = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("step")
    return as_svg(figure, description)


def _joined(steps: Sequence[int]) -> str:
    return "-" if len(steps) >= LEAST_CURVE else ""


def _styles(comparison: Comparison) -> list[tuple[dict[str, Any], str]]:
    styles = [({"color": FP8, "linestyle": "-"}, "o"), ({"color": BF16, "linestyle": (0, (4, 2))}, "s")]
    return styles[::-1] if comparison.run.kind == "bf16" else styles
