"""The cost of each number format in a trained model, layer by layer, and the best mix of formats for its bits.

    python scripts/formats.py FOLDER FILE --out runs/formats
    python scripts/formats.py FOLDER FILE --grid format=int4,e2m3,e4m3 --match e4m3 --budget 0.01 --out runs/formats

FOLDER is a Hugging Face causal language model, FILE documents, as data.path of a stage takes them.

1. Perplexity of the text with the weights of all linears in a format, one FP32 scale an output channel, and with their
   inputs cast too, one a token; and in block formats. Products are emulated: any format of config.formats can be asked
   for, with any granularity (format_search.py says how).
2. The sensitivity of every layer: how far the predictions move where this layer alone is cast.
3. --match: for each of these choices the mix of all formats of the grid with at most as many bits, beside it.
4. --budget: the mix of the fewest bits whose loss is at most (1 + budget) times BF16's.

Half of the text's rows select, and every figure of the tables is of the other half. --out leaves all figures in
formats.json, tables and a picture of the layers in formats.html, and the mix of --budget as fp8.linear.overrides in
stage.json, for `ds-fp8 train`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from format_search import (
    BF16,
    NAMED,
    Layer,
    bits_of,
    cast_as,
    choice_of,
    layers_of,
    mean_bits,
    mix_of_bits,
    mix_of_budget,
    overrides_of,
    section,
    sensitivities,
    uniform,
    weights_as,
)
from formats_page import render
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_fp8.commands.arguments import parser_of
from ds_fp8.commands.comparisons import add_out
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.files import check_writable
from ds_fp8.data import DataConfig, build_data, build_tokenizer, default_cache_dir
from ds_fp8.train import packed_attention
from ds_fp8.train.judge import Batch, Judge, Measured, difference, rows_of

DEFAULT = ("e4m3", "e5m2", "e3m4", "e2m5", "int8", "log8", "e2m3", "e3m2", "int6", "e2m1", "int4", *NAMED)


def read_rows(options: argparse.Namespace, device: str) -> tuple[list[Batch], list[Batch]]:
    """Return rows of the text to select by, and as many others. Raise UserError for a text that is too short."""
    config = DataConfig(
        path=options.file,
        format="documents",
        tokenizer=options.folder,
        sequence_length=options.length,
        validation_fraction=0.5,
    )
    data = build_data(config, build_tokenizer(config, default_cache_dir()), default_cache_dir())
    first, second = (rows_of(dataset, options.rows, device) for dataset in (data.train, data.validation))
    return first, second


def figures_of(mix: dict[str, str], layers: Sequence[Layer], measured: Measured) -> dict[str, Any]:
    """Return a mix in figures."""
    return {
        "bits": mean_bits(layers, mix),
        "loss": measured.loss,
        "perplexity": math.exp(measured.loss),
        "divergence": measured.divergence,
    }


def table_of(
    model: PreTrainedModel, judge: Judge, layers: Sequence[Layer], words: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return by choice the bits of a weight and, with weights alone and with inputs too, the figures; BF16's first."""
    table = {}
    for word in (BF16, *words):
        mix = uniform(layers, word)
        with weights_as(model, mix):
            weights = figures_of(mix, layers, judge.measure(model))
        with cast_as(model, mix):
            both = figures_of(mix, layers, judge.measure(model))
        table[word] = {"bits": weights["bits"], "weights": weights, "weights and inputs": both}
    return table


def compare(
    model: PreTrainedModel, judges: tuple[Judge, Judge], layers: Sequence[Layer], found: dict[str, Any], word: str
) -> dict[str, Any]:
    """Return a choice for all layers beside the best mix of its bits, and beside the best one choice of those bits.

    Args:
        model: The model in BF16.
        judges: One of the rows that select, one of those that the figures are of.
        layers: Its linears.
        found: What was measured of the choices.
        word: The choice.
    """
    limit = mean_bits(layers, uniform(layers, word))
    added = found["sensitivities"]
    words = [each for each in found["table"] if mean_bits(layers, uniform(layers, each)) <= limit]

    def divergence(mix: dict[str, str]) -> float:
        with cast_as(model, mix):
            return judges[0].measure(model).divergence

    best = min(words, key=lambda each: divergence(uniform(layers, each)))
    # Divergences do not quite add up: one choice for all may still be the best mix.
    mix = min(mix_of_bits(layers, added, limit), uniform(layers, best), key=divergence)
    mixes = {word: uniform(layers, word), best: uniform(layers, best), "mix": mix}
    measured = {}
    for name, mix in mixes.items():
        with cast_as(model, mix):
            measured[name] = judges[1].measure(model)
    result: dict[str, Any] = {"of": word, "best": best, "mix": mixes["mix"]}
    result["figures"] = {name: figures_of(mixes[name], layers, each) for name, each in measured.items()}
    for name in dict.fromkeys((word, best)):
        result[f"mix - {name}"] = {
            "loss": difference(measured["mix"].losses, measured[name].losses),
            "divergence": difference(measured["mix"].divergences, measured[name].divergences),
        }
    return result


def stage_of(mix: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Return a stage of `ds-fp8 train` whose overrides are a mix."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "fp8": {**section(overrides_of(mix)), "grad_reduce": {"format": "bf16"}},
        "model": {"path": options.folder},
        "data": {
            "path": options.file,
            "format": "documents",
            "tokenizer": options.folder,
            "sequence_length": options.length,
        },
        "train": {"run_dir": "runs/mix", "steps": 100},
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Raise UserError for a format that does not exist."""

    def words(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    def grid(text: str) -> list[str]:
        key, _, values = text.partition("=")
        if key != "format":
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not format=NAME,...")
        return words(values)

    parser = parser_of(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="a Hugging Face folder with weights")
    parser.add_argument("file", metavar="FILE", help="documents")
    parser.add_argument("--grid", type=grid, default=list(DEFAULT), metavar="format=NAME,...", help=",".join(DEFAULT))
    parser.add_argument("--rows", type=int, default=16, help="rows to select by, and as many to measure (default 16)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (default 512)")
    parser.add_argument("--match", type=words, default=[], metavar="NAME,...", help="compare a mix of the same bits")
    parser.add_argument("--budget", type=float, help="search a mix that adds at most this share to the loss, as 0.01")
    add_out(parser, None)
    options = parser.parse_args(arguments)
    for word in options.grid:
        choice_of(word)
    for word in options.match:
        if word not in options.grid:
            raise UserError(f'"{word}" is not measured', key="--match", remedy="name it in --grid too")
    if options.out is not None:
        check_writable(options.out, "--out")
    return options


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    table = Table("format", "bits", "perplexity, weights", "weights and inputs", "divergence")
    for name, row in figures["table"].items():
        both = row["weights and inputs"]
        numbers = (row["weights"]["perplexity"], both["perplexity"])
        table.add_row(name, f"{row['bits']:.2f}", *(f"{x:.4f}" for x in numbers), f"{both['divergence']:.2e}")
    console.print(table)
    for match in figures.get("matches", ()):
        for name, row in match["figures"].items():
            console.print(
                f"{name:>8}: {row['bits']:.2f} bits, loss {row['loss']:.5f}, divergence {row['divergence']:.2e}"
            )
        for key, gaps in match.items():
            if key.startswith("mix - "):
                shown = [f"{name} {gap:+.2e} ± {error:.0e}" for name, (gap, error) in gaps.items()]
                console.print(f"{key:>16}: {', '.join(shown)}")
    if "budget" in figures:
        row = figures["budget"]["figures"]
        console.print(f"mix: {row['bits']:.2f} bits a weight, perplexity {row['perplexity']:.4f}")


def main(arguments: list[str] | None = None) -> int:
    """Measure, search, and write what was asked for."""
    options = parse_arguments(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed_attention.register()
    selecting, reporting = read_rows(options, device)
    model = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.bfloat16, attn_implementation=packed_attention.NAME
    )
    model = model.to(device).eval()
    layers, judges = layers_of(model), (Judge(model, selecting), Judge(model, reporting))
    figures: dict[str, Any] = {"model": options.folder, "data": options.file, "rows": len(reporting)}
    figures["table"] = table_of(model, judges[1], layers, options.grid)
    if options.match or options.out or options.budget is not None:
        figures["sensitivities"] = sensitivities(model, judges[0], layers, options.grid)
    figures["matches"] = [compare(model, judges, layers, figures, word) for word in options.match]
    if options.budget is not None:
        limit = (1 + options.budget) * judges[0].measure(model).loss
        mix = mix_of_budget(model, judges[0], layers, figures["sensitivities"], limit)
        with cast_as(model, mix):
            figures["budget"] = {"mix": mix, "figures": figures_of(mix, layers, judges[1].measure(model))}
    print_figures(figures, Console(highlight=False))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        sizes = {layer.name: {word: bits_of(layer, word) for word in (*options.grid, BF16)} for layer in layers}
        files = {"formats.json": json.dumps(figures, indent=2) + "\n", "formats.html": render(figures, sizes)}
        if options.budget is not None:
            files["stage.json"] = json.dumps(stage_of(figures["budget"]["mix"], options), indent=2) + "\n"
        for name, text in files.items():
            (options.out / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    main_entry(main)
