"""scripts/check_cluster.py over two hosts: the table of differences, and what the network between them carries."""

from __future__ import annotations

import copy
import re
import sys

import pytest

from tests.multinode.conftest import START, write_stage
from tests.multinode.hosts import ROOT, Hosts
from tests.train.tiny_stage import TINY

EXCHANGES = [f"{way}, {numbers}" for way in ("all-gather", "all-to-all") for numbers in ("BF16", "FP8")]
ELEMENTS = 1 << 20


def check(hosts: Hosts, tmp_path, *options: str) -> tuple[int, str]:
    """Run the script on the first host and return its exit code and output."""
    output = tmp_path / "output"
    command = [sys.executable, str(ROOT / "scripts/check_cluster.py"), "--hostfile", str(hosts.hostfile), *options]
    launcher = ["--launcher-options", "--master_addr 10.77.0.1", "--elements", str(ELEMENTS)]
    process = hosts.start([*command, *launcher], output, tmp_path)
    code = process.wait(START)
    return code, output.read_text()


@pytest.mark.slow
def test_exchanges_of_equal_hosts_are_measured(make_hosts, tmp_path):
    hosts = make_hosts(2)
    hosts.slow_down(1, "100mbit")
    code, output = check(hosts, tmp_path)
    assert code == 0, output
    assert "2 ranks have the same versions" in output
    rows = {name: re.search(rf"{name} +([\d.]+) +([\d.]+) +([\d.]+)", output) for name in EXCHANGES}
    assert all(rows.values()), output
    figures = {name: [float(number) for number in row.groups()] for name, row in rows.items()}
    megabytes = [2 * ELEMENTS / 1e6 * part for part in (1, 1 / 2, 1 / 2, 33 / 128)]
    assert [figures[name][0] for name in EXCHANGES] == pytest.approx(megabytes, abs=0.06)
    assert all(rate < 0.02 for _, _, rate in figures.values())  # 100 Mbit/s are 0.0125 GB/s, and some are buffered
    assert "gradient reduction, FP8" in output


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
    assert re.search(r"own\.jsonl .*171 bytes, .* missing", output), output
    assert "Traceback" not in output
