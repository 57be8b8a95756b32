"""Sweep files, the tables of results, and sweeps as a user runs them: real runs, a kill in the middle, once more."""

import io
import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.memory import sweep as sweep_module
from ds_fp8.memory.report import best_of, print_records, write_best
from ds_fp8.memory.sweep import FILE, Sweep, check_points, only_driver
from ds_fp8.report.compare import Point, read_points
from ds_fp8.train import load_stage
from tests.corpus import DOCUMENTS
from tests.memory import workloads

SWEEPS = sorted((Path(__file__).parents[2] / "ds_configs" / "sweeps").glob("*.json"))
SHAPES = sorted((Path(__file__).parents[2] / "ds_configs" / "sweeps" / "shapes").glob("*.json"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fp8.presett": "infir2"}, "presett"),
        ({"zero_optimisation.stage": 3}, "zero_optimization"),
        ({"zero_optimization.stages": 3}, "stages"),
        ({"zero_optimization.stage": 2}, "stage 3"),
        ({"train_batch_size": 7}, "does not divide"),
        ({"data.sequence_length": "long"}, "sequence_length"),
    ],
)
def test_a_point_that_the_stage_does_not_take(tmp_path, settings, says):
    file = tmp_path / "stage.json"
    file.write_text(json.dumps(workloads.stage()))
    with pytest.raises(UserError) as error:
        check_points([Point("fine", {}, 1), Point("wrong", settings, 2)], file)
    assert 'the point "wrong"' in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("stage", SHAPES, ids=lambda file: file.stem)
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_ready_sweeps_load_with_the_ready_shapes(file, stage):
    check_points(read_points(file, 4), stage)


RAW = workloads.stage()


MEASURED = {"peak_bytes": 2 << 30, "loss": 2.5, "process_bytes": 0}


def record(name, peak, tokens, status="ran", **more):
    measured = {} if status != "ran" else {"peak_bytes": peak, "reserved_bytes": peak, "tokens_per_second": tokens}
    measured |= {} if status != "ran" else {"loss": 2.5, "step_seconds": 1.0, "steps": 2, "process_bytes": 0}
    parts = {"master weights": peak // 3, "moments": peak // 3, "activations": peak // 4}
    estimate = {"peak_bytes": sum(parts.values()), "parts": parts}
    return {
        "key": name, "name": name, "status": status, "reason": "" if status == "ran" else "<b>CUDA & co</b>",
        "settings": {"fp8.enabled": name != "BF16", "train_batch_size": None}, "gpus": 2, "device": "a GPU",
        "seconds": 1.0, "estimate": estimate, **measured, **more,
    }  # fmt: skip


RECORDS = [
    record("BF16", 40 << 30, 1000.0),
    record("infir2", 25 << 30, 1500.0),
    record("slow & <small>", 20 << 30, 600.0),
    record("too large", 90 << 30, None, "out of memory"),
    record("infir2, 4 rows", 30 << 30, 1600.0),
]


def test_the_table_on_the_terminal():
    console = Console(width=160, file=io.StringIO(), highlight=False)
    print_records(RECORDS, console)
    lines = console.file.getvalue().splitlines()
    assert [word.strip() for word in lines[4].split("│")[1:-1]] == [
        "infir2", "ran", "25.00", "22.92", "-8.3%", "0.62", "750", "2.5000",
    ]  # fmt: skip
    assert "out of memory" in lines[6]


def test_a_table_in_a_file_is_whole():
    """As in a pipe: rich takes 80 columns there."""
    console = Console(file=io.StringIO(), highlight=False, soft_wrap=True)
    print_records(RECORDS, console)
    lines = console.file.getvalue().splitlines()
    heads = ["point", "status", "peak GiB", "estimate GiB", "deviation", "of the first", "tokens/s/GPU", "loss"]
    assert [word.strip() for word in lines[1].split("┃")[1:-1]] == heads
    assert len(lines) == len(RECORDS) + 4


def test_the_best_point_has_the_casts_that_were_measured(tmp_path):
    """null says that wgrad's input is cast as fprop's, which is not so in this preset."""
    raw = workloads.stage(fp8={"preset": "hybrid_fast", "linear": {"wgrad": {"input": None}}})
    best = json.loads(write_best(tmp_path, [record("a", 1 << 30, 1.0)], raw).read_text())
    assert parse_fp8(best).linear == parse_fp8(raw).linear
    assert "train_batch_size" not in best


def test_the_best_point_is_a_stage(tmp_path):
    assert write_best(tmp_path, [RECORDS[3]], RAW) is None
    stage = json.loads(write_best(tmp_path, RECORDS, RAW).read_text())
    assert best_of(RECORDS)["name"] == "infir2, 4 rows"
    assert stage["fp8"]["enabled"] is True
    assert "train_batch_size" not in stage
    assert stage["train"] == RAW["train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    stage = workloads.stage(
        model={"config": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}},
        data={**DOCUMENTS, "sequence_length": 64},
        fp8={"monitor": {"every": 0}},
    )
    sweep = {"grid": {"fp8.enabled": [False, True]}}
    (folder / "stage.json").write_text(json.dumps(stage))
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


@pytest.fixture
def call(folder, monkeypatch):
    """Call a command within this process."""

    def run(command, *arguments):
        monkeypatch.chdir(folder)
        return main([command, "--deepspeed_config", "stage.json", *arguments])

    return run


@pytest.mark.parametrize("grid", [["--sweep", "sweep.json"], ["--grid", "fp8.enabled=true,false"]])
def test_a_plan_runs_nothing(call, folder, capsys, grid):
    assert call("sweep", *grid, "--plan", "--output", "planned") == 0
    assert "enabled false" in capsys.readouterr().out
    assert not (folder / "planned").exists()


def test_a_model_without_an_estimate_is_planned_and_measured(call, folder, capsys, monkeypatch):
    """Its vocabulary, the tokenizer's, is what an estimate lacks."""
    raw = json.loads((folder / "stage.json").read_text())
    del raw["model"]["config"]["vocab_size"]
    (folder / "open.json").write_text(json.dumps(raw))
    monkeypatch.setattr(
        sweep_module,
        "run_point",
        lambda *_, **__: {"status": "ran", "reason": "", **MEASURED, "tokens_per_second": 9.0},
    )
    arguments = ["open.json", "--grid", "fp8.enabled=true,false", "--out", "without"]
    monkeypatch.chdir(folder)
    assert main(["sweep", *arguments, "--plan"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"enabled true +│ +1 │ +– │", printed)
    assert printed.count("no estimate: the vocabulary") == 1
    assert main(["sweep", *arguments]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ enabled true ")]
    assert [[word.strip() for word in row.split("│")[2:-2]] for row in rows] == [["ran", "2.00", "–", "–", "1.00", "9"]]
    assert [json.loads(line)["estimate"] for line in (folder / "without" / FILE).read_text().split("\n") if line] == [
        None,
        None,
    ]
    assert (folder / "without" / "best.json").exists()


def test_the_estimate_as_json(call, capsys):
    assert call("estimate", "--gpus", "2", "--memory", "80", "--json") == 0
    output = capsys.readouterr().out
    result = json.loads(output[output.index("{") :])
    assert set(result) == {"as configured", "BF16, fused loss", "BF16, its own loss"}
    for column in result.values():
        assert column["gpus"] == 2
        assert column["largest"]["micro_batch"] > 0


@pytest.mark.parametrize("schedule", [{"warmup": 30}, {"type": "wsd", "warmup": 7, "decay": 0.6}, {}])
def test_a_stage_that_counts_epochs_is_measured_with_its_schedule(folder, monkeypatch, schedule):
    raw = json.loads((folder / "stage.json").read_text())
    raw["train"] |= {"epochs": 3, "steps": None, "schedule": schedule}
    file = folder / "epochs.json"
    file.write_text(json.dumps(raw))
    started = []

    def run_point(stage_file, overrides, **more):
        started.append(load_stage(stage_file, overrides))
        return {"status": "failed", "reason": "only started"}

    monkeypatch.setattr(sweep_module, "run_point", run_point)
    (folder / f"epochs {schedule}").mkdir()
    Sweep(file, raw, folder / f"epochs {schedule}", 4, 60.0).run([Point("base", {}, 1)])
    assert started[0].train.steps > 4


# ---------------------------------------------------------------- one run


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
exec(DEEDS[sys.argv[sys.argv.index("--deepspeed_config") + 1]])
"""
DEEDS = {
    "ran": "time.sleep(100)",
    "out of memory": 'print("torch.OutOfMemoryError: CUDA out of memory."); sys.exit(1)',
    "failed": 'raise ValueError("the reason")',
    "refused": 'print("error: a wrong key"); sys.exit(2)',
    "timeout": "time.sleep(100)",
    "killed": "os.kill(os.getpid(), 9)",
}
STEPS = {"ran": 2}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script in the place of train.py, without DeepSpeed's launcher."""
    script = tmp_path / "script.py"
    script.write_text(f"DEEDS = {DEEDS!r}\n{SCRIPT}")
    monkeypatch.setattr(sweep_module, "PROGRAM", [sys.executable, str(script)])

    def start(deed, folder=None):
        options = {"gpus": 1, "steps": STEPS.get(deed, 3), "folder": tmp_path / (folder or deed)}
        return sweep_module.run_point(Path(deed), [], **options, timeout=60.0 if folder or deed != "timeout" else 4.0)

    return start


def test_how_points_end(run, tmp_path):
    """Side by side, for most of it is waiting."""
    with ThreadPoolExecutor(len(DEEDS)) as pool:
        outcomes = dict(zip(DEEDS, pool.map(run, DEEDS), strict=True))
    ran = outcomes.pop("ran")
    assert (ran["status"], ran["peak_bytes"]) == ("ran", 20)
    assert ran["tokens_per_second"] == 14.0  # the first step is left out
    for status, outcome in outcomes.items():
        assert outcome["status"] == status
        assert outcome["reason"]
        assert "peak_bytes" not in outcome
    pids = {status: [int(pid) for pid in (tmp_path / status / "pids").read_text().split()] for status in DEEDS}
    assert not {status for status, those in pids.items() if any(map(_runs, those))}, "a process of a point is left"


def test_what_a_killed_driver_left_is_ended_before_the_next_try(run, tmp_path):
    driver = os.fork()
    if driver == 0:
        os.setsid()
        run("timeout", "ran")
        os._exit(0)
    pids_file = tmp_path / "ran" / "pids"
    deadline = time.monotonic() + 60
    while not pids_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    pids = [int(pid) for pid in pids_file.read_text().split()]
    assert len(pids) == 2
    assert all(map(_runs, pids))
    assert run("ran")["status"] == "ran"
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_is_measured_is_known_by_its_settings_and_runs_once(tmp_path, monkeypatch):
    """A line that was cut off is lost and nothing else, and a point that was killed runs again."""
    statuses = iter(["ran", "failed", "killed", "out of memory", "ran", "ran"])
    monkeypatch.setattr(
        sweep_module, "run_point", lambda *_, **__: {"status": next(statuses), "reason": "", "peak_bytes": 1}
    )
    points = [Point("a", {}, 1), Point("b", {"train.seed": 3}, 1), Point("c", {}, 2)]
    sweep = Sweep(Path("stage.json"), RAW, tmp_path, 4, 60.0)
    assert [record["status"] for record in sweep.run(points)] == ["ran", "failed"]
    with (tmp_path / FILE).open("a") as stream:
        stream.write('{"key": "b", "sta')
    assert [record["status"] for record in sweep.run(points)] == ["ran", "failed", "out of memory"]
    renamed = [Point("another name", {"train.run_dir": "elsewhere"}, 1), *points[1:]]
    assert [record["name"] for record in sweep.known(renamed)] == ["a", "b", "c"]
    longer = Sweep(Path("stage.json"), RAW, tmp_path, 5, 60.0)
    assert longer.known(points) == []
    assert len(longer.run(points[:1])) == 1


def test_one_driver_at_a_time(tmp_path):
    with only_driver(tmp_path), pytest.raises(UserError, match="another sweep"), only_driver(tmp_path):
        pass
    with only_driver(tmp_path):
        pass
