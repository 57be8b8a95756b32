"""Loading a stage: overrides, and every mistake found before data is read or processes meet."""

from pathlib import Path

import pytest

from ds_fp8.train import load_stage
from ds_fp8.train.stage import resolve_batch
from tests.refusals import refused

QUICKSTART = sorted((Path(__file__).parents[2] / "ds_configs" / "quickstart").glob("*.json"))


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_a_stage_holds_its_sections_and_batch(tiny, write):
    stage = load_stage(write(tiny))
    assert (stage.global_batch, stage.micro_batch, stage.accumulation, stage.world) == (4, 2, 1, 2)
    assert stage.train.steps == 12
    assert stage.fp8.enabled
    assert stage.data.sequence_length == 64


def test_there_are_three_quickstart_stages_each_starting_from_the_last():
    stages = {file.stem: load_stage(file) for file in QUICKSTART}
    assert stages["sft_stage1"].train.init_from == stages["cpt"].train.run_dir
    assert stages["sft_stage2"].train.init_from == stages["sft_stage1"].train.run_dir


def test_overrides_reach_all_sections(tiny, write):
    overrides = [
        "train.steps=50",
        "fp8.enabled=false",
        "zero_optimization.stage=2",
        "train.run_dir=elsewhere",
        'train.schedule={"type": "constant"}',
        "gradient_accumulation_steps=3",
    ]
    stage = load_stage(write(tiny), overrides)
    assert stage.train.steps == 50
    assert not stage.fp8.enabled
    assert stage.raw["zero_optimization"]["stage"] == 2
    assert stage.train.run_dir == "elsewhere"
    assert stage.train.schedule.type == "constant"
    assert stage.global_batch == 12


def test_a_section_of_deepspeed_that_asks_for_nothing_is_no_mistake(tiny, write):
    tiny["activation_checkpointing"] = {"cpu_checkpointing": False, "profile": False}
    assert load_stage(write(tiny)).model.activation_checkpointing is False


def test_mistakes_of_all_sections_are_named_at_once(tiny, write):
    del tiny["train"]["run_dir"]
    wrong = ["fp8.linear.input.format=e9", "zero_optimization.stge=3", "trian=1", "model.pathh=x", "data.seq=3"]
    with refused() as caught:
        load_stage(write(tiny), wrong)
    keys = [error.key for error in caught.value.all]
    assert sorted(keys) == sorted(
        ["fp8.linear.input.format", "zero_optimization.stge", "trian", "model.pathh", "data.seq", "train.run_dir"]
    )
    assert '"train.run_dir" is missing' in str(caught.value)


def test_a_key_like_no_other_is_no_reason_for_a_long_list(tiny, write):
    with refused() as caught:
        load_stage(write(tiny), ["zero_optimization.qqqqqq=3"])
    assert caught.value.remedy == "remove it"


# (override, key the error must name, words the screen must show)
WRONG = [
    ("trian.steps=5", "trian", 'Did you mean "train"?'),
    ('train.lora={"target": "x"}', "train.lora.target", 'Did you mean "targets"?'),
    ("train.schedule.warm_up=5", "train.schedule.warm_up", 'Did you mean "warmup"?'),
    ('data.sources=[{"path": "x", "weigth": 1}]', "data.sources.0.weigth", 'Did you mean "weight"?'),
    ("fp8.monitr.every=3", "fp8.monitr", 'Did you mean "monitor"?'),
    ("zero_optimization.stge=3", "zero_optimization.stge", 'Did you mean "stage"?'),
    ("train.steps=0", "train.steps", "greater than 0"),
    ("train.steps=many", "train.steps", "many"),
    ("train.keep_last=0", "train.keep_last", "greater than 0"),
    ("train.schedule.warmup=-1", "train.schedule.warmup", "greater than or equal to 0"),
    ("train.schedule.min_ratio=2", "train.schedule.min_ratio", "less than or equal to 1"),
    ("train.schedule.type=linear", "train.schedule.type", "wsd"),
    ("train.schedule.warmup=500", "train", "500"),
    ("train.schedule.decay_shape=step", "train.schedule.decay_shape", "1-sqrt"),
    ("model.attn_implementation=flash_attention_2", "model.attn_implementation", "packed"),
    ("model.activation_checkpointing=host", "model.activation_checkpointing", "offload"),
    ("zero_optimization=3", "zero_optimization", "DeepSpeed"),
    ("optimizer.type=AdamX", "optimizer.type", "AdamX"),
    ("gradient_clipping=auto", "gradient_clipping", '"auto"'),
    ("train.seed=-1", "train.seed", "greater than or equal to 0"),
    ("train.seed=99999999999", "train.seed", "less than"),
    ('csv_monitor={"enabled": true, "output_path": "/dev/null"}', "csv_monitor.output_path", "written"),
    ('tensorboard={"enabled": true, "job_name": "/dev/null/x"}', "tensorboard.output_path", "written"),
    ("train.run_dir=/dev/null/run", "train.run_dir", "written"),
    ("data.path=", "data.path", "at least 1 character"),
    ("train_batch_size=7", "train_batch_size", "2 (train_micro_batch_size_per_gpu) x 1"),
    ("train_micro_batch_size_per_gpu=0", "train_micro_batch_size_per_gpu", "greater than 0 (got 0)"),
    ("train_micro_batch_size_per_gpu=auto", "train_micro_batch_size_per_gpu", "auto"),
    ("train.steps.more=5", "train.steps.more", "has no keys"),
    ("train.steps", "", "KEY=VALUE"),
]


@pytest.mark.parametrize(("override", "key", "words"), WRONG, ids=[row[0] for row in WRONG])
def test_a_mistake_names_file_key_and_remedy(override, key, words, tiny, write):
    file = write(tiny)
    with refused() as caught:
        load_stage(file, [override])
    screen = str(caught.value)
    assert caught.value.key.startswith(key)
    assert caught.value.remedy
    assert str(file) in screen
    assert words in screen
    assert len(screen.splitlines()) < 20


@pytest.mark.parametrize("section", ["data", "train", "optimizer"])
def test_a_missing_section_is_named(section, tiny, write):
    del tiny[section]
    with refused("missing", section):
        load_stage(write(tiny))


@pytest.mark.parametrize(("epochs", "rows", "steps"), [(1, 40, 10), (2.5, 40, 25), (1, 41, 11), (0.01, 40, 1)])
def test_epochs_become_steps_once_the_rows_are_known(epochs, rows, steps, tiny, write):
    stage = load_stage(write(tiny), ["train.steps=null", f"train.epochs={epochs}", "train.schedule.warmup=0.1"])
    assert stage.train.steps is None
    assert stage.with_length(rows).train.steps == steps


def test_a_schedule_longer_than_the_epochs_is_refused(tiny, write):
    stage = load_stage(write(tiny), ["train.steps=null", "train.epochs=1", "train.schedule.warmup=50"])
    with refused("longer than the run", "train.schedule"):
        stage.with_length(40)


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ((None, 3, None), 2, (6, 3, 1)),
        ((None, 3, 4), 2, (24, 3, 4)),
        ((24, 3, None), 2, (24, 3, 4)),
        ((24, None, 4), 2, (24, 3, 4)),
        ((24, None, None), 3, (24, 8, 1)),
        ((24, 3, 4), 2, (24, 3, 4)),
    ],
)
def test_the_batch_follows_from_what_is_given(given, world, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    raw = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    assert resolve_batch(raw, world) == expected


@pytest.mark.parametrize(("given", "world"), [((10, 4, None), 1), ((10, None, 4), 1), ((10, None, None), 3)])
def test_a_batch_that_does_not_divide_shows_the_arithmetic(given, world):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    raw = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    with refused(rf"x {world} \(ranks\) = \d+"):
        resolve_batch(raw, world)
