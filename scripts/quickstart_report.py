"""Compare the quickstart's FP8 runs with their BF16 twins: runs/quickstart/report.html and summary.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_fp8.errors import main_entry
from ds_fp8.train.twin_report import KINDS, RunRecord, write_report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart"), help="folder with fp8/ and bf16/")
    parser.add_argument("stages", nargs="*", default=["cpt", "sft_stage1", "sft_stage2"])
    arguments = parser.parse_args()
    runs = {stage: {kind: RunRecord(arguments.runs / kind / stage) for kind in KINDS} for stage in arguments.stages}
    summary, report = write_report(runs, arguments.runs, "ds_fp8 quickstart: CPT, then two stages of SFT")
    print(f"figures: {summary}\nreport:  {report}")
    return 0


main_entry(main)
