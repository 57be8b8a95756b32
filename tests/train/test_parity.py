"""FP8 beside BF16 over seeds: gaps, noise, verdicts, and what the runs are told."""

import json
import sys
from pathlib import Path
from statistics import stdev

import pytest

from ds_fp8 import train as train_room
from ds_fp8.cli import main
from ds_fp8.commands import comparisons, robustness
from ds_fp8.commands import parity as command
from ds_fp8.config.errors import UserError
from ds_fp8.data import build_data, build_tokenizer, default_cache_dir
from ds_fp8.report import charts
from ds_fp8.report.parity import Cell, compare, comparisons_in, run_overrides, twins_of
from ds_fp8.report.verdict import Gap, judge, judge_all, judge_seeds, seed_noise
from ds_fp8.train import load_stage
from tests.report.runs import finished_run
from tests.train.conftest import ROOT
from tests.train.tiny_stage import RESULT


def runs_of(tmp_path, fp8: list[float], bf16: list[float], first=7):
    twins = twins_of({"": ()}, range(first, first + len(fp8)))
    for losses, cells in zip(zip(fp8, bf16, strict=True), twins, strict=True):
        for loss, cell in zip(losses, cells, strict=True):
            finished_run(cell.folder(tmp_path), loss, 10, 0.5, enabled=cell.kind == "fp8")
    return comparisons_in(tmp_path, twins)


def test_the_gap_is_a_mean_over_seeds_and_the_noise_is_bf16s(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.02, 2.00, 2.05], [2.0, 2.02, 2.04]))
    gaps = [2.02 / 2.0 - 1, 2.00 / 2.02 - 1, 2.05 / 2.04 - 1]
    assert comparison["gaps"] == pytest.approx(gaps)
    assert comparison["gap"] == pytest.approx(sum(gaps) / 3)
    assert comparison["gap_standard_error"] == pytest.approx(stdev(gaps) / 3**0.5)
    assert comparison["seed_noise"] == pytest.approx(0.02 / 2.02)
    assert comparison["seeds"] == [7, 8, 9]


def test_a_run_whose_steps_are_lost_has_no_speed(tmp_path):
    twins = runs_of(tmp_path, [0.5], [0.5])
    twins[0].run.result["tokens_per_second"] = None
    assert compare(twins)["tokens_per_second"] == {"fp8": None, "bf16": 1000.0}


def test_one_seed_has_no_noise(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.002], [2.0]))
    assert comparison["seed_noise"] is comparison["gap_standard_error"] is None
    assert comparison["passed"]


@pytest.mark.parametrize(
    ("gap", "error", "word", "passed"),
    [
        (0.001, None, "not worse", True),
        (-0.02, None, "not worse", True),
        (0.003, None, "worse", False),
        (-0.02, 0.001, "better", True),
        (0.001, 0.001, "noise", True),
        (0.002, 0.0001, "within the tolerance", True),
        (0.01, 0.02, "undecided", False),
        (0.01, 0.001, "worse", False),
    ],
)
def test_verdicts(gap, error, word, passed):
    verdict = judge(Gap(gap, error), None, 0.0025)
    assert word in verdict.words
    assert verdict.passed == passed
    assert ("one seed can show a failure" in verdict.words) == (error is None)
    if error is None:  # which says nothing about what is equal or better
        assert not verdict.words.startswith("equal")
        assert "%, better" not in verdict.words


@pytest.mark.parametrize(
    ("trained", "weights", "level"),
    [
        (Gap(0.001, None), Gap(0.0005, None), "good"),
        (Gap(0.008, None), Gap(0.0005, None), "bad"),
        (Gap(0.001, None), Gap(0.0045, None), "bad"),
        (Gap(0.001, 0.0001), Gap(0.01, 0.02), "undecided"),
        (Gap(0.01, 0.02), Gap(0.0045, 0.0001), "bad"),
    ],
)
def test_the_worse_of_the_two_losses_decides_and_both_are_named(trained, weights, level):
    verdict = judge(trained, weights, 0.0025)
    assert verdict.level == level
    assert f"the final loss of FP8 is {trained.mean:+.3%}" in verdict.words
    assert f"that of its weights in BF16 {weights.mean:+.3%}" in verdict.words


def test_both_losses_are_compared_over_seeds(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.02, 2.00, 2.05], [2.0, 2.02, 2.04]))
    gaps = [2.02 / 2.0 * 0.996 - 1, 2.00 / 2.02 * 0.996 - 1, 2.05 / 2.04 * 0.996 - 1]  # as finished_run has them
    assert comparison["gaps_bf16"] == pytest.approx(gaps)
    assert comparison["gap_standard_error_bf16"] == pytest.approx(stdev(gaps) / 3**0.5)
    assert comparison["final_loss_bf16"]["bf16"] == comparison["final_loss"]["bf16"]
    assert f"that of its weights in BF16 {sum(gaps) / 3:+.3%} from BF16's (standard error" in comparison["verdict"]


def test_runs_of_earlier_versions_are_judged_by_the_loss_they_have(tmp_path):
    twins = runs_of(tmp_path, [2.002], [2.0])
    del twins[0].run.result["final_loss_bf16"]
    comparison = compare(twins)
    assert comparison["passed"]
    assert comparison["gap_bf16"] is None
    assert "in BF16" not in comparison["verdict"]


def test_a_report_over_seeds_shows_their_mean_and_noise(tmp_path):
    twins = runs_of(tmp_path, [2.02, 2.00], [2.0, 2.02])
    verdict = judge_all(twins)
    assert verdict == judge_seeds(twins)
    assert "standard error" in verdict.words
    picture = charts.gaps_of_seeds(twins, seed_noise(twins), 0.0025)
    for words in ("BF16's own seeds", "seed 7", "seed 8"):
        assert words in picture


@pytest.mark.parametrize(
    ("fp8", "bf16", "passed"),
    [((0.8, 0.82, 0.78), (0.98, 0.96, 1.0), False), ((0.9, 0.5, 0.9), (0.98, 0.96, 0.98), True)],
)
def test_seeds_that_answer_less_are_worse_beyond_their_noise(fp8, bf16, passed, tmp_path):
    twins = twins_of({"": ()}, range(3))
    for shares, cells in zip(zip(fp8, bf16, strict=True), twins, strict=True):
        for share, cell in zip(shares, cells, strict=True):
            finished_run(cell.folder(tmp_path), 2.0, 10, share, enabled=cell.kind == "fp8")
    comparison = compare(comparisons_in(tmp_path, twins))
    differences = [ours - theirs for ours, theirs in zip(fp8, bf16, strict=True)]
    assert comparison["exact_match_difference"] == pytest.approx(sum(differences) / 3)
    assert comparison["exact_match_difference_standard_error"] >= stdev(differences) / 3**0.5 * (1 - 1e-9)
    assert comparison["passed"] == passed
    assert comparison["verdict"].startswith("equal: " if passed else "worse: ")


def test_a_loss_that_is_not_finite_is_no_comparison(tmp_path):
    comparison = compare(runs_of(tmp_path, [2.0, None], [2.0, 2.0]))
    assert not comparison["passed"]
    assert "not finite" in comparison["verdict"]


@pytest.mark.parametrize("name", ["cpt", "cpt_decay", "sft_stage1"])
def test_a_shorter_run_keeps_the_shape_of_the_schedule(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    file = ROOT / "ds_configs" / "infir2_1.5b" / f"{name}.json"
    stage = load_stage(file)
    twins = {kind: load_stage(file, run_overrides(stage, Cell(kind, 5), 400, tmp_path)) for kind in ("fp8", "bf16")}
    assert (twins["fp8"].fp8.enabled, twins["bf16"].fp8.enabled) == (True, False)
    for twin in twins.values():
        assert (twin.train.steps, twin.train.epochs, twin.train.seed) == (400, None, 5)
    assert twins["fp8"].run_dir != twins["bf16"].run_dir
    schedule = twins["fp8"].train.schedule
    lengths = {"cpt": (0.125, 0.125), "cpt_decay": (0, 400), "sft_stage1": (0.05, schedule.decay)}
    assert (schedule.warmup, schedule.decay) == lengths[name]


@pytest.fixture
def planned(monkeypatch, cache_home, tmp_path):
    """`planned(file, ...)`: what `ds-fp8 parity` would train, and whether it had loaded all of it before."""
    monkeypatch.setenv("DS_FP8_CACHE", str(cache_home))
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def plan(file, *arguments, command=command):
        events = []
        load = train_room.load_stage
        monkeypatch.setattr(train_room, "load_stage", lambda *given: events.append("load") or load(*given))
        monkeypatch.setattr(comparisons, "train_once", lambda file, ranks, changes: events.append(changes))
        monkeypatch.setattr(sys, "argv", ["parity", str(file), "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(UserError, match="there is no folder"):  # nothing was trained
            command.main()
        return events

    return plan


def test_all_twins_are_read_before_the_first_is_trained(tiny, write, planned):
    tiny["fp8"]["optimizer"] = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
    tiny["train"]["compact_checkpoints"] = True  # of no effect in BF16, which has no compressed moments
    events = planned(write(tiny), "--steps", "2", "--seeds", "2")
    assert events[:5] == ["load"] * 5
    assert len(events) == 9
    assert sum("fp8.enabled=false" in changes for changes in events[5:]) == 2


@pytest.mark.parametrize("compared", [command, robustness])
def test_a_schedule_in_steps_is_shortened_where_the_stage_counts_epochs(tiny, write, planned, compared):
    tiny["train"] |= {"steps": None, "epochs": 40, "schedule": {"type": "wsd", "warmup": 6, "decay": 12}}
    file = write(tiny)
    stage = load_stage(file)
    rows = len(build_data(stage.data, build_tokenizer(stage.data, default_cache_dir()), default_cache_dir()).train)
    steps = stage.with_length(rows).train.steps
    changes = planned(file, "--steps", "4", "--ranks", "1", command=compared)[-1]
    assert f"train.schedule.warmup={6 / steps}" in changes
    assert f"train.schedule.decay={12 / steps}" in changes


def test_points_that_differ_in_fp8_keys_alone_have_one_twin_in_bf16(tiny, write, planned):
    grid = ["--grid", "fp8.preset=infir2,tensorwise", "--grid", "optimizer.params.lr=0.001,0.002"]
    runs = [changes for changes in planned(write(tiny), "--steps", "2", *grid) if changes != "load"]
    fp8, bf16 = ([run for run in runs if f"fp8.enabled={word}" in run] for word in ("true", "false"))
    assert (len(fp8), len(bf16)) == (4, 2)
    assert not any("fp8.preset" in change for run in bf16 for change in run)
    folders = [next(change for change in run if "run_dir" in change) for run in runs]
    assert len(set(folders)) == 6
    assert folders[0].endswith("out/fp8/preset_infir2_lr_0.001/seed_1236")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--grid", "gpus=1,2"], "gpus"),
        (["--grid", "fp8.enabled=true,false"], "fp8.enabled"),
        (["--grid", "fp8.preset=infir2,infir3"], "fp8.preset"),
    ],
)
def test_grids_that_cannot_be_compared(tiny, write, monkeypatch, tmp_path, options, key):
    monkeypatch.setattr(comparisons, "train_once", None)
    monkeypatch.setattr(sys, "argv", ["parity", str(write(tiny)), "--steps", "2", "--out", str(tmp_path), *options])
    with pytest.raises(UserError) as caught:
        command.main()
    assert caught.value.key == key


def test_points_of_one_folder_are_refused():
    with pytest.raises(UserError, match="same folder"):
        twins_of({"a b": (), "a_b": ("train.log_every=2",)}, [1])


def test_compact_checkpoints_of_fp32_moments_are_still_refused(tiny, write):
    tiny["train"]["compact_checkpoints"] = True
    with pytest.raises(UserError, match="compact"):
        load_stage(write(tiny))


@pytest.mark.slow
def test_the_command_trains_twins_and_gives_its_verdict(tiny, write, cache_home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DS_FP8_CACHE", str(cache_home))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    file = write(tiny)
    monkeypatch.chdir(tmp_path)
    arguments = ["--steps", "2", "--set", "data.examples=100", "--out", "out", "--tolerance", "0.5"]
    monkeypatch.setattr(sys, "argv", ["parity", "--deepspeed_config", str(file), *arguments])
    assert command.main() == 0
    assert "not worse: " in capsys.readouterr().out
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    figures = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert figures["steps"] == 2
    assert list(figures["curves"]["fp8"][0]["loss"]) == ["1", "2"]
    assert figures["final_loss"]["fp8"] != figures["final_loss"]["bf16"]


@pytest.mark.parametrize("name", ["parity", "robustness"])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["--steps", "12"], None),
        (["--steps", "20"], "--steps"),
        (["--steps", "12", "--set", "data.seed=5"], "data.seed"),
    ],
)
def test_finished_runs_are_taken_as_they_are_if_they_are_the_same(
    tiny, write, tmp_path, monkeypatch, cache_home, name, changes, key
):
    """Not their figures for those of another stage, nor their weights trained on by another schedule."""
    monkeypatch.setenv("DS_FP8_CACHE", str(cache_home))
    file, made = write(tiny), []

    def finish(file, ranks, changes):
        made.append(changes)
        stage = load_stage(file, changes, ranks)
        stage.run_dir.mkdir(parents=True)
        (stage.run_dir / "config.json").write_text(json.dumps(stage.raw))
        (stage.run_dir / "result.json").write_text(json.dumps(RESULT | {"steps": stage.train.steps}))
        (stage.run_dir / "metrics.jsonl").write_text("")

    monkeypatch.setattr(comparisons, "train_once", finish)
    monkeypatch.setattr(robustness, "_measure", lambda *cell: None)
    words = [str(file), "--out", str(tmp_path / "out"), "--seeds", "1", "--gpus", "1"]
    main([name, *words, "--steps", "12"])
    first = len(made)
    assert first == (2 if name == "parity" else 8)
    if key is None:
        main([name, *words, *changes])
    else:
        with pytest.raises(UserError) as caught:
            main([name, *words, *changes])
        assert caught.value.key == key
    assert len(made) == first
