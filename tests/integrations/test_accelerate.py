"""Accelerate alone, with the section in its DeepSpeed configuration and from `install`, and PEFT before initialize."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.programs import counting, deepspeed_config, installed, small_model


def accelerated(section, default, adapters):
    """Losses of a loop over Accelerate's prepare and backward, and the start report."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    model = small_model()
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    with installed(default):
        plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(section))
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
        rows = DataLoader(counting(), batch_size=2)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        engine, optimizer, rows = accelerator.prepare(model, optimizer, rows)
        losses = []
        for _, batch in zip(range(4), rows, strict=False):
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
        return losses, engine.fp8.report, trained


def test_a_section_and_a_default_are_the_same(ranks):
    losses, report, _ = ranks(2, accelerated, {"preset": "coat"}, None, False)[0]
    default, _, _ = ranks(2, accelerated, None, "coat", False)[0]
    assert report["optimizer"] == "ds_fp8.optim.AdamW"
    assert report["fp8_linears"] == 14
    assert losses == default
    assert losses[-1] < losses[0] - 0.1


def test_adapters_train_over_frozen_fp8_layers(ranks):
    losses, report, trained = ranks(2, accelerated, {}, None, True)[0]
    plain, _, _ = ranks(2, accelerated, None, None, True)[0]
    assert report["fp8_linears"] == 14
    assert all("lora_" in name for name in trained)
    assert losses == pytest.approx(plain, rel=0.01)
