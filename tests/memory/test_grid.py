"""Sweep files: what they mean, and what is wrong with them before anything runs."""

import json
from pathlib import Path

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.memory.grid import Point, check_points, read_sweep
from tests.memory import workloads

SWEEPS = sorted((Path(__file__).parents[2] / "ds_configs" / "sweeps").glob("*.json"))
SHAPES = sorted((Path(__file__).parents[2] / "ds_configs" / "sweeps" / "shapes").glob("*.json"))


@pytest.fixture
def sweep(tmp_path):
    def read(content, gpus=1):
        file = tmp_path / "sweep.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_sweep(file, gpus)[1]

    return read


def test_named_points_times_a_grid(sweep):
    points = sweep(
        {
            "set": {"data.sequence_length": 64, "train.seed": 1},
            "points": [{"name": "a", "set": {"train.seed": 2}}, {"name": "b"}],
            "grid": {"fp8.activations.save": ["fp8", "bf16"], "gpus": [1, 4]},
        },
        gpus=2,
    )
    assert [point.name for point in points][:3] == [
        "a, save fp8, gpus 1",
        "a, save fp8, gpus 4",
        "a, save bf16, gpus 1",
    ]
    assert len(points) == 8
    assert points[0].settings == {"data.sequence_length": 64, "train.seed": 2, "fp8.activations.save": "fp8"}
    assert [points[0].gpus, points[1].gpus] == [1, 4]
    assert points[4].settings["train.seed"] == 1


def test_a_grid_alone_and_points_alone(sweep):
    assert [point.name for point in sweep({"grid": {"train.seed": [1, 2]}}, gpus=3)] == ["seed 1", "seed 2"]
    assert sweep({"points": [{"name": "x"}]}, gpus=3) == [Point("x", {}, 3)]


def test_a_grid_of_the_command_line(sweep, tmp_path):
    words = ["fp8.preset=infir2, coat", "train.seed=1,2"]
    config, points = read_sweep(None, 2, words, ["data.sequence_length=64", "train.steps=5"])
    assert config.grid == {"fp8.preset": ["infir2", "coat"], "train.seed": [1, 2]}
    assert [point.name for point in points][:2] == ["preset infir2, seed 1", "preset infir2, seed 2"]
    assert points[0].settings == {
        "data.sequence_length": 64, "train.steps": 5, "fp8.preset": "infir2", "train.seed": 1,
    }  # fmt: skip
    sweep({"points": [{"name": "a", "set": {"train.steps": 6}}]})
    _, points = read_sweep(tmp_path / "sweep.json", 2, words[1:], ["train.steps=5"])
    assert [(point.name, point.settings["train.steps"]) for point in points] == [("a, seed 1", 6), ("a, seed 2", 6)]
    objects = read_sweep(None, 1, ['fp8.linear={"input": {"format": "int8"}},{}'])[0].grid
    assert objects == {"fp8.linear": [{"input": {"format": "int8"}}, {}]}


@pytest.mark.parametrize("word", ["", "train.seed", "=1", "train.seed= "])
def test_words_that_are_no_grid(word):
    with pytest.raises(UserError, match="KEY=VALUE") as error:
        read_sweep(None, 1, [word])
    assert "--grid" in error.value.remedy


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "line 1"),
        ("[]", "JSON object"),
        ({}, "no points"),
        ({"grids": {}}, "grid"),
        ({"points": [{"nam": "x"}]}, "nam"),
        ({"points": [{"name": "x"}, {"name": "x"}]}, "two points"),
        ({"grid": {"train.seed": []}}, "no values"),
        ({"grid": {"train.seed": 3}}, "list"),
        ({"grid": {"train.seed": list(range(100)), "train.steps": list(range(1, 101))}}, "10,000 points"),
        ({"grid": {"gpus": [0]}}, "gpus"),
    ],
)
def test_what_is_wrong_with_a_file(sweep, content, says):
    with pytest.raises(UserError) as error:
        sweep(content)
    assert says in str(error.value)
    assert error.value.remedy
    assert error.value.file


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


def test_keys_of_points():
    raw = workloads.stage()
    point = Point("a", {"train.seed": 2}, 1)
    assert point.key(raw, 4) == Point("another name", {"train.seed": 2}, 1).key(raw, 4)
    assert point.key({**raw, "train": {**raw["train"], "run_dir": "elsewhere"}}, 4) == point.key(raw, 4)
    others = [Point("a", {"train.seed": 3}, 1).key(raw, 4), Point("a", {"train.seed": 2}, 2).key(raw, 4)]
    assert len({point.key(raw, 4), point.key(raw, 5), *others}) == 4


@pytest.mark.parametrize("stage", SHAPES, ids=lambda file: file.stem)
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_ready_sweeps_load_with_the_ready_shapes(file, stage):
    _, points = read_sweep(file, 4)
    check_points(points, stage)


def test_there_are_ready_sweeps():
    assert {file.stem for file in SWEEPS} >= {"fp8_levels", "context_length", "optimizer_states", "zero_stages"}
    assert {file.stem for file in SHAPES} == {"qwen2.5_1.5b", "qwen2.5_7b"}
