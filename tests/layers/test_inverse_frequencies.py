"""Inverse frequencies of rotary embeddings that were rounded to BF16 are computed again."""

import deepspeed
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ds_fp8.layers.decoder.rotary import restore_inverse_frequencies
from tests.layers.hugging_face import causal_lm
from tests.ranks import on_ranks
from tests.zero import models

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}


def frequencies(model) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


@pytest.mark.parametrize(
    ("architecture", "changes", "dtype"),
    [("llama", {}, torch.float16), ("qwen3", {"rope_parameters": YARN}, torch.bfloat16), ("phi3", {}, torch.bfloat16)],
)
def test_a_model_that_was_cast_gets_its_frequencies_back(architecture, changes, dtype):
    model = causal_lm(architecture, **changes)
    expected = {name: buffer.clone() for name, buffer in frequencies(model).items()}
    weights = {name: p.clone() for name, p in model.to(dtype).named_parameters()}
    assert any(not torch.equal(buffer.float(), expected[name]) for name, buffer in frequencies(model).items())
    (line,) = restore_inverse_frequencies(model)
    assert "computed again" in line
    assert frequencies(model).keys() == expected.keys()
    for name, buffer in frequencies(model).items():
        assert buffer.dtype is torch.float32
        assert torch.equal(buffer, expected[name])
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert restore_inverse_frequencies(model) == []


def test_frequencies_that_nobody_can_compute_again_are_named():
    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", torch.rand(8).bfloat16())

    (line,) = restore_inverse_frequencies(torch.nn.ModuleDict({"rope": Rotary()}))
    assert line.startswith("inverse frequencies of rope are rounded")


@on_ranks(2)
def test_a_model_made_under_zero_init_has_exact_positions():
    section = {"linear": {"backend": "reference"}}
    settings = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    with deepspeed.zero.Init(config_dict_or_path=models.config()):
        model = Qwen3ForCausalLM(Qwen3Config(**settings, num_attention_heads=2, num_key_value_heads=2, head_dim=128))
    assert model.model.rotary_emb.inv_freq.dtype is torch.bfloat16, "otherwise this test means nothing"
    engine = models.engine(section, model)
    exact = 1 / 1e4 ** (torch.arange(0, 128, 2) / 128)
    assert torch.equal(engine.module.model.rotary_emb.inv_freq, exact)
    assert any("computed again in FP32" in note for note in engine.fp8.report["notes"])
    engine.destroy()
