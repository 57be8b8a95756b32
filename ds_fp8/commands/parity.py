"""FP8 against BF16 on your own stage: ds-fp8 parity my_stage.json --steps 500 --seeds 3.

Trains the stage for so many steps in FP8 and in BF16 from each of the seeds, one run after the other, and compares the
final validation losses. The verdict is one of: as good, undecided (always below 200 steps, and with one seed that shows
no failure), worse. Leaves parity.json and report.html in --out. Run it again and it continues where it stopped. The
exit code is 1 where FP8 is worse, else 0.

    --grid fp8.preset=infir2,hybrid_fast,coat     every value against BF16; or every combination, or a --sweep FILE
    --grid optimizer.params.lr=5e-5,1e-4,2e-4     how robust is it?

BF16 runs are shared by points where they are the same. Of every point the page also has diverged runs and spikes.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fp8.commands.arguments import (
    add_grid,
    add_out,
    add_stage,
    count,
    load_deepspeed,
    parser_of,
    points_of,
    share,
    stage_file,
)
from ds_fp8.config.files import check_writable

if TYPE_CHECKING:
    from ds_fp8.train import Stage


def main() -> int:
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--steps", required=True, type=count, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=count, default=1, help="seeds, from train.seed upwards (default 1)")
    parser.add_argument("--gpus", "--ranks", type=count, help="ranks of every run (default: the GPUs; without GPUs 1)")
    parser.add_argument("--evaluations", type=count, default=10, help="evaluations along every run (default 10)")
    parser.add_argument("--tolerance", type=share, help="relative gap that is allowed (default 0.0025)")
    add_out(parser, "runs/parity")
    add_grid(parser)
    arguments = parser.parse_args()
    check_writable(arguments.out, "--out")
    load_deepspeed()

    import torch

    from ds_fp8.report import compare
    from ds_fp8.report.verdict import TOLERANCE
    from ds_fp8.train import load_stage

    file, ranks, out = stage_file(arguments), arguments.gpus or torch.cuda.device_count() or 1, arguments.out
    stage = load_stage(file, arguments.set, ranks)
    points = points_of(arguments, compare.SET_HERE)
    stages = {point: load_stage(file, [*arguments.set, *changes], ranks) for point, changes in points.items()}
    pairs = compare.pairs_of(points, range(stage.train.seed, stage.train.seed + arguments.seeds))
    stages = {point: _with_length(stage) for point, stage in stages.items()}
    changes = {
        str(run): [*arguments.set,
                   *compare.changes_of(stages[pair[0].point], run, arguments.steps, arguments.evaluations, out)]
        for pair in pairs for run in pair
    }  # fmt: skip
    compare.train_all(changes, file, ranks, partial(train_once, file, ranks), partial(print, flush=True))
    found, title = compare.comparisons_in(out, pairs), f"FP8 against BF16, {file.parent.name}/{file.name}"
    figures, page, verdict = compare.write_parity(found, out, title, arguments.tolerance or TOLERANCE)
    print(f"\n{verdict}\nfigures: {figures}\nreport:  {page}")
    return int(verdict.word == "worse")


def _with_length(stage: Stage) -> Stage:
    """Return the stage with its steps: where it has epochs and a schedule in steps, they are known once data is."""
    schedule = stage.train.schedule
    if stage.train.steps is not None or max(schedule.warmup, schedule.decay) < 1:
        return stage
    from ds_fp8.data import build_data, build_tokenizer
    from ds_fp8.train import trial
    from ds_fp8.train.model import load_model_config

    tokenizer = build_tokenizer(stage.data)
    alone = trial.check_rows(load_model_config(stage, tokenizer), stage.model.attn_implementation) is not None
    return stage.with_length(len(build_data(stage.data, tokenizer, alone=alone).train))


def train_once(config: Path, ranks: int, overrides: list[str]) -> None:
    from ds_fp8.cluster.launcher import train_here

    changes = [part for change in overrides for part in ("--set", change)]
    if code := train_here(["--deepspeed_config", str(config), *changes], ranks):
        sys.exit(code)
