"""Losses with and without each ingredient of NVFP4 pre-training (arXiv 2509.25149): a Llama that learns a file's bytes.

    python scripts/bench/nvfp4_ingredients.py FILE --jobs 6 --output runs.jsonl                           one GPU
    python scripts/bench/nvfp4_ingredients.py FILE --quick --steps 20 --seeds 0 --output runs.jsonl      any machine

BF16, preset `nvfp4` with its last --kept layers in BF16 ("recipe"), and that without one of its ingredients, each from
the same weights with the same batches for every seed. --jobs runs share the GPUs, a process each. A run says early what
a step takes, and ends with a line here and one in --output; runs that are there already are not repeated.

    "other-draws"   the recipe with other random numbers for its rounding: how far chance alone parts two runs
    "final loss"    mean training loss of the last tenth of the steps; "gap": relative to BF16 of the same seed
    "validation"    loss on the last hundredth of the file, which no run trains on

Casts are emulated; products of what they leave, E2M1 times scales, are of TF32, which rounds it to 11 bits, unless
--products fp32 asks for more: results are rounded to BF16's 8 in either case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from byte_training import Scale, batch, build_model, deterministic, figures, learning_rate, train_steps
from cast_parity import BF16, GATHER_IN_BF16, check_variants
from common import argument_parser, begin, positive, print_table, whole_numbers, words, write_json
from stage_formats import print_runs, read_runs

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import EMULATED_PRESETS
from ds_fp8.layers.convert import convert
from ds_fp8.optim import AdamW

FULL = Scale(hidden=512, intermediate=1536, layers=6, heads=8, length=256, rows=16, steps=1500, text=0)
QUICK = Scale(hidden=128, intermediate=384, layers=3, heads=2, length=64, rows=8, steps=20, text=0)
RECIPE, OTHER_DRAWS = "recipe", "other-draws"
_NVFP4 = EMULATED_PRESETS["nvfp4"]["linear"]
LEFT_OUT: dict[str, dict[str, Any]] = {
    "no-2d-scales": {"weight": _NVFP4["input"]},
    "no-stochastic-rounding": {"grad_output": _NVFP4["input"]},
    "no-hadamard": {"rotation": {}},
    "no-bf16-layers": {"overrides": {}},
}
"""Replacements of parts of the recipe's section "linear"."""
VARIANTS = [BF16, RECIPE, *LEFT_OUT, OTHER_DRAWS]
LEARNING_RATE = 6e-4
FIRST, TIMED = 10, 20
"""Steps before those that an early figure is of, and their number."""


def linear_section(variant: str, layers: int, kept: int) -> dict[str, Any]:
    """Return the section "linear" of a variant that is not BF16.

    Args:
        variant: Name of the variant.
        layers: Decoder layers of the model.
        kept: How many of the last layers stay in BF16.
    """
    in_bf16 = {f"model.layers.{number}.*": "bf16" for number in range(layers - kept, layers)}
    return {**_NVFP4, "overrides": in_bf16, **LEFT_OUT.get(variant, {})}


def train(variant: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one run from its start; return its line."""
    scale, text = options.scale, read_text(options.file, options.scale)
    torch.backends.cuda.matmul.allow_tf32 = options.products == "tf32"
    model = build_model(scale, seed)
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    if variant != BF16:
        linear = linear_section(variant, scale.layers, options.kept)
        convert(model, FP8Config(**GATHER_IN_BF16, linear=linear, monitor={"every": 0}))
    torch.manual_seed(2 * seed + (variant == OTHER_DRAWS))
    training = text[: len(text) * 99 // 100]
    losses: list[float] = []
    started = time.perf_counter()
    with context(options):
        for last in (FIRST, FIRST + TIMED, scale.steps):
            steps = range(len(losses), min(last, scale.steps))
            batches = (batch(training, scale, seed * 1_000_003 + step) for step in steps)
            curve, seconds = train_steps(
                model, optimizer, batches, (learning_rate(step, scale.steps, options.lr) for step in steps)
            )
            losses += curve
            if last == FIRST + TIMED and len(losses) < scale.steps:
                rest = seconds * (scale.steps - len(losses))
                print(f"{variant:>24} seed {seed}: {1e3 * seconds:.0f} ms a step, {rest:.0f} s to go", flush=True)
        row = figures(seed, losses, optimizer, model, seconds, scale, text)
    whole = {"variant": variant, "steps": scale.steps, "seconds": time.perf_counter() - started}
    return {**whole, "scale": scale._asdict(), "kept": options.kept, "lr": options.lr, **row}


def context(options: argparse.Namespace) -> AbstractContextManager:
    """Return what a run trains in."""
    return nullcontext() if options.nondeterministic else deterministic()


def read_text(file: Path, scale: Scale) -> torch.Tensor:
    """Return the bytes of a file, uint8. Raise UserError where its last hundredth is less than a row."""
    text = bytearray(file.read_bytes())
    if len(text) < 200 * scale.length:
        raise UserError(f"{file} has {len(text)} bytes", remedy=f"a text of more than {200 * scale.length} bytes")
    return torch.frombuffer(text, dtype=torch.uint8)


def _take_device(taken: Any) -> None:
    """Let the runs of this process go to the next GPU in turn; `taken` counts the processes that have done so."""
    with taken.get_lock():
        number, taken.value = taken.value, taken.value + 1
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def all_runs(options: argparse.Namespace, wanted: list[tuple[str, int]]) -> list[str]:
    """Train the runs that are wanted and write down those that end; return what the others failed of."""
    failures = []

    def ended(variant: str, seed: int, run: Any) -> None:
        try:
            row = run()
        except Exception as error:  # whatever one run fails of, the others go on
            failures.append(f"{variant} seed {seed}: {type(error).__name__}: {error}")
            print(failures[-1], flush=True)
            return
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{variant:>24} seed {seed}: final {row['final_loss']:.4f}, validation {row['validation_loss']:.4f}, "
              f"{row['milliseconds_a_step']:.0f} ms a step, {row['seconds']:.0f} s", flush=True)  # fmt: skip

    if options.jobs == 1:
        for variant, seed in wanted:
            ended(variant, seed, partial(train, variant, seed, options))
        return failures
    # Spawned: CUDA does not survive a fork. A process trains one run after another, so that it imports once.
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawning, _take_device, (spawning.Value("i", 0),)) as pool:
        runs = {pool.submit(train, variant, seed, options): (variant, seed) for variant, seed in wanted}
        for run in as_completed(runs):
            ended(*runs[run], run.result)
    return failures


def print_differences(runs: list[dict[str, Any]]) -> None:
    """Print for each variant but BF16 how much its loss is above the recipe's of the same seed."""
    recipe = {run["seed"]: run for run in runs if run["variant"] == RECIPE}
    lines = []
    for variant in [name for name in VARIANTS if name not in (BF16, RECIPE)]:
        mine = [run for run in runs if run["variant"] == variant and run["seed"] in recipe]
        cells: list[object] = [variant, len(mine)]
        for key in ("final_loss", "validation_loss"):
            above = [100 * (run[key] / recipe[run["seed"]][key] - 1) for run in mine]
            cells += (
                [f"{statistics.mean(above):+.2f}", " ".join(f"{gap:+.2f}" for gap in above)] if mine else [None] * 2
            )
        lines.append(cells)
    columns = ("linears", "seeds", "final, %", "each seed", "validation, %", "each seed")
    print_table("above the recipe of the same seed", columns, lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a text of some megabytes")
    parser.add_argument("--variants", type=words, default=VARIANTS, metavar="NAME,...", help=",".join(VARIANTS))
    parser.add_argument("--seeds", type=whole_numbers, default=[0, 1], metavar="N,...", help="default 0,1")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at the same time")
    for name in ("hidden", "intermediate", "layers", "heads", "length", "rows", "steps"):
        default = f"default {getattr(FULL, name)}, --quick: {getattr(QUICK, name)}"
        parser.add_argument(f"--{name}", type=positive, help=default)
    parser.add_argument("--kept", type=int, default=1, metavar="N", help="last layers that stay in BF16 (default 1)")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help=f"peak learning rate ({LEARNING_RATE:g})")
    parser.add_argument("--products", choices=("tf32", "fp32"), default="tf32", help="of emulated operands, on a GPU")
    parser.add_argument(
        "--nondeterministic", action="store_true", help="let kernels sum in any order: faster, 0.2%% more chance"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines, one a run")
    options = parser.parse_args(arguments)
    check_variants(options.variants, VARIANTS)
    sizes = {name: value for name in Scale._fields if (value := getattr(options, name, None)) is not None}
    options.scale = (QUICK if options.quick else FULL)._replace(**sizes)
    if not 0 < options.kept < options.scale.layers:
        raise UserError(
            f"{options.kept} of {options.scale.layers} layers in BF16",
            key="--kept",
            remedy=f"1 to {options.scale.layers - 1}",
        )
    read_text(options.file, options.scale)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    size = {"scale": options.scale._asdict(), "kept": options.kept, "lr": options.lr}

    def of_this_size() -> list[dict[str, Any]]:
        return [run for run in read_runs(options.output) if all(run[key] == value for key, value in size.items())]

    there = {(run["variant"], run["seed"]) for run in of_this_size()}
    every = [(variant, seed) for seed in options.seeds for variant in options.variants]
    # Those in BF16 first: they are short, and without them the others say nothing.
    wanted = sorted((run for run in every if run not in there), key=lambda run: run[0] != BF16)
    failures = all_runs(options, wanted)
    runs = sorted(of_this_size(), key=lambda run: (VARIANTS.index(run["variant"]), run["seed"]))
    print_runs(runs, options.scale.steps)
    print_differences(runs)
    if options.json:
        write_json(options.json, machine=facts, runs=runs, failures=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    main_entry(main)
