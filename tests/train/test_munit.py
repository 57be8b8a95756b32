"""Munit scaling under ZeRO-3 on two ranks: steps without an amax, and a stage that is resumed, saved and evaluated."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ds_fp8
from ds_fp8.commands.export import main as export
from ds_fp8.research import munit
from ds_fp8.train import load_stage, train
from ds_fp8.train.model import parameters_to_train
from tests.layers.hugging_face import causal_lm, tokens
from tests.refusals import refused
from tests.zero import models


def count_amax(preset: str) -> tuple[list[str], int, list[float]]:
    """Train three steps; return the profiled operations that find an amax, all-reduces of a MAX, and the losses."""
    munit.register()
    model = causal_lm("munit_qwen3")
    # With the model's own loss: in plain torch the fused one takes the largest logit out of its softmax by amax.
    config = models.config({"preset": preset, "monitor": {"every": 0}, "loss": "off"})
    engine, *_ = ds_fp8.initialize(model=model, model_parameters=munit.parameter_groups(model, 0.05), config=config)
    maxima, losses, reduce = [], [], torch.distributed.all_reduce

    def spy(tensor, op=torch.distributed.ReduceOp.SUM, *args, **kwargs):
        maxima.extend([op] * (op == torch.distributed.ReduceOp.MAX))
        return reduce(tensor, op, *args, **kwargs)

    torch.distributed.all_reduce = spy
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(3):
                ids = tokens(2, 32)
                losses.append(models.take_step(engine, engine(ids, labels=ids).loss))
    finally:
        torch.distributed.all_reduce = reduce
    return [event.key for event in profiler.key_averages() if "amax" in event.key], len(maxima), losses


@pytest.mark.slow
def test_no_amax_and_no_all_reduce_of_one(ranks):
    """The same count finds both in a preset whose scales follow the numbers."""
    for operations, maxima, losses in ranks(2, count_amax, "munit"):
        assert operations == []
        assert maxima == 0
        assert losses[-1] < losses[0]
    for operations, maxima, _ in ranks(2, count_amax, "infir2"):
        assert operations
        assert maxima >= 3


def train_here(file, run_dir):
    return train(load_stage(file, [f"train.run_dir={run_dir}"]))


@pytest.fixture
def munit_stage(tiny):
    tiny["model"]["config"] |= {"model_type": "munit_qwen2", "tie_word_embeddings": False}
    tiny["fp8"] = {"preset": "munit", "monitor": {"every": 3}}
    tiny["optimizer"]["params"] |= {"lr": 0.05, "eps": 1e-12}
    tiny["train"] |= {"steps": 6, "save_every": 3}
    return tiny


@pytest.mark.slow
def test_a_stage_is_saved_loaded_and_not_exported(munit_stage, write, ranks, tmp_path, monkeypatch):
    file, run_dir = write(munit_stage), tmp_path / "run"
    whole = ranks(2, train_here, file, run_dir)[0]
    assert whole["final_loss"] < whole["first_validation_loss"]
    assert json.loads((run_dir / "model" / "config.json").read_text())["model_type"] == "munit_qwen2"

    next_stage = munit_stage | {"model": {"path": str(run_dir / "model")}, "train": munit_stage["train"] | {"steps": 3}}
    after = ranks(2, train_here, write(next_stage, "next.json"), tmp_path / "next")[0]
    assert after["first_validation_loss"] == pytest.approx(whole["final_loss"], rel=1e-3)

    monkeypatch.setattr("sys.argv", ["ds-fp8 export", str(run_dir), str(tmp_path / "served"), "--format", "bf16"])
    with refused("is not a qwen2"):
        export()


def test_a_stage_without_a_learning_rate_is_refused(munit_stage, write):
    munit_stage["optimizer"]["params"].pop("lr")
    munit.register()
    stage = load_stage(write(munit_stage))
    with refused("multiplies the learning rate"):
        parameters_to_train(stage, causal_lm("munit_qwen2"))
