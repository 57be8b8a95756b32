"""Accelerate alone, with the section in its DeepSpeed configuration and from `install`."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from tests.integrations.programs import counting, deepspeed_config, installed, small_model


def accelerated(section, default):
    """Losses of a loop over Accelerate's prepare and backward, and the start report."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    model = small_model()
    with installed(default):
        plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(section))
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
        rows = DataLoader(counting(), batch_size=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, optimizer, rows = accelerator.prepare(model, optimizer, rows)
        losses = []
        for _, batch in zip(range(4), rows, strict=False):
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, engine.fp8.report


def test_a_section_and_a_default_are_the_same(ranks):
    losses, report = ranks(2, accelerated, {"preset": "coat"}, None)[0]
    default, _ = ranks(2, accelerated, None, "coat")[0]
    assert report["optimizer"] == "ds_fp8.optim.AdamW"
    assert report["fp8_linears"] == 14
    assert losses == default
    assert losses[-1] < losses[0] - 0.1
