"""Gradients that enter a fused layer beside its output: by the keys and values of an earlier forward."""

import deepspeed
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ds_fp8
from tests.zero import models


def train(section, kind: str, segments: tuple[int, ...], loss_on_all: bool):
    """Losses and norms of three steps over rows in segments; each reads the keys and values of those before."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads), dtype=torch.bfloat16)
    initialize = deepspeed.initialize if section is None else ds_fp8.initialize
    engine = initialize(model=model, model_parameters=list(model.parameters()), config=models.config(section))[0]
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(7 * step + deepspeed.comm.get_rank())
        x = torch.randint(0, 128, (2, sum(segments)), generator=generator)
        cache, loss = None, 0.0
        for part in x.split(segments, 1):
            out = engine(input_ids=part, labels=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            loss = loss + out.loss if loss_on_all else out.loss
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), float(engine.get_global_grad_norm())))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "segments", "loss_on_all"),
    [("qwen3", (16, 16), False), ("llama", (8, 8, 16), False), ("llama", (16, 16), True)],
)
def test_keys_and_values_of_an_earlier_forward_learn(ranks, kind, segments, loss_on_all):
    fused = ranks(2, train, {"monitor": {"every": 0}}, kind, segments, loss_on_all)[0]
    stock = ranks(2, train, None, kind, segments, loss_on_all)[0]
    for (loss, norm), (right, right_norm) in zip(fused, stock, strict=True):
        assert loss == pytest.approx(right, rel=0.01)
        assert norm == pytest.approx(right_norm, rel=0.08)
