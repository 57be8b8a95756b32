"""Tables of what fits: models by GPUs, all parameters or adapters, and what was measured (docs/fits.md)."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ds_fp8.commands.arguments import load_deepspeed, say
from ds_fp8.commands.new_stage import defaults
from ds_fp8.config.errors import UserError

if TYPE_CHECKING:
    from ds_fp8.memory import Workload

MODELS = (
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B"),
    *("Qwen/Qwen2.5-14B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-32B", "meta-llama/Llama-3.1-70B"),
)
CARDS, NUMBERS = ("h100", "h200"), (1, 2, 4, 8)
SHORTEST, RANK = 512, 16  # Tokens of a row, of which less is none; rank of adapters
ALL, COMPACT, ADAPTERS = KINDS = ("all parameters", "all, `compact`", "adapters")
_COMPACT = {"fp8": {"preset": {"linear": "precise", "optimizer": "compact"}}}  # with gradients in BF16
LEGEND = """\
Estimated: tokens of the longest row that fits, at most the model's positions (micro-batches of one row, layers
recomputed, `precise`; –: below 512). **Bold is measured**: tokens/s a GPU, from the last table."""


class Measured(NamedTuple):
    """A run of docs/log/zero3.md."""

    model: str
    kind: str
    gpus: int
    gpu: str
    settings: str
    rows: str
    gib: float  # Allocated, a GPU
    speed: int  # Tokens/s a GPU
    date: str


_RECOMPUTED = "hybrid_fast, recomputed"
MEASURED = (
    Measured("Qwen2.5-1.5B", "all, `coat`", 2, "h200", "hybrid_fast", "2 x 8,192", 24.5, 55_550, "2026-11-28"),
    Measured("Qwen2.5-7B", ALL, 2, "h200", "precise", "1 x 8,192", 80.8, 15_407, "2026-11-28"),
    Measured("Qwen2.5-7B", "all, `coat`", 2, "h200", "hybrid_fast", "1 x 8,192", 59.6, 15_970, "2026-11-28"),
    Measured("Qwen2.5-7B", "all, `coat`", 2, "h100", "hybrid_fast", "1 x 8,192", 61.7, 14_674, "2026-11-24"),
    Measured("Llama-3.1-8B", COMPACT, 1, "h100", _RECOMPUTED, "1 x 8,192", 59.4, 9_538, "2026-11-26"),
    Measured("Qwen2.5-32B", COMPACT, 2, "h200", _RECOMPUTED, "1 x 4,096", 116, 2_515, "2026-11-28"),
    Measured("Qwen2.5-7B", ADAPTERS, 1, "h100", "hybrid_fast", "2 x 4,096", 25.6, 20_241, "2026-11-26"),
    Measured("Qwen2.5-7B", ADAPTERS, 2, "h100", "hybrid_fast", "2 x 4,096", 22.1, 18_746, "2026-11-26"),
    Measured("Qwen2.5-7B", ADAPTERS, 1, "h200", "hybrid_fast", "2 x 4,096", 25.6, 21_340, "2026-11-27"),
    Measured("Qwen2.5-7B", ADAPTERS, 2, "h200", "hybrid_fast", "2 x 4,096", 22.1, 19_741, "2026-11-27"),
    Measured("Qwen3-30B-A3B", ADAPTERS, 1, "h100", _RECOMPUTED, "1 x 4,096", 42.1, 3_511, "2026-11-26"),
    Measured("Qwen2.5-32B", ADAPTERS, 1, "h100", _RECOMPUTED, "1 x 4,096", 38.7, 2_950, "2026-11-26"),
)


def print_fits(arguments: argparse.Namespace) -> int:
    """Print the tables for the GPU of --gpu, or for those of 80 and 141 GB, as Markdown."""
    for name in ("stage", "deepspeed_config", "gpus", "memory", "lora", "seq", "set", "json"):
        if getattr(arguments, name) not in (None, [], False):
            raise UserError(
                "--fits has models and numbers of GPUs of its own, and takes --gpu alone",
                key="FILE" if name == "stage" else f"--{name}",
                remedy="leave it out; of one model: ds-fp8 estimate MODEL --gpus 8 --gpu h100",
            )
    load_deepspeed()

    from ds_fp8.memory.estimate import gpu_of

    cards = CARDS if arguments.gpu is None else (arguments.gpu.lower(),)
    for card in cards:
        if (limits := gpu_of(card).limits) is not None:
            remedy = f"--gpu h100, h200 or h20; or ds-fp8 estimate MODEL --gpu {card}, with --set fp8.preset=..."
            raise UserError(f"--fits is for Hopper GPUs, and {card} has {limits}", key="--gpu", remedy=remedy)
    say("estimating ...")
    print("\n\n".join([LEGEND, *(_of_card(card) for card in cards), _markdown(_measured(cards))]))
    return 0


def _of_card(card: str) -> str:
    from ds_fp8.memory.estimate import gpu_of

    heads = ["model", "trained", *(f"{gpus} x {card}" for gpus in NUMBERS)]
    rows = [row for model in MODELS for row in rows_of(model, card)]
    return f"## {card}: {gpu_of(card).gib} GiB\n\n{_markdown([heads, *rows])}"


def rows_of(model: str, card: str) -> Iterator[list[str]]:
    """Return the rows of a model: for each of KINDS the longest row that fits each number of GPUs."""
    from ds_fp8.memory.estimate import gpu_of, largest_that_fits

    name = model.partition("/")[2]
    for kind, w in workloads(model).items():
        cells = []
        for gpus in NUMBERS:
            longest = largest_that_fits(replace(w, gpus=gpus), "sequence_length", gpu_of(card).bytes)
            run = next((run for run in MEASURED if run[:4] == (name, kind, gpus, card)), None)
            cells.append((f"{longest:,}" if longest >= SHORTEST else "–") + (f" **{run.speed:,}/s**" if run else ""))
        yield [name, kind, *cells]


@functools.cache
def workloads(model: str) -> dict[str, Workload]:
    """Return the workloads of a model of SHAPES by kind; all layers are equal: one is built."""
    from ds_fp8.config.fp8 import parse_fp8
    from ds_fp8.memory.shapes import BF16, SHAPES, read_workload

    config, found = SHAPES[model], {}
    for kind in (ALL, ADAPTERS):
        raw = defaults(model, "DATA", 1, RANK if kind == ADAPTERS else None)
        raw["model"] = {"config": {**config, "num_hidden_layers": 1}, "activation_checkpointing": True}
        w = read_workload(raw, gpus=1)
        found[kind] = replace(w, model=replace(w.model, layers=w.model.layers * config["num_hidden_layers"]))
    # Moments and masters alone differ: the layers that were measured are the same.
    fp8 = found[ALL].fp8.model_copy(update={"optimizer": parse_fp8(_COMPACT).optimizer})
    return {kind: found.get(kind) or replace(found[ALL], fp8=fp8, accumulation_bytes=BF16) for kind in KINDS}


def _measured(cards: Sequence[str]) -> list[list[str]]:
    heads = ["measured", "trained", "GPUs", "settings", "rows a GPU", "GiB a GPU", "tokens/s a GPU", "log"]
    return [heads] + [
        [run.model, run.kind, f"{run.gpus} x {run.gpu}", run.settings, run.rows, f"{run.gib:g}", f"**{run.speed:,}**",
         run.date] for run in MEASURED if run.gpu in cards
    ]  # fmt: skip


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])
