"""Ranks of commands, forked from a process that has imported everything, as those of tests/ranks.py."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


def _rank(command: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path) -> None:
    """Run `python -m MODULE ...` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.argv = list(command[2:])
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


@pytest.fixture
def forked_ranks(monkeypatch, tmp_path):
    """Fork the ranks of a job in the place of new interpreters, which import for seconds; their output is printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])

    def run_job(jobs):
        outputs = [tmp_path / f"output{rank}" for rank in range(len(jobs))]
        pairs = zip(jobs, outputs, strict=True)
        ranks = [context.Process(target=_rank, args=(*job, Path.cwd(), output)) for job, output in pairs]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        print("".join(output.read_text() for output in outputs))
        return max(rank.exitcode for rank in ranks)

    monkeypatch.setattr("ds_fp8.cluster.launcher.run_job", run_job)
