"""Ranks that do nothing but what a test wants, each with its guardian."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_fp8.cluster.entry import rank_entry
from ds_fp8.cluster.hosts import free_port

PATIENCE = 60


@dataclass
class Ended:
    """How a job of several ranks ended."""

    codes: list[int]  # Exit codes by rank; minus the signal's number for a rank that was killed
    output: str  # What all ranks and guardians wrote to stderr
    left: list[psutil.Process]  # Processes of the job that outlived it


def _rank(rank: int, world: int, port: int, output: str, own: bool, body: Callable, arguments: tuple) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_FP8_TEST_JOB=str(port))
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if own:
        # As a shell starts it: the server of forks has what a test before it ignored.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        body(rank, *arguments)
    else:
        rank_entry(lambda: body(rank, *arguments))


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Ended]:
    """`job(world, body, *arguments)`: call the module-level `body(rank, *arguments)` as the main of every rank.

    With `own_program` without ds_fp8's entry for ranks.
    """

    def run(world: int, body: Callable, *arguments: Any, own_program: bool = False) -> Ended:
        port = free_port()
        output = tmp_path / "stderr"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        ranks = [
            context.Process(target=_rank, args=(rank, world, port, str(output), own_program, body, arguments))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(PATIENCE)
        codes = [rank.exitcode for rank in ranks]
        guardians = of_job(port)
        left = psutil.wait_procs(guardians, timeout=10)[1]
        for process in [*left, *(rank for rank in ranks if rank.is_alive())]:
            process.kill()
        return Ended(codes, output.read_text() if output.exists() else "", left)

    return run


def of_job(port: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DS_FP8_TEST_JOB") == str(port):
                found.append(process)
        except psutil.Error:
            continue
    return found
