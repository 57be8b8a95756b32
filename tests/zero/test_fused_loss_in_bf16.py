"""A BF16 run with the loss of the FP8 runs, to compare memory and time with."""

import pytest

import ds_fp8
from tests.layers.hugging_face import causal_lm, tokens
from tests.zero import models


def losses(section):
    model = causal_lm("qwen2")
    engine = ds_fp8.initialize(
        model=model, model_parameters=list(model.parameters()), config=models.config({"enabled": False, **section})
    )[0]
    result = []
    for _ in range(3):
        ids = tokens()
        result.append(models.take_step(engine, engine(input_ids=ids, labels=ids).loss))
    return result, engine.fp8.loss is not None and engine.fp8.loss.fused


def test_the_fused_loss_without_fp8(ranks):
    own, fused = ranks(2, losses, {})[0], ranks(2, losses, {"loss": "fused"})[0]
    assert (own[1], fused[1]) == (False, True)
    assert fused[0] == pytest.approx(own[0], rel=2e-3)
