"""The fused loss under ZeRO-3: with the head's products in FP8, and in a BF16 run, to compare memory and time with."""

import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.initialize import initialize
from tests.layers.hugging_face import causal_lm, tokens
from tests.zero import models


def training(section, tied=False):
    """Losses of four micro-batches in two steps and of an evaluation, and what the start report says of the loss."""
    model = causal_lm("qwen2", tie_word_embeddings=tied)
    config = models.config(section) | {"gradient_accumulation_steps": 2}
    engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    losses = []
    for _ in range(4):
        ids = tokens()
        loss = engine(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(30.0)).loss
        losses.append(models.take_step(engine, loss))
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=ids, labels=ids).loss.item())
        assert engine(input_ids=ids).logits.shape == (2, 16, 97)
    released = engine.module.lm_head.weight.numel() == 0
    return losses, released, engine.fp8.report.get("loss"), engine.fp8.loss is not None and engine.fp8.loss.fused


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_head_in_fp8_trains_as_one_in_bf16(ranks, tied):
    in_bf16, in_fp8 = (ranks(2, training, {"loss": {"head": head}}, tied)[0] for head in ("bf16", "fp8"))
    assert in_fp8[1], "the head's weight must have been partitioned for this test to mean something"
    assert "head's products in FP8" in in_fp8[2]
    assert "FP8" not in in_bf16[2]
    assert in_fp8[0] != in_bf16[0]
    assert in_fp8[0] == pytest.approx(in_bf16[0], rel=5e-3)
    assert in_fp8[0][-1] < in_fp8[0][0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_fused_loss_without_fp8(ranks, tied):
    own, fused = (ranks(2, training, {"enabled": False, **loss}, tied)[0] for loss in ({}, {"loss": "fused"}))
    assert (own[3], fused[3]) == (False, True)
    assert fused[1], "the head's weight must have been partitioned for this test to mean something"
    assert fused[0] == pytest.approx(own[0], rel=2e-3)


def test_a_head_in_fp8_needs_a_loss_that_can_be_fused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    model = causal_lm("gemma2", final_logit_softcapping=5.0)
    with pytest.raises(UserError, match="changes its logits") as error:
        initialize(model=model, config=models.config({"preset": "infir2", "loss": {"head": "fp8"}}))
    assert error.value.key == "fp8.loss.head"


def test_words_and_keys_of_the_loss():
    assert FP8Config(loss="off") == FP8Config(loss={"mode": "off"})
    assert not FP8Config(enabled=False, loss={"mode": "fused", "head": "fp8"}).multiplies_head_in_fp8
    with pytest.raises(UserError, match="off"):
        FP8Config(loss={"mode": "off", "head": "fp8"})
