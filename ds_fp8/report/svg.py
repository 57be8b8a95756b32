"""Charts as SVG elements whose text and lines take their colours from the page, light or dark."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, MUTED, GRID, FP8, BF16 = "#000001", "#000002", "#000003", "#000004", "#000005"
"""Stand-ins that `as_svg` replaces by the page's variables; no chart may use these five as colours."""
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", FP8: "--fp8", BF16: "--bf16"}
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
WIDTH = 4.8
"""Inches of a chart, 346 CSS pixels: about as wide as a phone, so that its text is not scaled down there."""


styled = matplotlib.rc_context(_STYLE)
"""Decorator of functions that draw: matplotlib takes its style when each part is made."""


def chart(height: float = 2.9) -> tuple[Figure, Any]:
    """Return an empty figure and its axes, `height` in inches, whose horizontal axis counts steps."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def as_svg(figure: Figure, description: str) -> str:
    """Return the figure as an <svg> element; `description` is what screen readers say."""
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
