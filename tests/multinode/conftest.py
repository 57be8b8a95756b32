"""Hosts made of network namespaces, where this machine allows them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multinode.hosts import Hosts, why_impossible

ENVIRONMENT = "DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\nOMP_NUM_THREADS=1\n"
START = 600
"""Seconds until a job must have come to its work."""


@pytest.fixture(scope="session")
def possible() -> None:
    """Skip where the machine allows no such hosts."""
    reason = why_impossible()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def make_hosts(possible, tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """`make_hosts(count, slots=1, hidden=None)`: hosts that are taken down after the test."""
    made: list[Hosts] = []

    def make(*arguments, **options) -> Hosts:
        (tmp_path / ".deepspeed_env").write_text(f"{ENVIRONMENT}DS_FP8_CACHE={tmp_path}/cache\n")
        hosts = Hosts(tmp_path / "hosts", *arguments, **options)
        made.append(hosts)
        return hosts.__enter__()

    yield make
    for hosts in made:
        hosts.__exit__()


def wait_for(condition: Callable[[], bool], seconds: float, process: subprocess.Popen, output: Path) -> None:
    """Return once `condition` holds; fail, with the job's output, when it ends or takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, output.read_text()[-6000:]
        assert time.monotonic() < deadline, output.read_text()[-6000:]
        time.sleep(0.1)
