"""scripts/test.sh and scripts/quickstart.sh: their options, what they say is missing, and closed folders of PATH."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "cat", "cksum", "cp", "cut", "dirname", "flock", "grep", "head", "mkdir", "sed", "sh", "touch")
PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/bin/activate;;
  *pytest*) echo "pytest of $PATH";;
  *train.py*) echo "train $*";;
esac
"""


@pytest.fixture
def script(tmp_path):
    """`script(NAME, option, ...)`: run it in a folder with a space, with programs that only say that they were called.

    PATH has the tools of a bare machine; `programs` are added to them.
    """
    folder, found = tmp_path / "a folder", tmp_path / "bin"
    found.mkdir()
    (folder / "examples").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=lambda *_: ["bench", "faults"])
    shutil.copy(ROOT / "pyproject.toml", folder)
    for tool in TOOLS:
        (found / tool).symlink_to(shutil.which(tool))

    def run(name: str, *options: str, root: bool = False, programs: tuple[str, ...] = (), path: str = ""):
        own = {"python": PYTHON, "python3": PYTHON, "id": f"#!/bin/sh\necho {0 if root else 1000}\n"}
        for program, text in {**dict.fromkeys(("ruff", "ds-fp8", *programs), "#!/bin/sh\n"), **own}.items():
            (found / program).unlink(missing_ok=True)
            (found / program).write_text(text)
            (found / program).chmod(0o755)
        command = [found / "bash", folder / "scripts" / name, *options]
        return subprocess.run(command, env={"PATH": f"{found}{path}"}, cwd=tmp_path, capture_output=True, text=True)

    run.folder = folder
    return run


def test_skipped_tests_are_said_where_their_programs_or_rights_are_missing(script):
    bare = script("test.sh")
    assert bare.returncode == 0, bare.stderr
    assert "no browser: tests that open reports are skipped" in bare.stdout
    assert "not root: tests of jobs on several hosts are skipped" in bare.stdout
    assert "pytest of" in bare.stdout
    hosts = "pdsh", "sshd", "ip", "tc"
    whole = script("test.sh", root=True, programs=("chromium", *hosts)).stdout
    assert "are skipped" not in whole
    assert "several hosts are skipped" in script("test.sh", programs=("chromium", *hosts)).stdout


def test_what_is_not_in_reach_is_no_part_of_path(script, tmp_path):
    """DeepSpeed looks for numactl along PATH, and ends at a folder that may not be entered."""
    told = script("test.sh", path=f":{tmp_path / 'absent'}:/usr/games").stdout
    assert "absent" not in told
    assert f"pytest of {tmp_path / 'bin'}" in told


@pytest.mark.parametrize("options", [["--stesp", "2"], ["--steps"], ["--steps", "0"], ["--steps", "two"], ["2"]])
def test_wrong_options_of_the_quickstart_are_refused_before_anything_is_installed(script, options):
    refused = script("quickstart.sh", *options)
    assert refused.returncode == 2
    assert "error: " in refused.stderr
    assert "usage: " in refused.stderr
    assert not (script.folder / ".venv").exists()


def test_the_tests_packages_are_those_of_the_quickstart_too(script):
    assert "Installing" in script("test.sh").stdout
    assert "Installing" not in script("quickstart.sh").stdout


def test_the_quickstart_in_few_steps(script):
    assert "--steps N" in script("quickstart.sh", "--help").stdout
    lines = script("quickstart.sh", "--steps", "2").stdout.splitlines()
    trained = [line for line in lines if line.startswith("train ")]
    assert len(trained) == 6
    assert all("--set train.steps=2" in line for line in trained)
    (script.folder / "runs/quickstart/fp8").mkdir()  # which the stages would have made
    assert script("quickstart.sh", "--steps", "2").returncode == 0
    for other in (["--steps", "3"], []):
        refused = script("quickstart.sh", *other)
        assert refused.returncode == 2
        assert "other lengths" in refused.stderr
    shutil.rmtree(script.folder / "runs")
    assert "train.steps" not in script("quickstart.sh").stdout
