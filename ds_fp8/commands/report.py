"""Write a report on finished runs: report.html, one file that needs no network, and summary.json.

ds-fp8 report runs/cpt                     one run: losses, answers, health of its casts
ds-fp8 report runs/cpt runs/cpt_bf16       compared with its BF16 run, or any other run
ds-fp8 report runs/quickstart              all stages NAME with fp8/NAME and bf16/NAME in that folder
"""

from __future__ import annotations

from pathlib import Path

from ds_fp8.commands.arguments import load_deepspeed, parser_of
from ds_fp8.config.files import check_writable


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or one that holds fp8/ and bf16/")
    parser.add_argument("other", type=Path, nargs="?", metavar="RUN2", help="folder of the run to compare with")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default RUN)")
    parser.add_argument("--title", help="what the page says it is about (default the folders' names)")
    arguments = parser.parse_args()
    if arguments.out is not None:
        check_writable(arguments.out, "--out")
    load_deepspeed()

    from ds_fp8.report.page import write_report

    folders = [folder for folder in (arguments.run, arguments.other) if folder is not None]
    summary, page, verdict = write_report(folders, arguments.out or arguments.run, arguments.title)
    print(f"{verdict}\nfigures: {summary}\nreport:  {page}")
    return 0
