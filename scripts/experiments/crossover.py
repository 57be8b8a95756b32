"""At which sizes does FP8 stop paying? Decoder layers over hidden sizes and tokens, against the same in BF16.

    python scripts/experiments/crossover.py                         every preset
    python scripts/experiments/crossover.py --graphs                both as CUDA graphs, too: without the time of Python
    python scripts/experiments/crossover.py --quick                 seconds on a CPU, with the emulated product

Answer (2026-11-21, H200): the table in docs/performance.md; ds_fp8/engine/break_even.py says it where graphs are off.

Forward and backward of Qwen2 layers, as transformers runs them in BF16 and fused in FP8 with FP8 weights, as the
parameter gather leaves them. The MLP is 4 times as wide as the hidden size, heads have 64 elements and 2 query heads
share a key-value head. Of presets that compute alike the first is measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import bench_path  # noqa: F401  (for `common` and its neighbours)
import torch
from common import (
    ModelSize,
    argument_parser,
    begin,
    check_presets,
    distinct_presets,
    integers,
    print_table,
    refuse_on_cpu,
    words,
    write_json,
)
from decoder_stacks import Shape, our_layers, transformers_layers
from layers import free_memory, operands, time_and_peak

from ds_fp8.config.errors import main_entry
from ds_fp8.config.presets import PRESETS
from ds_fp8.gemm import unavailable

HEAD_DIM = 64
LAYERS = 2


def shape_of(hidden: int, tokens: int) -> Shape:
    """Return the shape of one sequence of `tokens` through layers of `hidden` features, a multiple of 256."""
    heads = hidden // HEAD_DIM
    return Shape(ModelSize(hidden, 4 * hidden, heads, heads // 2, HEAD_DIM), LAYERS, 1, tokens)


def captured(step: Callable[[], Any]) -> Callable[[], None]:
    """Return the replay of a step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure_step(step: Callable[[], Any], repeats: int, graphs: bool) -> tuple[float, float | None]:
    """Return the milliseconds of a step that Python launches, and of its CUDA graph (None without `graphs`)."""
    time, _ = time_and_peak(step, repeats)
    return time, time_and_peak(captured(step), repeats)[0] if graphs else None


def measure_crossover(
    presets: list[str], hidden: int, tokens: int, repeats: int, graphs: bool = False
) -> list[dict[str, Any]]:
    """Return one result a preset, all against the same BF16 layers."""
    shape = shape_of(hidden, tokens)
    x, dy = operands(shape)
    bf16_time, bf16_captured = measure_step(partial(transformers_layers(shape).step, x, dy), repeats, graphs)
    rows = []
    for preset in presets:
        stack = our_layers(shape, preset, "fp8")
        time, of_graph = measure_step(partial(stack.step, x, dy), repeats, graphs)
        rows.append(
            {
                "preset": preset,
                "backend": stack.backend,
                "hidden": hidden,
                "tokens": tokens,
                "milliseconds": time,
                "bf16_milliseconds": bf16_time,
                "speedup": bf16_time / time,
                "captured_milliseconds": of_graph,
                "bf16_captured_milliseconds": bf16_captured,
                "captured_speedup": of_graph and bf16_time / of_graph,
                "both_captured_speedup": of_graph and bf16_captured / of_graph,
            }
        )
        del stack
        free_memory()
    return rows


TABLES = {
    "speedup": "both launched by Python",
    "captured_speedup": "FP8 as a CUDA graph, BF16 launched by Python",
    "both_captured_speedup": "both as CUDA graphs",
}
"""Key of a row -> how it was run."""


def print_crossover(rows: list[dict[str, Any]]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    kinds = dict.fromkeys((row["preset"], row["backend"]) for row in rows)
    for (preset, backend), (key, how) in itertools.product(kinds, TABLES.items()):
        mine = {(row["hidden"], row["tokens"]): row[key] for row in rows if row["preset"] == preset}
        if None in mine.values():
            continue
        print_table(
            f"{preset}, {backend}, {how}: forward and backward of layers, BF16 time / FP8 time (below 1 FP8 loses)",
            ("hidden", *(f"{count} tokens" for count in tokens)),
            [(hidden, *(mine[hidden, count] for count in tokens)) for hidden in sorted({h for h, _ in mine})],
        )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the defaults that follow from --quick and the machine."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=integers, metavar="T,...", help="tokens of a micro-batch")
    parser.add_argument("--hidden", type=integers, metavar="H,...", help="hidden sizes, multiples of 256")
    parser.add_argument("--presets", type=words, metavar="NAME,...", help=f"default all: {','.join(PRESETS)}")
    parser.add_argument("--graphs", action="store_true", help="measure CUDA graphs of both as well")
    options = parser.parse_args(arguments)
    options.presets = check_presets(options.presets)
    if options.graphs and not torch.cuda.is_available():
        parser.error("--graphs: needs a CUDA device")
    if not (options.quick or (options.tokens and options.hidden)):
        refuse_on_cpu("--hidden and --tokens")
    for hidden in options.hidden or ():
        if hidden % 256:
            parser.error(f"--hidden {hidden}: must be a multiple of 256, or q, k and v cannot be stacked")
    options.tokens = options.tokens or ([32, 128] if options.quick else [512, 2048, 4096, 8192, 16384])
    options.hidden = options.hidden or ([256, 512] if options.quick else [512, 1024, 1536, 2048, 4096])
    options.repeats = 3 if options.quick else 15
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    unavailable("transformer_engine")  # loads it, which fails once torch has loaded another cuDNN
    facts = begin()
    presets = list(distinct_presets(options.presets))
    rows = [
        row
        for hidden in options.hidden
        for tokens in options.tokens
        for row in measure_crossover(presets, hidden, tokens, options.repeats, options.graphs)
    ]
    print_crossover(rows)
    if options.json:
        write_json(options.json, banner=facts, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
