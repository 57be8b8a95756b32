"""Every stage in ds_configs loads in stock DeepSpeed and here, and those of InfiR2 have the numbers of its recipe."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from ds_fp8.config.files import read_json
from ds_fp8.memory import estimate, estimate_workload, read_workload
from ds_fp8.memory.estimate import gpu_of, longest_contexts
from ds_fp8.memory.shapes import SHAPES, with_known_model
from ds_fp8.train import Stage, learning_rate_factor, load_stage
from tests.memory.peaks import of_equal_layers

FOLDER = Path(__file__).parents[1] / "ds_configs"
FILES = sorted(file for file in FOLDER.glob("*/*.json") if file.parent.name != "sweeps")  # which are no stages
FAMILIES = ("infir2_1.5b", "infir2_7b", "llama3.1_8b", "qwen3_8b")
STAGES = ("cpt", "cpt_decay", "sft_stage1", "sft_stage2")
# Folder -> parameters, as published
SMALL = {
    "qwen3_0.6b": 0.596e9,
    "qwen3_1.7b": 1.721e9,
    "qwen3_4b": 4.022e9,
    "llama3.2_1b": 1.236e9,
    "llama3.2_3b": 3.213e9,
    "mistral_7b": 7.248e9,
    "gemma3_1b": 1.000e9,
}
ROW = re.compile(r"\| `(\S+)` \| (\S+) \| (\d+) \| (yes|no) \| (\d+) x (\S+) \| ([\d.]+) \|")
SFT_LEARNING_RATE = {"infir2_1.5b": 5e-5, "infir2_7b": 2e-5}


@pytest.fixture(autouse=True)
def eight_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")


@functools.cache
def load(family: str, name: str) -> Stage:
    return load_stage(FOLDER / family / f"{name}.json")


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_stage_loads_here_and_in_stock_deepspeed(file):
    stage = load_stage(file)
    raw = json.loads(file.read_text())
    if "train_batch_size" in raw:  # stock DeepSpeed sees one rank here
        raw["train_batch_size"] //= 8 // stage.shared_by
    stock = DeepSpeedConfig(raw)
    assert stock.zero_config.stage == 3
    assert stock.bfloat16_config.enabled
    assert stock.train_micro_batch_size_per_gpu == stage.micro_batch
    assert stock.gradient_accumulation_steps == stage.accumulation
    assert stock.gradient_clipping == 1.0
    assert stage.fp8.enabled
    assert not load_stage(file, ["fp8.enabled=false"]).fp8.enabled  # its twin in BF16 is one key away
    assert "hidden_size" in with_known_model(raw, file)["model"]["config"]  # without a network


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_starts_where_the_one_before_ends(family):
    cpt, decay, first, second = (load(family, name).train for name in STAGES)
    assert decay.resume == f"{cpt.run_dir}/checkpoints/step_35000"
    assert 40_000 - (cpt.keep_last - 1) * cpt.save_every <= 35_000
    assert first.init_from == cpt.run_dir
    assert second.init_from == first.run_dir
    assert len({load(family, name).train.run_dir for name in STAGES}) == 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", STAGES)
def test_what_all_stages_of_the_recipe_share(family, name):
    stage = load(family, name)
    assert (stage.data.sequence_length, stage.micro_batch, stage.train.seed) == (32768, 1, 1236)
    assert stage.raw["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert (stage.train.save_every, stage.train.eval_every, stage.train.eval_batches) == (1000, 100, 10)
    assert (stage.data.validation_fraction, stage.data.test_fraction) == (0.05, 0.05)
    assert stage.fp8.preset == "infir2"
    assert stage.train.schedule.min_ratio == 0.1
    assert stage.model.activation_checkpointing


@pytest.mark.parametrize("name", ["cpt_128k", "sft_128k"])
def test_stages_of_128k_fit_on_8_gpus(name):
    """The model's own rotary embedding reaches as far; attention is in BF16, for in FP8 it costs loss."""
    file = FOLDER / "llama3.1_8b" / f"{name}.json"
    stage = load_stage(file)
    assert (stage.data.sequence_length, stage.shared_by, stage.micro_batch) == (131072, 4, 1)
    assert stage.fp8.attention.format == "bf16"
    w = read_workload(with_known_model(json.loads(file.read_text()), file), gpus=8)
    assert (w.sequence_length, w.tokens, w.model.longest) == (131072, 32768, 131072)
    assert estimate_workload(w).device_bytes < gpu_of("h200").bytes
    assert longest_contexts(w, gpu_of("h200").bytes)[4] > 2 * 131072


def test_an_estimate_passes_over_json_that_is_no_stage(tmp_path):
    """Data beside the stages, or notes, while the run that a stage begins from is still to be made."""
    for name in ("cpt", "sft"):
        shutil.copy(FOLDER / "qwen3_0.6b" / f"{name}.json", tmp_path)
    raw = json.loads((tmp_path / "sft.json").read_text())
    raw["model"].pop("path")
    raw["train"]["init_from"] = json.loads((tmp_path / "cpt.json").read_text())["train"]["run_dir"]
    (tmp_path / "chats.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text('{"train": ')
    found = with_known_model(raw, tmp_path / "sft.json")
    assert found["model"]["config"] == SHAPES["Qwen/Qwen3-0.6B-Base"]


@pytest.mark.parametrize("family", FAMILIES)
def test_cpt_is_warmup_stable_decay_over_168_billion_tokens(family):
    stage = load(family, "cpt")
    params = stage.raw["optimizer"]["params"]
    assert (params["lr"], params["weight_decay"], stage.global_batch) == (1e-4, 0.1, 128)
    assert stage.train.steps * stage.global_batch * stage.data.sequence_length == pytest.approx(167.8e9, rel=1e-3)

    def factor(step):
        return learning_rate_factor(step, stage.train.steps, stage.train.schedule)

    assert [factor(step) for step in (2499, 4999, 20_000, 34_999)] == [0.5, 1.0, 1.0, 1.0]
    assert factor(37_499) == pytest.approx(0.55, abs=1e-3)  # half-way down a cosine
    assert factor(39_999) == pytest.approx(0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decay_alone_has_no_warmup_and_the_same_batches(family):
    whole, decay = load(family, "cpt"), load(family, "cpt_decay")
    assert decay.train.steps == 5000
    assert decay.train.schedule.warmup == 0
    for section in ("optimizer", "data", "train_batch_size", "model"):
        assert decay.raw[section] == whole.raw[section]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["sft_stage1", "sft_stage2"])
def test_sft_packs_64_chats_a_step_by_tokens_for_5_epochs(family, name):
    stage = load(family, name)
    params = stage.raw["optimizer"]["params"]
    assert (params["lr"], params["weight_decay"]) == (SFT_LEARNING_RATE.get(family, 2e-5), 0.0)
    assert (stage.global_batch, stage.data.tokens_per_gpu, stage.train.epochs) == (64, 32768, 5)
    assert stage.data.format == "chat"
    schedule = stage.train.schedule
    assert (schedule.type, schedule.warmup) == ("cosine", 0.05)
    assert stage.with_length(72_000).train.steps == 5625
    first, second = load(family, "sft_stage1").raw, load(family, "sft_stage2").raw
    assert {key for key in first if first[key] != second[key]} == {"data", "train"}


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "gib", "parameters"),
    [
        ("infir2_7b/lora", 1, "h100", 28.2, 7.656e9),
        ("llama3.1_70b/lora_two_gpus", 2, "h100", 46.6, 70.76e9),
        ("qwen2.5_14b/one_h200", 1, "h200", 109.2, 14.77e9),
        ("qwen2.5_32b/two_h200", 2, "h200", 118.7, 32.76e9),
        ("llama3.1_70b/eight_gpus", 8, "h100", 73.4, 70.55e9),
    ],
)
def test_a_stage_fits_on_the_gpus_that_the_table_names(name, gpus, gpu, gib, parameters):
    file = FOLDER / f"{name}.json"
    found = estimate_workload(of_equal_layers(with_known_model(read_json(file), file), gpus=gpus))
    assert f"{gib} GiB" in next(line for line in (FOLDER / "README.md").read_text().splitlines() if f"`{name}" in line)
    assert found.device_bytes / 2**30 == pytest.approx(gib, abs=0.05)
    assert found.device_bytes < 0.95 * gpu_of(gpu).bytes
    assert found.workload.model.numel == pytest.approx(parameters, rel=1e-3)


def test_the_table_has_every_small_model():
    assert {row[0] for row in ROW.findall((FOLDER / "README.md").read_text())} == set(SMALL)


@pytest.mark.parametrize("stage", ["cpt", "sft"])
@pytest.mark.parametrize("row", ROW.findall((FOLDER / "README.md").read_text()), ids=lambda row: row[0])
def test_a_small_model_fits_on_the_gpus_that_the_table_names(row, stage):
    name, weights, length, recomputed, gpus, gpu, gib = row
    file = FOLDER / name / f"{stage}.json"
    raw = read_json(file)
    assert raw["fp8"]["preset"] == "precise"  # all begin with weights that were trained in BF16
    assert raw["model"] == {"path": weights, "activation_checkpointing": recomputed == "yes"}
    assert raw["data"]["sequence_length"] == int(length) <= SHAPES[weights]["max_position_embeddings"]
    found = estimate(with_known_model(raw, file), gpus=int(gpus))
    assert found.workload.model.numel == pytest.approx(SMALL[name], rel=2e-3)
    assert found.device_bytes / 2**30 == pytest.approx(float(gib), abs=0.05)
    assert found.device_bytes < 0.95 * gpu_of(gpu).bytes


@pytest.mark.parametrize("stage", ["cpt", "sft"])
@pytest.mark.parametrize("name", SMALL)
def test_small_models_share_all_settings_but_the_model_and_its_learning_rate(name, stage):
    ours, first = (read_json(FOLDER / folder / f"{stage}.json") for folder in (name, "qwen3_0.6b"))
    for raw in (ours, first):
        del raw["zero_optimization"]["leaf_module"], raw["optimizer"]["params"]["lr"], raw["train"]["run_dir"]
    assert {key for key in first if ours[key] != first[key]} <= {"model", "data"}
