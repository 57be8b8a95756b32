"""The page of formats.py: what each format costs, which layers feel it, and the mixes, in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from format_search import BF16
from jinja2 import ChoiceLoader, DictLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ds_fp8.report import charts as svg

FLOOR = 1e-9
"""Nats: a divergence of zero, as of BF16 from itself, is drawn as this."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Number formats of {{ figures.model }}</title>
<link rel="icon" href="data:,">
<style>{% include "report.css" %} .wide { max-width: none }</style>
</head>
<body>
<h1>Number formats of {{ figures.model }}</h1>
<p class="muted">{{ figures.rows }} rows of {{ figures.data }} that selected nothing. Divergence: mean over tokens of
KL(BF16 || format), in nats. Casts and products are emulated.</p>
<h2>Every format</h2>
<table>
<thead><tr><th>format</th><th>bits a weight</th><th>perplexity, weights cast</th><th>perplexity, inputs too</th>
<th>divergence, inputs too</th></tr></thead>
<tbody>
{% for name, row in figures.table.items() %}
<tr><td>{{ name }}</td><td>{{ "%.2f" | format(row.bits) }}</td><td>{{ "%.4f" | format(row.weights.perplexity) }}</td>
<td>{{ "%.4f" | format(row["weights and inputs"].perplexity) }}</td>
<td>{{ "%.2e" | format(row["weights and inputs"].divergence) }}</td></tr>
{% endfor %}
</tbody>
</table>
<figure>{{ bits }}</figure>
<h2>Every layer</h2>
<p>How far the predictions move where one layer alone is cast.</p>
<figure class="wide">{{ layers }}</figure>
{% if figures.matches %}
<h2>Mixes of as many bits</h2>
<table>
<thead><tr><th>choice</th><th>bits a weight</th><th>loss</th><th>divergence</th></tr></thead>
<tbody>
{% for match in figures.matches %}{% for name, row in match.figures.items() %}
<tr><td>{{ name if name != "mix" else "mix of the bits of " + match.of }}</td><td>{{ "%.2f" | format(row.bits) }}</td>
<td>{{ "%.5f" | format(row.loss) }}</td><td>{{ "%.2e" | format(row.divergence) }}</td></tr>
{% endfor %}{% endfor %}
</tbody>
</table>
{% endif %}
{% for name, mix in mixes.items() %}
<h3>Mix {{ name }}</h3>
<table>
<thead><tr><th>layer</th><th>format</th><th>bits a weight</th></tr></thead>
<tbody>
{% for layer, word, bits in mix %}
<tr><td>{{ layer }}</td><td>{{ word }}</td><td>{{ "%.2f" | format(bits) }}</td></tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
</body>
</html>
"""


@svg.styled
def layer_map(sensitivities: Mapping[str, Mapping[str, float]]) -> str:
    """Draw the divergence of every layer in every format, the tenth power that it has as a colour."""
    names = list(sensitivities)
    words = [word for word in sensitivities[names[0]] if word != BF16]
    values = np.array([[sensitivities[name][word] for word in words] for name in names])
    figure, axes = svg.chart(1.6 + 0.16 * len(names))
    axes.grid(visible=False)
    image = axes.imshow(np.log10(np.maximum(values, FLOOR)), aspect="auto", interpolation="nearest", cmap="YlOrBr")
    figure.colorbar(image, ax=axes, pad=0.02).outline.set_visible(False)
    axes.set_xticks(range(len(words)), words, rotation=60, fontsize=7)
    axes.set_yticks(
        range(len(names)), [name.removeprefix("model.").removeprefix("layers.") for name in names], fontsize=6
    )
    axes.set(title="Divergence of one layer cast, log10 of nats")
    return svg.as_svg(figure, "Divergence of every layer in every format")


@svg.styled
def bits_chart(figures: Mapping[str, Any]) -> str:
    """Draw divergence over bits: every format for all layers, and the mixes."""
    figure, axes = svg.chart(3.4)
    for name, row in figures["table"].items():
        if name != BF16:
            place = (row["bits"], max(row["weights and inputs"]["divergence"], FLOOR))
            axes.plot(*place, "o", color=svg.BF16, markersize=4)
            axes.annotate(name, place, fontsize=6.5, xytext=(3, 2), textcoords="offset points")
    mixes = [match["figures"]["mix"] for match in figures["matches"]]
    mixes += [figures["budget"]["figures"]] if "budget" in figures else []
    for row in mixes:
        axes.plot(row["bits"], max(row["divergence"], FLOOR), "D", color=svg.FP8, markersize=5)
    axes.set_yscale("log")
    axes.set(xlabel="bits a weight", ylabel="divergence, nats", title="All layers alike (dots) and mixes (diamonds)")
    return svg.as_svg(figure, "Divergence over bits of a weight, formats and mixes")


def render(figures: Mapping[str, Any], sizes: Mapping[str, Mapping[str, int]]) -> str:
    """Return the page.

    Args:
        figures: What formats.py measured.
        sizes: By layer and choice the bits of all its weights.
    """
    loader = ChoiceLoader([DictLoader({"formats": PAGE}), PackageLoader("ds_fp8.report", "templates")])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    found = {f"of the bits of {match['of']}": match["mix"] for match in figures["matches"]}
    if "budget" in figures:
        found["of the budget"] = figures["budget"]["mix"]
    mixes = {
        name: [(layer, word, 16 * sizes[layer][word] / sizes[layer][BF16]) for layer, word in mix.items()]
        for name, mix in found.items()
    }
    pictures = {"bits": Markup(bits_chart(figures)), "layers": Markup(layer_map(figures["sensitivities"]))}
    return environment.get_template("formats").render(figures=figures, mixes=mixes, **pictures)
