"""Arguments of the commands that compare: one way to name a grid."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_fp8.commands.arguments import config_file
from ds_fp8.config.errors import UserError


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
    from ds_fp8.memory.sweep import GPUS, read_sweep

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
