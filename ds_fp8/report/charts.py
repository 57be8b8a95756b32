"""The charts of a report: losses and their gap, speed, and the health of casts over the steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from ds_fp8.monitor.heat_maps import health_matrix, health_sites, short_name
from ds_fp8.monitor.thresholds import LABELS
from ds_fp8.report import svg
from ds_fp8.report.runs import Comparison, RunRecord

MAX_POINTS = 300
"""Points of a curve; of more, means of neighbours are drawn."""
GAP_POINTS = 25
"""Points of the gap of the training losses, each a mean of as many steps."""
LOG_RATIO = 3.0
"""Ratio of the largest to the smallest loss from which their axis is logarithmic."""
NORM_RATIO = 30.0
"""The same of gradient norms, which one spike must not press flat."""
MAX_COLUMNS = 160
"""Measurements in a heat map; of more, some evenly spaced ones are shown."""
HEAT_RANGES = {"flushed": (0.0, 1.0), "saturated": (0.0, 0.1), "snr_db": (20.0, 34.0)}
"""Least range of the colours, in percent, percent and dB: small differences must not look large."""
HEAT_TITLES = {
    "flushed": ("flushed to zero, %", "YlOrBr"),
    "saturated": ("saturated, %", "YlOrBr"),
    "snr_db": ("signal-to-noise ratio, dB", "YlOrBr_r"),
}


@svg.styled
def losses(comparison: Comparison) -> str:
    """Draw training and validation losses over the steps."""
    figure, axes = svg.chart()
    for (label, run), style in zip(comparison.columns.items(), _styles(comparison), strict=False):
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        axes.plot(*_thinned(*run.series("loss"), MAX_POINTS), **line, linewidth=1.3, label=f"{label} training")
        axes.plot(
            *run.series("validation_loss"), style["marker"], color=style["color"], fillstyle="none", markersize=6,
            linestyle="", label=f"{label} validation",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="nats per token", title="Loss")
    values = [value for run in comparison.columns.values() for value in run.series("loss")[1]]
    if values and max(values) > LOG_RATIO * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    return svg.as_svg(figure, f"Loss over the steps, {comparison.name}")


@svg.styled
def gap(comparison: Comparison, tolerance: float) -> str | None:
    """Draw FP8 / BF16 - 1 of the losses over the steps, or return None where no step has both."""
    if comparison.twin is None:
        return None
    curves = {}
    for key in ("loss", "validation_loss"):
        ours, theirs = comparison.run.by_step(key), comparison.twin.by_step(key)
        steps = [step for step in ours if theirs.get(step)]
        points = _thinned(steps, [ours[step] / theirs[step] - 1 for step in steps], GAP_POINTS)
        if len(steps) > 1:
            curves[key] = points
    if not curves:
        return None
    figure, axes = svg.chart()
    axes.axhspan(-tolerance, tolerance, color=svg.GRID, linewidth=0, label=f"±{tolerance:.2%}")
    axes.axhline(0, color=svg.MUTED, linewidth=0.8)
    if "loss" in curves:
        axes.plot(*curves["loss"], color=svg.MUTED, linewidth=1, alpha=0.6, label="training, means")
    if "validation_loss" in curves:
        axes.plot(*curves["validation_loss"], "o-", color=svg.FP8, linewidth=1.5, markersize=4, label="validation")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    first, second = comparison.columns
    title = (
        f"{first} against {second}" if comparison.run.kind != comparison.twin.kind else "The first against the second"
    )
    axes.set(xlabel="step", title=f"Loss: {title}")
    axes.legend()
    return svg.as_svg(figure, f"Relative gap of the losses over the steps, {comparison.name}")


@svg.styled
def gaps_of_seeds(comparisons: Sequence[Comparison], noise: float | None, tolerance: float) -> str:
    """Draw FP8 / BF16 - 1 of the validation losses, one line a seed, and how far BF16's own seeds are apart."""
    figure, axes = svg.chart()
    if noise is not None:
        axes.axhspan(-noise, noise, color=svg.GRID, linewidth=0, label="BF16's own seeds")
    axes.axhline(0, color=svg.MUTED, linewidth=0.8)
    axes.axhline(tolerance, color=svg.MUTED, linewidth=0.8, linestyle=":", label=f"{tolerance:.2%}")
    for index, (comparison, marker) in enumerate(zip(comparisons, itertools.cycle("osD^v"), strict=False)):
        ours, theirs = (run.by_step("validation_loss") for run in comparison.columns.values())
        values = {step: loss / theirs[step] - 1 for step, loss in ours.items() if theirs.get(step)}
        axes.plot(
            list(values), list(values.values()), color=svg.FP8, alpha=1 - 0.6 * index / len(comparisons),
            marker=marker, markersize=4, linewidth=1.2, label=comparison.name.replace("_", " "),
        )  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="step", title="Validation loss: FP8 against BF16, by seed")
    axes.legend()
    return svg.as_svg(figure, "Relative gap of the validation losses over the steps, one line a seed")


def learning_rate(comparison: Comparison) -> str | None:
    """Draw the learning rate over the steps, or return None where no run has recorded it."""
    return _over_steps(comparison, "learning_rate", "Learning rate")


def gradient_norm(comparison: Comparison) -> str | None:
    """Draw the norm of the gradient, before it is clipped, or return None where no run has recorded it."""
    return _over_steps(comparison, "gradient_norm", "Gradient norm, before clipping")


def speed(comparison: Comparison) -> str | None:
    """Draw tokens per second over the steps, or return None where no run has recorded it."""
    return _over_steps(comparison, "tokens_per_second", "Tokens per second")


ROUTING = {
    "entropy": ("Entropy of tokens per expert, 1 = even", min, "lowest layer"),
    "largest_share": ("Largest expert's share of a layer's tokens", max, "highest layer"),
}
"""Figures of routing that are drawn: title, the layer drawn beside the mean, and its name."""


def routing(comparison: Comparison) -> list[str]:
    """Draw how evenly tokens are spread over experts, and the auxiliary loss, where a run has recorded them."""
    pictures = [_routing(comparison, figure) for figure in ROUTING]
    pictures.append(_over_steps(comparison, "auxiliary_loss", "Auxiliary loss"))
    return [picture for picture in pictures if picture is not None]


@svg.styled
def _routing(comparison: Comparison, figure: str) -> str | None:
    title, worst, name = ROUTING[figure]
    drawing, axes = svg.chart(2.4)
    for (label, run), style in zip(comparison.columns.items(), _styles(comparison), strict=False):
        steps = [record["step"] for record in run.routing]
        mean = [record["routing"]["mean"][figure] for record in run.routing]
        layer = [worst(record["routing"][figure]) for record in run.routing]
        if steps:
            line = {"color": style["color"], "linestyle": style["linestyle"]}
            axes.plot(*_thinned(steps, mean, MAX_POINTS), **line, linewidth=1.3, label=f"{label} mean")
            axes.plot(*_thinned(steps, layer, MAX_POINTS), **line, linewidth=0.8, alpha=0.6, label=f"{label} {name}")
    if not axes.lines:
        return None
    axes.set(xlabel="step", title=title)
    axes.legend()
    return svg.as_svg(drawing, f"{title}, over the steps, {comparison.name}")


@svg.styled
def _over_steps(comparison: Comparison, key: str, title: str) -> str | None:
    """Draw one figure of the training steps from zero upwards; where it spans orders of magnitude, by its logarithm."""
    curves = {label: run.series(key) for label, run in comparison.columns.items()}
    values = [value for _, series in curves.values() for value in series]
    if not values:
        return None
    figure, axes = svg.chart(2.4)
    for (label, series), style in zip(curves.items(), _styles(comparison), strict=False):
        points = _thinned(*series, MAX_POINTS)
        axes.plot(*points, color=style["color"], linestyle=style["linestyle"], linewidth=1.3, label=label)
    if key == "gradient_norm" and max(values) > NORM_RATIO * min(values) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="step", title=title)
    axes.legend()
    return svg.as_svg(figure, f"{title} over the steps, {comparison.name}")


def health_maps(name: str, run: RunRecord, figures: Sequence[str]) -> Iterator[str]:
    """Draw each of `figures` for every tensor class: layers from top to bottom, steps from left to right.

    Args:
        name: distinguishes the run from the others in the page.
        run: whose measurements are drawn.
        figures: keys of HEAT_RANGES.
    """
    measured = run.measurements[:: max(1, -(-len(run.measurements) // MAX_COLUMNS))]
    sites, steps = health_sites(measured), [record["step"] for record in measured]
    for figure in figures:
        for tensor_class in LABELS:
            values = health_matrix(measured, tensor_class, figure, sites)
            if np.isfinite(values).any():
                picture = _health_map(values, sites, steps, figure, LABELS[tensor_class])
                yield svg.as_svg(picture, f"{LABELS[tensor_class]}, {HEAT_TITLES[figure][0]}, {name}")


@svg.styled
def _health_map(
    values: np.ndarray, sites: Sequence[str], steps: Sequence[int], figure: str, tensor_class: str
) -> Figure:
    title, colours = HEAT_TITLES[figure]
    drawing, axes = svg.chart(1.2 + min(0.11 * len(sites), 3.4))
    axes.grid(visible=False)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours)
    low, high = HEAT_RANGES[figure]
    image.set_clim(min(low, np.nanmin(values)), max(high, np.nanmax(values)))
    drawing.colorbar(image, ax=axes, pad=0.02).outline.set_visible(False)
    columns, rows = range(0, len(steps), -(-len(steps) // 5)), range(0, len(sites), -(-len(sites) // 22))
    axes.set_xticks(list(columns), [steps[index] for index in columns])
    axes.set_yticks(list(rows), [short_name(sites[index]) for index in rows], fontsize=7.5)
    what = f"{tensor_class}: {title}"
    axes.set(title=what[0].upper() + what[1:], xlabel="step")
    return drawing


def _styles(comparison: Comparison) -> list[Mapping[str, Any]]:
    """Return the line styles of the first and the second run; BF16 alone is drawn as beside FP8."""
    styles = [
        {"color": svg.FP8, "linestyle": "-", "marker": "o"},
        {"color": svg.BF16, "linestyle": (0, (4, 2)), "marker": "s"},
    ]
    return styles[::-1] if comparison.run.kind == "bf16" else styles


def _thinned(steps: Sequence[int], values: Sequence[float], count: int) -> tuple[Sequence[float], Sequence[float]]:
    if len(steps) <= count:
        return steps, values
    means = [[part.mean() for part in np.array_split(np.array(line, dtype=float), count)] for line in (steps, values)]
    return means[0], means[1]
