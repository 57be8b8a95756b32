"""What each number format costs a trained model, layer by layer, and the cheapest mix within a budget of loss.

    python scripts/formats.py --model FOLDER --data FILE --json table.json
    python scripts/formats.py --model FOLDER --data FILE --formats int4,e4m3 --budget 0.01 --output fp8.json

1. Perplexity of the text with the weights of all linears in a format, one scale an output channel, and with their
   inputs cast too, one scale a token; products are emulated, so that any format of config.formats can be asked for.
2. With --budget: the loss each layer alone adds in each format, its sensitivity. All layers begin in the format of the
   fewest bits; upgrades that win most loss for their bits come first, as many as keep the whole model's loss within
   (1 + budget) times BF16's, found by bisection. --output is a DeepSpeed JSON with that mix as fp8.linear.overrides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.formats import FORMATS
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.config.schema import nearest
from ds_fp8.layers.convert import convert, restore
from ds_fp8.layers.linear import FP8Linear

DEFAULT = ("e4m3", "e5m2", "e3m4", "int8", "e3m2", "e2m3", "e2m1", "int4")


class Layer(NamedTuple):
    """A linear layer that formats are tried on."""

    name: str
    numel: int


def section(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the "fp8" section in which layers have these casts."""
    linear = {"backend": "reference", "overrides": overrides}
    return {"fuse": "off", "monitor": {"every": 0}, "param_gather": {"format": "bf16"}, "linear": linear}


def casts_of(format: str) -> dict[str, Any]:
    """Return the override of a layer in a format."""
    cast = {"format": format, "granularity": "row"}
    return {"input": cast, "weight": cast}


@torch.no_grad()
def loss_of(model: PreTrainedModel, rows: torch.Tensor) -> float:
    """Return the mean loss of the rows of tokens [R, L]."""
    return sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in rows) / len(rows)


@contextmanager
def cast_as(model: PreTrainedModel, overrides: dict[str, Any]) -> Iterator[None]:
    """Let layers compute with the casts of `overrides` for a while, all others in BF16."""
    convert(model, parse_fp8({"fp8": section({**overrides, "*": "bf16"})}))
    try:
        yield
    finally:
        restore(model)


@contextmanager
def weights_as(model: PreTrainedModel, layers: list[Layer], format: str) -> Iterator[None]:
    """Let layers have weights of a format for a while, and compute in BF16."""
    before = {layer.name: model.get_submodule(layer.name).weight.data for layer in layers}
    for name, weight in before.items():
        model.get_submodule(name).weight.data = quantize(weight, format, "row").dequantize(weight.dtype)
    try:
        yield
    finally:
        for name, weight in before.items():
            model.get_submodule(name).weight.data = weight


def layers_of(model: PreTrainedModel) -> list[Layer]:
    """Return the linears that ds_fp8 would convert."""
    convert(model, parse_fp8({"fp8": section({})}))
    layers = [Layer(n, m.weight.numel()) for n, m in model.named_modules() if isinstance(m, FP8Linear)]
    restore(model)
    return layers


def table_of(model: PreTrainedModel, rows: torch.Tensor, layers: list[Layer], formats: list[str]) -> dict[str, Any]:
    """Return by format the losses with weights alone and with inputs too, BF16's first."""
    loss = loss_of(model, rows)
    table = {"bf16": {"bits": 16, "weights": loss, "weights and inputs": loss}}
    for format in formats:
        with weights_as(model, layers, format):
            weights = loss_of(model, rows)
        with cast_as(model, {layer.name: casts_of(format) for layer in layers}):
            both = loss_of(model, rows)
        table[format] = {"bits": FORMATS[format].bits, "weights": weights, "weights and inputs": both}
    return table


def sensitivities(
    model: PreTrainedModel, rows: torch.Tensor, layers: list[Layer], formats: list[str], loss: float
) -> dict[str, dict[str, float]]:
    """Return by layer and format the loss that this layer alone adds to BF16's."""
    found: dict[str, dict[str, float]] = {}
    for layer in layers:
        found[layer.name] = {"bf16": 0.0}
        for format in formats:
            with cast_as(model, {layer.name: casts_of(format)}):
                found[layer.name][format] = loss_of(model, rows) - loss
    return found


def upgrades(layers: list[Layer], added: dict[str, dict[str, float]], bits: dict[str, int]) -> list[tuple[str, str]]:
    """Return (layer, format) in the order in which to give layers more bits: those that win most loss a bit first."""
    formats = sorted(bits, key=lambda format: bits[format])
    steps = []
    for layer in layers:
        for before, after in itertools.pairwise(formats):
            won = added[layer.name][before] - added[layer.name][after]
            steps.append((won / (layer.numel * (bits[after] - bits[before])), layer.name, before, after))
    # A layer takes its steps in order, also where the second wins more.
    steps.sort(key=lambda step: -step[0])
    current, ordered = {layer.name: formats[0] for layer in layers}, []
    while steps:
        position = next(i for i, (_, name, before, _) in enumerate(steps) if current[name] == before)
        _, name, _, after = steps.pop(position)
        current[name] = after
        ordered.append((name, after))
    return ordered


def search(
    model: PreTrainedModel, rows: torch.Tensor, layers: list[Layer], formats: list[str], loss: float, budget: float
) -> dict[str, Any]:
    """Return the mix of the fewest upgrades whose loss is at most (1 + budget) times `loss`, and how it was found."""
    bits = {**{format: FORMATS[format].bits for format in formats}, "bf16": 16}
    added = sensitivities(model, rows, layers, formats, loss)
    steps = upgrades(layers, added, bits)
    cheapest = min(formats, key=lambda format: bits[format])

    def mix(count: int) -> dict[str, str]:
        return {**{layer.name: cheapest for layer in layers}, **dict(steps[:count])}

    def measured(count: int) -> float:
        casts = {name: casts_of(format) for name, format in mix(count).items() if format != "bf16"}
        if not casts:
            return loss
        with cast_as(model, casts):
            return loss_of(model, rows)

    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if measured(middle) <= (1 + budget) * loss else (middle + 1, high)
    chosen = mix(low)
    numel = sum(layer.numel for layer in layers)
    mean = sum(layer.numel * bits[chosen[layer.name]] for layer in layers) / numel
    return {"mix": chosen, "loss": measured(low), "bits": mean, "sensitivities": added}


def stage_of(mix: dict[str, str]) -> dict[str, Any]:
    """Return a DeepSpeed configuration whose overrides are a mix."""
    fp8 = section({name: "bf16" if format == "bf16" else casts_of(format) for name, format in mix.items()})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3},
        "fp8": {**fp8, "grad_reduce": {"format": "bf16"}},
    }


def read_rows(folder: str, file: str, count: int, length: int) -> torch.Tensor:
    """Return the first `count` rows of tokens [R, L] of a text. Raises UserError for a text that is too short."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}", key="--data", remedy="name a text file") from error
    tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: count * length]
    rows = len(tokens) // length
    if not rows:
        raise UserError(f"{file} has only {len(tokens)} tokens", key="--data", remedy="a longer text, or --length")
    return torch.tensor(tokens[: rows * length]).view(rows, length)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises UserError for a format that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a Hugging Face folder with weights")
    parser.add_argument("--data", required=True, metavar="FILE", help="a text, UTF-8")
    parser.add_argument("--formats", default=",".join(DEFAULT), metavar="NAME,...")
    parser.add_argument("--rows", type=int, default=8, help="rows of text (default 8)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (default 512)")
    parser.add_argument("--budget", type=float, help="search a mix that adds at most this share to the loss, as 0.01")
    parser.add_argument("--output", metavar="FILE", help="write the mix there as a DeepSpeed JSON")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(arguments)
    options.formats = options.formats.split(",")
    for name in options.formats:
        if name not in FORMATS:
            raise UserError(f'unknown format "{name}"', key="--formats", remedy=nearest(name, FORMATS))
    if options.output and options.budget is None:
        raise UserError("there is no mix to write", key="--output", remedy="--budget 0.01")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, search, and write what was asked for."""
    options = parse_arguments(arguments)
    rows = read_rows(options.model, options.data, options.rows, options.length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(device).eval()
    rows, layers, console = rows.to(device), layers_of(model), Console(highlight=False)
    figures: dict[str, Any] = {"table": table_of(model, rows, layers, options.formats)}
    table = Table("format", "bits", "perplexity, weights", "weights and inputs")
    for name, row in figures["table"].items():
        perplexities = [f"{math.exp(row[key]):.4f}" for key in ("weights", "weights and inputs")]
        table.add_row(name, str(row["bits"]), *perplexities)
    console.print(table)
    if options.budget is not None:
        loss = figures["table"]["bf16"]["weights"]
        found = figures["search"] = search(model, rows, layers, options.formats, loss, options.budget)
        console.print(f"mix: {found['bits']:.2f} bits a weight, perplexity {math.exp(found['loss']):.4f}")
        if options.output:
            Path(options.output).write_text(json.dumps(stage_of(found["mix"]), indent=2) + "\n", encoding="utf-8")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    main_entry(main)
