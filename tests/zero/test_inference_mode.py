"""torch.inference_mode() around a forward leaves no tensor behind that training may not write."""

import pytest
import torch
from torch import nn

import ds_fp8
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import convert
from ds_fp8.monitor.cast_monitor import CastMonitor
from tests.layers.hugging_face import causal_lm, tokens
from tests.zero import models


def losses(section, mode):
    """Of three steps, each behind an evaluation in `mode`."""
    model, found, ids = causal_lm("qwen2"), [], tokens()
    config = models.config({"preset": "precise", "monitor": {"every": 1}, **section})
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    for _ in range(3):
        engine.eval()
        with mode():
            found.append(engine(input_ids=ids).logits.float().sum().item())
        engine.train()
        found.append(models.take_step(engine, engine(input_ids=ids, labels=ids).loss))
    return found


@pytest.mark.parametrize("section", [{}, {"attention": {"format": "e4m3"}}], ids=str)
def test_training_goes_on_as_behind_no_grad(ranks, section):
    behind_no_grad, behind_inference = (
        ranks(2, losses, section, mode) for mode in (torch.no_grad, torch.inference_mode)
    )
    assert behind_inference == behind_no_grad


def test_a_monitor_without_an_engine():
    model = nn.Sequential(nn.Linear(128, 128))
    convert(model, FP8Config(), CastMonitor(1))
    with torch.inference_mode():
        model(torch.randn(2, 128))
    model(torch.randn(2, 128)).sum().backward()
