"""scripts/newest_releases.py: what is counted and listed, and an environment beside this one."""

import subprocess
import sys
from pathlib import Path

import deepspeed
import newest_releases
import pytest
import torch

TESTS = """
import os
import time

import pytest


def test_right():
    assert os.environ["DS_FP8_TRY_DEEPSPEED"] == "1.2.3"
    assert os.environ["DS_FP8_TRY_TRANSFORMERS"] == "4.5.6"


@pytest.mark.parametrize("seconds", [0.0])
def test_wrong(seconds):
    assert seconds == 1, "one and not zero"


def test_skipped():
    pytest.skip("not here")


@pytest.fixture
def broken():
    raise RuntimeError("a fixture")


def test_broken(broken):
    time.sleep(seconds)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of tests in place of the project's."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(newest_releases, "ROOT", tmp_path)
    return tmp_path


def test_outcomes_are_counted_and_failures_listed(project):
    outcome = newest_releases.run(
        Path(sys.executable), "tests/test_some.py", {"deepspeed": "1.2.3", "transformers": "4.5.6"}, 60
    )
    assert (outcome.passed, outcome.skipped, len(outcome.failed)) == (1, 1, 2)
    text = newest_releases.table([outcome])
    assert "| `tests/test_some.py` | 1 | 2 | 1 |" in text
    assert "test_wrong[0.0]: AssertionError: one and not zero" in text
    assert "test_broken: " in text
    assert "a fixture" in text


def test_the_environment_sees_the_packages_of_this_one(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "pyproject.toml").write_text('[project]\nname = "pydantic"\nversion = "999"\n')
    python = newest_releases.make_environment(tmp_path / "venv", [str(tmp_path / "small")])
    script = "import sys, torch; print(torch.__version__, sys.prefix)"
    printed = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed.split() == [torch.__version__, str(tmp_path / "venv")]
    assert newest_releases.versions_in(python)["deepspeed"] == deepspeed.__version__
    script = "import importlib.metadata as m; print(m.version('pydantic'))"
    printed = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "999", "what was installed comes first"
