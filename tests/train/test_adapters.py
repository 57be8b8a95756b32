"""Adapters of a stage on mixtures of experts: where they are, and what their sum with the weights is."""

import pytest
import torch

from ds_fp8.layers.experts.adapters import wraps_parameter
from ds_fp8.train import Lora
from ds_fp8.train.adapters import add_adapters, with_adapters_merged
from tests.layers.hugging_face import causal_lm, tokens
from tests.layers.moe import mixture
from tests.numerics import error

EXPERTS = {"gate_up_proj", "down_proj"}
TARGETS = {
    "all-linear": ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "weight", *EXPERTS}),
    "experts": (("gate_up_proj", "down_proj"), EXPERTS),
    "one weight of experts, and attention": (("q_proj", "experts.gate_up_proj"), {"q_proj", "gate_up_proj"}),
}


@pytest.mark.parametrize("case", TARGETS)
def test_adapters_are_where_the_stage_puts_them_and_merge(case):
    targets, expected = TARGETS[case]
    torch.manual_seed(0)
    # In FP32: a router's rounding in BF16 would send some tokens elsewhere.
    model, plain = (mixture("qwen3_moe", torch.float32) for _ in range(2))
    add_adapters(model, Lora(r=4, targets=targets))
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    own = {part.parameter_name if wraps_parameter(part) else name.rpartition(".")[2] for name, part in adapted.items()}
    assert own == expected
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    ids = torch.arange(48).view(2, 24)
    before, wanted = (one(input_ids=ids, use_cache=False).logits for one in (plain, model))
    plain.load_state_dict(with_adapters_merged(model, model.state_dict()))
    assert error(plain(input_ids=ids, use_cache=False).logits, wanted) < 1e-4 < error(before, wanted)


def test_a_linear_layer_with_two_results_has_no_adapter():
    model = causal_lm("llama4_text", torch.float32, num_local_experts=2, num_hidden_layers=1, intermediate_size_mlp=64)
    add_adapters(model, Lora(r=4, targets="all-linear"))
    assert "lora_A" in dict(model.named_modules())["model.layers.0.self_attn.q_proj"]._modules
    assert model(input_ids=tokens(), use_cache=False).logits.isfinite().all()
