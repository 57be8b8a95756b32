"""Compare the robustness of FP8 with BF16's: ds-fp8 robustness my_stage.json --steps 200 --seeds 3 --rates 0.5,1,2,4.

Trains the stage for so many steps in FP8 and in BF16 at every point of a grid (without one: at multiples of the stage's
own learning rate) from each of the seeds, one run after the other: final losses, share of diverged runs, loss spikes,
and the sharpness of the loss in the logits of every final model. Leaves robustness.json and robustness.html in --out.
Run it again and it continues where it stopped: finished runs are not made again.

    --grid fp8.preset=infir2,coat --grid optimizer.params.lr=1e-4,4e-4
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fp8.commands.arguments import amount, count, parser_of, stage_file
from ds_fp8.commands.comparisons import add_runs, ranks_of, read_points, train_all, with_length
from ds_fp8.config.errors import UserError

if TYPE_CHECKING:
    from ds_fp8.report.parity import Cell
    from ds_fp8.train import Stage

RATE = "optimizer.params.lr"
MULTIPLES = [0.5, 1.0, 2.0, 4.0]


def main() -> int:
    """Train the grid, measure its models and write the page."""
    parser = parser_of(__doc__)
    add_runs(parser, "runs/robustness", seeds=2)
    parser.add_argument("--rates", type=_amounts, metavar="X,X",
                        help=f"--grid {RATE}=... in multiples of the stage's (default 0.5,1,2,4)")  # fmt: skip
    parser.add_argument("--batches", type=count, default=2, help="validation batches of the sharpness (default 2)")
    arguments = parser.parse_args()

    from ds_fp8.report.parity import twins_of
    from ds_fp8.report.robustness import cell_overrides, outcomes
    from ds_fp8.report.robustness_page import write_robustness
    from ds_fp8.report.runs import RunRecord
    from ds_fp8.train import load_stage
    from ds_fp8.train.sharpness import RELATIVE

    file, ranks = stage_file(arguments), ranks_of(arguments)
    stage = load_stage(file, arguments.set, ranks)
    if arguments.rates or not (arguments.grid or arguments.sweep):
        rates = [_rate(stage) * multiple for multiple in arguments.rates or MULTIPLES]
        arguments.grid.append(f"{RATE}={','.join(map(repr, rates))}")
    twins = twins_of(read_points(arguments), range(stage.train.seed, stage.train.seed + arguments.seeds))
    stages = {cell: load_stage(file, [*arguments.set, *cell.changes], ranks) for pair in twins for cell in pair}
    runs = {
        str(cell): [*arguments.set, *cell_overrides(with_length(own), cell, arguments.steps, arguments.out)]
        for cell, own in stages.items()
    }
    train_all(runs, file, ranks)
    print("\n== sharpness of the final models", flush=True)
    for cell, own in stages.items():  # not in between: runs would inherit this process's place in its process group
        _measure(own, cell, arguments.out, arguments.batches)
    found = outcomes(stage, twins, arguments.out)
    result = RunRecord(twins[0][0].folder(arguments.out)).result
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


def _rate(stage: Stage) -> float:
    rate = stage.configuration.optimizer_params.get("lr")
    if rate is None:
        raise UserError(
            "the stage has no learning rate to vary",
            key=RATE,
            file=stage.file,
            remedy='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
        )
    return rate


def _amounts(text: str) -> list[float]:
    """Parse "0.5,1,2"."""
    found = [amount(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} lists a value twice")
    return found


def _measure(stage: Stage, cell: Cell, out: Path, batches: int) -> None:
    """Write the sharpness of a finished run's model beside its result, unless it is there or its loss is not finite."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from transformers import AutoModelForCausalLM

    import ds_fp8
    from ds_fp8.data import build_data, default_cache_dir, load_tokenizer, measured_rows
    from ds_fp8.layers.linear import munit
    from ds_fp8.report.robustness import SHARPNESS
    from ds_fp8.report.runs import RunRecord
    from ds_fp8.train import packed_attention, processes
    from ds_fp8.train.batches import micro_batches
    from ds_fp8.train.checkpoints import MODEL
    from ds_fp8.train.durable import write_atomically
    from ds_fp8.train.sharpness import logit_sharpness

    folder, stage = cell.folder(out), stage.unshared()
    if (folder / SHARPNESS).is_file() or RunRecord(folder).result["final_loss"] is None:
        return
    processes.set_single_process_env()
    processes.init_distributed()
    packed_attention.register()
    munit.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder / MODEL, dtype=torch.bfloat16, attn_implementation=stage.model.attn_implementation
    ).to(get_accelerator().current_device_name())
    # A run in FP8 is judged with the casts that it was trained with.
    if cell.kind == "fp8":
        ds_fp8.convert(model, stage.fp8)
    rows = build_data(stage.data, load_tokenizer(str(folder / MODEL)), default_cache_dir()).validation
    chosen = measured_rows(rows.rows_by_source, batches * stage.global_batch, stage.data.weights())
    found = logit_sharpness(model, micro_batches(stage, rows, chosen, model.device))
    # Atomically, for the file's presence says that this model has been measured.
    write_atomically(folder / SHARPNESS, json.dumps(found, indent=2) + "\n")
