"""Does the best learning rate stay where it is when a model becomes wider? Munit scaling beside the usual weights.

    python scripts/experiments/width_transfer.py --json transfer.json                         a GPU
    python scripts/experiments/width_transfer.py --quick --steps 150                          a CPU

Answer (2026-11-22, CPU): with munit scaling 2^-4 is best at widths 64, 128 and 256, in BF16 and in FP8 with static
scales, whose loss there is -0.41, -0.14 and +0.47% from BF16's in the mean of five seeds.

A Llama of bytes of Python sources (byte_training.py) trains once for every width, learning rate and variant:

    munit          munit scaling, its linears with the static scales of preset "munit"
    munit_bf16     the same model in BF16
    standard       weights of deviation 0.02, norms before the branches, BF16: learning rates of its own grid

Every run of a width starts from the same seed and sees the same batches. Heads have 32 dimensions at any width. The
figure is the mean loss of the last tenth of the steps, the optimum the learning rate of the lowest: a parametrisation
transfers where the optima of all widths are within a factor of 2. --json is written after every run, and runs that it
holds are not made again; every seed and number of steps wants a file of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from byte_training import Scale, batch, final_loss, learning_rate, read_sources
from common import argument_parser, begin, device, integers, print_table, whole_numbers, words, write_json
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.layers import munit
from ds_fp8.layers.convert import convert
from ds_fp8.optim import AdamW

VARIANTS = ("munit", "munit_bf16", "standard")
HEAD = 32
"""Dimensions of a head."""
EPSILON = 1e-12
"""Of Adam: gradients of unit-variance weights are small."""


def build_model(width: int, scale: Scale, variant: str, base_width: int, seed: int) -> PreTrainedModel:
    """Return the model of a width in BF16, ready to be trained as `variant` says."""
    munit.register()
    torch.manual_seed(seed)
    heads = width // HEAD
    config = AutoConfig.for_model(
        "llama" if variant == "standard" else "munit_llama",
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=scale.layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD, max_position_embeddings=scale.length,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    if variant != "standard":
        config.munit_base_width = base_width
    model = AutoModelForCausalLM.from_config(config).to(device(), torch.bfloat16)
    if variant == "munit":
        convert(model, FP8Config.from_preset("munit", monitor={"every": 0}))
    return model


def train(width: int, variant: str, peak: float, scale: Scale, text: torch.Tensor, base_width: int, seed: int) -> float:
    """Return the mean loss of the last tenth of the steps; NaN for a run that diverged."""
    model = build_model(width, scale, variant, base_width, seed)
    groups = [{"params": list(model.parameters()), "lr": peak}]
    if variant != "standard":
        groups = munit.parameter_groups(model, peak)
    optimizer = AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step in range(scale.steps):
        for group, own in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = learning_rate(step, scale.steps, own)
        rows = batch(text, scale, seed * 1_000_003 + step)
        loss = model(input_ids=rows, labels=rows).loss
        if not math.isfinite(loss.item()):
            return math.nan
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return final_loss(losses)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--widths", type=integers, default=[64, 128, 256], metavar="D,D", help="multiples of 32")
    parser.add_argument("--variants", type=words, default=list(VARIANTS), metavar="NAME,NAME", help="of those above")
    parser.add_argument("--rates", type=whole_numbers, default=[-6, -5, -4, -3, -2, -1], metavar="E,E",
                        help="munit's learning rates at the smallest width, as exponents of 2")  # fmt: skip
    parser.add_argument("--standard-rates", type=whole_numbers, default=[-11, -10, -9, -8, -7, -6, -5], metavar="E,E",
                        help="the standard parametrisation's")  # fmt: skip
    parser.add_argument("--steps", type=int, default=200, help="of every run (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    options = parser.parse_args(arguments)
    for name in options.variants:
        if name not in VARIANTS:
            raise UserError(f'unknown variant "{name}"', remedy=f"use {', '.join(VARIANTS)}")
    if any(width % HEAD or width <= 0 for width in options.widths):
        raise UserError("a width is no multiple of 32", remedy="--widths 64,128,256")
    return options


def settings_of(options: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Return what two runs must have in common to be compared."""
    return {**scale._asdict(), "seed": options.seed, "base_width": min(options.widths)}


def earlier_runs(file: str | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that `file` holds.

    Raises:
        UserError: They have other settings, and would be overwritten.
    """
    if file is None or not Path(file).is_file():
        return []
    found = json.loads(Path(file).read_text())
    if found["settings"] != settings:
        changed = [name for name, value in settings.items() if found["settings"].get(name) != value]
        raise UserError(
            f"{file} holds runs of another {', '.join(changed)}", remedy="name another file, or delete this one"
        )
    return found["runs"]


def summary(runs: list[dict[str, Any]], variant: str) -> list[tuple[object, ...]]:
    """Return (variant, width, log2 of the best learning rate, its loss, loss by learning rate) of every width."""
    rows = []
    for width in sorted({run["width"] for run in runs if run["variant"] == variant}):
        losses = {run["log2_rate"]: run["loss"] for run in runs if (run["variant"], run["width"]) == (variant, width)}
        finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
        best = min(finite, key=finite.get) if finite else None
        curve = " ".join(f"{rate}:{loss:.3f}" for rate, loss in sorted(losses.items()))
        rows.append((variant, width, best, finite.get(best, math.nan), curve))
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    scale = Scale(0, 0, 2, 0, 64, 8, options.steps, 500_000) if options.quick else Scale(
        0, 0, 4, 0, 512, 32, options.steps, 96_000_000
    )  # fmt: skip
    text, facts, settings = read_sources(scale.text), begin(), settings_of(options, scale)
    runs = earlier_runs(options.json, settings)
    done = {(run["variant"], run["width"], run["log2_rate"]) for run in runs}
    for variant in options.variants:
        for rate in options.standard_rates if variant == "standard" else options.rates:
            for width in options.widths:
                if (variant, width, rate) in done:
                    continue
                started = time.perf_counter()
                loss = train(width, variant, 2.0**rate, scale, text, min(options.widths), options.seed)
                seconds = time.perf_counter() - started
                runs.append({"variant": variant, "width": width, "log2_rate": rate, "loss": loss, "seconds": seconds})
                print(f"{variant} width {width} rate 2^{rate}: {loss:.4f} ({seconds:.0f} s)", flush=True)
                if options.json:
                    write_json(options.json, banner=facts, settings=settings, runs=runs)
    rows = [row for variant in options.variants for row in summary(runs, variant)]
    print_table("Best learning rate by width", ["variant", "width", "log2 best", "loss", "log2 rate: loss"], rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
