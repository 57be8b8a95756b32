"""Charts as SVG elements of a page, whose colours and font they take, light or dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean
from typing import Any

from ds_fp8.report.runs import BF16, FP8, Comparison, RunRecord
from ds_fp8.train.metrics import BF16_LOSS

WIDTH, HEIGHT = 360, 210  # About as wide as a phone, so that text is not scaled down there
LEFT, BOTTOM, TOP = 50, 32, 6  # Margins of the area of the curves
MAX_POINTS = 300  # Points of a curve; of more, means of neighbours are drawn
GAP_POINTS = 25  # Points of the gap of the training losses, each a mean of as many steps
EARLY = 0.2  # Share of the steps, from the first, that does not set the range of an axis: it is far off, or mere noise
LEAST_CURVE = 4  # Points of a validation loss that are joined by a line; a line through fewer would look like a trend
# Figures of routing that are drawn: title, the layer drawn with the mean, and its name
ROUTING = {
    "entropy": ("Entropy of tokens per expert, 1 = even", min, "lowest layer"),
    "largest_share": ("Largest expert's share of a layer's tokens", max, "highest layer"),
}
LOOKS = {FP8: {"colour": 1, "marker": "circle"}, BF16: {"colour": 2, "marker": "square", "dash": "5 3"}}


class Html(str):
    """Text that is HTML already."""


def tag(_name: str, /, *children: Any, **attributes: Any) -> Html:
    """Return an element; children are Html, text or lists of both, and None, as attribute too, is left out."""
    given = (f' {key.strip("_").replace("_", "-")}="{escape(str(value))}"'
             for key, value in attributes.items() if value is not None)  # fmt: skip
    flat = (each for child in children for each in (child if isinstance(child, list) else [child]))
    inner = (each if isinstance(each, Html) else escape(str(each), quote=False) for each in flat if each is not None)
    return Html(f"<{_name}{''.join(given)}>{''.join(inner)}</{_name}>")


@dataclass
class Line:
    """A curve, or its points alone."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0  # Of the page's --c1 to --c8, 0 is --muted
    marker: str = ""  # "circle" or "square" at each point
    dash: str | None = None
    joined: bool = True
    in_range: bool = True  # It sets the range of the axis
    most: int = MAX_POINTS

    def late(self) -> list[float]:
        """Return the values that set the range."""
        return [value for step, value in zip(self.steps, self.values, strict=True) if step > EARLY * self.steps[-1]]

    def points(self) -> list[tuple[float, float]]:
        count = len(self.steps)
        if count <= self.most:
            return list(zip(self.steps, self.values, strict=True))
        edges = [count * n // self.most for n in range(self.most + 1)]
        return [(fmean(self.steps[a:b]), fmean(self.values[a:b])) for a, b in itertools.pairwise(edges)]

    def drawn(self, places: Sequence[tuple[float, float]]) -> Html:
        colour = f"var(--c{self.colour})" if self.colour else "var(--muted);opacity:.6"
        style, parts = f"stroke:{colour};fill:none", []
        if self.joined and places:
            d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(tag("path", d=d, style=style, stroke_width=1.4, stroke_dasharray=self.dash))
        for x, y in places if self.marker == "circle" else ():
            parts.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, style=style))
        for x, y in places if self.marker == "square" else ():
            parts.append(tag("rect", x=f"{x - 3:.1f}", y=f"{y - 3:.1f}", width=6, height=6, style=style))
        return Html("".join(parts))


def chart(
    title: str,
    description: str,
    lines: Sequence[Line],
    *,
    percent: bool = False,
    log: bool = False,
    from_zero: bool = False,
    late: bool = False,
    bands: Mapping[str, float] | None = None,
    names: Sequence[str] = (),
) -> Html | None:
    """Return a figure, or None where no line has a point.

    Args:
        late: the first steps do not set the range of the axis.
        log: the values are logarithms to the base 10.
        bands: by their labels, how far bands around 0 reach to both sides.
        names: of the places on the x axis, in place of steps.
    """
    lines = [line for line in lines if line.steps]
    if not lines:
        return None
    shown = [line for line in lines if line.in_range] or lines
    values = [value for line in shown for value in (line.late() if late else ()) or line.values]
    values += [edge for each in (bands or {}).values() for edge in (each, -each)]
    low, high = min(values), max(values)
    room = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = min(low, 0.0) if from_zero else low - room, high + room
    last = max(line.steps[-1] for line in lines)

    def x(step: float) -> float:
        return 8 + (WIDTH - LEFT - 24) * (step / last if last else 0.5)

    def y(value: float) -> float:
        share = (value - low) / (high - low)
        return (HEIGHT - TOP - BOTTOM) * (1 - max(-9.0, min(share, 9.0)))

    digits = max(0, -math.floor(math.log10((high - low) * 20)))
    axis, inside, keys = [], [], []
    for tick in ticks(low, high):
        at = f"{TOP + y(tick):.1f}"
        axis.append(tag("line", x1=LEFT, x2=WIDTH, y1=at, y2=at, style="stroke:var(--line)"))
        text = f"{float(f'{10**tick:.2g}'):g}" if log else f"{tick:.{digits}%}" if percent else f"{tick:.6g}"
        axis.append(tag("text", text, x=LEFT - 6, y=at, dy="0.35em", text_anchor="end"))
    for step, text in enumerate(names) if names else ((n, f"{n:g}") for n in ticks(0, last) if n == int(n)):
        axis.append(tag("text", text, x=f"{LEFT + x(step):.1f}", y=HEIGHT - BOTTOM + 14, text_anchor="middle"))
    axis.append(tag("text", "" if names else "step", x=(LEFT + WIDTH) / 2, y=HEIGHT - 4, text_anchor="middle"))
    for label, edge in (bands or {}).items():
        place = {"y": f"{y(edge):.1f}", "height": f"{y(-edge) - y(edge):.1f}", "width": WIDTH}
        inside.append(tag("rect", **place, style="fill:var(--line);opacity:.6"))
        keys.append((label, tag("rect", width=22, height=10, style="fill:var(--line)")))
    for line in lines:
        inside.append(line.drawn([(x(step), y(value)) for step, value in line.points()]))
        if line.label:
            curve = replace(line, marker="").drawn([(0, 5), (22, 5)] if line.joined else [])
            keys.append((line.label, Html(curve + replace(line, joined=False).drawn([(11, 5)]))))
    area = tag("svg", *inside, x=LEFT, y=TOP, width=WIDTH - LEFT, height=HEIGHT - TOP - BOTTOM)  # it clips its content
    picture = tag("svg", *axis, area, role="img", aria_label=description, viewBox=f"0 0 {WIDTH} {HEIGHT}")
    legend = (tag("span", tag("svg", swatch, aria_hidden="true", viewBox="0 0 22 10"), label) for label, swatch in keys)
    return tag("figure", tag("figcaption", tag("b", title)), picture, tag("figcaption", *legend, class_="keys"))


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from `low` to `high`, at most `most` + 1."""
    if not high > low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    unit *= next(n for n in (1, 2, 5, 10) if (high - low) / (n * unit) <= most)
    return [n * unit for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def losses(pair: Comparison) -> Html | None:
    lines = _curves(pair, lambda run: run.series("loss"), " training")
    for label, run, look in _looks(pair):
        lines.append(Line(f"{label} validation", *run.series("validation_loss"), joined=False, **look))
    return chart("Loss, nats per token", f"Loss over the steps, {pair.name}", lines, late=True)


def gap(pair: Comparison, tolerance: float) -> Html | None:
    """Draw FP8 / BF16 - 1 of the losses over the steps, or return None where no step has both."""
    if pair.other is None:
        return None
    # Without those before the first step, where both are the same model.
    training, validation, in_bf16 = (pair.gaps(key, first=1) for key in ("loss", "validation_loss", BF16_LOSS))
    lines = [
        Line("training, means", *training, most=GAP_POINTS, in_range=not validation[0]),
        _points("validation", *validation, **LOOKS[FP8]),
        _points("weights in BF16", *(in_bf16 if len(in_bf16[0]) > 1 else ([], [])), **LOOKS[BF16]),
    ]
    title = f"Loss: {'the first' if pair.run.kind == pair.other.kind else 'FP8'} against {pair.other.label}"
    description = f"Relative gap of the losses over the steps, {pair.name}"
    return chart(title, description, lines, percent=True, late=True, bands={f"±{tolerance:.2%}": tolerance})


def gaps_of_seeds(found: Sequence[Comparison], noise: float | None, tolerance: float) -> Html | None:
    """Draw FP8 / BF16 - 1 of the validation losses, one line a seed, and the noise of BF16's own seeds."""
    looks = zip(found, itertools.cycle(range(1, 9)), itertools.cycle(("circle", "square")), strict=False)
    lines = [_points(each.name, *each.gaps("validation_loss"), colour=n, marker=marker) for each, n, marker in looks]
    bands = {**({"BF16's own seeds": noise} if noise else {}), f"±{tolerance:.2%}": tolerance}
    description = "Relative gap of the validation losses over the steps, one line a seed"
    return chart("Validation loss: FP8 against BF16", description, lines, percent=True, late=True, bands=bands)


def over_points(title: str, points: Sequence[str], values: Mapping[str, Sequence[Sequence[float]]]) -> Html | None:
    """Draw what the runs of each kind have at each point of a grid, and a line through their means."""
    lines = []
    for kind, found in values.items():
        each = [(place, value) for place, those in enumerate(found) for value in those]
        means = [(place, fmean(those)) for place, those in enumerate(found) if those]
        for label, pairs, more in ((kind.upper(), means, {"marker": ""}), ("", each, {"joined": False})):
            lines.append(Line(label, *(zip(*pairs, strict=True) if pairs else ((), ())), **{**LOOKS[kind], **more}))
    short = len(points) <= 4 and max(map(len, points)) <= 12
    names = points if short else [str(n) for n in range(1, len(points) + 1)]
    return chart(title, f"{title} over the points, FP8 and BF16", lines, names=names)


def over_steps(pair: Comparison) -> list[Html]:
    """Draw what the runs recorded at their steps: learning rate, gradient norm, speed on a GPU, routing of experts."""
    keys = {"learning_rate": "Learning rate", "gradient_norm": "Gradient norm, before clipping"}
    if pair.run.result["device"] != "cpu":
        keys["tokens_per_second"] = "Tokens per second"
    keys["auxiliary_loss"] = "Auxiliary loss"
    found = []
    for key, title in keys.items():
        log = key == "gradient_norm"  # in every stage, so that one with a spike looks like the others
        lines = _curves(pair, lambda run, key=key: run.series(key))
        for line in lines if log else ():
            line.values = [math.log10(max(value, 1e-30)) for value in line.values]
        found.append(chart(title, f"{title} over the steps, {pair.name}", lines, log=log, from_zero=not log))
    for key, (title, worst, name) in ROUTING.items():
        lines = _curves(pair, lambda run, key=key: run.routing(key), " mean")
        lines += _curves(pair, lambda run, key=key, worst=worst: run.routing(key, worst), f" {name}", dash="1 3")
        found.append(chart(title, f"{title}, over the steps, {pair.name}", lines))
    return [picture for picture in found if picture]


def _points(label: str, steps: Sequence[float], values: Sequence[float], **look: Any) -> Line:
    return Line(label, steps, values, joined=len(steps) >= LEAST_CURVE, **{**look, "dash": None})


def _curves(pair: Comparison, series: Callable[[RunRecord], Any], name: str = "", **more: str) -> list[Line]:
    return [Line(f"{label}{name}", *series(run), **{**look, "marker": "", **more}) for label, run, look in _looks(pair)]


def _looks(pair: Comparison) -> list[tuple[str, RunRecord, dict[str, Any]]]:
    looks = [LOOKS[pair.run.kind]] if pair.other is None else LOOKS.values()
    return [(label, run, look) for (label, run), look in zip(pair.columns.items(), looks, strict=True)]
