"""What does each ingredient of NVFP4 pre-training (arXiv 2509.25149) do to the gradients of one trained model?

    python scripts/experiments/nvfp4_gradients.py --seeds 0,1,2 --json gradients.json      minutes a seed on a CPU

Answer (2026-11-22, CPU, three seeds): each is worse left out by the measure of what it is for, such as 0.096 in place
of 0.022 for the mean of draws without stochastic rounding; the error of one gradient grows without 2D scales alone.

A Llama learns bytes of Python sources in BF16. Its weights, in FP32, and other batches of that text then stay as
they are, so that no chance of training parts what is compared: the weight gradients of the preset `nvfp4` with its last
--kept layers in BF16 ("recipe"), and of that without one of its ingredients (LEFT_OUT), against

    "exact"       the model without casts
    "forward"     the same quantized forward, differentiated exactly: dx = dy · W and dw = dyᵀ · X, of what fprop read
    "unrounded"   the variant itself but for the rounding of dy

as relative errors (Frobenius norm, all linears of the decoder as one vector), of "one draw" of the stochastic rounding
(the root mean square over --draws) and of the "mean" of all draws; "batches" means over batches, a draw each.

    "loss %"         of --batches batches, above that of the model without casts
    "inconsistency"  of the weight: as dgrad reads it from what fprop read; of dx, with dy as it is (means over
                     linears); of gradients: those that dgrad's weight gives, else as "forward", from "forward"
    "outliers"       wgrad's product alone, of the exact x and dy of every linear, with every 64th token of x or dy
                     times 2^E; mean over linears
    "kept"           of the other tokens' part of that gradient: its coefficient in the product less the outliers' exact
                     part; 1 where nothing of it is lost but for noise
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from byte_training import (
    Scale,
    add_arguments,
    batch,
    build_model,
    chosen_scale,
    deterministic,
    read_sources,
    train_bytes,
)
from cast_parity import GATHER_IN_BF16
from common import argument_parser, begin, positive, print_table, whole_numbers, write_json
from exact_products import gradients, linears, operands, with_exact_products
from torch import nn

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import EMULATED_PRESETS
from ds_fp8.layers.convert import convert
from ds_fp8.layers.linear import FP8Linear
from ds_fp8.layers.weights import dgrad_weight
from ds_fp8.optim import AdamW

FULL = Scale(hidden=128, intermediate=384, layers=4, heads=4, length=128, rows=8, steps=500, text=4_000_000)
QUICK = Scale(hidden=64, intermediate=64, layers=2, heads=2, length=32, rows=2, steps=2, text=100_000)
RECIPE = "recipe"
_NVFP4 = EMULATED_PRESETS["nvfp4"]["linear"]
LEFT_OUT: dict[str, dict[str, Any]] = {
    "no-2d-scales": {"weight": _NVFP4["input"]},
    "no-stochastic-rounding": {"grad_output": _NVFP4["input"]},
    "no-hadamard": {"rotation": {}},
    "no-bf16-layers": {"overrides": {}},
}
"""Replacements of parts of the recipe's section "linear"."""
VARIANTS = [RECIPE, *LEFT_OUT]
NEAREST = "no-stochastic-rounding"
REFERENCES = ("exact", "forward", "unrounded")
PLANTED_EVERY = 64


def converted(model: nn.Module, variant: str, options: argparse.Namespace) -> nn.Module:
    """Return a copy of the model with the casts of a variant."""
    model = copy.deepcopy(model)
    layers = options.scale.layers
    in_bf16 = {f"model.layers.{number}.*": "bf16" for number in range(layers - options.kept, layers)}
    linear = {**_NVFP4, "overrides": in_bf16, **LEFT_OUT.get(variant, {})}
    convert(model, FP8Config(**GATHER_IN_BF16, linear=linear, fuse="off", monitor={"every": 0}))
    return model


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in Frobenius norm."""
    return ((found - exact).norm() / exact.norm()).item()


def root_mean_square(values: Iterable[float]) -> float:
    values = list(values)
    return math.sqrt(sum(value**2 for value in values) / len(values))


def errors_of_means(
    found: Iterable[torch.Tensor], exact: Callable[[int], dict[str, torch.Tensor]]
) -> dict[str, list[float]]:
    """Return by reference the relative errors of the mean of the first, the first two, ... of some gradients.

    Args:
        found: The gradients.
        exact: Called with the index of the last of them; returns what their mean is to be, by reference.
    """
    total, errors = torch.zeros(()), {}
    for index, gradient in enumerate(found):
        total = total + gradient
        for name, reference in exact(index).items():
            errors.setdefault(name, []).append(relative(total / (index + 1), reference))
    return errors


def of_draws(
    model: nn.Module, tokens: torch.Tensor, references: dict[str, torch.Tensor], parts: dict[str, torch.Tensor],
    draws: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the errors of single draws, of parts of them, and of means over draws."""
    torch.manual_seed(seed)
    found = torch.stack([gradients(model, tokens) for _ in range(draws)])
    single = {name: root_mean_square(relative(draw, exact) for draw in found) for name, exact in references.items()}
    exact = references["exact"]
    by_part = {
        name: root_mean_square(relative(draw[part], exact[part]) for draw in found) for name, part in parts.items()
    }
    return {"one_draw": single, "parts": by_part, "means": errors_of_means(found, lambda index: references)}


def parts_of(model: nn.Module, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return where the gradients of each kind of linear lie, and those of the layers no variant keeps in BF16: bool."""
    labels = {"quantized": [], **{name.rpartition(".")[2]: [] for name in linears(model)}}
    for name, layer in linears(model).items():
        early = int(name.split(".")[2]) < options.scale.layers - options.kept
        for label, places in labels.items():
            belongs = early if label == "quantized" else name.endswith(label)
            places.append(torch.full((layer.weight.numel(),), belongs))
    return {label: torch.cat(places) for label, places in labels.items()}


def inconsistency(model: nn.Module, found: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Return how far dgrad's weight and the dx of it are from those of fprop's, means over the quantized linears."""
    of_weight, of_dx = [], []
    for name, layer in linears(model).items():
        if isinstance(layer, FP8Linear):
            forward = layer.recipe.cast_weight(layer.weight).dequantize()
            backward = dgrad_weight([layer.weight], layer.recipe)[0].dequantize().t()
            dy = found[name][1]
            of_weight.append(relative(backward, forward))
            of_dx.append(relative(dy @ backward, dy @ forward))
    return {"weight": sum(of_weight) / len(of_weight), "dx": sum(of_dx) / len(of_dx)}


def wgrad_of_outliers(
    model: nn.Module, found: dict[str, tuple[torch.Tensor, torch.Tensor]], exponents: list[int], seed: int
) -> dict[str, dict[str, float]]:
    """Return "outliers" and "kept" by what is planted, such as "x 2^4", and "none"."""
    torch.manual_seed(seed)
    planted = [("none", 0), *((place, exponent) for place in ("x", "dy") for exponent in exponents)]
    quantized = {name: layer for name, layer in linears(model).items() if isinstance(layer, FP8Linear)}
    errors, kept = {}, {}
    for place, exponent in planted:
        label = place if place == "none" else f"{place} 2^{exponent}"
        pairs = [_wgrad_of_outliers(layer, *found[name], place == "dy", exponent) for name, layer in quantized.items()]
        errors[label], kept[label] = (sum(values) / len(values) for values in zip(*pairs, strict=True))
    return {"outliers": errors, "kept": kept}


def _wgrad_of_outliers(
    layer: FP8Linear, x: torch.Tensor, dy: torch.Tensor, in_dy: bool, exponent: int
) -> tuple[float, float]:
    """Return the error of one wgrad of x [T, K] and dy [T, N], and how much of the ordinary tokens' part it keeps."""
    x, dy = x.clone(), dy.clone()
    (dy if in_dy else x)[::PLANTED_EVERY] *= 2.0**exponent
    recipe = layer.recipe
    dy_NT, x_KT = recipe.cast_grad_output(dy, dgrad=False)[1], recipe.cast_input_columnwise(x)
    dw = recipe.wgrad_result(recipe.multiply(dy_NT, x_KT, torch.float32), layer.weight)
    of_outliers = dy[::PLANTED_EVERY].t() @ x[::PLANTED_EVERY]
    exact = dy.t() @ x
    ordinary = exact - of_outliers
    return relative(dw, exact), ((dw - of_outliers) * ordinary).sum().item() / ordinary.square().sum().item()


def measure(seed: int, text: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Train the model of a seed and return all figures of its variants."""
    scale = options.scale
    model = build_model(scale, seed)
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, _ = train_bytes(model, optimizer, scale, text, seed, options.lr, range(scale.steps))
    model = model.float()
    batches = [batch(text, scale, seed * 1_000_003 + scale.steps + number) for number in range(options.batches)]
    first, found = batches[0], operands(model, batches[0])
    exact, parts = [gradients(model, tokens) for tokens in batches], parts_of(model, options)
    without_casts = mean_loss(model, batches)
    variants = {}
    for variant in VARIANTS:
        own = converted(model, variant, options)
        models = {"forward": with_exact_products(own, False, False), "unrounded": with_exact_products(own, True, True)}
        references = {"exact": exact[0], **{name: gradients(other, first) for name, other in models.items()}}
        draws = 1 if variant == NEAREST else options.draws
        row = variants[variant] = of_draws(own, first, references, parts, draws, seed)
        row["inconsistency"] = inconsistency(own, found)
        consistent, read_by_dgrad = references["forward"], gradients(with_exact_products(own, True, False), first)
        row["inconsistency"]["gradients"] = relative(read_by_dgrad, consistent)
        row["loss"] = 100 * (mean_loss(own, batches) / without_casts - 1)
        row |= wgrad_of_outliers(own, found, options.outliers, seed)
        if variant in (RECIPE, NEAREST):
            each = {"exact": exact, **{name: [gradients(m, b) for b in batches] for name, m in models.items()}}
            sums = {name: torch.stack(of_batches).cumsum(0) for name, of_batches in each.items()}
            row["batches"] = errors_of_means(
                (gradients(own, tokens) for tokens in batches),
                lambda index, sums=sums: {name: total[index] / (index + 1) for name, total in sums.items()},
            )
        print(f"{variant:>24} seed {seed}: one draw {row['one_draw']['exact']:.4f}", flush=True)
    crossings = {
        over: {name: crossing(variants[RECIPE][over][name], variants[NEAREST][over][name]) for name in REFERENCES}
        for over in ("means", "batches")
    }
    return {"seed": seed, "trained_loss": losses[-1], "crossings": crossings, "variants": variants}


@torch.no_grad()
def mean_loss(model: nn.Module, batches: list[torch.Tensor]) -> float:
    """Return the mean loss of some batches."""
    return sum(model(input_ids=tokens, labels=tokens).loss.item() for tokens in batches) / len(batches)


def crossing(stochastic: list[float], nearest: list[float]) -> int | None:
    """Return how many are averaged when the error is first below nearest rounding's; None if it never is.

    Args:
        stochastic: Errors of means of one, two, ... gradients.
        nearest: Those of as many with nearest rounding; a single number where all draws are the same.
    """
    pairs = zip(stochastic, nearest * len(stochastic) if len(nearest) == 1 else nearest, strict=True)
    return next((number for number, (found, limit) in enumerate(pairs, 1) if found < limit), None)


def print_figures(seeds: list[dict[str, Any]]) -> None:
    """Print tables of all measures: every seed's figure, separated by spaces."""

    def each(variant: str, *path: str | int) -> str:
        return " ".join(f"{_at(seed['variants'][variant], path):.4f}" for seed in seeds)

    def table(title: str, columns: dict[str, tuple[str | int, ...]]) -> None:
        rows = [[variant, *(each(variant, *path) for path in columns.values())] for variant in VARIANTS]
        print_table(title, ("linears", *columns), rows)

    single = {f"one draw vs {name}": ("one_draw", name) for name in REFERENCES}
    means = {f"mean vs {name}": ("means", name, -1) for name in REFERENCES}
    table("relative errors of gradients, each seed", {"loss %": ("loss",), **single, **means})
    for key in ("parts", "inconsistency", "outliers", "kept"):
        table(key, {name: (key, name) for name in seeds[0]["variants"][RECIPE][key]})
    for over in ("means", "batches"):
        counts = [2**power for power in range(len(seeds[0]["variants"][RECIPE][over]["exact"]).bit_length())]
        rows = [
            [variant, name, *(each(variant, over, name, count - 1) for count in counts)]
            for variant in (RECIPE, NEAREST)
            for name in REFERENCES
        ]
        title = f"errors of the mean over {'draws' if over == 'means' else over}"
        print_table(title, ("linears", "vs", *map(str, counts)), rows)
        found = {name: [seed["crossings"][over][name] for seed in seeds] for name in REFERENCES}
        print(f"below nearest rounding's from: {found}", flush=True)


def _at(row: Any, path: tuple[str | int, ...]) -> float:
    """Return what lies there; of lists of a single number, which all draws share, that number."""
    for step in path:
        row = row[step if isinstance(step, str) or len(row) > 1 else 0]
    return row


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_arguments(parser, FULL, QUICK, 2e-3)
    parser.add_argument("--draws", type=positive, default=64, help="of the stochastic rounding (default 64)")
    parser.add_argument("--batches", type=positive, default=32, help="of loss, and of means over batches (default 32)")
    parser.add_argument("--outliers", type=whole_numbers, default=[2, 4, 6, 8], metavar="E,...", help="default 2,4,6,8")
    parser.add_argument("--kept", type=int, default=1, metavar="N", help="last layers that stay in BF16 (default 1)")
    options = parser.parse_args(arguments)
    options.scale = chosen_scale(options, FULL, QUICK)
    if not 0 < options.kept < options.scale.layers:
        remedy = f"1 to {options.scale.layers - 1}"
        raise UserError(f"{options.kept} of {options.scale.layers} layers in BF16", key="--kept", remedy=remedy)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts, text = begin(), read_sources(options.scale.text)
    with deterministic():
        seeds = [measure(seed, text, options) for seed in options.seeds]
    print_figures(seeds)
    if options.json:
        write_json(options.json, machine=facts, scale=options.scale._asdict(), seeds=seeds)
    return 0


if __name__ == "__main__":
    main_entry(main)
