"""Jobs on two hosts that lose a rank, a link, a host or their launcher: ended everywhere, and the host named."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from tests.multinode.hosts import ROOT, Hosts, why_impossible

COUNTING = ROOT / "tests/multinode/counting.py"
LAUNCH = """
import sys
from ds_fp8.cluster.launcher import launch
sys.exit(launch(sys.argv[1], sys.argv[2:], ["--master_addr", "10.77.0.1"]))
"""
ENVIRONMENT = "DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\nOMP_NUM_THREADS=1\n"
TIMEOUT = 60  # Of the job that counts; a host counts as lost after half of it, and ssh notices a dead link after 20 s
BEGUN = 600  # Seconds until a job must have come to its work


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


def signal_all(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def of_rank(hosts: Hosts, host: int) -> list[psutil.Process]:
    """Return the process of the rank on a host, without DeepSpeed's launcher above it."""
    running = [p for p in hosts.processes(host) if str(COUNTING) in p.cmdline()]
    return [p for p in running if not any(str(COUNTING) in child.cmdline() for child in p.children())]


def whole(hosts: Hosts, host: int) -> list[psutil.Process]:
    """Return all processes of a host, its ssh daemons among them."""
    return hosts.all_processes(hosts.names[host])


def fail(fault: str, hosts: Hosts, launcher: psutil.Process) -> None:
    if fault == "rank killed":
        signal_all(of_rank(hosts, 1), signal.SIGKILL)
    elif fault == "rank stopped":
        signal_all(of_rank(hosts, 1), signal.SIGSTOP)
    elif fault == "host frozen":
        signal_all(whole(hosts, 1), signal.SIGSTOP)
    elif fault == "launcher killed":
        below = launcher.children(recursive=True)
        started = [p for p in below if p.name() in ("pdsh", "ssh") or "deepspeed.launcher.runner" in p.cmdline()]
        signal_all([launcher, *started], signal.SIGKILL)
    else:
        hosts.cut_link(0 if fault == "link of the first host down" else 1)
        signal_all(whole(hosts, 1) if fault == "host dead" else [], signal.SIGKILL)


SILENT = "(rank 1): no message for"
FAULTS = {  # exit code, words, seconds to the launcher's end
    "rank killed": (75, "10.77.0.2 (rank 1): its process ", 20),
    "rank stopped": (75, "10.77.0.2 (rank 1): stopped by a signal for 60 s: limit train.timeout", TIMEOUT + 30),
    "link of the other host down": (75, f"10.77.0.2 {SILENT}", 60),
    "link of the first host down": (75, f"10.77.0.2 {SILENT}", 60),
    "host dead": (75, f"10.77.0.2 {SILENT}", 60),
    "host frozen": (75, f"10.77.0.2 {SILENT}", 60),
    "launcher killed": (-signal.SIGKILL, "", 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_host_ends_the_job_everywhere(fault, hosts, tmp_path):
    output = tmp_path / "output"
    command = [sys.executable, "-c", LAUNCH, str(hosts.hostfile), str(COUNTING), str(TIMEOUT)]
    process = hosts.start(command, output, tmp_path)
    wait_for(lambda: "counted 9" in output.read_text() or process.poll() is not None, BEGUN, output.read_text)
    assert process.poll() is None, output.read_text()[-6000:]
    started = time.monotonic()
    fail(fault, hosts, psutil.Process(process.pid))
    code, words, seconds = FAULTS[fault]
    assert process.wait(seconds) == code
    launcher_ended = time.monotonic() - started
    if fault == "host frozen":
        signal_all(whole(hosts, 1), signal.SIGCONT)
        started = time.monotonic()
    wait_for(lambda: not hosts.processes(), 60, hosts.processes)
    all_ended = time.monotonic() - started
    text = output.read_text()
    said = next((line.strip() for line in text.splitlines() if "(rank 1): " in line), "")
    print(f"HOSTS | {fault} | {code} | {launcher_ended:.0f} s | {all_ended:.0f} s | {said}")
    assert words in text, text
