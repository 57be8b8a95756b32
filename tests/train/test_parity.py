"""FP8 beside BF16 over seeds and grids: gaps, noise, verdicts, the page, and what the runs are told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import stdev

import pytest

from ds_fp8 import train as train_room
from ds_fp8.cli import main
from ds_fp8.commands import parity as command
from ds_fp8.config.errors import UserError
from ds_fp8.data import build_data, build_tokenizer
from ds_fp8.report import charts
from ds_fp8.report.parity import (
    LONGER,
    Cell,
    compare,
    comparisons_in,
    grid_of,
    judge_grid,
    run_overrides,
    sign_test,
    table_to_loss,
    to_loss,
    twins_of,
    write_parity,
)
from ds_fp8.report.verdict import LOSSES, WEIGHTS, ExactMatch, Gap, diverged, judge, judge_all, judge_seeds, seed_noise
from ds_fp8.train import load_stage
from tests.browser import look
from tests.report.runs import finished_run
from tests.train.conftest import ROOT
from tests.train.tiny_stage import RESULT


def runs_of(tmp_path, fp8: list[float], bf16: list[float], first=7):
    twins = twins_of({"": ()}, range(first, first + len(fp8)))
    for losses, cells in zip(zip(fp8, bf16, strict=True), twins, strict=True):
        for loss, cell in zip(losses, cells, strict=True):
            finished_run(cell.folder(tmp_path), loss, 10, 0.5, enabled=cell.kind == "fp8")
    return comparisons_in(tmp_path, twins)[""]


@pytest.mark.parametrize(
    ("fp8", "longer", "steps", "in_bf16"),
    [
        (2.0, None, 10, 10),
        (1.9, None, 10, 10),  # not fewer: nothing is extrapolated
        (2.02, 1.98, 11, 10 + 2 * (2.02 * 0.996 - 2) / (0.04 * 0.996)),
        (2.005, 2.001, None, 10),
        (2.02, 2.02, None, None),
        (2.02, None, None, None),
        (None, None, None, None),
    ],
)
def test_steps_to_the_final_loss_of_bf16(fp8, longer, steps, in_bf16, tmp_path):
    """In FP8 the fakes have a loss in BF16 that is 0.4% lower, and DeepSpeed's BF16 takes half as long again a step."""
    twins = twins_of({"": ()}, [7])
    finished_run(twins[0][0].folder(tmp_path), fp8, 10, 0.5)
    finished_run(twins[0][1].folder(tmp_path), 2.0, 10, 0.5, enabled=False, step_seconds=0.75)
    if longer:
        finished_run(Cell(LONGER, 7).folder(tmp_path), longer, 10, 0.5, steps=12)
    found = comparisons_in(tmp_path, twins)[""]
    figures, rows = [to_loss(found, key) for key in LOSSES], table_to_loss({"": found}).rows
    for way, row, expected in zip(figures, rows[1:], (steps, in_bf16), strict=True):
        assert way["steps"] == (expected and pytest.approx(expected))
        assert way["steps_ratio"] == (expected and pytest.approx(expected / 10))
        assert way["seconds_ratio"] == (expected and pytest.approx(expected / 10 * 0.5 / 0.75))
        assert row[2] == (f"{expected:.0f}" if expected else f"not within {12 if longer else 10} (1 of 1 seeds)")
        assert (row[6] == "–") == (expected is None)
    assert rows[0][:7] == ["DeepSpeed's BF16", "", "10", "1.000", "750.0", "7.5", "1.000"]


def test_the_gaps_along_the_runs_are_counted(tmp_path):
    found = runs_of(tmp_path, [2.02, 2.02], [2.0, 2.0])
    for each, losses in zip(found, ([2.0, 1.9, 2.2], [2.2, 2.2, 2.2]), strict=True):
        for step, loss in enumerate(losses, 1):
            each.run.metrics += [{"step": step, "validation_loss": 2.5}, {"step": step, "validation_loss_bf16": loss}]
            each.twin.metrics.append({"step": step, "validation_loss": 2.0})
    way = to_loss(found, WEIGHTS)  # with those after the last step, 0.6% above
    assert [(seed["times"], seed["of"]) for seed in way["bf16_better"]] == [(2, 4), (4, 4)]
    assert [seed["p"] for seed in way["bf16_better"]] == [1.0, pytest.approx(2 / 2**4)]  # a tie is left out
    assert way["gap_along"] == pytest.approx((0 - 0.05 + 0.1 + 3 * 0.1 + 2 * (2.02 * 0.996 / 2 - 1)) / 8)
    assert [seed["times"] for seed in to_loss(found)["bf16_better"]] == [4, 4]
    assert "weights in BF16" in charts.gap(found[0], 0.0025)


def test_bf16_by_our_own_layers_is_a_row_and_a_column(tmp_path):
    points = {name: twins_of({name: ()}, [7]) for name in ("precise", "own BF16")}
    for (pair,), loss, linears, seconds in zip(points.values(), (2.0, 1.99), (14, 0), (0.5, 0.6), strict=True):
        fp8 = {"enabled": True, "fp8_linears": linears, "notes": []}
        finished_run(pair[0].folder(tmp_path), loss, 10, 0.5, fp8=fp8, step_seconds=seconds)
    # Without changes of their own both have the stage's twin, named by the first.
    finished_run(points["precise"][0][1].folder(tmp_path), 2.0, 10, 0.5, enabled=False)
    shared = [(pair[0], points["precise"][0][1]) for (pair,) in points.values()]
    table = table_to_loss(comparisons_in(tmp_path, shared))
    assert [row[:2] for row in table.rows] == [
        ["DeepSpeed's BF16", ""],
        ["precise", "as trained"],
        ["precise", "in BF16"],
        ["own BF16", "as trained"],
        ["own BF16", "in BF16"],
    ]
    assert table.columns[7] == "/ own BF16"
    assert [row[7] for row in table.rows] == ["0.833", "0.833", "0.833", "1.000", "1.000"]


@pytest.mark.parametrize(("better", "count", "p"), [(16, 32, 1), (21, 32, 0.11), (22, 32, 0.05), (10, 32, 0.05)])
def test_the_sign_test_is_that_of_the_binomial_distribution(better, count, p):
    assert sign_test(better, count - better) == pytest.approx(p, abs=5e-4)


def figures_of(tmp_path, fp8, bf16):
    return compare({"": runs_of(tmp_path, fp8, bf16)})["points"][""]


def test_the_gaps_are_means_over_seeds_and_the_noise_is_bf16s(tmp_path):
    twins = runs_of(tmp_path, [2.02, 2.00, 2.05], [2.0, 2.02, 2.04])
    figures = compare({"": twins})["points"][""]
    gaps = [2.02 / 2.0 - 1, 2.00 / 2.02 - 1, 2.05 / 2.04 - 1]
    assert figures["gap"] == pytest.approx(sum(gaps) / 3)
    assert figures["gap_standard_error"] == pytest.approx(stdev(gaps) / 3**0.5)
    assert figures["seed_noise"] == pytest.approx(0.02 / 2.02)
    assert list(figures["seeds"]) == ["7", "8", "9"]
    in_bf16 = [(1 + gap) * 0.996 - 1 for gap in gaps]  # as finished_run has them
    assert figures["gap_bf16"] == pytest.approx(sum(in_bf16) / 3)
    assert figures["gap_standard_error_bf16"] == pytest.approx(stdev(in_bf16) / 3**0.5)
    verdict = judge_seeds(twins)
    assert verdict == judge_all(twins) == judge_grid({"": twins})[0]
    assert f"of its weights in BF16 {sum(in_bf16) / 3:+.2%} ± " in verdict.figures
    picture = charts.gaps_of_seeds(twins, seed_noise(twins), 0.0025)
    for words in ("BF16's own seeds", "seed_7", "seed_8", "var(--c1)", "var(--c2)", "var(--c3)"):
        assert words in picture


def test_one_seed_has_no_noise(tmp_path):
    figures = figures_of(tmp_path, [2.002], [2.0])
    assert figures["seed_noise"] is figures["gap_standard_error"] is None
    assert figures["passed"]
    assert "no worse than BF16 in this run. One seed cannot say more" in figures["verdict"]


@pytest.mark.parametrize(
    ("trained", "weights", "level"),
    [
        (Gap(0.001, None), Gap(0.001, None), "good"),
        (Gap(-0.02, None), Gap(-0.02, None), "good"),
        (Gap(0.003, None), Gap(0.003, None), "bad"),
        (Gap(-0.02, 0.001), Gap(-0.02, 0.001), "good"),
        (Gap(0.001, 0.001), Gap(0.001, 0.001), "good"),
        (Gap(0.01, 0.02), Gap(0.01, 0.02), "undecided"),
        (Gap(0.01, 0.001), Gap(0.01, 0.001), "bad"),
        # The worse of the two losses decides.
        (Gap(0.001, None), Gap(0.0005, None), "good"),
        (Gap(0.008, None), Gap(0.0005, None), "bad"),
        (Gap(0.001, None), Gap(0.0045, None), "bad"),
        (Gap(0.001, 0.0001), Gap(0.01, 0.02), "undecided"),
        (Gap(0.01, 0.02), Gap(0.0045, 0.0001), "bad"),
    ],
)
def test_levels(trained, weights, level):
    assert judge(trained, weights, 0.0025) == level
    fewer = ExactMatch(0.5, 0.9, 0.05)
    expected = max(level, "undecided" if trained.error is None else "bad", key=("good", "undecided", "bad").index)
    assert judge(trained, weights, 0.0025, fewer) == expected


@pytest.mark.parametrize(
    ("fp8", "bf16", "passed"),
    [((0.8, 0.82, 0.78), (0.98, 0.96, 1.0), False), ((0.9, 0.5, 0.9), (0.98, 0.96, 0.98), True)],
)
def test_seeds_that_answer_less_are_worse_beyond_their_noise(fp8, bf16, passed, tmp_path):
    twins = runs_of(tmp_path, [2.0] * 3, [2.0] * 3)
    for shares in zip(twins, fp8, bf16, strict=True):
        for run, share in zip((shares[0].run, shares[0].twin), shares[1:], strict=True):
            run.result["exact_match"]["after"] = share
    figures = compare({"": twins})["points"][""]
    differences = [ours - theirs for ours, theirs in zip(fp8, bf16, strict=True)]
    assert figures["exact_match_difference"] == pytest.approx(sum(differences) / 3)
    assert figures["exact_match_difference_standard_error"] >= stdev(differences) / 3**0.5 * (1 - 1e-9)
    assert figures["passed"] == passed


def test_seeds_that_gain_little_have_not_diverged(tmp_path):
    twins = runs_of(tmp_path, [1.990, 1.996, 1.997], [1.990, 1.996, 1.997])
    for run in (run for each in twins for run in each.columns.values()):
        run.result["first_validation_loss"] = 2.0
    figures = compare({"": twins})["points"][""]
    assert figures["diverged"] == {"fp8": 0, "bf16": 0}
    assert figures["gap"] == 0


def test_a_loss_that_is_not_finite_fails(tmp_path):
    twins = runs_of(tmp_path, [2.0, None], [2.0, 2.0])
    assert not judge_seeds(twins).passed
    assert judge_grid({"": twins})[0].headline == "FP8 diverges more often than BF16."


RATES, SEEDS = [0.001, 0.004], [5, 6]
GRID_OF_RATES = "optimizer.params.lr=0.001,1.0"
GRID = twins_of({f"lr {rate}": [f"optimizer.params.lr={rate}"] for rate in RATES}, SEEDS)
ALL = [(kind, rate, seed) for kind in ("fp8", "bf16") for rate in RATES for seed in SEEDS]


def grid_in(folder: Path, losses: dict[tuple[str, float, int], float | None]):
    """Return the runs of GRID; those of `losses` end there, all others at 0.5 and, in FP8, 0.501."""
    for cell in (cell for pair in GRID for cell in pair):
        usual = 0.501 if cell.kind == "fp8" else 0.5
        loss = losses.get((cell.kind, float(cell.point.removeprefix("lr ")), cell.seed), usual)
        finished_run(cell.folder(folder), loss, 10, 0.5, cell.kind == "fp8", measured=False)
    return comparisons_in(folder, GRID)


def test_a_grid_tells_divergence_and_spikes(tmp_path):
    # Before the first step the loss is 6.1 and the best of the grid 0.5: beyond 3.3 a run has diverged.
    lost = {("fp8", 0.004, 5): None, ("fp8", 0.004, 6): 3.31, ("bf16", 0.004, 6): 3.29}
    points = grid_in(tmp_path, lost)
    spiking = points["lr 0.001"][0].run
    spiking.metrics += [{"step": 5, "event": "spike", "score": 9.0}, {"step": 4, "event": "rollback", "score": 9.0}]
    grid = grid_of(points)
    runs = {(run.kind, each.name, point): run for point, found in points.items() for each in found
            for run in each.columns.values()}  # fmt: skip
    assert [key for key, run in runs.items() if diverged(run, grid)] == [
        ("fp8", "seed_5", "lr 0.004"),
        ("fp8", "seed_6", "lr 0.004"),
    ]
    assert {key: run.spikes for key, run in runs.items() if run.spikes} == {("fp8", "seed_5", "lr 0.001"): 2}
    figures = compare(points)
    assert not figures["passed"]
    assert figures["verdict"] == "FP8 is worse than BF16 at 1 of 2 points: lr 0.004."
    assert figures["points"]["lr 0.004"]["diverged"] == {"fp8": 2, "bf16": 0}
    assert figures["points"]["lr 0.001"]["gap"] == pytest.approx(0.002)
    assert figures["points"]["lr 0.001"]["passed"]


def test_points_at_which_neither_trains_do_not_fail(tmp_path):
    verdict, each = judge_grid(grid_in(tmp_path, {key: 6.0 for key in ALL if key[1] == 0.004}))
    assert verdict.passed
    assert verdict.headline == "FP8 is no worse than BF16 at 1 of 2 points. No run trained at lr 0.004."
    assert each["lr 0.004"].level == "undecided"
    assert "no twins are left" in each["lr 0.004"].headline


def test_nothing_is_said_where_no_twins_trained(tmp_path):
    lost = grid_in(tmp_path / "all", dict.fromkeys(ALL))
    one_twin_each = runs_of(tmp_path / "one", [None, 2.0], [2.0, None])
    for points in (lost, {"": lost["lr 0.004"]}, {"": one_twin_each}):
        figures = compare(points)
        assert not figures["passed"]
        assert "no twins are left" in figures["verdict"]
        assert not any(point["passed"] for point in figures["points"].values())


@pytest.mark.parametrize("losses", [{("fp8", 0.004, 5): None}, {}, dict.fromkeys(ALL)])
def test_a_browser_shows_the_page_of_a_grid(tmp_path, losses):
    figures, page, verdict = write_parity(grid_in(tmp_path / "runs", losses), tmp_path, "Robustness of <FP8>")
    assert json.loads(figures.read_text())["verdict"] == str(verdict)
    text = page.read_text()
    assert "<h1>Robustness of &lt;FP8&gt;</h1>" in text
    assert text.count("<svg") == 1
    assert text.count('<th scope="row">lr 0.00') == 2 + 4  # and as trained and in BF16, on the way to BF16's loss
    assert "+0.20%" in text or len(losses) == len(ALL)
    look(page, tmp_path)


@pytest.mark.parametrize("name", ["cpt", "cpt_decay", "sft_stage1"])
def test_a_shorter_run_keeps_the_shape_of_the_schedule(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    file = ROOT / "ds_configs" / "infir2_1.5b" / f"{name}.json"
    stage = load_stage(file)
    twins = {kind: load_stage(file, run_overrides(stage, Cell(kind, 5), 400, 10, tmp_path)) for kind in ("fp8", "bf16")}
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

    def plan(file, *arguments):
        events = []
        load = train_room.load_stage
        monkeypatch.setattr(train_room, "load_stage", lambda *given: events.append("load") or load(*given))
        monkeypatch.setattr(command, "train_once", lambda file, ranks, changes: events.append(changes))
        monkeypatch.setattr(sys, "argv", ["parity", str(file), "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(UserError, match="there is no folder"):  # nothing was trained
            command.main()
        return events

    return plan


def test_all_twins_are_read_before_the_first_is_trained(tiny, write, planned):
    tiny["fp8"]["optimizer"] = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
    tiny["train"]["compact_checkpoints"] = True  # of no effect in BF16, which has no compressed moments
    events = planned(write(tiny), "--steps", "2", "--seeds", "2")
    assert events[:6] == ["load"] * 6
    assert len(events) == 10
    assert sum("fp8.enabled=false" in changes for changes in events[6:]) == 2


def test_a_schedule_in_steps_is_shortened_where_the_stage_counts_epochs(tiny, write, planned):
    tiny["train"] |= {"steps": None, "epochs": 40, "schedule": {"type": "wsd", "warmup": 6, "decay": 12}}
    file = write(tiny)
    stage = load_stage(file)
    rows = len(build_data(stage.data, build_tokenizer(stage.data)).train)
    steps = stage.with_length(rows).train.steps
    changes = planned(file, "--steps", "4", "--ranks", "1")[-1]
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
        (["--set", "fp8.enabled=false"], "fp8.enabled"),
        (["--grid", "fp8.preset=infir2,infir3"], "fp8.preset"),
        *((["--grid", f"{key}=7,8"], key) for key in command.SET_HERE),
        (["--grid", 'train.schedule={"type": "constant"}', "--grid", 'train={"seed": 7}'], "train.seed"),
    ],
)
def test_grids_that_cannot_be_compared(tiny, write, monkeypatch, tmp_path, options, key):
    monkeypatch.setattr(command, "train_once", None)
    monkeypatch.setattr(sys, "argv", ["parity", str(write(tiny)), "--steps", "2", "--out", str(tmp_path), *options])
    with pytest.raises(UserError) as caught:
        command.main()
    assert caught.value.key == key
    assert caught.value.remedy


def test_what_a_run_is_told_in_spite_of_its_point_is_refused_in_points(tiny, write, tmp_path):
    stage = load_stage(write(tiny))
    told = {change.partition("=")[0] for change in run_overrides(stage, Cell("fp8", 5), 400, 10, tmp_path)}
    by_the_point = {"train.spike", "train.schedule.warmup"}  # the run has what its point says, or in proportion to it
    assert told - by_the_point == {"fp8.enabled", *command.SET_HERE}


DEEP = f"data.path={'folder/' * 14}"  # Longer than what a folder is named by


@pytest.mark.parametrize(
    "points",
    [
        {"a b": (), "a_b": ("train.log_every=2",)},
        # Of their own the points have short names; their twins in BF16 are named by these changes.
        {name: ("fp8.preset=coat", f"{DEEP}{name}.jsonl") for name in ("a", "b")},
    ],
)
def test_points_of_one_folder_are_refused(points):
    with pytest.raises(UserError, match="same folder") as caught:
        twins_of(points, [1])
    assert caught.value.remedy


def test_fp8_that_ends_above_bf16_is_trained_again(tiny, write, tmp_path, monkeypatch, capsys):
    file, made = write(tiny), {}

    def finish(file, ranks, changes):
        stage = load_stage(file, changes, ranks)
        made[stage.run_dir.relative_to(tmp_path).parts[1]] = stage.train
        loss = {(False, 12): 5.0, (True, 12): 5.02, (True, 18): 4.99}[stage.fp8.enabled, stage.train.steps]
        finished_run(stage.run_dir, loss, 10, 0.5, stage.fp8.enabled, steps=stage.train.steps)
        (stage.run_dir / "config.json").write_text(json.dumps(stage.raw))

    monkeypatch.setattr(command, "train_once", finish)
    words = ["parity", str(file), "--out", str(tmp_path / "out"), "--gpus", "1", "--steps", "12", "--more", "0.5"]
    for _ in range(2):  # the second time all is there
        assert main([*words, "--tolerance", "0.01"]) == 0
        assert list(made) == ["fp8", "bf16", LONGER]
        rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("FP8  ")]
        assert [row[0] for row in rows] == ["FP8", "FP8"]
        assert " 16 " in "  ".join(rows[0])  # 12 + 6 * 2 / 3
    assert (made[LONGER].steps, made[LONGER].schedule.warmup) == (18, 2 / 12)
    assert [train.eval_bf16 for train in made.values()] == [True, True, False]
    figures = json.loads((tmp_path / "out" / "parity.json").read_text())["points"][""]
    assert figures["to_bf16_loss"]["steps"] == pytest.approx(16)
    assert figures["to_bf16_loss_bf16"]["steps"] == 12
    assert "the schedule stretched over it" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_a_whole_grid_and_the_same_again_without_training(tiny, write, cache_home, tmp_path):
    command = [sys.executable, "-m", "ds_fp8.cli", "parity", write(tiny).name, "--steps", "6", "--grid", GRID_OF_RATES]
    command += ["--tolerance", "0.5", "--out", "out", "--more", "0.5"]
    environment = {**os.environ, "DS_FP8_CACHE": str(cache_home), "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    for _ in range(2):
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert "FP8 is no worse than BF16 at 1 of 2 points. No run trained at lr 1.0." in ran.stdout
    behind = list((tmp_path / "out" / LONGER).glob("*/*/result.json"))
    assert ran.stdout.count("finished before") == 4 + len(behind)
    figures = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert figures["steps"] == 6
    assert figures["made"]["command"].startswith("ds-fp8 train ")
    assert figures["made"]["seed"] == int(next(iter(figures["points"]["lr 0.001"]["seeds"])))
    sane, wild = figures["points"]["lr 0.001"], figures["points"]["lr 1.0"]
    assert sane["diverged"] == {"fp8": 0, "bf16": 0}
    assert wild["seeds"].keys() == sane["seeds"].keys()
    assert sane["gap"] != 0
    (along,), (in_bf16,) = (sane[f"to_bf16_loss{key}"]["bf16_better"] for key in ("", "_bf16"))
    assert along["of"] == in_bf16["of"] == 6
    for folder in {file.parents[1].name for file in behind}:
        assert max(figures["points"][folder.replace("_", " ")][key] for key in ("gap", "gap_bf16")) > 0
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["--steps", "12"], None),
        (["--steps", "20"], "--steps"),
        (["--steps", "12", "--set", "data.seed=5"], "data.seed"),
    ],
)
def test_finished_runs_are_taken_as_they_are_if_they_are_the_same(
    tiny, write, tmp_path, monkeypatch, cache_home, changes, key
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
        (stage.run_dir / "metrics.jsonl").write_text('{"step": 12, "loss": 5.0}\n')

    monkeypatch.setattr(command, "train_once", finish)
    words = ["parity", str(file), "--out", str(tmp_path / "out"), "--gpus", "1", "--grid", GRID_OF_RATES]
    main([*words, "--steps", "12"])
    assert len(made) == 4
    if key is None:
        main([*words, *changes])
    else:
        with pytest.raises(UserError) as caught:
            main([*words, *changes])
        assert caught.value.key == key
    assert len(made) == 4
