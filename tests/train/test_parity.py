"""FP8 beside BF16 over seeds: gaps, noise, verdicts, and what the runs are told."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import stdev

import pytest

from ds_fp8.train import load_stage
from ds_fp8.train.parity import compare, judge, twin_overrides, write
from ds_fp8.train.twin_report import RunRecord
from tests.train.conftest import ROOT
from tests.train.test_twin_report import finished_run


def runs_of(tmp_path, fp8: list[float], bf16: list[float]):
    losses = {"fp8": fp8, "bf16": bf16}
    for kind, values in losses.items():
        for seed, loss in enumerate(values):
            finished_run(tmp_path / kind / str(seed), loss, 10, 0.5)
    return {
        kind: [RunRecord(tmp_path / kind / str(seed)) for seed in range(len(values))] for kind, values in losses.items()
    }


def test_the_gap_is_a_mean_over_seeds_and_the_noise_is_bf16s(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.02, 2.00, 2.05], [2.0, 2.02, 2.04]), [7, 8, 9])
    gaps = [2.02 / 2.0 - 1, 2.00 / 2.02 - 1, 2.05 / 2.04 - 1]
    assert comparison["gaps"] == pytest.approx(gaps)
    assert comparison["gap"] == pytest.approx(sum(gaps) / 3)
    assert comparison["gap_standard_error"] == pytest.approx(stdev(gaps) / 3**0.5)
    assert comparison["seed_noise"] == pytest.approx(0.02 / 2.02)


def test_one_seed_has_no_noise(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.002], [2.0]), [7])
    assert comparison["seed_noise"] is comparison["gap_standard_error"] is None
    assert comparison["passed"]


@pytest.mark.parametrize(
    ("gap", "error", "word", "passed"),
    [
        (0.001, None, "equal", True),
        (0.003, None, "worse", False),
        (-0.02, 0.001, "better", True),
        (0.001, 0.001, "noise", True),
        (0.002, 0.0001, "within the tolerance", True),
        (0.01, 0.02, "undecided", False),
        (0.01, 0.001, "worse", False),
    ],
)
def test_verdicts(gap, error, word, passed):
    verdict = judge(gap, error, 0.0025)
    assert word in verdict.words
    assert verdict.passed == passed


@pytest.mark.parametrize("seeds", [1, 2])
def test_figures_and_picture_are_written(seeds, tmp_path):
    comparison = compare(runs_of(tmp_path, [2.0] * seeds, [2.0] * seeds), list(range(seeds)))
    numbers, picture = write(comparison, tmp_path / "out")
    assert json.loads(numbers.read_text())["final_loss"] == {"fp8": [2.0] * seeds, "bf16": [2.0] * seeds}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["cpt", "cpt_decay", "sft_stage1"])
def test_a_shorter_run_keeps_the_shape_of_the_schedule(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    file = ROOT / "ds_configs" / "infir2_1.5b" / f"{name}.json"
    stage = load_stage(file)
    twins = {kind: load_stage(file, twin_overrides(stage, kind, 5, 400, tmp_path)) for kind in ("fp8", "bf16")}
    assert (twins["fp8"].fp8.enabled, twins["bf16"].fp8.enabled) == (True, False)
    for twin in twins.values():
        assert (twin.train.steps, twin.train.epochs, twin.train.seed) == (400, None, 5)
    assert twins["fp8"].run_dir != twins["bf16"].run_dir
    schedule = twins["fp8"].train.schedule
    lengths = {"cpt": (0.125, 0.125), "cpt_decay": (0, 400), "sft_stage1": (0.05, schedule.decay)}
    assert (schedule.warmup, schedule.decay) == lengths[name]


def test_the_script_trains_twins_and_gives_its_verdict(tiny, write, cache_home, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_FP8_CACHE", str(cache_home))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    file = write(tiny)
    command = [sys.executable, str(ROOT / "scripts" / "parity.py"), "--deepspeed_config", str(file)]
    command += ["--steps", "2", "--set", "data.examples=100", "--out", "out", "--tolerance", "0.5"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal: " in result.stdout
    figures = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert figures["steps"] == 2
    assert list(figures["curves"]["fp8"][0]["loss"]) == ["1", "2"]
    assert figures["final_loss"]["fp8"] != figures["final_loss"]["bf16"]
