"""scripts/check_cluster.py over two hosts: the table of differences."""

from __future__ import annotations

import copy
import re
import sys

import pytest

from tests.multinode.conftest import START, write_stage
from tests.multinode.hosts import ROOT, Hosts
from tests.train.tiny_stage import TINY


def check(hosts: Hosts, tmp_path, *options: str) -> tuple[int, str]:
    """Run the script on the first host and return its exit code and output."""
    output = tmp_path / "output"
    command = [sys.executable, str(ROOT / "scripts/check_cluster.py"), "--hostfile", str(hosts.hostfile), *options]
    launcher = ["--launcher-options", "--master_addr 10.77.0.1"]
    process = hosts.start([*command, *launcher], output, tmp_path)
    code = process.wait(START)
    return code, output.read_text()


@pytest.mark.slow
def test_a_host_without_the_data_is_named(make_hosts, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.jsonl").write_text('{"text": "a line"}\n' * 9)
    stage = copy.deepcopy(TINY)
    stage["data"]["path"] = str(tmp_path / "data" / "own.jsonl")
    hosts = make_hosts(2, hidden={1: [tmp_path / "data"]})
    code, output = check(hosts, tmp_path, "--deepspeed_config", str(write_stage(tmp_path, stage)))
    assert code == 2, output
    assert "10.77.0.2 differs from 10.77.0.1 (rank 0):" in output
    assert re.search(r"own\.jsonl: 171 bytes, .* -> missing", output), output
    assert "Traceback" not in output
