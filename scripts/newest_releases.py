"""Run a part of the CPU tests against the newest releases of what the package is built on, and print a table.

    python scripts/newest_releases.py                                   the tests below, the newest of all PACKAGES
    python scripts/newest_releases.py --transformers 5.22.2             one of them in another version
    python scripts/newest_releases.py --only transformers,trl           the others as they are installed here
    python scripts/newest_releases.py tests/layers tests/train          other tests

The releases, and what they need beside what is installed here, go into a virtual environment of their own that sees the
packages of this one; it is removed afterwards. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_fp8.commands.arguments import amount

ROOT = Path(__file__).resolve().parents[1]
# torch: where pip finds a CPU build of it; otherwise the installed one stays
PACKAGES = ("deepspeed", "transformers", "accelerate", "trl", "peft", "triton", "torch")
TESTS = (
    *("tests/test_pinned_sources.py", "tests/zero/test_deepspeed.py", "tests/zero/test_parameter_gather.py"),
    *("tests/zero/test_gradient_reduce.py", "tests/zero/test_step.py", "tests/engine"),
    *("tests/layers/test_convert.py", "tests/layers/test_transformers_classes.py"),
    *("tests/layers/test_decoder.py", "tests/layers/test_loss.py"),
    *("tests/train/test_packed_attention.py", "tests/integrations"),
)
SECONDS = 3600  # Seconds that a file or folder of tests may take


@dataclass(frozen=True)
class Outcome:
    """Outcome of a file or folder of tests."""

    tests: str
    passed: int
    skipped: int
    failed: dict[str, str]  # First line of the error, by the name of the test
    seconds: float


def make_environment(folder: Path, requirements: list[str]) -> Path:
    """Make a virtual environment that sees the packages of this one, install into it, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    paths = {"base": str(folder), "platbase": str(folder)}
    overlay = Path(sysconfig.get_path("purelib", vars=paths)) / "packages_of_the_other.pth"
    overlay.write_text("".join(f"{path}\n" for path in dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))))
    # DeepSpeed's build looks at the installed torch, so it must not build in an environment of its own.
    install = ["install", "-q", "--upgrade", "--no-build-isolation", "--disable-pip-version-check", *requirements]
    subprocess.run([python, "-m", "pip", *install], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    return python


def newest_torch() -> str:
    """Return the version of the newest CPU build of torch that pip finds; without one, of the installed torch."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    builds = re.findall(r"[0-9][0-9.]*[+]cpu", printed)
    return max(builds, key=Version, default=importlib.metadata.version("torch"))


def versions_in(python: Path) -> dict[str, str]:
    script = f"import json, importlib.metadata as m; print(json.dumps([m.version(name) for name in {PACKAGES}]))"
    printed = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    return dict(zip(PACKAGES, json.loads(printed), strict=True))


def run(python: Path, tests: str, versions: dict[str, str], seconds: float) -> Outcome:
    """Run a file or folder of tests with these `versions`, whether they are supported or not; return its outcome."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, environment = Path(folder, "report.xml"), dict(os.environ)
        environment |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
        environment |= {f"DS_FP8_TRY_{name.upper()}": versions[name] for name in ("deepspeed", "transformers")}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", tests]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return Outcome(tests, 0, 0, {tests: f"took more than {seconds:g} s"}, time.monotonic() - began)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the ranks of a test that hung
                process.wait()
            log.seek(0)
            lines = log.read().splitlines()
        took = time.monotonic() - began
        if not report.exists():
            return Outcome(tests, 0, 0, {tests: lines[-1] if lines else "pytest printed nothing"}, took)
        return outcome_of(tests, report, took)


def outcome_of(tests: str, report: Path, seconds: float) -> Outcome:
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed: dict[str, str] = {}
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            message = (problem.get("message") or problem.text or "").strip()
            failed[f"{case.get('classname')}::{case.get('name')}"] = message.partition("\n")[0]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(tests, len(cases) - skipped - len(failed), skipped, failed, seconds)


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a table in Markdown, and below it the tests that failed."""
    lines = ["| tests | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for o in outcomes:
        lines.append(f"| `{o.tests}` | {o.passed} | {len(o.failed)} | {o.skipped} | {o.seconds:.0f} |")
    failed = [f"- {name}: {message}" for outcome in outcomes for name, message in outcome.failed.items()]
    return "\n".join([*lines, *(["", *failed] if failed else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders of tests below the root")
    for name in PACKAGES:
        parser.add_argument(f"--{name}", metavar="VERSION", help="this version instead of the newest")
    parser.add_argument("--only", default=",".join(PACKAGES), help="packages to bring up to date, with commas between")
    parser.add_argument("--seconds", type=amount, default=SECONDS, help="that a file or folder of tests may take")
    arguments = parser.parse_args()
    for tests in arguments.tests:
        if not (ROOT / tests).exists():
            parser.error(f"{tests} is not below {ROOT}")
    wanted = {name: getattr(arguments, name) for name in arguments.only.split(",")}
    if wanted.get("torch", "") is None:
        wanted["torch"] = newest_torch()
    with tempfile.TemporaryDirectory(prefix="newest_releases_") as folder:
        requirements = [f"{name}=={version}" if version else name for name, version in wanted.items()]
        try:
            python = make_environment(Path(folder, "venv"), requirements)
        except subprocess.CalledProcessError as error:
            print(f"could not be installed: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
            return 2
        versions = versions_in(python)
        print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
        outcomes = []
        for tests in arguments.tests:
            outcomes.append(run(python, tests, versions, arguments.seconds))
            print(f"{tests}: {outcomes[-1].passed} passed, {len(outcomes[-1].failed)} failed", flush=True)
    print(f"\n{table(outcomes)}")
    return 1 if any(outcome.failed or not outcome.passed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
