"""The cost of formats in a trained model: its losses on rows of text, the sensitivity of every layer, mixes of formats.

A choice is how the weights and inputs of a layer are cast: a format ("int4": one FP32 scale an output channel and a
token), "FORMAT:GRANULARITY[:SCALE]" ("e2m3:1x32:pow2"), a word of NAMED, or "bf16". A mix is a choice for every layer.

How far a mix moves a model is measured by its divergence (ds_fp8/train/judge.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS, GRANULARITIES, CastSpec, scale_shape
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.config.schema import nearest
from ds_fp8.layers.convert import convert, restore
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.train.judge import Judge

BF16 = "bf16"
NAMED = {
    "mxfp8": "e4m3:1x32:pow2",
    "mxfp6": "e2m3:1x32:pow2",
    "mxfp4": "e2m1:1x32:pow2",
    "nvfp4": "e2m1:1x16:e4m3",
    "blocks": "e4m3:1x128:pow2",
}
"""Block formats of hardware, and E4M3 as the preset infir2 has it: weights in blocks of 128x128."""
SCALE_BITS = {"fp32": 32, "pow2": 8, "e4m3": 8}

Mix = dict[str, str]
"""By layer, the word of its choice."""


class Layer(NamedTuple):
    """A linear layer that formats are tried on."""

    name: str
    shape: tuple[int, int]


class Choice(NamedTuple):
    """The cast of a layer."""

    input: CastSpec
    weight: CastSpec

    def override(self) -> dict[str, Any]:
        """Return these casts as a value of fp8.linear.overrides."""
        keys = ("format", "granularity", "scale")
        return {name: {key: getattr(cast, key) for key in keys} for name, cast in self._asdict().items()}


def choice_of(word: str) -> Choice:
    """Return what a word stands for, but for "bf16". Raise UserError for one that means nothing."""
    format, *rest = NAMED.get(word, word).split(":")
    granularity, scale = (*rest, "pow2")[:2] if rest else ("row", "fp32")
    for part, known in ((format, [*FORMATS, *NAMED]), (granularity, GRANULARITIES), (scale, SCALE_BITS)):
        if part not in known or len(rest) > 2:
            raise UserError(f'no cast is "{word}"', key="--grid", remedy=nearest(part, known))
    weight = "128x128" if granularity == "1x128" else granularity
    return Choice(CastSpec(format, granularity, scale), CastSpec(format, weight, scale))


def bits_of(layer: Layer, word: str) -> int:
    """Return the bits of a layer's weights and their scales."""
    numel = math.prod(layer.shape)
    if word == BF16:
        return 16 * numel
    cast = choice_of(word).weight
    return FORMATS[cast.format].bits * numel + SCALE_BITS[cast.scale] * math.prod(
        scale_shape(layer.shape, cast.granularity)
    )


def mean_bits(layers: Sequence[Layer], mix: Mapping[str, str]) -> float:
    """Return the bits a weight of a mix, scales included."""
    return sum(bits_of(layer, mix[layer.name]) for layer in layers) / sum(math.prod(layer.shape) for layer in layers)


def uniform(layers: Sequence[Layer], word: str) -> Mix:
    """Return the mix that has one choice only."""
    return {layer.name: word for layer in layers}


def section(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "fp8" section in which layers have these casts."""
    linear = {"backend": "reference", "overrides": dict(overrides)}
    return {"fuse": "off", "monitor": {"every": 0}, "linear": linear}


def overrides_of(mix: Mapping[str, str]) -> dict[str, Any]:
    """Return fp8.linear.overrides of a mix."""
    return {name: BF16 if word == BF16 else choice_of(word).override() for name, word in mix.items()}


def layers_of(model: PreTrainedModel) -> list[Layer]:
    """Return the linears that ds_fp8 would convert."""
    convert(model, parse_fp8({"fp8": section({})}))
    layers = [Layer(n, tuple(m.weight.shape)) for n, m in model.named_modules() if isinstance(m, FP8Linear)]
    restore(model)
    return layers


@contextmanager
def cast_as(model: PreTrainedModel, mix: Mapping[str, str]) -> Iterator[None]:
    """Let layers compute with the casts of `mix` for a while, all others in BF16."""
    if set(mix.values()) <= {BF16}:
        yield
        return
    convert(model, parse_fp8({"fp8": section({**overrides_of(mix), "*": BF16})}))
    try:
        yield
    finally:
        restore(model)


@contextmanager
def weights_as(model: PreTrainedModel, mix: Mapping[str, str]) -> Iterator[None]:
    """Let layers have the weights of `mix` for a while, and compute in BF16."""
    before = {name: model.get_submodule(name).weight.data for name, word in mix.items() if word != BF16}
    for name, weight in before.items():
        cast = choice_of(mix[name]).weight
        rounded = quantize(weight, cast.format, cast.granularity, cast.scale)
        model.get_submodule(name).weight.data = rounded.dequantize(weight.dtype)
    try:
        yield
    finally:
        for name, weight in before.items():
            model.get_submodule(name).weight.data = weight


def sensitivities(
    model: PreTrainedModel, judge: Judge, layers: Sequence[Layer], words: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return by layer and choice the divergence where this layer alone is cast."""
    found: dict[str, dict[str, float]] = {}
    for layer in layers:
        found[layer.name] = {BF16: 0.0}
        for word in words:
            with cast_as(model, {layer.name: word}):
                found[layer.name][word] = judge.measure(model).divergence
    return found


def hull(layer: Layer, added: Mapping[str, float]) -> list[str]:
    """Return the choices worth having, by ascending bits: corners of the lower convex hull of (bits, divergence)."""
    points = sorted((bits_of(layer, word), cost, word) for word, cost in added.items())
    corners: list[tuple[int, float, str]] = []
    for point in points:
        if corners and point[1] >= corners[-1][1]:
            continue  # as many bits or more, and no better
        if corners and point[0] == corners[-1][0]:
            corners.pop()
        while len(corners) > 1 and _slope(corners[-2], point) <= _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(point)
    return [word for *_, word in corners]


def _slope(first: tuple[int, float, str], second: tuple[int, float, str]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def upgrades(layers: Sequence[Layer], added: Mapping[str, Mapping[str, float]]) -> tuple[Mix, list[tuple[Layer, str]]]:
    """Return the cheapest mix, and (layer, choice) in the order in which to spend bits: what wins most for its bits.

    Where the divergences of layers add up, every beginning of these upgrades is the best mix of its bits.
    """
    cheapest, steps = {}, []
    for layer in layers:
        words = hull(layer, added[layer.name])
        cheapest[layer.name] = words[0]
        for before, after in itertools.pairwise(words):
            won = added[layer.name][before] - added[layer.name][after]
            steps.append((won / (bits_of(layer, after) - bits_of(layer, before)), layer, after))
    steps.sort(key=lambda step: -step[0])  # along a hull gains fall: a layer's steps stay in order
    return cheapest, [(layer, after) for _, layer, after in steps]


def mix_of_bits(layers: Sequence[Layer], added: Mapping[str, Mapping[str, float]], limit: float) -> Mix:
    """Return the mix of at most `limit` bits a weight whose divergences add up to the least, but for a remainder."""
    mix, steps = upgrades(layers, added)
    full: set[str] = set()
    for layer, word in steps:
        if layer.name not in full and mean_bits(layers, {**mix, layer.name: word}) <= limit:
            mix[layer.name] = word
        else:
            full.add(layer.name)
    return mix


def mix_of_budget(
    model: PreTrainedModel,
    judge: Judge,
    layers: Sequence[Layer],
    added: Mapping[str, Mapping[str, float]],
    limit: float,
) -> Mix:
    """Return the mix of the fewest upgrades whose loss is at most `limit`, found by bisection."""
    cheapest, steps = upgrades(layers, added)

    def mix(count: int) -> Mix:
        return {**cheapest, **{layer.name: word for layer, word in steps[:count]}}

    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        with cast_as(model, mix(middle)):
            fits = judge.measure(model).loss <= limit
        low, high = (low, middle) if fits else (middle + 1, high)
    return mix(low)
