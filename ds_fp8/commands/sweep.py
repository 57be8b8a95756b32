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
    parser_of,
    say,
    stage_file,
)
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import read_json
from ds_fp8.config.schema import nearest


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
    parser.add_argument("--only", action="append", metavar="POINT", help="measure this point alone (repeatable)")
    parser.add_argument("--rerun", action="append", default=[], metavar="STATUS", help="measure such points again")
    arguments = parser.parse_args()
    # Terminated, it ends the point that is running as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    stage, sweep_file = stage_file(arguments), arguments.sweep and config_file(arguments.sweep)
    say("loading torch and DeepSpeed ...")

    from deepspeed.utils.logging import set_log_level_from_string
    from rich.console import Console

    from ds_fp8.memory.report import print_plan, print_records, write_report
    from ds_fp8.memory.sweep import DONE, FILE, Setting, Sweep, check_points, only_driver, read_sweep

    set_log_level_from_string("warning")
    for status in arguments.rerun:
        if status not in DONE:
            raise UserError(f'"{status}" is not a status of points', remedy=nearest(status, DONE))
    raw = read_json(stage)
    _, points = read_sweep(sweep_file, arguments.gpus, arguments.grid, arguments.set)
    names = [point.name for point in points]
    for name in arguments.only or []:
        if name not in names:
            raise UserError(f'the sweep has no point "{name}"', file=sweep_file, remedy=nearest(name, names))
    points = [point for point in points if not arguments.only or point.name in arguments.only]
    check_points(points, stage)
    if arguments.plan:
        print_plan(points, raw, None if arguments.memory is None else round(arguments.memory * 2**30))
        return 0

    sweep_name = sweep_file.stem if sweep_file else "grid"
    folder = arguments.out or Path("runs/sweeps") / sweep_name / f"{stage.parent.name}_{stage.stem}"
    setting = Setting(stage, raw, folder, arguments.steps, arguments.timeout)
    console = Console(highlight=False, soft_wrap=True)
    # Two drivers of one folder would measure on the same GPUs at once, and each other's memory.
    with only_driver(folder):
        sweep = Sweep(setting, console)
        try:
            sweep.run(points, frozenset(arguments.rerun))
        # Also after Ctrl-C: the points measured so far make a table.
        finally:
            records = sweep.known(points)
            files = [folder / FILE, *write_report(folder, records, raw)] if records else []
        if records:
            print_records(records, console)
            console.print("\n".join(f"  {file}" for file in files), markup=False)
    return 0 if len(records) >= len(points) else 1
