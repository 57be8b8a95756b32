"""scripts/deepspeed_tests.py: what is the same, refused or different, and what becomes of a test's ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import deepspeed_tests
import deepspeed_tests_plugin
import pytest

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


@pytest.mark.parametrize(
    ("config", "bf16"),
    [
        ({"fp16": {"enabled": True}, "steps_per_print": 3}, {"enabled": True}),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": False}, "amp": {}}, {"enabled": True}),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, {"enabled": True, "check_grad_overflow": True}),
    ],
)
def test_bf16_takes_the_place_of_other_precisions(tmp_path, config, bf16):
    expected = {key: value for key, value in config.items() if key == "steps_per_print"} | {"bf16": bf16}
    before = json.dumps(config)
    assert deepspeed_tests_plugin.in_bf16(config) == expected
    assert json.dumps(config) == before
    (tmp_path / "config.json").write_text(before)
    assert deepspeed_tests_plugin.in_bf16(str(tmp_path / "config.json")) == expected


@pytest.fixture
def warm() -> None:
    """Let the fork server have imported what tests/ranks.py lets it import."""
    multiprocessing.set_forkserver_preload(["tests.preload"])


class Ranks:
    """Stand-in for one of DeepSpeed's tests, by what its ranks do."""

    def __init__(self, *does: str):
        self.does = does

    def _dist_run(self, local_rank: int, num_procs: int, master_port: str, init_method: str) -> str:
        assert (num_procs, init_method) == (len(self.does), "file://store")
        what = self.does[local_rank]
        if what == "raise":
            raise ValueError(f"rank {local_rank}")
        if what == "die":
            os._exit(3)
        if what == "wait":
            time.sleep(600)
        return what


@pytest.mark.parametrize(
    ("does", "error", "message"),
    [
        (["raise", ""], ValueError, "rank 0"),
        (["wait", "raise"], ValueError, "rank 1"),
        (["wait", "die"], RuntimeError, "rank 1 ended with exit code 3"),
        (["no GPU", "no GPU"], pytest.skip.Exception, "no GPU"),
        (["", "wait"], deepspeed_tests_plugin.Hung, "of 2 had not ended"),
    ],
)
def test_a_rank_that_fails_ends_the_test(warm, monkeypatch, does, error, message):
    monkeypatch.setattr(deepspeed_tests_plugin, "GRACE", 0.2)
    if error is deepspeed_tests_plugin.Hung:
        monkeypatch.setattr(deepspeed_tests_plugin, "_limit", time.monotonic() + 2)
    with pytest.raises(error, match=message):
        deepspeed_tests_plugin.run_ranks(Ranks(*does), len(does), "file://store")
