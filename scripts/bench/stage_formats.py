"""A stage of `ds-fp8 train` with the linears in each number format, beside BF16: the same model, data and order.

    python scripts/bench/stage_formats.py --stage ds_configs/quickstart/cpt.json --steps 300 --output runs.jsonl
    python scripts/bench/stage_formats.py --variants bf16,perturbed,e4m3,mxfp8 --seeds 1236,1237 --output runs.jsonl

Model, data, optimizer and schedule are the stage's, in one process that takes the rows of --ranks ranks at every step.
Weights are cast where they are used, so that runs of one seed differ by the casts of their linears alone. Variants are
those of cast_parity.py: "bf16", "perturbed" (BF16, and one weight that differs in its last bit), a format (of all
operands, weights in blocks of 128x128, the rest in groups of 1x128), a preset, or a block format. Every run ends with a
line in --output; runs that are there already are not repeated, and the table is of all that are there.

    "final loss"   mean training loss of the last tenth of the steps
    "validation"   mean loss per token of held-out rows after the last step; "gap": relative to BF16 of the same seed
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from byte_training import PERTURBED, deterministic, perturb
from cast_parity import BF16, BLOCK_FORMATS, check_variants, fp8_section
from common import argument_parser, begin, device, integers, positive, print_table, words
from transformers import PreTrainedModel

from ds_fp8.config.errors import main_entry
from ds_fp8.config.formats import FORMATS
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import EMULATED_PRESETS, PRESETS
from ds_fp8.data import IGNORED, PackedDataset, StageData, build_data, build_tokenizer, default_cache_dir
from ds_fp8.layers.convert import convert
from ds_fp8.optim import AdamW
from ds_fp8.train.model import build_model, load_model_config
from ds_fp8.train.schedules import learning_rate_factor
from ds_fp8.train.stage import Stage, load_stage

STAGE = Path(__file__).parents[2] / "ds_configs" / "quickstart" / "cpt.json"
DEFAULT = "bf16,perturbed,e4m3,e5m2,e3m4,int8,log8,e2m3,e3m2,e2m1,int4,mxfp8,mxfp4,nvfp4,nvfp4-nearest"
VALIDATION_ROWS = 64


def stage_of(options: argparse.Namespace, seed: int) -> Stage:
    """Return the stage as `--ranks` ranks would read it."""
    os.environ["WORLD_SIZE"] = str(options.ranks)
    try:
        return load_stage(options.stage, [f"train.steps={options.steps}", f"train.seed={seed}"])
    finally:
        del os.environ["WORLD_SIZE"]


def batch_of(dataset: PackedDataset, rows: list[int]) -> dict[str, Any]:
    """Return rows of a dataset as the model takes them, with the number of tokens that their loss is the mean over."""
    items = [dataset[row] for row in rows]
    batch = {name: torch.stack([item[name] for item in items]).to(device()) for name in items[0]}
    # With a cache transformers would attend across the documents of a row.
    return {**batch, "num_items_in_batch": (batch["labels"][:, 1:] != IGNORED).sum(), "use_cache": False}


@torch.no_grad()
def validation_loss(model: PreTrainedModel, data: StageData, rows_at_once: int) -> float:
    """Return the mean loss per token of the first VALIDATION_ROWS held-out rows."""
    total = count = 0.0
    last = min(VALIDATION_ROWS, len(data.validation))
    model.eval()
    for start in range(0, last, rows_at_once):
        batch = batch_of(data.validation, list(range(start, min(start + rows_at_once, last))))
        items = batch["num_items_in_batch"].item()
        total, count = total + model(**batch).loss.item() * items, count + items
    return total / count


def train(variant: str, stage: Stage, data: StageData, model: PreTrainedModel) -> dict[str, Any]:
    """Train all steps of the stage; the figures of the run."""
    params = {key: stage.raw["optimizer"]["params"][key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = AdamW(model.parameters(), **params)
    if variant == PERTURBED:
        perturb(model, optimizer)
    section = fp8_section(variant)
    if section is not None:
        convert(model, FP8Config(**section, monitor={"every": 0}))
    losses, started = torch.zeros(stage.train.steps), time.perf_counter()
    for step in range(stage.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = params["lr"] * learning_rate_factor(step, stage.train.steps, stage.train.schedule)
        loss = model(**batch_of(data.train, data.rows_of_step(step, stage.global_batch, stage.train.seed))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), stage.raw["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    seconds = (time.perf_counter() - started) / stage.train.steps
    return {
        "final_loss": losses[-max(1, len(losses) // 10) :].mean().item(),
        "validation_loss": validation_loss(model, data, stage.global_batch),
        "seconds_a_step": seconds,
        "losses": losses.tolist(),
    }


def read_runs(file: Path) -> list[dict[str, Any]]:
    """Return the runs that have ended."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def print_runs(runs: list[dict[str, Any]], steps: int) -> None:
    """Print a line for each variant: means over its seeds, and the gap of every seed."""
    reference = {run["seed"]: run for run in runs if run["variant"] == BF16}
    lines = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        mine = [run for run in runs if run["variant"] == variant and run["seed"] in reference]
        if not mine:
            continue
        gaps = {
            key: [100 * (run[key] / reference[run["seed"]][key] - 1) for run in mine]
            for key in ("final_loss", "validation_loss")
        }
        cells: list[object] = [variant, len(mine)]
        for key, numbers in gaps.items():
            mean = statistics.mean(run[key] for run in mine)
            each = " ".join(f"{gap:+.2f}" for gap in numbers)
            cells += [f"{mean:.4f}", f"{statistics.mean(numbers):+.2f}", each]
        lines.append(cells)
    columns = ("linears", "seeds", "final loss", "gap %", "each seed", "validation", "gap %", "each seed")
    print_table(f"{steps} steps", columns, lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    known = [BF16, PERTURBED, *PRESETS, *EMULATED_PRESETS, *FORMATS, *BLOCK_FORMATS]
    parser.add_argument("--stage", type=Path, default=STAGE, metavar="JSON", help="default: the quickstart's cpt.json")
    parser.add_argument("--variants", type=words, default=words(DEFAULT), metavar="NAME,...", help=DEFAULT)
    parser.add_argument("--seeds", type=integers, default=[1236])
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--ranks", type=positive, default=2, help="whose rows a step takes (default 2)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines, one a run")
    options = parser.parse_args(arguments)
    check_variants(options.variants, known)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    for seed in options.seeds:
        stage = stage_of(options, seed)
        tokenizer = build_tokenizer(stage.data, default_cache_dir())
        data, config = build_data(stage.data, tokenizer, default_cache_dir()), load_model_config(stage, tokenizer)
        for variant in options.variants:
            if any((run["variant"], run["seed"], run["steps"]) == (variant, seed, options.steps)
                   for run in read_runs(options.output)):  # fmt: skip
                continue
            with deterministic():
                row = train(variant, stage, data, build_model(stage, config).to(device()))
            with options.output.open("a") as file:
                line = {"variant": variant, "seed": seed, "steps": options.steps, **row, "machine": facts}
                file.write(json.dumps(line) + "\n")
            print(f"{variant:>18} seed {seed}: final {row['final_loss']:.4f}, validation {row['validation_loss']:.4f}, "
                  f"{row['seconds_a_step']:.2f} s a step", flush=True)  # fmt: skip
    print_runs([run for run in read_runs(options.output) if run["steps"] == options.steps], options.steps)
    return 0


if __name__ == "__main__":
    main_entry(main)
