"""Runs that are killed, in the middle of a save too, and end as if nobody had touched them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import psutil
import pytest

from tests.train.conftest import ROOT


def runs_in(folder) -> list[psutil.Process]:
    """Return the processes that were started with `folder` as TMPDIR, and theirs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # ended since it was listed, or another user's
            continue
    return found


@pytest.mark.slow
def test_killed_runs_end_as_undisturbed_ones(cache_home, tmp_path):
    """Of ranks and of whole runs, one kill inside a save: equal weights, equal losses of every step, ever."""
    command = [sys.executable, str(ROOT / "scripts/faults/kills.py"), "--presets", "coat", "--by-launcher", "0"]
    options = ["--steps", "8", "--seed", "18", "--kills", "3", "--in-save", "1", "--set", "keep_last=1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "DS_FP8_CACHE": str(cache_home)}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kills, in_saves, runs = map(int, re.search(r"(\d+) kills .* (\d+) inside a save, (\d+) runs", done.stdout).groups())
    assert kills >= 3
    assert in_saves >= 1
    assert re.search(r"resumed from steps \[\d", done.stdout)
    assert done.stdout.count(": equal") == runs >= 1
    assert runs_in(tmp_path) == []
