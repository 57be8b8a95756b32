"""scripts/experiments/continue_training.py: its line of figures, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "experiments" / "continue_training.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


def test_a_run_in_fp8_tells_its_losses():
    found = run("--quick", "--fp8", "precise")
    assert found.returncode == 0, found.stderr
    figures = json.loads(found.stdout.splitlines()[-1])
    assert figures["as_trained"] < figures["before"] - 0.05
    assert figures["in_bf16"] == pytest.approx(figures["as_trained"], rel=0.01)
    assert figures["in_bf16"] != figures["as_trained"]  # the one without casts, the other with them


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model"),
        (("--quick", "--fp8", "precize"), "precise"),
        (("--quick", "--peer", "torchao-row"), "torchao-rowwise"),
        (("--quick", "--peer", "torchao-rowwise", "--in_bf16", "forward"), "fprop"),
    ],
)
def test_what_it_refuses(arguments, words):
    found = run(*arguments)
    assert found.returncode
    assert words in found.stderr
    assert "Traceback" not in found.stderr
