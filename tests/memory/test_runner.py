"""A point's process: measured, out of memory, failed, timed out, killed; and the file that keeps the results."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.memory import runner
from ds_fp8.memory.runner import Results, only_driver

SCRIPT = """
import json, os, pathlib, subprocess, sys, time
settings = dict(part.split("=", 1) for part in sys.argv[1:] if "=" in part)
folder = pathlib.Path(json.loads(settings["train.run_dir"]))
folder.mkdir(parents=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
(folder.parent / "pids.part").write_text(f"{os.getpid()} {child.pid}")
(folder.parent / "pids.part").rename(folder.parent / "pids")
with (folder / "metrics.jsonl").open("w") as metrics:
    for step in range(1, 3):
        record = {"step": step, "loss": 1.0, "memory_bytes": 10 * step, "reserved_bytes": 20, "process_bytes": 5}
        record |= {"tokens_per_second": 7.0 * step, "step_seconds": 1.0}
        metrics.write(json.dumps(record) + chr(10))
DEED
"""
DEEDS = {
    "ok": "time.sleep(100)",
    "out of memory": 'print("torch.OutOfMemoryError: CUDA out of memory."); sys.exit(1)',
    "failed": 'raise ValueError("the reason")',
    "refused": 'print("error: a wrong key"); sys.exit(2)',
    "timeout": "time.sleep(100)",
    "killed": "os.kill(os.getpid(), 9)",
}
STEPS = {"ok": 2}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script in the place of train.py, without DeepSpeed's launcher."""
    monkeypatch.setattr(runner, "deepspeed_command", lambda gpus: [sys.executable])

    def start(deed, steps=3, timeout=60.0):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.replace("DEED", deed))
        folder = tmp_path / "point"
        options = {"gpus": 1, "steps": steps, "folder": folder, "timeout": timeout}
        return runner.run_point([str(script)], Path("stage.json"), [], **options)

    return start


@pytest.mark.parametrize("status", DEEDS)
def test_how_a_point_ends(run, tmp_path, status):
    outcome = run(DEEDS[status], STEPS.get(status, 3), 6 if status == "timeout" else 60)
    assert outcome.status == status
    if status == "ok":
        assert outcome.measured["peak_bytes"] == 20
        assert outcome.measured["tokens_per_second"] == 14.0  # the first step is left out
    else:
        assert outcome.reason
        assert outcome.measured is None
    pids = [int(pid) for pid in (tmp_path / "point" / "pids").read_text().split()]
    assert not any(_runs(pid) for pid in pids), "a process of the point is left"


def test_what_a_killed_driver_left_is_ended_before_the_next_try(run, tmp_path):
    driver = os.fork()
    if driver == 0:
        os.setsid()
        run("time.sleep(100)")
        os._exit(0)
    pids_file = tmp_path / "point" / "pids"
    deadline = time.monotonic() + 60
    while not pids_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    pids = [int(pid) for pid in pids_file.read_text().split()]
    assert len(pids) == 2
    assert all(map(_runs, pids))
    assert run(DEEDS["ok"], 2).status == "ok"
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_torn_line_is_lost_and_nothing_else(tmp_path):
    results = Results(tmp_path)
    results.append({"key": "a", "status": "ok"})
    with results.file.open("a") as stream:
        stream.write('{"key": "b", "sta')
    again = Results(tmp_path)
    assert set(again.by_key) == {"a"}
    again.append({"key": "c", "status": "failed"})
    assert set(Results(tmp_path).by_key) == {"a", "c"}
    again.append({"key": "c", "status": "ok"})
    assert Results(tmp_path).by_key["c"]["status"] == "ok"
    assert json.loads(results.file.read_text().splitlines()[-1])["key"] == "c"


def test_one_driver_at_a_time(tmp_path):
    with only_driver(tmp_path), pytest.raises(UserError, match="another sweep"), only_driver(tmp_path):
        pass
    with only_driver(tmp_path):
        pass
