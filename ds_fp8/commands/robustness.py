"""Compare the robustness of FP8 with BF16's: ds-fp8 robustness my_stage.json --steps 200 --seeds 3 --rates 0.5,1,2,4.

Trains the stage for so many steps in FP8 and in BF16 at every learning rate (a multiple of the stage's own) from each
of the seeds, one run after the other: final losses, share of diverged runs, loss spikes, and the sharpness of the loss
in the logits of every final model. Leaves robustness.json and robustness.html in --out. Run it again and it continues
where it stopped: finished runs are not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fp8.commands.arguments import add_stage, amount, count, parser_of, stage_file
from ds_fp8.commands.parity import train_once
from ds_fp8.config.errors import UserError

if TYPE_CHECKING:
    from ds_fp8.report.robustness import Cell
    from ds_fp8.train import Stage


def main() -> int:
    """Train the grid, measure its models and write the page."""
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--steps", required=True, type=count, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=count, default=2, help="number of seeds, from train.seed upwards (default 2)")
    parser.add_argument("--rates", type=_amounts, default=[0.5, 1.0, 2.0, 4.0], metavar="X,X",
                        help="multiples of the stage's learning rate (default 0.5,1,2,4)")  # fmt: skip
    parser.add_argument("--ranks", type=count, help="processes of every run (default: the GPUs, or 1)")
    parser.add_argument("--batches", type=count, default=2, help="validation batches of the sharpness (default 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"), help="folder (default runs/robustness)")
    arguments = parser.parse_args()

    import torch

    from ds_fp8.report.robustness import cell_overrides, grid, outcomes
    from ds_fp8.report.robustness_page import write_robustness
    from ds_fp8.report.runs import RunRecord
    from ds_fp8.train import load_stage
    from ds_fp8.train.checkpoints import RESULT
    from ds_fp8.train.sharpness import RELATIVE

    file = stage_file(arguments)
    ranks = arguments.ranks or torch.cuda.device_count() or 1
    stage = load_stage(file, arguments.set, ranks)
    rate = stage.configuration.optimizer_params.get("lr")
    if rate is None:
        raise UserError(
            "the stage has no learning rate to vary",
            key="optimizer.params.lr",
            file=file,
            remedy='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
        )
    seeds = range(stage.train.seed, stage.train.seed + arguments.seeds)
    cells = list(grid([rate * multiple for multiple in arguments.rates], seeds))
    for number, cell in enumerate(cells, 1):
        print(f"\n== {number} of {len(cells)}: {cell.kind}, learning rate {cell.rate:g}, seed {cell.seed}", flush=True)
        if not (cell.folder(arguments.out) / RESULT).is_file():
            changes = cell_overrides(stage, cell, arguments.steps, arguments.out)
            train_once(file, ranks, [*arguments.set, *changes])
    print("\n== sharpness of the final models", flush=True)
    for cell in cells:  # not in between: runs would inherit this process's place in its process group
        _measure(stage, cell, arguments.out, arguments.batches)
    found = outcomes(stage, cells, arguments.out)
    result = RunRecord(cells[0].folder(arguments.out)).result
    facts = {
        "stage": file.name,
        "steps": result["steps"],
        "device": result["device"],
        "relative": RELATIVE,
        "versions": result["versions"],
    }
    figures, page, sentence = write_robustness(found, facts, arguments.out, f"Robustness of FP8, {file.name}")
    print(f"\n{sentence}\nfigures: {figures}\npage:    {page}")
    return 0


def _amounts(text: str) -> list[float]:
    """Parse "0.5,1,2"."""
    found = [amount(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names one of them twice")
    return found


def _measure(stage: Stage, cell: Cell, out: Path, batches: int) -> None:
    """Write the sharpness of a finished run's model beside its result, unless it is there or its loss is not finite."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from transformers import AutoModelForCausalLM

    import ds_fp8
    from ds_fp8.data import build_data, default_cache_dir, load_tokenizer
    from ds_fp8.layers import munit
    from ds_fp8.report.robustness import SHARPNESS
    from ds_fp8.report.runs import RunRecord
    from ds_fp8.train import packed_attention, processes
    from ds_fp8.train.batches import micro_batches
    from ds_fp8.train.checkpoints import MODEL
    from ds_fp8.train.durable import write_atomically
    from ds_fp8.train.sharpness import logit_sharpness

    folder = cell.folder(out)
    if (folder / SHARPNESS).is_file() or RunRecord(folder).result["final_loss"] is None:
        return
    processes.set_single_process_env()
    processes.init_distributed()
    packed_attention.register()
    munit.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder / MODEL, dtype=torch.bfloat16, attn_implementation=stage.model.attn_implementation
    ).to(get_accelerator().current_device_name())
    if cell.kind == "fp8":
        ds_fp8.convert(model, stage.fp8)
    rows = build_data(stage.data, load_tokenizer(str(folder / MODEL)), default_cache_dir()).validation
    chosen = range(min(batches * stage.global_batch, len(rows)))
    found = logit_sharpness(model, micro_batches(stage, rows, chosen, model.device))
    write_atomically(folder / SHARPNESS, json.dumps(found, indent=2) + "\n")
