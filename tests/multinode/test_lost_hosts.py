"""Jobs on two hosts that lose a link: ended everywhere, and the host named."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from tests.multinode.conftest import START, wait_for
from tests.multinode.hosts import ROOT, Hosts

COUNTING = ROOT / "tests/multinode/counting.py"
LAUNCH = """
import sys
from ds_fp8.cluster.launcher import launch
sys.exit(launch(sys.argv[1], sys.argv[2:], ["--master_addr", "10.77.0.1"]))
"""
TIMEOUT = 20
"""Of the job that counts; it is given up after half of it without a word, and ssh notices a dead link after 20 s."""
ENDED = 60


def count(hosts: Hosts, tmp_path) -> tuple[psutil.Popen, object]:
    """Start ranks that count together, and return once they do."""
    output = tmp_path / "output"
    process = hosts.start(
        [sys.executable, "-c", LAUNCH, str(hosts.hostfile), str(COUNTING), str(TIMEOUT)], output, tmp_path
    )
    wait_for(lambda: "counted 9" in output.read_text(), START, process, output)
    return process, output


def wait_until_empty(hosts: Hosts, *numbers: int) -> None:
    deadline = time.monotonic() + ENDED
    while any(hosts.processes(number) for number in numbers):
        assert time.monotonic() < deadline, [hosts.processes(number) for number in numbers]
        time.sleep(0.1)


@pytest.mark.slow
def test_a_link_that_goes_down_ends_both_sides(make_hosts, tmp_path):
    hosts = make_hosts(2)
    process, output = count(hosts, tmp_path)
    hosts.cut_link(1)
    assert process.wait(ENDED) == 75
    wait_until_empty(hosts, 0, 1)
    assert "10.77.0.2 (rank 1): no message for" in output.read_text()
