"""Models that do not separate documents of a row train on rows of one example, as if each example were alone."""

from __future__ import annotations

import json
import logging
import sys
from itertools import pairwise
from unittest import mock

import pytest
import torch

from ds_fp8.commands import evaluate
from ds_fp8.config.log import logger
from ds_fp8.data import IGNORED, build_data, build_tokenizer
from ds_fp8.graphs.conditions import rows_in_a_graph
from ds_fp8.train import load_stage, train, trial
from ds_fp8.train.batches import micro_batches
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.model import build_model, load_model_config
from tests.corpus import CHATS

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # tokens that are seen change the loss
}
TYPES = {
    "llama": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "num_local_experts": 2}
    | {"num_experts_per_tok": 1, "sliding_window": 32},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_key_head_dim": 16}
    | {"linear_value_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
}


@pytest.fixture
def stage_of(tiny, write, tmp_path):
    """The file of a stage that trains a type on chats, of which a row has room for several."""

    def make(architecture, budget=None):
        tiny["fp8"]["enabled"] = False
        tiny["data"] = {**CHATS, "sequence_length": 256, "validation_fraction": 0.1, "tokens_per_gpu": budget}
        tiny["model"] = {"config": {"model_type": architecture, **SIZES, **TYPES[architecture]}}
        tiny["model"] |= {"attn_implementation": "eager"} if architecture == "gpt_oss" else {}
        tiny["train"] |= {"eval_batches": 100, "schedule": {"type": "constant"}, "run_dir": str(tmp_path / "run")}
        if budget:
            tiny.update(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4)
        return write(tiny, f"{architecture}.json")

    return make


def said_in_training(file, steps, run_dir=None, found=None):
    """Train, where `found` is what the trial finds; return what is said of the rows."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    changes = [f"train.steps={steps}"] + ([f"train.run_dir={run_dir}"] if run_dir else [])
    try:
        with mock.patch.object(
            trial, "check_rows", **({"return_value": None} if found else {"wraps": trial.check_rows})
        ):
            train(load_stage(file, changes))
    finally:
        logger.removeHandler(handler)
    return [line for line in said if "a row" in line and line.startswith("note")]


def mean_loss_alone(model, dataset, rows):
    """The mean loss over all label tokens of some rows, each document by itself."""
    total = count = 0
    for row in rows:
        ids, labels, places = (
            dataset[row][name][: dataset.row_tokens(row)] for name in ("input_ids", "labels", "position_ids")
        )
        starts = (places == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            with torch.no_grad():
                logits = model(input_ids=ids[None, start:stop], use_cache=False).logits[0].float()
            losses = torch.nn.functional.cross_entropy(logits[:-1], labels[start + 1 : stop], reduction="sum")
            total, count = total + losses.item(), count + (labels[start + 1 : stop] != IGNORED).sum().item()
    return total / count


def evaluated(file, run_dir):
    arguments = ["evaluate", str(run_dir / "model"), str(file), "--gpus", "2", "--problems", "0"]
    with mock.patch.object(sys, "argv", [*arguments, "--out", str(run_dir / "found.json")]):
        evaluate.main()
    return json.loads((run_dir / "found.json").read_text())["loss"]


@pytest.mark.parametrize(("architecture", "budget"), [*((name, None) for name in TYPES), ("lfm2", 512)])
def test_a_document_is_trained_on_as_if_it_were_alone(architecture, budget, stage_of, ranks, tmp_path):
    file = stage_of(architecture, budget)
    said = ranks(2, said_in_training, file, 1)[0]
    alone = architecture != "llama"
    assert ["one example a row, " in line and "% padding" in line for line in said] == [True] * alone
    stage = load_stage(file, world=2)
    tokenizer = build_tokenizer(stage.data)
    data = build_data(stage.data, tokenizer, alone=alone)
    model = build_model(stage, load_model_config(stage, tokenizer)).eval()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    first = data.rows_of_step(0, stage.global_batch, stage.train.seed)
    assert result["first_loss"] == pytest.approx(mean_loss_alone(model, data.train, first), rel=1e-5)
    loss = mean_loss_alone(model, data.validation, range(len(data.validation)))
    assert result["first_validation_loss"] == pytest.approx(loss, rel=1e-5)
    if architecture == "lfm2":
        assert ranks(1, evaluated, file, tmp_path / "run")[0] == pytest.approx(result["final_loss"], rel=1e-4)


def examples_of_all_ranks(file):
    """The examples of this rank's micro-batches of all rows, and the shapes of these."""
    stage = load_stage(file)
    data = build_data(stage.data, build_tokenizer(stage.data), alone=True)
    batches = micro_batches(stage, data.train, range(len(data.train)), torch.device("cpu"))
    # One document a row, also where it is padded: any attention can then be captured in a CUDA graph.
    assert all(rows_in_a_graph(torch.nn.Module(), batch) == (0, None) for batch in batches)
    examples = [
        ids[labels != IGNORED].tolist()
        for batch in batches
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    return [example for example in examples if example], [tuple(batch["input_ids"].shape) for batch in batches]


@pytest.mark.parametrize("budget", [None, 512])
def test_every_example_has_a_row_once_with_little_padding(budget, stage_of, ranks):
    file = stage_of("lfm2", budget)
    stage = load_stage(file, world=2)
    train = build_data(stage.data, build_tokenizer(stage.data)).train
    expected = []
    for row in train:
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["labels"])]
        parts = (row["labels"][start:stop] for start, stop in pairwise(starts))
        expected += [part[part != IGNORED].tolist() for part in parts]
    found, shapes = zip(*ranks(2, examples_of_all_ranks, file), strict=True)
    assert sorted(found[0] + found[1]) == sorted(filter(None, expected))
    assert len(shapes[0]) == len(shapes[1])
    lengths = {128, 256}  # multiples of 128 up to a row
    assert {length for shape in shapes for _, length in shape} == lengths
    if budget:
        assert {rows * length for shape in shapes for rows, length in shape} <= {512, 256, 128, 384}


def test_a_run_resumes_to_the_bit_and_keeps_the_rows_that_it_began_with(stage_of, ranks, tmp_path):
    file = stage_of("lfm2")
    ranks(2, said_in_training, file, 3, tmp_path / "straight")
    for steps in (1, 3):
        said = ranks(2, said_in_training, file, steps, tmp_path / "stopped")[0]
        assert "one example a row" in said[0]
    losses = [
        [record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl", 10**9) if "loss" in record]
        for name in ("straight", "stopped")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    # As by a version that packs every model's rows
    assert ranks(2, said_in_training, file, 1, tmp_path / "packed", True)[0] == []
    said = ranks(2, said_in_training, file, 2, tmp_path / "packed")[0]
    assert ["see those before them, as since this run began" in line for line in said] == [True]
