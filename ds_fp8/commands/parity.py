"""FP8 against BF16 on your own stage: ds-fp8 parity my_stage.json --steps 500 --seeds 3.

Trains the stage for so many steps in FP8 and in BF16 from each of the seeds, one run after the other, and compares the
final validation losses with what another seed changes. Leaves parity.json and report.html in --out. Run it again and it
continues where it stopped. The exit code is 0 where FP8 is equal, else 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fp8.commands.arguments import add_stage, amount, count, parser_of, stage_file
from ds_fp8.config.files import check_writable

if TYPE_CHECKING:
    from ds_fp8.train.stage import Stage


def main() -> int:
    """Train the twins and give the verdict."""
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--steps", required=True, type=count, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=count, default=1, help="number of seeds, from train.seed upwards (default 1)")
    parser.add_argument("--gpus", "--ranks", type=count, help="processes of every run (default: the GPUs, or 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/parity"), help="folder (default runs/parity)")
    parser.add_argument("--tolerance", type=amount, help="relative gap that is allowed (default 0.0025)")
    arguments = parser.parse_args()
    check_writable(arguments.out, "--out")

    import torch

    from ds_fp8.report import parity
    from ds_fp8.report.page import write_report
    from ds_fp8.report.runs import KINDS
    from ds_fp8.report.verdict import TOLERANCE, judge_seeds
    from ds_fp8.train import load_stage

    file = stage_file(arguments)
    ranks = arguments.gpus or torch.cuda.device_count() or 1
    stage = _with_length(load_stage(file, arguments.set, ranks))
    seeds = range(stage.train.seed, stage.train.seed + arguments.seeds)
    runs = {
        f"{kind}, seed {seed}": [
            *arguments.set,
            *parity.twin_overrides(stage, kind, seed, arguments.steps, arguments.out),
        ]
        for seed in seeds
        for kind in KINDS
    }
    for changes in runs.values():
        load_stage(file, changes, ranks)  # a mistake in any of them, before the first has taken its time
    for name, changes in runs.items():
        print(f"\n== {name}", flush=True)
        train_once(file, ranks, changes)
    tolerance = TOLERANCE if arguments.tolerance is None else arguments.tolerance
    twins = parity.comparisons_in(arguments.out, seeds)
    comparison = parity.compare(twins, tolerance)
    verdict = judge_seeds(twins, tolerance)
    figures = parity.write(comparison, arguments.out)
    _, page = write_report(twins, verdict, arguments.out, f"FP8 against BF16, {file.name}", tolerance)
    print(f"\n{verdict.words}\nfigures: {figures}\nreport:  {page}")
    return 0 if verdict.passed else 1


def _with_length(stage: Stage) -> Stage:
    """Return the stage with its steps: where it has epochs and a schedule in steps, they are known once data is."""
    schedule = stage.train.schedule
    if stage.train.steps is not None or max(schedule.warmup, schedule.decay) < 1:
        return stage
    from ds_fp8.data import build_data, build_tokenizer, default_cache_dir

    data = build_data(stage.data, build_tokenizer(stage.data, default_cache_dir()), default_cache_dir())
    return stage.with_length(len(data.train))


def train_once(config: Path, ranks: int, overrides: list[str]) -> None:
    """Make one run, with what it prints; its failure is this command's."""
    from ds_fp8.cluster.local_launch import train_here

    changes = [part for change in overrides for part in ("--set", change)]
    code = train_here(["--deepspeed_config", str(config), *changes], ranks)
    if code:
        sys.exit(code)
