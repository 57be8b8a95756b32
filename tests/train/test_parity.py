"""FP8 beside BF16 over seeds: gaps, noise, verdicts, and what the runs are told."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import stdev

import pytest

from ds_fp8.report import charts
from ds_fp8.report.parity import compare, comparisons_in, run_folder, twin_overrides
from ds_fp8.report.verdict import judge, judge_all, judge_seeds, seed_noise
from ds_fp8.train import load_stage
from tests.report.runs import finished_run
from tests.train.conftest import ROOT


def runs_of(tmp_path, fp8: list[float], bf16: list[float], first=7):
    for kind, values in {"fp8": fp8, "bf16": bf16}.items():
        for seed, loss in enumerate(values, start=first):
            finished_run(run_folder(tmp_path, kind, seed), loss, 10, 0.5, enabled=kind == "fp8")
    return comparisons_in(tmp_path, range(first, first + len(fp8)))


def test_the_gap_is_a_mean_over_seeds_and_the_noise_is_bf16s(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.02, 2.00, 2.05], [2.0, 2.02, 2.04]))
    gaps = [2.02 / 2.0 - 1, 2.00 / 2.02 - 1, 2.05 / 2.04 - 1]
    assert comparison["gaps"] == pytest.approx(gaps)
    assert comparison["gap"] == pytest.approx(sum(gaps) / 3)
    assert comparison["gap_standard_error"] == pytest.approx(stdev(gaps) / 3**0.5)
    assert comparison["seed_noise"] == pytest.approx(0.02 / 2.02)
    assert comparison["seeds"] == [7, 8, 9]


def test_one_seed_has_no_noise(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.002], [2.0]))
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


def test_a_report_over_seeds_shows_their_mean_and_noise(tmp_path):
    twins = runs_of(tmp_path, [2.02, 2.00], [2.0, 2.02])
    verdict = judge_all(twins)
    assert verdict == judge_seeds(twins)
    assert "standard error" in verdict.words
    picture = charts.gaps_of_seeds(twins, seed_noise(twins), 0.0025)
    for words in ("BF16's own seeds", "seed 7", "seed 8"):
        assert words in picture


def test_a_loss_that_is_not_finite_is_no_comparison(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.0, None], [2.0, 2.0]))
    assert not comparison["passed"]
    assert "not finite" in comparison["verdict"]


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
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal: " in result.stdout
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    figures = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert figures["steps"] == 2
    assert list(figures["curves"]["fp8"][0]["loss"]) == ["1", "2"]
    assert figures["final_loss"]["fp8"] != figures["final_loss"]["bf16"]
