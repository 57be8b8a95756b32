"""Run DeepSpeed's own tests twice, plainly and with an "fp8" section in every configuration, and print a table.

    git clone --branch v0.19.8 https://github.com/deepspeedai/DeepSpeed
    python scripts/deepspeed_tests.py DeepSpeed                               tests of ZeRO and of checkpoints
    python scripts/deepspeed_tests.py DeepSpeed --tests unit/runtime/zero/test_zeropp.py
    python scripts/deepspeed_tests.py DeepSpeed --fp8 '{"preset": "coat"}'
    python scripts/deepspeed_tests.py DeepSpeed --bf16                        in BF16 whatever a test asks for

Most of the tests train in FP16 or FP32, which FP8 refuses; with --bf16 they go on, in both runs. All is on CPU ranks,
over gloo. Every test falls under one of:

    same       the outcome is that of plain DeepSpeed: passed, skipped, or failed where plain DeepSpeed fails as well
    refused    a UserError names the setting that FP8 does not go with
    differs    anything else, listed with its message

Outcomes are kept in the folder --results, in files of JSON lines, and are not computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

TESTS = ("unit/runtime/zero", "unit/checkpoint")
RANKS = 4  # The most that one of these tests asks for; most ask for 2

REFUSED = "UserError: error: "


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test: passed, failed, skipped or hung, and the message of its error."""

    outcome: str
    message: str

    def refusal(self) -> str | None:
        """Return the first line of the UserError that the test ended with, or None."""
        return self.message.partition(REFUSED)[2].partition("\n")[0] or None


BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("FusedAdamBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
"""


def build_optimizers(results: Path) -> None:
    """Compile DeepSpeed's optimizers before a test has to: one killed in the middle leaves a lock to the others."""
    extensions = results / "extensions"
    for lock in extensions.glob("**/lock"):
        lock.unlink()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
    subprocess.run([sys.executable, "-c", BUILD], env=os.environ | {"DS_ACCELERATOR": "cpu"}, check=True)


@dataclass(frozen=True)
class Runs:
    """Settings of the runs: DeepSpeed's folder tests/, that of the outcomes, seconds a test has, all in BF16?"""

    tests: Path
    results: Path
    seconds: int
    bf16: bool

    def kept(self, path: str, fp8: str | None) -> Path:
        """Return the file of the outcomes of a file or folder of tests with this "fp8" section, or without any."""
        kind = sha256(fp8.encode()).hexdigest()[:8] if fp8 else "plain"
        return self.results / f"{path.replace('/', '.')}.{kind}{'.bf16' if self.bf16 else ''}.jsonl"


def outcomes_of(runs: Runs, path: str, fp8: str | None, skipped: dict[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcome of every test of a file or folder by its name, from the file that keeps them if complete.

    A test without ranks that exceeds its time takes pytest with it; the rest is run by another one. The tests that
    DeepSpeed itself `skipped` need not run; their outcomes are returned as well.
    """
    kept = runs.kept(path, fp8)
    while True:
        lines = kept.read_text().splitlines() if kept.exists() else []
        records = {record.pop("test"): Outcome(**record) for record in map(json.loads, lines)}
        finished = records.pop("", None)
        if finished is not None:
            return skipped | records
        _run(runs, path, fp8, [*records, *skipped])


def _run(runs: Runs, path: str, fp8: str | None, without: list[str]) -> None:
    scripts = Path(__file__).resolve().parent
    kept = runs.kept(path, fp8)
    leave_out = kept.with_suffix(".without")
    leave_out.write_text(json.dumps(without))
    before = kept.stat().st_size if kept.exists() else 0
    environment = {name: value for name, value in os.environ.items() if name != "DS_FP8"} | {
        "PYTHONPATH": os.pathsep.join([str(runs.tests), str(scripts), str(scripts.parent)]),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "LOG_LEVEL": "ERROR",
        "DEEPSPEED_TESTS_OUTCOMES": str(kept),
        "DEEPSPEED_TESTS_SECONDS": str(runs.seconds),
        "DEEPSPEED_TESTS_WITHOUT": str(leave_out),
        "DEEPSPEED_TESTS_BF16": "1" if runs.bf16 else "",
        **({} if fp8 is None else {"DS_FP8": fp8}),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "deepspeed_tests_plugin"]
    with kept.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(
            [*command, path],
            cwd=runs.tests,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks of a test that hung
    if not kept.exists() or kept.stat().st_size == before:
        sys.exit(f"pytest could not run {path}; {log.name} says why")


def print_table(plain: dict[str, Outcome], with_fp8: dict[str, Outcome]) -> int:
    """Print a row of counts for every file, the refusals by message, and every other difference; return how many."""
    print("| file | tests | same: passed | skipped | failed | refused | differs |\n|---|---|---|---|---|---|---|")
    refusals: Counter[str] = Counter()
    differences = []
    for file in sorted({name.partition("::")[0] for name in plain}):
        counts: Counter[str] = Counter()
        for name in (name for name in plain if name.startswith(f"{file}::")):
            before, after = plain[name], with_fp8.get(name, Outcome("absent", ""))
            if after.refusal() and after.outcome != before.outcome:
                counts["refused"] += 1
                refusals[after.refusal()] += 1
            elif after.outcome == before.outcome:
                counts[before.outcome] += 1
            else:
                counts["differs"] += 1
                differences.append(f"- {name}: {before.outcome}, with FP8 {after.outcome}: {after.message[:300]}")
        columns = ("passed", "skipped", "failed", "refused", "differs")
        print(f"| {file} | {counts.total()} | {' | '.join(str(counts[column]) for column in columns)} |")
    print("\n| refused because | tests |\n|---|---|")
    for reason, count in refusals.most_common():
        print(f"| {reason} | {count} |")
    print("\n".join(["", f"{len(differences)} differ", *differences]))
    return len(differences)


def main() -> int:
    """Run both, print the table, return 1 where anything differs without being refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of DeepSpeed's repository")
    parser.add_argument("--tests", nargs="+", default=TESTS, help=f"below its tests/; default: {' '.join(TESTS)}")
    parser.add_argument("--fp8", default="{}", help='the "fp8" section, as JSON; default: {}')
    parser.add_argument("--bf16", action="store_true", help="BF16 for FP16 and FP32 in every configuration")
    parser.add_argument("--seconds", type=int, default=180, help="time limit of a test; default: 180")
    parser.add_argument("--results", type=Path, default=Path("deepspeed_tests"), help="default: deepspeed_tests")
    arguments = parser.parse_args()
    runs = Runs(
        (arguments.checkout / "tests").resolve(), arguments.results.resolve(), arguments.seconds, arguments.bf16
    )
    runs.results.mkdir(parents=True, exist_ok=True)
    build_optimizers(runs.results)
    plain: dict[str, Outcome] = {}
    with_fp8: dict[str, Outcome] = {}
    for path in arguments.tests:
        outcomes = outcomes_of(runs, path, None, {})
        plain |= outcomes
        skipped = {name: outcome for name, outcome in outcomes.items() if outcome.outcome == "skipped"}
        with_fp8 |= outcomes_of(runs, path, arguments.fp8, skipped)
    return 1 if print_table(plain, with_fp8) else 0


if __name__ == "__main__":
    sys.exit(main())
