"""Seconds until a training job of two hosts is ended everywhere, by what befalls it. Needs root; no GPU.

    python scripts/faults/lost_hosts.py [--timeout 60] [--only link,frozen]

The hosts are network namespaces of this machine with an sshd each (tests/multinode/hosts.py); the job is started with
scripts/train.py --hostfile on the first of them.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.multinode.hosts import Hosts, why_impossible  # noqa: E402
from tests.train.tiny_stage import TINY  # noqa: E402

ENVIRONMENT = "DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\nOMP_NUM_THREADS=1\nHF_HUB_OFFLINE=1\n"
START = 400
"""Seconds in which the job must have trained a few steps."""


def rank_of(hosts: Hosts, host: int) -> psutil.Process:
    """Return the process of the host's only rank."""
    return next(p for p in hosts.processes(host) if "--local_rank=0" in _command(p))


def kill_launcher(hosts: Hosts) -> None:
    """Kill what keeps the job going, which this script has started: train.py, deepspeed, pdsh and its ssh."""
    for process in psutil.Process().children(recursive=True):
        process.kill()


# What is done to a job that trains; the second host is the one to be named, unless said otherwise.
FAULTS: dict[str, tuple[str, Callable[[Hosts], None]]] = {
    "rank killed": ("10.77.0.2", lambda hosts: rank_of(hosts, 1).kill()),
    "rank stopped (SIGSTOP)": ("10.77.0.2", lambda hosts: rank_of(hosts, 1).send_signal(signal.SIGSTOP)),
    "link of the other host down": ("10.77.0.2", lambda hosts: hosts.cut_link(1)),
    "link of the launching host down": ("10.77.0.2", lambda hosts: hosts.cut_link(0)),
    "host dead": ("10.77.0.2", lambda hosts: hosts.power_off(1)),
    "host frozen": ("10.77.0.2", lambda hosts: hosts.freeze(1)),
    "launcher killed": ("", kill_launcher),
}
FILES = ("data file missing on one host", "run folder not shared")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=60, help="train.timeout of the job")
    parser.add_argument("--only", default="", help="parts of the names of the rows to measure")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the jobs' output there")
    arguments = parser.parse_args()
    reason = why_impossible()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    print(
        "| fault | exit code | launcher ended after | no process left after | named |\n|---|---|---|---|---|",
        flush=True,
    )
    for name in [*FAULTS, *FILES]:
        if any(part in name for part in arguments.only.split(",")):
            with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
                print(f"| {name} | {measure(name, Path(folder), arguments.timeout, arguments.keep)} |", flush=True)
    return 0


def measure(name: str, folder: Path, timeout: float, keep: Path | None) -> str:
    """Return the cells of one row."""
    data = folder / "data"
    data.mkdir()
    (data / "text.jsonl").write_text("".join(json.dumps({"text": f"Line {n} of a text."}) + "\n" for n in range(300)))
    run = folder / "runs" / "run"
    run.parent.mkdir()
    stage = {**TINY, "data": {"path": str(data / "text.jsonl"), "sequence_length": 64}}
    stage["train"] = {**TINY["train"], "run_dir": str(run), "steps": 100_000, "save_every": 10, "timeout": timeout}
    stage["train"]["eval_every"] = None
    (folder / "stage.json").write_text(json.dumps(stage))
    cache = folder / "cache"
    (folder / ".deepspeed_env").write_text(f"{ENVIRONMENT}DS_FP8_CACHE={cache}\n")
    hidden = {FILES[0]: [data], FILES[1]: [run.parent]}.get(name, [])
    output = folder / "output"
    with Hosts(folder / "hosts", 2, hidden={1: hidden}) as hosts:
        command = [sys.executable, str(ROOT / "scripts/train.py"), "--deepspeed_config", str(folder / "stage.json")]
        options = ["--hostfile", str(hosts.hostfile), "--launcher-options", "--master_addr 10.77.0.1"]
        process = hosts.start([*command, *options], output, folder)
        if name in FILES:
            # From when both ranks run: imports take longer than the comparison.
            _until(lambda: len(_ranks(hosts)) == 2, START, process)
            named = "10.77.0.2"
        else:
            _until(lambda: "step 2/" in output.read_text() or "step 1/" in output.read_text(), START, process)
            named, fault = FAULTS[name]
            fault(hosts)
        began = time.monotonic()
        process.wait(10 * timeout)
        ended = time.monotonic() - began
        thawed = ""
        if name == "host frozen":
            hosts.thaw(1)
            began, thawed = time.monotonic(), " of thawing"
        _until(lambda: not hosts.processes(0) and not hosts.processes(1), 10 * timeout)
        left = time.monotonic() - began
        text = output.read_text()
        if keep:
            (keep / f"{name}.log").write_text(text)
        blamed = re.search(rf"[^\n]*{re.escape(named)}\b[^\n]*", text.partition("error: ")[2]) if named else None
        words = blamed[0].strip() if blamed else "-"
        return f"{process.returncode} | {ended:.0f} s | {left:.0f} s{thawed} | {words[-100:]}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return []


def _ranks(hosts: Hosts) -> list[psutil.Process]:
    found = []
    for host in (0, 1):
        found += [p for p in hosts.processes(host) if "--local_rank=0" in _command(p)]
    return found


def _until(condition: Callable[[], bool], seconds: float, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the job did not come that far")
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the job ended early with {process.returncode}")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
