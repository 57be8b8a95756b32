"""Graphs of "auto" over two hosts: captured and replayed on all ranks alike, with the losses of Python."""

from __future__ import annotations

import json
import sys

import pytest

from tests.multinode.conftest import START


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_hosts_replay_what_python_computes(make_hosts, tmp_path, slots):
    hosts = make_hosts(2, slots)
    started = []
    for rank in range(2 * slots):
        names = {"RANK": rank, "LOCAL_RANK": rank % slots, "WORLD_SIZE": 2 * slots, "LOCAL_WORLD_SIZE": slots}
        names |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
        command = ["env", *(f"{name}={value}" for name, value in names.items())]
        command += [sys.executable, "-m", "tests.multinode.graphing", str(tmp_path)]
        started.append(hosts.start(command, tmp_path / f"output{rank}", tmp_path, host=rank // slots))
    for rank, process in enumerate(started):
        assert process.wait(START) == 0, (tmp_path / f"output{rank}").read_text()[-6000:]
    for rank in range(2 * slots):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        (eager, _, of_hosts), (losses, log, _) = found["eager"], found["graphs"]
        assert of_hosts == f"2 x {slots}"
        assert log == ["eager", "eager", "captured for 0", "checked", "eager", "replayed for 0", "checked", "eager",
                       "replayed for 0"]  # fmt: skip
        assert losses == eager
