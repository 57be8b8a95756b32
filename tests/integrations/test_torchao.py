"""torchao's float8: the same casts, and training that goes on here. Skipped where torchao is not installed.

pip install torchao==0.18.0; pytest tests/integrations/test_torchao.py
"""

import json

import pytest
import torch

import ds_fp8
from ds_fp8.train import load_stage
from ds_fp8.train.model import build_model, load_model_config
from tests.casts.peers import assert_same_as_torchao
from tests.corpus import DOCUMENTS
from tests.integrations.programs import counting, small_model, small_tokenizer
from tests.zero.models import config, take_step

TRAINING = {**config({}), "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}}


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_casts_are_torchaos(format, granularity, scale):
    assert_same_as_torchao(format, granularity, scale, "cpu")


def train_with_torchao(folder) -> list[float]:
    """Train a few steps in torchao's float8, emulated, write a Hugging Face folder, and return the losses."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = small_model(hidden_size=128, intermediate_size=256)
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: "lm_head" not in name
    )
    assert "Float8Linear" in str(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.stack([row["input_ids"] for row in counting(8)])
    losses = []
    for _ in range(6):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return losses


def go_on(folder) -> list[float]:
    """Load the folder as a stage does, and return the losses of further steps on this rank."""
    stage = load_stage(folder / "stage.json")
    model = build_model(stage, load_model_config(stage, small_tokenizer()))
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=TRAINING)[0]
    assert engine.fp8.report["fp8_linears"] == 14
    rows = torch.stack([row["input_ids"] for row in counting(8)])
    return [take_step(engine, engine(input_ids=rows, labels=rows).loss) for _ in range(4)]


def test_weights_trained_with_torchao_go_on_here(ranks, tmp_path):
    pytest.importorskip("torchao")
    before = train_with_torchao(tmp_path)
    stage = TRAINING | {
        "model": {"path": str(tmp_path)},
        "data": {**DOCUMENTS, "tokenizer": str(tmp_path), "sequence_length": 64},
        "train": {"run_dir": "run", "steps": 4},
    }
    (tmp_path / "stage.json").write_text(json.dumps(stage))
    after, _ = ranks(2, go_on, tmp_path)
    assert after[0] < before[-1] < before[0]  # the next step, not a new start
    assert after[-1] < after[0]
