"""Where FP8 stops paying: whole linears with the casts of their inputs, over tokens and hidden sizes, against BF16.

    python scripts/bench/crossover.py                         every preset and backend
    python scripts/bench/crossover.py --quick                 seconds on a CPU, with the emulated product

Of presets that compute alike the first is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from common import (
    able_backends,
    argument_parser,
    banner,
    check_presets,
    distinct_presets,
    integers,
    measure,
    preset_recipe,
    print_banner,
    print_table,
    random_operands,
    refuse_on_cpu,
    words,
    write_json,
)
from gemms import report_gaps
from torch import nn

from ds_fp8.config import PRESETS
from ds_fp8.errors import main_entry
from ds_fp8.gemm import BACKENDS
from ds_fp8.modules.linear import FP8Linear
from ds_fp8.modules.weights import hold_in_fp8


def measure_crossover(
    preset: str, backend: str, hidden: int, tokens: int, milliseconds: float
) -> dict[str, int | float | str]:
    """Forward and backward of a linear [hidden, hidden], casts of x and dy included, FP8 against BF16.

    The weight is in FP8 beforehand, as the parameter gather leaves it.
    """
    x, _, dy = random_operands(tokens, hidden, hidden)
    x.requires_grad_()
    layer = nn.Linear(hidden, hidden, bias=False, device=x.device, dtype=x.dtype)

    def step() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)

    bf16_time = measure(step, milliseconds=milliseconds)
    layer.__class__ = FP8Linear
    layer.recipe = dataclasses.replace(preset_recipe(preset), backend=backend)
    hold_in_fp8([layer.weight], layer.recipe)
    time = measure(step, milliseconds=milliseconds)
    return {
        "preset": preset,
        "backend": backend,
        "hidden": hidden,
        "tokens": tokens,
        "milliseconds": time,
        "bf16_milliseconds": bf16_time,
        "speedup": bf16_time / time,
    }


def print_crossover(rows: list[dict[str, Any]]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    for preset, backend in dict.fromkeys((row["preset"], row["backend"]) for row in rows):
        mine = {
            (row["hidden"], row["tokens"]): row["speedup"]
            for row in rows
            if (row["preset"], row["backend"]) == (preset, backend)
        }
        print_table(
            f"{preset}, {backend}: forward and backward of one linear, BF16 time / FP8 time (below 1 FP8 loses)",
            ("hidden", *(f"{count} tokens" for count in tokens)),
            [(hidden, *(mine[hidden, count] for count in tokens)) for hidden in sorted({h for h, _ in mine})],
        )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with the defaults that follow from --quick and the machine filled in."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=integers, metavar="T,...", help="tokens of a micro-batch")
    parser.add_argument("--hidden", type=integers, metavar="H,...", help="input and output features of the linear")
    parser.add_argument("--presets", type=words, metavar="NAME,...", help=f"default all: {','.join(PRESETS)}")
    parser.add_argument(
        "--backends", type=words, metavar="NAME,...", help=f"default all that run: {','.join(BACKENDS)}"
    )
    options = parser.parse_args(arguments)
    options.presets = check_presets(options.presets)
    if not (options.quick or (options.tokens and options.hidden)):
        refuse_on_cpu("--hidden and --tokens")
    options.tokens = options.tokens or ([32, 128] if options.quick else [256, 1024, 4096, 16384])
    options.hidden = options.hidden or ([64, 128] if options.quick else [512, 1024, 2048, 4096, 8192])
    options.milliseconds = 2.0 if options.quick else 120.0
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = banner()
    print_banner(facts)
    backends = able_backends(options.backends)
    presets = distinct_presets(options.presets)
    gaps = report_gaps(list(presets), backends)
    rows = [
        measure_crossover(preset, backend, hidden, tokens, options.milliseconds)
        for preset in presets
        for backend in backends
        if (preset, backend) not in gaps
        for hidden in options.hidden
        for tokens in options.tokens
    ]
    print_crossover(rows)
    if options.json:
        write_json(options.json, banner=facts, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
