"""Measure memory and speed over a grid of settings of a stage.

    ds-fp8 sweep my_stage.json --sweep sweeps/fp8_levels.json [--gpus 4]
    ds-fp8 sweep my_stage.json --grid train_micro_batch_size_per_gpu=1,2,4 --grid fp8.preset=infir2,coat

Every point is a run of `ds-fp8 train` in processes of its own. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from ds_fp8.commands.arguments import (
    add_grid,
    add_out,
    add_stage,
    amount,
    config_file,
    count,
    load_deepspeed,
    parser_of,
    stage_file,
)
from ds_fp8.config.files import read_json


def main() -> int:
    parser = parser_of(__doc__)
    add_stage(parser)
    add_grid(parser)
    parser.add_argument("--gpus", type=count, default=1, help="ranks of points that do not set them (default 1)")
    parser.add_argument("--steps", type=count, default=4, help="optimizer steps to measure (default 4)")
    parser.add_argument("--timeout", type=amount, default=900, metavar="SECONDS", help="of a point (default 900)")
    add_out(parser, None)
    parser.add_argument("--plan", action="store_true", help="print the points and their estimates, and run nothing")
    parser.add_argument("--memory", type=amount, metavar="GIB", help="with --plan: say which points fit on a GPU")
    arguments = parser.parse_args()
    # Terminated, it ends the point that is running as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    stage, sweep_file = stage_file(arguments), arguments.sweep and config_file(arguments.sweep)
    load_deepspeed()

    from deepspeed.utils.logging import set_log_level_from_string

    from ds_fp8.memory.report import print_plan, print_records, write_best
    from ds_fp8.memory.sweep import FILE, Sweep, check_points, only_driver
    from ds_fp8.report.compare import read_points

    set_log_level_from_string("warning")
    raw = read_json(stage)
    points = read_points(sweep_file, arguments.gpus, arguments.grid, arguments.set)
    check_points(points, stage)
    if arguments.plan:
        print_plan(points, raw, None if arguments.memory is None else round(arguments.memory * 2**30))
        return 0

    sweep_name = sweep_file.stem if sweep_file else "grid"
    folder = arguments.out or Path("runs/sweeps") / sweep_name / f"{stage.parent.name}_{stage.stem}"
    sweep = Sweep(stage, raw, folder, arguments.steps, arguments.timeout)
    # Two drivers of one folder would measure on the same GPUs at once, and each other's memory.
    with only_driver(folder):
        try:
            sweep.run(points)
        # Also after Ctrl-C: the points measured so far make a table.
        finally:
            records = sweep.known(points)
            best = write_best(folder, records, raw)
        if records:
            print_records(records, sweep.console)
            sweep.console.print("\n".join(f"  {file}" for file in (folder / FILE, best) if file), markup=False)
    return 0 if len(records) >= len(points) else 1
