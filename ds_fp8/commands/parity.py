"""FP8 against BF16 on your own stage: ds-fp8 parity my_stage.json --steps 500 --seeds 3.

Trains the stage for so many steps in FP8 and in BF16 from each of the seeds, one run after the other, and compares the
final validation losses with what another seed changes. Leaves parity.json and report.html in --out. Run it again and it
continues where it stopped. The exit code is 0 where FP8 is equal, else 1.

    --grid fp8.preset=infir2,hybrid_fast,coat

compares every value (or every combination, or every point of a --sweep FILE) with BF16, in a folder each; runs in BF16
are shared where they are the same.
"""

from __future__ import annotations

from ds_fp8.commands.arguments import amount, parser_of, stage_file
from ds_fp8.commands.comparisons import add_runs, ranks_of, read_points, train_all, with_length
from ds_fp8.config.files import check_writable


def main() -> int:
    """Train the twins and give the verdict."""
    parser = parser_of(__doc__)
    add_runs(parser, "runs/parity", seeds=1)
    parser.add_argument("--tolerance", type=amount, help="relative gap that is allowed (default 0.0025)")
    arguments = parser.parse_args()
    check_writable(arguments.out, "--out")

    from ds_fp8.report import parity
    from ds_fp8.report.page import write_report
    from ds_fp8.report.verdict import TOLERANCE, judge_seeds
    from ds_fp8.train import load_stage

    file, ranks, points = stage_file(arguments), ranks_of(arguments), read_points(arguments)
    stages = {point: load_stage(file, [*arguments.set, *changes], ranks) for point, changes in points.items()}
    first = next(iter(stages.values()))
    twins = parity.twins_of(points, range(first.train.seed, first.train.seed + arguments.seeds))
    stages = {point: with_length(stage) for point, stage in stages.items()}
    runs = {
        str(cell): [*arguments.set, *parity.run_overrides(stages[pair[0].point], cell, arguments.steps, arguments.out)]
        for pair in twins
        for cell in pair
    }
    train_all(runs, file, ranks)
    tolerance = TOLERANCE if arguments.tolerance is None else arguments.tolerance
    passed = True
    for point in points:
        found = parity.comparisons_in(arguments.out, [pair for pair in twins if pair[0].point == point])
        verdict, out = judge_seeds(found, tolerance), arguments.out / parity.point_folder(point)
        figures = parity.write(parity.compare(found, tolerance), out)
        _, page = write_report(found, verdict, out, f"FP8 against BF16, {point or file.name}", tolerance)
        title = f"{point}: " if point else ""
        print(f"\n{title}{verdict.words}\nfigures: {figures}\nreport:  {page}")
        passed &= verdict.passed
    return 0 if passed else 1
