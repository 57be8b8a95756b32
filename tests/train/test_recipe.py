"""The four stages of the InfiR2 recipe, from their own files, on a model and data of a few seconds."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ds_fp8.data import build_data, build_tokenizer
from ds_fp8.train import load_stage, train
from ds_fp8.train.metrics import read_metrics
from tests.corpus import FOLDER, TOKENIZER
from tests.train.tiny_stage import TINY

TOLERANCE = 1e-3  # Losses of BF16 models whose attention and logits are computed another way
CONFIGS = Path(__file__).parents[2] / "ds_configs" / "infir2_1.5b"
MODEL = {**TINY["model"]["config"], "max_position_embeddings": 256, "tie_word_embeddings": False}
SMALL = [
    f"data.tokenizer={TOKENIZER}",
    "data.sequence_length=192",
    "zero_optimization.stage3_param_persistence_threshold=100",
    "train.eval_every=100",
    "fp8.monitor.every=0",
    "train.eval_batches=1",
    "train.save_every=2",
]
CPT = [
    f"data.path={FOLDER}/documents.jsonl",
    "train_batch_size=4",
    "model.path=null",
    f"model.config={json.dumps(MODEL)}",
]
SFT = [f"data.path={FOLDER}/basic.jsonl", "train_batch_size=8", "data.tokens_per_gpu=200", "train.epochs=0.05"]
SFT += ["optimizer.params.lr=1e-3"]


def run(stage: str, folder: str, overrides: list[str]) -> tuple[dict, str]:
    """The result of one stage, and what this rank printed."""
    runs = [f"train.run_dir={folder}/{stage}", *SMALL, *overrides]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = train(load_stage(CONFIGS / f"{stage}.json", runs))
    return result, printed.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture(scope="module")
def recipe(ranks, folder):
    """What rank 0 has to say of each stage, each run on two ranks."""
    steps = ["train.steps=6", "train.schedule.warmup=2", "train.schedule.decay=2"]
    rest = ["train.steps=2", "train.schedule.decay=2", f"train.resume={folder}/cpt/checkpoints/step_4"]
    overrides = {
        "cpt": [*CPT, *steps],
        "cpt_decay": [*CPT, *rest],
        "sft_stage1": [*SFT, f"train.init_from={folder}/cpt"],
        "sft_stage2": [*SFT, f"train.init_from={folder}/sft_stage1", f"data.path={FOLDER}/mixed.jsonl"],
    }
    return {stage: ranks(2, run, stage, str(folder), more)[0] for stage, more in overrides.items()}


def test_every_stage_runs_to_its_end_and_learns(recipe):
    for stage, (result, printed) in recipe.items():
        assert result["final_loss"] < result["first_validation_loss"], stage
        assert result["fp8"]["enabled"], stage
        assert result["skipped_steps"] == 0, stage
        assert "tokens in" in printed, stage
        assert "perplexity" in printed, stage


def test_sft_counts_epochs_over_chats(recipe, folder):
    result, _ = recipe["sft_stage1"]
    # 90% of 400 chats, a twentieth of them, 8 a step.
    assert result["data"]["train"]["rows"] == result["data"]["train"]["examples"] == 360
    assert result["steps"] == 3
    logged = read_metrics(folder / "sft_stage1" / "metrics.jsonl", 100)
    # A step's chats take as many micro-batches of at most 200 tokens as they need on two ranks.
    assert {record["tokens"] <= 2 * 200 * 8 for record in logged if "tokens" in record} == {True}
    assert len({record["tokens"] for record in logged if "tokens" in record}) > 1


def test_a_step_of_chats_has_their_mean_loss_per_token(recipe, ranks, folder, monkeypatch):
    """However they are packed and shared: the first loss is that of the step's chats, each run through alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    own = [*SFT, f"train.init_from={folder}/cpt", "fp8.enabled=false"]
    result = ranks(2, run, "sft_stage1", str(folder / "bf16"), own)[0][0]
    stage = load_stage(CONFIGS / "sft_stage1.json", [*SMALL, *own])
    tokenizer = build_tokenizer(stage.data)
    data = build_data(stage.data, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder / "cpt" / "model", dtype=torch.bfloat16).eval()
    total = count = 0
    for row in data.rows_of_step(0, 8, 1236):
        chat = data.train.joined([row], data.train.row_tokens(row))
        with torch.no_grad():
            logits = model(input_ids=chat["input_ids"][None]).logits[0, :-1].float()
        labels = chat["labels"][1:]
        total += F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        count += (labels != -100).sum().item()
    assert result["first_loss"] == pytest.approx(total / count, rel=TOLERANCE)


def test_the_decay_stage_repeats_the_end_of_the_whole_run(recipe, folder):
    """Weights, moments, place in the data and learning rate: all of the last steps come out the same."""
    whole = [r for r in read_metrics(folder / "cpt" / "metrics.jsonl", 100) if r["step"] > 4 and "loss" in r]
    alone = [r for r in read_metrics(folder / "cpt_decay" / "metrics.jsonl", 100) if "loss" in r]
    keys = ("loss", "learning_rate", "gradient_norm")
    assert [[r[key] for key in keys] for r in alone] == [[r[key] for key in keys] for r in whole]
    assert recipe["cpt_decay"][0]["final_loss"] == recipe["cpt"][0]["final_loss"]
