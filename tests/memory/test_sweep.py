"""Sweeps as a user runs them: real training runs, a kill in the middle, the same command again."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ds_fp8.cli import main
from ds_fp8.cluster.local_launch import TRAIN
from ds_fp8.config.errors import UserError
from ds_fp8.memory import runner
from ds_fp8.memory import sweep as sweep_module
from ds_fp8.memory.grid import Point
from ds_fp8.memory.results import OK, OUT_OF_MEMORY
from ds_fp8.memory.runner import PROCESS
from ds_fp8.train import load_stage
from tests.memory import workloads

DEVIATION = 0.15
"""Relative, of the process: at this size libraries that load in the first step show."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    stage = workloads.stage(
        model={"config": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}},
        data={"path": "synthetic", "examples": 300, "sequence_length": 64},
        fp8={"monitor": {"every": 0}},
    )
    sweep = {"grid": {"fp8.enabled": [False, True]}}
    (folder / "stage.json").write_text(json.dumps(stage))
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


def environment(folder):
    return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "DS_FP8_CACHE": str(folder / "cache")}


def start(folder, command, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "ds_fp8.cli", command, "stage.json", *arguments], cwd=folder,
        env={**os.environ, **environment(folder)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def output_of(folder, command, *arguments):
    process = start(folder, command, *arguments)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def records(out):
    return [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]


def assert_measured(record):
    assert record["status"] == "ok", record["reason"]
    expected = record["estimate"]["peak_bytes"] + record["process_bytes"]
    assert expected == pytest.approx(record["peak_bytes"], rel=DEVIATION)


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again(folder):
    command = ("sweep", "--sweep", "sweep.json", "--steps", "2", "--out", "out")
    driver = start(folder, *command)
    deadline = time.monotonic() + 240
    while not ((folder / "out" / "sweep.jsonl").exists() and (running := _running(folder))):
        assert driver.poll() is None, driver.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    left = psutil.Process(running)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    first = records(folder / "out")
    assert [record["status"] for record in first] == ["ok"]

    code, output = output_of(folder, *command)
    assert code == 0, output
    assert "1 of 2 points are measured already" in output
    both = records(folder / "out")
    assert both[0] == first[0]
    assert [record["name"] for record in both] == ["enabled false", "enabled true"]
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, (
        "the run that the killed driver left is still there"
    )
    for record in both:
        assert_measured(record)
    assert {"sweep.csv", "report.html", "best.json"} <= {file.name for file in (folder / "out").iterdir()}


def _running(folder):
    for file in (folder / "out" / "points").glob(f"*/{PROCESS}"):
        try:
            return json.loads(file.read_text())["pid"]
        except ValueError:
            continue  # just being written
    return None


@pytest.fixture
def call(folder, monkeypatch):
    """Call a command within this process."""

    def run(command, *arguments):
        monkeypatch.chdir(folder)
        return main([command, "--deepspeed_config", "stage.json", *arguments])

    return run


@pytest.mark.slow
def test_a_point_is_measured_once(call, folder, monkeypatch, capsys):
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    command = ("sweep", "--grid", "fp8.enabled=true", "--steps", "2", "--out", "once")
    assert call(*command) == 0
    (record,) = records(folder / "once")
    assert_measured(record)
    assert call(*command) == 0
    assert "1 of 1 points are measured already" in capsys.readouterr().out
    assert records(folder / "once") == [record]
    assert {"sweep.csv", "report.html", "best.json"} <= {file.name for file in (folder / "once").iterdir()}


@pytest.mark.parametrize("grid", [["--sweep", "sweep.json"], ["--grid", "fp8.enabled=true,false"]])
def test_a_plan_runs_nothing(call, folder, capsys, grid):
    assert call("sweep", *grid, "--plan", "--output", "planned") == 0
    assert "enabled false" in capsys.readouterr().out
    assert not (folder / "planned").exists()


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        ({"grid": {"fp8.presett": ["infir2"]}}, [], "presett"),
        ({"grid": {"train.seed": list(range(10_000))}}, [], "10,000 points"),
        ({"grid": {"train.seed": [1]}}, ["--only", "sed 1"], "seed 1"),
        ({"grid": {"train.seed": [1]}}, ["--rerun", "faild"], "failed"),
        ({"grid": {"train.seed": [1]}}, ["--find-max", "micro_batch"], "--memory"),
    ],
)
def test_mistakes_end_before_the_first_run(call, folder, content, arguments, says):
    (folder / "wrong.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        call("sweep", "--sweep", "wrong.json", "--output", "never", *arguments)
    assert says in str(error.value)
    assert not (folder / "never" / "points").exists()


def test_the_estimate_as_json(call, capsys):
    assert call("estimate", "--gpus", "2", "--memory", "80", "--json") == 0
    output = capsys.readouterr().out
    result = json.loads(output[output.index("{") :])
    assert set(result) == {"as configured", "BF16, its own loss"}
    for column in result.values():
        assert column["gpus"] == 2
        assert column["largest"]["micro_batch"] > 0


def test_the_estimate_as_a_table(call, capsys):
    assert call("estimate", "--set", "fp8.enabled=false", "--memory", "1") == 1
    output = capsys.readouterr().out
    assert "does not fit: " in output
    assert "master weights" in output
    assert "largest micro-batch" in output


@pytest.mark.parametrize(
    "schedule",
    [{"warmup": 30}, {"type": "wsd", "warmup": 7, "decay": 0.6}, {"type": "wsd", "warmup": 3, "decay": 4}, {}],
)
def test_a_stage_that_counts_epochs_is_measured_with_its_schedule(folder, monkeypatch, schedule):
    raw = json.loads((folder / "stage.json").read_text())
    raw["train"] |= {"epochs": 3, "steps": None, "schedule": schedule}
    file = folder / "epochs.json"
    file.write_text(json.dumps(raw))
    started = []

    def run_point(program, stage_file, overrides, **more):
        started.append(load_stage(stage_file, overrides))
        return runner.Outcome("failed", "only started", 1.0)

    monkeypatch.setattr(sweep_module, "run_point", run_point)
    setting = sweep_module.Setting(TRAIN, file, raw, folder / f"epochs {schedule}", 4, 60.0)
    setting.folder.mkdir()
    sweep_module.Sweep(setting).run([Point("base", {}, 1)])
    assert started[0].train.steps > 4


def test_searching_the_largest(folder, monkeypatch):
    """Runs are stood in for: what fits is decided by the number of rows."""

    def run_point(program, stage_file, overrides, **more):
        rows = json.loads(dict(part.split("=", 1) for part in overrides)["train_micro_batch_size_per_gpu"])
        if rows > 11:
            return runner.Outcome(OUT_OF_MEMORY, "too many", 1.0)
        figures = {"peak_bytes": rows << 20, "reserved_bytes": 0, "tokens_per_second": 1.0, "process_bytes": 0}
        return runner.Outcome(OK, "", 1.0, figures)

    monkeypatch.setattr(sweep_module, "run_point", run_point)
    raw = json.loads((folder / "stage.json").read_text())
    output = folder / "search"
    output.mkdir()
    setting = sweep_module.Setting(TRAIN, folder / "stage.json", raw, output, 2, 60.0)
    sweep = sweep_module.Sweep(setting)
    point = Point("base", {}, 1)
    assert sweep.find_max(point, "micro_batch", 80 << 30)["tried"] == 11
    tried = sweep.known([point])
    assert {r["tried"] for r in tried if r["status"] == OUT_OF_MEMORY} >= {12}
    monkeypatch.setattr(sweep_module, "run_point", None)  # all of it is known already
    assert sweep_module.Sweep(setting).find_max(point, "micro_batch", 80 << 30)["tried"] == 11
