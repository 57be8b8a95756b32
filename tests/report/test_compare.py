"""Grids of a stage, FP8 runs and BF16 runs over seeds: what is trained, figures, verdicts, and the page."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import stdev

import pytest

from ds_fp8.cli import main
from ds_fp8.commands import parity as command
from ds_fp8.config.errors import UserError
from ds_fp8.data import build_data, build_tokenizer
from ds_fp8.report import charts, compare
from ds_fp8.report.compare import (
    Point,
    Run,
    changes_of,
    comparisons_in,
    figures_of,
    pairs_of,
    read_points,
    write_parity,
)
from ds_fp8.report.verdict import (
    LOSSES,
    MIN_STEPS,
    TOLERANCE,
    Mean,
    best_of,
    diverged,
    judge,
    seed_noise,
    word_of,
)
from ds_fp8.train import load_stage
from tests.browser import look
from tests.report.runs import finished_run
from tests.train.conftest import ROOT

# ---------------------------------------------------------------- the points of a grid


@pytest.fixture
def points(tmp_path):
    def read(content, gpus=1, *more):
        file = tmp_path / "sweep.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_points(file, gpus, *more)

    return read


def test_named_points_times_a_grid(points):
    found = points(
        {
            "set": {"data.sequence_length": 64, "train.seed": 1},
            "points": [{"name": "a", "set": {"train.seed": 2}}, {"name": "b"}],
            "grid": {"fp8.activations.save": ["fp8", "bf16"], "gpus": [1, 4]},
        },
        2,
    )
    assert [each.name for each in found][:3] == ["a, save fp8, gpus 1", "a, save fp8, gpus 4", "a, save bf16, gpus 1"]
    assert len(found) == 8
    assert found[0].settings == {"data.sequence_length": 64, "train.seed": 2, "fp8.activations.save": "fp8"}
    assert [found[0].gpus, found[1].gpus] == [1, 4]
    assert found[4].settings["train.seed"] == 1
    assert [each.name for each in points({"grid": {"train.seed": [1, 2]}}, 3)] == ["seed 1", "seed 2"]
    assert points({"points": [{"name": "x"}]}, 3) == [Point("x", {}, 3)]


def test_a_grid_of_the_command_line(points):
    words = ["fp8.preset=infir2, coat", "train.seed=1,2"]
    found = read_points(None, 2, words, ["data.sequence_length=64", "train.steps=5"])
    assert [each.name for each in found][:2] == ["preset infir2, seed 1", "preset infir2, seed 2"]
    assert [each.settings["fp8.preset"] for each in found] == ["infir2", "infir2", "coat", "coat"]
    assert found[0].settings == {
        "data.sequence_length": 64, "train.steps": 5, "fp8.preset": "infir2", "train.seed": 1,
    }  # fmt: skip
    found = points({"points": [{"name": "a", "set": {"train.steps": 6}}]}, 2, words[1:], ["train.steps=5"])
    assert [(each.name, each.settings["train.steps"]) for each in found] == [("a, seed 1", 6), ("a, seed 2", 6)]
    objects = read_points(None, 1, ['fp8.linear={"input": {"format": "int8"}},{}'])
    assert [each.settings["fp8.linear"] for each in objects] == [{"input": {"format": "int8"}}, {}]


@pytest.mark.parametrize("word", ["", "train.seed", "=1", "train.seed= "])
def test_words_that_are_no_grid(word):
    with pytest.raises(UserError, match="KEY=VALUE"):
        read_points(None, 1, [word])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "line 1"),
        ("[]", "JSON object"),
        ({}, "no points"),
        ({"grids": {}}, "grid"),
        ({"points": [{"nam": "x"}]}, "nam"),
        ({"points": [{"name": "x"}, {"name": "x"}]}, "two points"),
        ({"grid": {"train.seed": []}}, "no points"),
        ({"grid": {"train.seed": 3}}, "list"),
        ({"grid": {"train.seed": list(range(100)), "train.steps": list(range(1, 101))}}, "10,000 points"),
        ({"grid": {"gpus": [0]}}, "gpus"),
        ({"grid": {"gpus": [None]}}, "gpus"),
    ],
)
def test_what_is_wrong_with_a_file(points, content, says):
    with pytest.raises(UserError) as error:
        points(content)
    assert says in str(error.value)
    assert error.value.remedy
    assert error.value.file


# ---------------------------------------------------------------- figures and verdicts


def seeds_of(folder, fp8, bf16, first=7, **more):
    """Return comparisons of runs with these final losses, of 400 steps unless `more` says otherwise."""
    pairs = pairs_of({"": ()}, range(first, first + len(fp8)))
    for losses, pair in zip(zip(fp8, bf16, strict=True), pairs, strict=True):
        for loss, run in zip(losses, pair, strict=True):
            finished_run(run.folder(folder), loss, 10, 0.5, enabled=run.kind == "fp8", **{"steps": 400, **more})
    return comparisons_in(folder, pairs)[""]


def point_of(found):
    return figures_of({"": found})[1]["points"][""]


def test_weights_in_bf16_are_a_curve_of_the_gap(tmp_path):
    (each,) = seeds_of(tmp_path, [2.02], [2.0])
    for step, loss in enumerate([2.0, 1.9, 2.2], 1):
        each.run.metrics += [{"step": step, "validation_loss": 2.5}, {"step": step, "validation_loss_bf16": loss}]
        each.other.metrics.append({"step": step, "validation_loss": 2.0})
    assert "weights in BF16" in charts.gap(each, 0.0025)


def test_the_gaps_are_means_over_seeds_and_the_noise_is_bf16s(tmp_path):
    found = seeds_of(tmp_path, [2.02, 2.00, 2.05], [2.0, 2.02, 2.04])
    figures, gaps = point_of(found), [2.02 / 2.0 - 1, 2.00 / 2.02 - 1, 2.05 / 2.04 - 1]
    assert figures["gap"] == pytest.approx(sum(gaps) / 3)
    assert figures["gap_standard_error"] == pytest.approx(stdev(gaps) / 3**0.5)
    assert figures["seed_noise"] == pytest.approx(0.02 / 2.02)
    assert list(figures["seeds"]) == ["7", "8", "9"]
    in_bf16 = [(1 + gap) * 0.996 - 1 for gap in gaps]  # as finished_run has them
    assert figures["gap_bf16"] == pytest.approx(sum(in_bf16) / 3)
    assert figures["gap_standard_error_bf16"] == pytest.approx(stdev(in_bf16) / 3**0.5)
    assert f"weights in BF16 {sum(in_bf16) / 3:+.2%} ± " in figures["figures"]
    picture = charts.gaps_of_seeds(found, seed_noise(found), 0.0025)
    for words in ("BF16's own seeds", "seed_7", "seed_8", "var(--c1)", "var(--c2)", "var(--c3)"):
        assert words in picture


def test_one_seed_has_no_noise_and_decides_nothing(tmp_path):
    figures = point_of(seeds_of(tmp_path, [2.002], [2.0], steps=5000))
    assert figures["seed_noise"] is figures["gap_standard_error"] is None
    assert figures["verdict"] == "undecided"
    assert figures["reason"] == "one seed of 5,000 steps decides nothing, ds-fp8 parity --seeds 3 can"


@pytest.mark.parametrize(
    ("gap", "chance", "word"),
    [
        (Mean(0.0025, None), 0.0, "as good"),
        (Mean(-0.02, 0.001), 0.0, "as good"),
        (Mean(0.003, None), 0.0, "worse"),
        (Mean(0.003, None), 0.05, "undecided"),
        (Mean(0.051, None), 0.05, "worse"),
        (Mean(0.01, 0.005), 0.0, "undecided"),  # two standard errors
        (Mean(0.0101, 0.005), 0.05, "worse"),
    ],
)
def test_the_word_for_a_gap(gap, chance, word):
    assert word_of(gap, TOLERANCE, chance) == word


@pytest.mark.parametrize(
    ("fp8", "bf16", "steps", "word"),
    [
        ([2.0, 2.01, 2.0], [2.0, 2.01, 2.0], MIN_STEPS, "as good"),
        ([2.0, 2.01, 2.0], [2.0, 2.01, 2.0], MIN_STEPS - 1, "undecided"),
        ([2.5, 2.5], [2.0, 2.0], MIN_STEPS - 1, "undecided"),
        ([None, 2.0], [2.0, 2.0], MIN_STEPS - 1, "undecided"),
        ([2.02, 2.021], [2.0, 2.0], MIN_STEPS, "worse"),
        ([2.06, 2.0], [2.0, 2.0], MIN_STEPS, "undecided"),  # the gap of one of two seeds
        ([2.09], [2.0], MIN_STEPS, "undecided"),
        ([2.11], [2.0], MIN_STEPS, "worse"),
        ([2.02], [2.0], 1000, "worse"),
        ([None, 2.0], [2.0, 2.0], MIN_STEPS, "worse"),
        ([2.0, 2.0], [None, 2.0], MIN_STEPS, "undecided"),
        ([None, 2.0], [2.0, None], MIN_STEPS, "undecided"),
    ],
)
def test_verdicts_over_seeds(fp8, bf16, steps, word, tmp_path):
    found = seeds_of(tmp_path, fp8, bf16, steps=steps)
    verdict, figures = figures_of({"": found})
    assert verdict == judge({"": found})[0]
    assert (figures["verdict"], figures["points"][""]["verdict"]) == (word, word)
    assert verdict.word == word, verdict
    assert str(verdict).startswith(f"{word}: {figures['reason']}\n")
    assert f"{steps:,} steps" in verdict.reason or "diverges" in verdict.reason or "no pair" in verdict.reason


@pytest.mark.parametrize("key", LOSSES)
def test_the_worse_of_the_losses_as_trained_and_in_bf16_decides(key, tmp_path):
    found = seeds_of(tmp_path, [2.0, 2.0], [2.0, 2.0])
    for each in found:
        each.run.result[key] = 2.02
    assert judge({"": found})[0].word == "worse"


@pytest.mark.parametrize(
    ("fp8", "bf16", "word"),
    [((0.8, 0.82, 0.78), (0.98, 0.96, 1.0), "worse"), ((0.9, 0.5, 0.9), (0.98, 0.96, 0.98), "as good")],
)
def test_seeds_that_answer_less_are_worse_beyond_their_noise(fp8, bf16, word, tmp_path):
    found = seeds_of(tmp_path, [2.0] * 3, [2.0] * 3)
    for each, *shares in zip(found, fp8, bf16, strict=True):
        for run, share in zip((each.run, each.other), shares, strict=True):
            run.result["exact_match"]["after"] = share
    figures, differences = point_of(found), [ours - theirs for ours, theirs in zip(fp8, bf16, strict=True)]
    assert figures["exact_match_difference"] == pytest.approx(sum(differences) / 3)
    assert figures["exact_match_difference_standard_error"] >= stdev(differences) / 3**0.5 * (1 - 1e-9)
    assert figures["verdict"] == word


def test_seeds_that_gain_little_have_not_diverged(tmp_path):
    found = seeds_of(tmp_path, [1.990, 1.996, 1.997], [1.990, 1.996, 1.997])
    for run in (run for each in found for run in each.columns.values()):
        run.result["first_validation_loss"] = 2.0
    figures = point_of(found)
    assert (figures["diverged"], figures["gap"]) == ({"fp8": 0, "bf16": 0}, 0)


RATES, SEEDS = [0.001, 0.004], [5, 6]
GRID_OF_RATES = "optimizer.params.lr=0.001,1.0"
GRID = pairs_of({f"lr {rate}": [f"optimizer.params.lr={rate}"] for rate in RATES}, SEEDS)
ALL = [(kind, rate, seed) for kind in ("fp8", "bf16") for rate in RATES for seed in SEEDS]


def grid_in(folder: Path, losses: dict[tuple[str, float, int], float | None]):
    """Return the runs of GRID; those of `losses` end there, all others at 0.5 and, in FP8, 0.501."""
    for run in (run for pair in GRID for run in pair):
        usual = 0.501 if run.kind == "fp8" else 0.5
        loss = losses.get((run.kind, float(run.point.removeprefix("lr ")), run.seed), usual)
        finished_run(run.folder(folder), loss, 10, 0.5, run.kind == "fp8", measured=False, steps=400)
    return comparisons_in(folder, GRID)


def test_a_grid_counts_divergence_and_spikes(tmp_path):
    # Before the first step the loss is 6.1 and the best of the grid 0.5: beyond 3.3 a run has diverged.
    lost = {("fp8", 0.004, 5): None, ("fp8", 0.004, 6): 3.31, ("bf16", 0.004, 6): 3.29}
    found = grid_in(tmp_path, lost)
    spiking = found["lr 0.001"][0].run
    spiking.metrics += [{"step": 5, "event": "spike", "score": 9.0}, {"step": 4, "event": "rollback", "score": 9.0}]
    runs = {(run.kind, each.name, point): run for point, some in found.items() for each in some
            for run in each.columns.values()}  # fmt: skip
    assert [key for key, run in runs.items() if diverged(run, best_of(found))] == [
        ("fp8", "seed_5", "lr 0.004"),
        ("fp8", "seed_6", "lr 0.004"),
    ]
    assert {key: run.spikes for key, run in runs.items() if run.spikes} == {("fp8", "seed_5", "lr 0.001"): 2}
    figures = figures_of(found)[1]
    assert (figures["verdict"], figures["reason"]) == (
        "worse",
        "at 1 of 2 points (lr 0.004), FP8 diverges more often than BF16",
    )
    assert figures["points"]["lr 0.004"]["diverged"] == {"fp8": 2, "bf16": 0}
    assert figures["points"]["lr 0.001"]["gap"] == pytest.approx(0.002)
    assert figures["points"]["lr 0.001"]["verdict"] == "as good"
    assert cells_of(found, tmp_path, "lr 0.001") == [
        *("400", "0.5010", "0.5000", "+0.20% ± 0.00%", "0 of 2", "0 of 2", "2", "0"),
    ]


def cells_of(found, folder, point):
    """Return the cells of a point in the table on the page."""
    text = write_parity(found, folder, "grid")[1].read_text()
    row = text[text.index(f'<th scope="row">{point}') :].partition("</tr>")[0]
    return [cell.partition("</td>")[0] for cell in row.split("<td>")[1:]]


def test_the_gap_of_a_point_is_that_of_the_seeds_at_which_both_trained(tmp_path):
    found = grid_in(tmp_path / "runs", {("fp8", 0.004, 6): 3.31})
    assert cells_of(found, tmp_path, "lr 0.004")[3:5] == ["+0.20%", "1 of 2"]


def test_points_at_which_neither_trains_leave_the_verdict_to_the_others(tmp_path):
    verdict, each = judge(grid_in(tmp_path, {key: 6.0 for key in ALL if key[1] == 0.004}), grid=True)
    assert verdict.word == "as good"
    assert verdict.reason.startswith("at 1 of 2 points (lr 0.001), ")
    assert verdict.reason.endswith("; no run trained: lr 0.004")
    assert (each["lr 0.004"].word, each["lr 0.004"].reason) == ("undecided", "no pair of runs is left to compare")


def test_bf16_in_the_layers_of_this_package_is_not_judged(tmp_path):
    found = grid_in(tmp_path, {})
    for each in found["lr 0.004"]:
        each.run.result["fp8"]["fp8_linears"] = 0
    verdict, each = judge(found, grid=True)
    assert (verdict.word, each["lr 0.004"].word) == ("as good", "ran")


@pytest.mark.parametrize("losses", [{("fp8", 0.004, 5): None}, {}, dict.fromkeys(ALL)])
def test_a_browser_shows_the_page_of_a_grid(tmp_path, losses):
    figures, page, verdict = write_parity(grid_in(tmp_path / "runs", losses), tmp_path, "Robustness of <FP8>")
    assert json.loads(figures.read_text())["verdict"] == verdict.word
    assert verdict.word != ("as good" if losses else "worse")
    text = page.read_text()
    assert "<h1>Robustness of &lt;FP8&gt;</h1>" in text
    assert text.count("<figure>") == (len(losses) < len(ALL))
    assert text.count('<th scope="row">lr 0.00') == 2
    assert "+0.20%" in text or len(losses) == len(ALL)
    look(page, tmp_path)


# ---------------------------------------------------------------- what is trained


@pytest.mark.parametrize("name", ["cpt", "cpt_decay", "sft_stage1"])
def test_a_shorter_run_keeps_the_shape_of_the_schedule(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    file = ROOT / "ds_configs" / "infir2_1.5b" / f"{name}.json"
    stage = load_stage(file)
    runs = {kind: load_stage(file, changes_of(stage, Run(kind, 5), 400, 10, tmp_path)) for kind in ("fp8", "bf16")}
    assert (runs["fp8"].fp8.enabled, runs["bf16"].fp8.enabled) == (True, False)
    for run in runs.values():
        assert (run.train.steps, run.train.epochs, run.train.seed) == (400, None, 5)
    assert runs["fp8"].run_dir != runs["bf16"].run_dir
    schedule = runs["fp8"].train.schedule
    lengths = {"cpt": (0.125, 0.125), "cpt_decay": (0, 400), "sft_stage1": (0.05, schedule.decay)}
    assert (schedule.warmup, schedule.decay) == lengths[name]


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """`planned(file, ...)`: what `ds-fp8 parity` would train, and whether it had loaded all of it before."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def plan(file, *arguments):
        events = []
        load = compare.load_stage
        monkeypatch.setattr(compare, "load_stage", lambda *given: events.append("load") or load(*given))
        monkeypatch.setattr(command, "train_once", lambda file, ranks, changes: events.append(changes))
        with pytest.raises(UserError, match="there is no folder"):  # nothing was trained
            main(["parity", str(file), "--out", str(tmp_path / "out"), *arguments])
        return events

    return plan


def test_all_runs_are_read_before_the_first_is_trained(tiny, write, planned):
    tiny["fp8"]["optimizer"] = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
    tiny["train"]["compact_checkpoints"] = True  # of no effect in BF16, which has no compressed moments
    events = planned(write(tiny), "--steps", "2", "--seeds", "2")
    assert events[:4] == ["load"] * 4
    assert len(events) == 8
    assert sum("fp8.enabled=false" in changes for changes in events[4:]) == 2


def test_a_schedule_in_steps_is_shortened_where_the_stage_counts_epochs(tiny, write, planned):
    tiny["train"] |= {"steps": None, "epochs": 40, "schedule": {"type": "wsd", "warmup": 6, "decay": 12}}
    file = write(tiny)
    stage = load_stage(file)
    rows = len(build_data(stage.data, build_tokenizer(stage.data)).train)
    steps = stage.with_length(rows).train.steps
    changes = planned(file, "--steps", "4", "--ranks", "1")[-1]
    assert f"train.schedule.warmup={6 / steps}" in changes
    assert f"train.schedule.decay={12 / steps}" in changes


def test_points_that_differ_in_fp8_keys_alone_share_their_bf16_run(tiny, write, planned):
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
        (["--set", "gpus=2"], "gpus"),
        (["--grid", "fp8.enabled=true,false"], "fp8.enabled"),
        (["--set", "fp8.enabled=false"], "fp8.enabled"),
        (["--grid", "fp8.preset=infir2,infir3"], "fp8.preset"),
        *((["--grid", f"{key}=7,8"], key) for key in compare.SET_HERE),
        (["--grid", 'train.schedule={"type": "constant"}', "--grid", 'train={"seed": 7}'], "train.seed"),
    ],
)
def test_grids_that_cannot_be_compared(tiny, write, monkeypatch, tmp_path, options, key):
    monkeypatch.setattr(command, "train_once", None)
    with pytest.raises(UserError) as caught:
        main(["parity", str(write(tiny)), "--steps", "2", "--out", str(tmp_path), *options])
    assert caught.value.key == key
    assert caught.value.remedy


def test_what_a_comparison_sets_is_refused_in_points(tiny, write, tmp_path):
    stage = load_stage(write(tiny))
    set_here = {change.partition("=")[0] for change in changes_of(stage, Run("fp8", 5), 400, 10, tmp_path)}
    by_the_point = {"train.spike", "train.schedule.warmup"}  # the run has what its point says, or in proportion to it
    assert set_here - by_the_point == {"fp8.enabled", *compare.SET_HERE}


DEEP = f"data.path={'folder/' * 14}"  # Longer than what a folder is named by


@pytest.mark.parametrize(
    "given",
    [
        {"a b": (), "a_b": ("train.log_every=2",)},
        # Of their own the points have short names; their BF16 runs are named by these changes.
        {name: ("fp8.preset=coat", f"{DEEP}{name}.jsonl") for name in ("a", "b")},
    ],
)
def test_points_of_one_folder_are_refused(given):
    with pytest.raises(UserError, match="same folder") as caught:
        pairs_of(given, [1])
    assert caught.value.remedy


@pytest.fixture
def trained(tiny, write, tmp_path, monkeypatch):
    """`trained(option, ...)`: `ds-fp8 parity`, whose runs end at 5.0, in FP8 at 5.02; its runs."""
    file, made = write(tiny), {}

    def finish(file, ranks, changes):
        stage = load_stage(file, changes, ranks)
        made[stage.run_dir] = stage.train
        loss = 5.02 if stage.fp8.enabled else 5.0
        finished_run(stage.run_dir, loss, 10, 0.5, stage.fp8.enabled, steps=stage.train.steps)
        (stage.run_dir / "config.json").write_text(json.dumps(stage.raw))

    def run(*options):
        assert (
            main(["parity", str(file), "--out", str(tmp_path / "out"), "--gpus", "1", *options]) == 0
        )  # so few steps decide nothing
        return made

    monkeypatch.setattr(command, "train_once", finish)
    return run


@pytest.mark.slow
def test_a_whole_grid_and_the_same_again_without_training(tiny, write, tmp_path):
    command = [sys.executable, "-m", "ds_fp8.cli", "parity", write(tiny).name, "--steps", "6", "--grid", GRID_OF_RATES]
    command += ["--tolerance", "0.5", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    for _ in range(2):
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 1, ran.stderr[-2000:]
        assert (
            "undecided: at 1 of 2 points (lr 0.001), 6 steps decide nothing, 200 may; no run trained: lr 1.0"
            in ran.stdout
        )
    assert ran.stdout.count("finished before") == 4
    figures = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert figures["steps"] == 6
    assert figures["made"]["command"].startswith("ds-fp8 train ")
    assert figures["made"]["seed"] == int(next(iter(figures["points"]["lr 0.001"]["seeds"])))
    sane, wild = figures["points"]["lr 0.001"], figures["points"]["lr 1.0"]
    assert sane["diverged"] == {"fp8": 0, "bf16": 0}
    assert wild["seeds"].keys() == sane["seeds"].keys()
    assert sane["gap"] != 0
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_finished_runs_are_taken_as_they_are_if_they_are_the_same(trained):
    """Not their figures for those of another stage, nor their weights trained on by another schedule."""
    same = ["--grid", GRID_OF_RATES, "--steps"]
    before = dict(trained(*same, "12"))
    assert len(before) == 4
    again = trained(*same, "12")
    assert all(again[folder] is train for folder, train in before.items())
    for changes, key in ((["20"], "--steps"), (["12", "--set", "data.seed=5"], "data.seed")):
        with pytest.raises(UserError) as caught:
            trained(*same, *changes)
        assert caught.value.key == key
