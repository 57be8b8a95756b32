"""Arguments of the scripts: wrong ones are a usage message, never a traceback."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fp8.commands.arguments import amount, count

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "nan", "9" * 30, "9" * 5000, "1e3"])
def test_a_count_is_a_whole_number_from_1(text):
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)
    assert count("12") == 12


@pytest.mark.parametrize("text", ["0", "-1", "", "x", "nan", "inf", "-inf", "1e999"])
def test_an_amount_is_finite_and_above_0(text):
    with pytest.raises(argparse.ArgumentTypeError):
        amount(text)
    assert amount("0.5") == 0.5


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("estimate_memory.py", ["--deepspeed_config", "x.json", "--memory", "nan"]),
        ("memory_sweep.py", ["--deepspeed_config", "x.json", "--sweep", "y.json", "--timeout", "inf"]),
    ],
)
def test_scripts_refuse_them(script, arguments, tmp_path):
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert arguments[-2] in result.stderr
    assert not list(tmp_path.iterdir())
