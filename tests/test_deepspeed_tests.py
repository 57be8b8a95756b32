"""The table of scripts/deepspeed_tests.py: which outcomes count as the same, as refused, and as different."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import deepspeed_tests

REFUSED = "ds_fp8.config.errors.UserError: error: hpZ is not for FP8\n  key: zero_hpz_partition_size"


def kept(results: Path, kind: str, **outcomes: tuple[str, str]) -> None:
    """Write what a run of a file's tests leaves, each announced as hung before it has an outcome."""
    records = []
    for name, (outcome, message) in outcomes.items():
        records.append({"test": f"a.py::{name}", "outcome": "hung", "message": ""})
        records.append({"test": f"a.py::{name}", "outcome": outcome, "message": message})
    records.append({"test": "", "outcome": "finished", "message": ""})
    (results / f"a.py.{kind}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(("outcome", "message", "code"), [("passed", "", 0), ("failed", "AssertionError: 1 != 2", 1)])
def test_refusals_are_counted_and_other_differences_listed(tmp_path, monkeypatch, capsys, outcome, message, code):
    fp8 = deepspeed_tests.sha256(b"{}").hexdigest()[:8]
    kept(
        tmp_path, "plain", same=("passed", ""), broken=("failed", "KeyError"), hpz=("passed", ""), other=("passed", "")
    )
    after = {"same": ("passed", ""), "broken": ("failed", "KeyError"), "hpz": ("failed", REFUSED)}
    kept(tmp_path, fp8, **after, other=(outcome, message))
    monkeypatch.setattr(deepspeed_tests, "build_optimizers", lambda results: None)
    monkeypatch.setattr(sys, "argv", ["deepspeed_tests", str(tmp_path), "--tests", "a.py", "--results", str(tmp_path)])
    assert deepspeed_tests.main() == code
    table = capsys.readouterr().out
    assert f"| a.py | 4 | {2 - code} | 0 | 1 | 1 | {code} |" in table
    assert "| hpZ is not for FP8 | 1 |" in table
    assert ("a.py::other: passed, with FP8 failed: AssertionError: 1 != 2" in table) == bool(code)
