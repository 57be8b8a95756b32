"""FP8 against BF16 on your own stage: ds-fp8 parity my_stage.json --steps 500 --seeds 3.

Trains the stage for so many steps in FP8 and in BF16 from each of the seeds, one run after the other, and compares the
final validation losses with what another seed changes. Leaves parity.json and report.html in --out. Run it again and it
continues where it stopped. The exit code is 0 where FP8 is no worse, else 1.

    --more 0.1 --evaluations 32       what FP8 needs to BF16's final loss: steps, and seconds on the same GPUs

A run in FP8 that ends above BF16 is made again with 10% more steps, the schedule stretched over them, and losses along
the runs are compared by the weights in BF16, too.

    --grid fp8.preset=infir2,hybrid_fast,coat     every value against BF16; or every combination, or a --sweep FILE
    --grid optimizer.params.lr=5e-5,1e-4,2e-4     how robust is it?

Runs in BF16 are shared by points where they are the same. Of every point the page also tells diverged runs and spikes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fp8.commands.arguments import (
    add_grid,
    add_out,
    add_stage,
    amount,
    count,
    load_deepspeed,
    parser_of,
    read_points,
    share,
    stage_file,
)
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import check_writable, read_json

if TYPE_CHECKING:
    from ds_fp8.report.page import Table
    from ds_fp8.train import Stage

SAVED_ONCE = "leave it out: runs of a comparison are saved at their end alone"
# Keys that `parity.run_overrides` sets whatever a point says, and what to give instead
SET_HERE = {
    "train.seed": "--seeds 3, and --set train.seed=1 for the first of them",
    "train.steps": "--steps 500; for every other length another --out",
    "train.epochs": "--steps 500: the length of every run",
    "train.run_dir": "--out FOLDER",
    "train.eval_every": "--evaluations 10: so many in every run",
    "train.save_every": SAVED_ONCE,
    "train.keep_best": SAVED_ONCE,
}


def main() -> int:
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--steps", required=True, type=count, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=count, default=1, help="seeds, from train.seed upwards (default 1)")
    parser.add_argument("--gpus", "--ranks", type=count, help="ranks of every run (default: the GPUs; without GPUs 1)")
    parser.add_argument("--evaluations", type=count, default=10, help="evaluations along every run (default 10)")
    parser.add_argument("--more", type=amount, metavar="SHARE", help="more steps of FP8, to BF16's final loss")
    parser.add_argument("--tolerance", type=share, help="relative gap that is allowed (default 0.0025)")
    add_out(parser, "runs/parity")
    add_grid(parser)
    arguments = parser.parse_args()
    check_writable(arguments.out, "--out")
    load_deepspeed()

    import torch

    from ds_fp8.report import parity
    from ds_fp8.report.verdict import TOLERANCE
    from ds_fp8.train import load_stage

    file, ranks = stage_file(arguments), arguments.gpus or torch.cuda.device_count() or 1
    stage = load_stage(file, arguments.set, ranks)
    points = read_points(arguments, SET_HERE)
    stages = {point: load_stage(file, [*arguments.set, *changes], ranks) for point, changes in points.items()}
    twins = parity.twins_of(points, range(stage.train.seed, stage.train.seed + arguments.seeds))
    stages = {point: _with_length(stage) for point, stage in stages.items()}
    along, changes = ["train.eval_bf16=true"] if arguments.more else [], {}
    for fp8, bf16 in twins:
        for cell in (fp8, bf16):
            own = parity.run_overrides(stages[fp8.point], cell, arguments.steps, arguments.evaluations, arguments.out)
            changes[str(cell)] = [*arguments.set, *own, *along]
    _train_all(changes, file, ranks)
    if arguments.more:
        steps, changes = math.ceil(arguments.steps * (1 + arguments.more)), {}
        for cell in parity.longer_runs(arguments.out, twins):
            own = parity.run_overrides(stages[cell.point], cell, steps, 1, arguments.out)
            changes[str(cell)] = [*arguments.set, *own]
        _train_all(changes, file, ranks)
    title, tolerance = f"FP8 against BF16, {file.parent.name}/{file.name}", arguments.tolerance or TOLERANCE
    points = parity.comparisons_in(arguments.out, twins)
    figures, page, verdict = parity.write_parity(points, arguments.out, title, tolerance)
    _print(parity.table_to_loss(points))
    print(f"\n{verdict}\nfigures: {figures}\nreport:  {page}")
    return 0 if verdict.passed else 1


def _print(table: Table) -> None:
    cells = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    print("", table.caption, "", *lines, sep="\n")


def _with_length(stage: Stage) -> Stage:
    """Return the stage with its steps: where it has epochs and a schedule in steps, they are known once data is."""
    schedule = stage.train.schedule
    if stage.train.steps is not None or max(schedule.warmup, schedule.decay) < 1:
        return stage
    from ds_fp8.data import build_data, build_tokenizer

    return stage.with_length(len(build_data(stage.data, build_tokenizer(stage.data)).train))


def _train_all(runs: Mapping[str, list[str]], config: Path, ranks: int) -> None:
    """Make the runs that are not there, by their names, one by one. Raises UserError where a folder holds another."""
    from ds_fp8.train import load_stage
    from ds_fp8.train.resume import inspect_run

    # All of them first: a mistake in the last run is found before the first has taken hours.
    stages = {name: load_stage(config, changes, ranks) for name, changes in runs.items()}
    finished = set()
    for name, stage in stages.items():
        _check_same_length(stage)
        if inspect_run(stage).result is not None:
            finished.add(name)
    for number, (name, changes) in enumerate(runs.items(), 1):
        print(f"\n== {number} of {len(runs)}: {name}{', finished before' if name in finished else ''}", flush=True)
        if name not in finished:
            train_once(config, ranks, changes)


def _check_same_length(stage: Stage) -> None:
    from ds_fp8.config.fp8 import section_of
    from ds_fp8.train.run_folder import CONFIG

    file = stage.run_dir / CONFIG
    steps = section_of(read_json(file), "train").get("steps") if file.is_file() else stage.train.steps
    if steps != stage.train.steps:
        # It would go on, and end with weights of two schedules one after the other.
        raise UserError(
            f"{stage.run_dir} holds a run of {steps} steps, and one of {stage.train.steps} has another schedule",
            key="--steps",
            remedy="another --out, or as many steps",
        )


def train_once(config: Path, ranks: int, overrides: list[str]) -> None:
    from ds_fp8.cluster.launcher import train_here

    changes = [part for change in overrides for part in ("--set", change)]
    code = train_here(["--deepspeed_config", str(config), *changes], ranks)
    if code:
        sys.exit(code)
