"""Jobs on two hosts that lose a link: ended everywhere, and the host named."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from tests.multinode.hosts import ROOT, Hosts, why_impossible

COUNTING = ROOT / "tests/multinode/counting.py"
LAUNCH = """
import sys
from ds_fp8.cluster.launcher import launch
sys.exit(launch(sys.argv[1], sys.argv[2:], ["--master_addr", "10.77.0.1"]))
"""
ENVIRONMENT = "DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\nOMP_NUM_THREADS=1\n"
# Of the job that counts; it is given up after half of it without a word, and ssh notices a dead link after 20 s
TIMEOUT = 20
BEGUN, ENDED = 600, 60  # Seconds until a job must have come to its work, and until all of it has ended


@pytest.fixture
def hosts(tmp_path):
    """Two of them, where this machine allows such."""
    if reason := why_impossible():
        pytest.skip(reason)
    (tmp_path / ".deepspeed_env").write_text(f"{ENVIRONMENT}DS_FP8_CACHE={tmp_path}/cache\n")
    with Hosts(tmp_path / "hosts", 2) as made:
        yield made


def wait_for(condition: Callable[[], bool], seconds: float, said: Callable[[], object]) -> None:
    """Return once `condition` holds; fail, with what is `said`, when it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_link_that_goes_down_ends_both_sides(hosts, tmp_path):
    output = tmp_path / "output"
    command = [sys.executable, "-c", LAUNCH, str(hosts.hostfile), str(COUNTING), str(TIMEOUT)]
    process = hosts.start(command, output, tmp_path)
    wait_for(lambda: "counted 9" in output.read_text() or process.poll() is not None, BEGUN, output.read_text)
    assert process.poll() is None, output.read_text()[-6000:]
    hosts.cut_link(1)
    assert process.wait(ENDED) == 75
    wait_for(lambda: not hosts.processes(), ENDED, hosts.processes)
    assert "10.77.0.2 (rank 1): no message for" in output.read_text()
