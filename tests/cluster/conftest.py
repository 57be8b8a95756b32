"""Ranks that do nothing but what a test wants, each with its guardian."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_fp8.cluster.entry import rank_entry
from ds_fp8.cluster.hosts import free_port

PATIENCE = 150  # Seconds for a rank to end; on busy cores it needs a minute
AT_ONCE = 4  # tests of a module that run at the same time, where it has no number of its own


def at_once(body: Callable) -> Callable:
    """Run the body of a test in a thread, begun together with the others of its module: most of their time they wait.

    It gets a folder of its own, and the test's parameters.
    """
    names = list(inspect.signature(body).parameters)[1:]

    def test(**given: Any) -> None:
        given["threads"][given["request"].node.nodeid].result()

    kind = inspect.Parameter.KEYWORD_ONLY
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("threads", "request", *names)])
    test.__name__, test.__module__, test.__doc__, test.at_once = body.__name__, body.__module__, body.__doc__, body
    return test


@pytest.fixture(scope="module")
def threads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Begin the chosen tests of the module that run `at_once`; return their futures by node id."""
    chosen = [item for item in request.session.items if item.path == request.path and hasattr(item.function, "at_once")]
    with ThreadPoolExecutor(getattr(request.module, "AT_ONCE", AT_ONCE)) as pool:
        yield {
            item.nodeid: pool.submit(
                item.function.at_once,
                tmp_path_factory.mktemp("job"),
                **(item.callspec.params if hasattr(item, "callspec") else {}),
            )
            for item in chosen
        }


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


def run_job(folder: Path, world: int, body: Callable, *arguments: Any, own_program: bool = False) -> Ended:
    """Call the module-level `body(rank, *arguments)` as the main of every rank, or as a program of its own."""
    port, output = free_port(), folder / "stderr"
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
    left = psutil.wait_procs(of_job(port), timeout=10)[1]
    for process in [*left, *(rank for rank in ranks if rank.is_alive())]:
        process.kill()
    return Ended(codes, output.read_text() if output.exists() else "", left)


def of_job(port: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DS_FP8_TEST_JOB") == str(port):
                found.append(process)
        except psutil.Error:
            continue
    return found
