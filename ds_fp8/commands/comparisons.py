"""Arguments and runs of the commands that compare: one way to name a grid, and every point in FP8 and in BF16."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ds_fp8.commands.arguments import add_stage, config_file, count
from ds_fp8.config.errors import UserError

if TYPE_CHECKING:
    from ds_fp8.train import Stage


def add_runs(parser: argparse.ArgumentParser, out: str, seeds: int) -> None:
    """Add the stage, the grid, and what its runs have in common.

    Args:
        parser: Parser of the command.
        out: Default of --out.
        seeds: Default of --seeds.
    """
    add_stage(parser)
    parser.add_argument("--steps", required=True, type=count, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=count, default=seeds, help=f"seeds, from train.seed upwards (default {seeds})")
    parser.add_argument("--gpus", "--ranks", type=count, help="ranks of every run (default: the GPUs; without GPUs 1)")
    add_out(parser, out)
    add_grid(parser)


def add_out(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add --out, the folder that the command writes to; --output is the same."""
    parser.add_argument(
        "--out", "--output", type=Path, metavar="FOLDER", default=default and Path(default),
        help=f"folder (default {default})" if default else "folder",
    )  # fmt: skip


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Add --grid and --sweep, which name the points of a grid."""
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=VALUE,...",
                        help="values to try for a key; repeatable, every combination is run")  # fmt: skip
    parser.add_argument("--sweep", metavar="FILE", help="file with a grid or with named points")


def read_points(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return the changes KEY=VALUE of every point by its name; without a grid the stage itself, named "".

    Raises:
        UserError: The grid is malformed, or has another number of GPUs or BF16 among its points.
    """
    from ds_fp8.memory.grid import GPUS, read_sweep

    if not arguments.grid and arguments.sweep is None:
        return {"": ()}
    config, points = read_sweep(arguments.sweep and config_file(arguments.sweep), 1, arguments.grid)
    varied = {
        key for settings in (config.set, config.grid, *(named.set for named in config.points)) for key in settings
    }
    if GPUS in varied:
        raise UserError("all points of a comparison need the same number of ranks", key=GPUS, remedy="--gpus 4")
    if "fp8.enabled" in varied:
        raise UserError(
            "a comparison runs every point with FP8 and with BF16 already", key="fp8.enabled", remedy="leave it out"
        )
    return {point.name: tuple(point.overrides(measuring=False)) for point in points}


def ranks_of(arguments: argparse.Namespace) -> int:
    """Return the ranks of every run: --gpus, or else the GPUs here, or 1."""
    import torch

    return arguments.gpus or torch.cuda.device_count() or 1


def with_length(stage: Stage) -> Stage:
    """Return the stage with its steps: where it has epochs and a schedule in steps, they are known once data is."""
    schedule = stage.train.schedule
    if stage.train.steps is not None or max(schedule.warmup, schedule.decay) < 1:
        return stage
    from ds_fp8.data import build_data, build_tokenizer, default_cache_dir

    data = build_data(stage.data, build_tokenizer(stage.data, default_cache_dir()), default_cache_dir())
    return stage.with_length(len(data.train))


def train_all(runs: Mapping[str, list[str]], config: Path, ranks: int) -> None:
    """Load the stage as every run changes it, then make the runs that are not there, by their names, one by one.

    Raises:
        UserError: A run is wrong, or its folder holds another one; before the first has taken its time.
    """
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
    """Raise UserError where the run in the stage's folder was started with other steps."""
    from ds_fp8.config.files import read_json
    from ds_fp8.config.fp8 import section_of
    from ds_fp8.train.checkpoints import CONFIG

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
    """Make one run, with what it prints; its failure is this command's."""
    from ds_fp8.cluster.local_launch import train_here

    changes = [part for change in overrides for part in ("--set", change)]
    code = train_here(["--deepspeed_config", str(config), *changes], ranks)
    if code:
        sys.exit(code)
