"""Jobs on two and three hosts that lose a link or a host: ended everywhere, the host named, and started again."""

from __future__ import annotations

import copy
import json
import sys
import time

import psutil
import pytest

from tests.multinode.conftest import START, wait_for, write_stage
from tests.multinode.hosts import ROOT, Hosts
from tests.train.tiny_stage import TINY

COUNTING = ROOT / "tests/multinode/counting.py"
LAUNCH = """
import sys
from ds_fp8.cluster.launcher import Launch, launch
sys.exit(launch(sys.argv[1], Launch(sys.argv[2:], ["--master_addr", "10.77.0.1"])))
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


@pytest.mark.slow
def test_a_host_that_dies_is_left_out_of_the_restart(make_hosts, tmp_path):
    """Three hosts, one over a slow link; the first attempt's third host dies, and two of them finish the run."""
    hosts = make_hosts(3)
    hosts.slow_down(1, "20mbit")
    stage = copy.deepcopy(TINY)
    del stage["gradient_accumulation_steps"]  # it follows from the number of hosts
    stage |= {"train_batch_size": 12}
    stage["train"] |= {"run_dir": str(tmp_path / "run"), "steps": 14, "save_every": 2, "timeout": 30}
    output = tmp_path / "output"
    command = [sys.executable, str(ROOT / "scripts/train.py"), "--deepspeed_config", str(write_stage(tmp_path, stage))]
    launcher = ["--max-restarts", "1", "--min-hosts", "2", "--launcher-options"]
    process = hosts.start(
        [*command, "--hostfile", str(hosts.hostfile), *launcher, "--master_addr 10.77.0.1"], output, tmp_path
    )
    wait_for((tmp_path / "run/checkpoints/step_2/manifest.json").exists, START, process, output)
    hosts.power_off(2)
    assert process.wait(2 * START) == 0, output.read_text()[-6000:]
    wait_until_empty(hosts, 0, 1, 2)
    text = output.read_text()
    assert "10.77.0.3" in text.partition("error: the job was ended on all hosts")[2]
    assert "continuing with 2 of 3 hosts, without 10.77.0.3" in text
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["steps"] == 14
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(15))
