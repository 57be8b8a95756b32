"""FP8 products of transformers' own modules of experts, beside their eager forward."""

import functools

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.layers.experts.experts import multiply_experts, products_of
from ds_fp8.layers.linear.recipe import recipe_from_config
from tests.layers.test_expert_products import FP8_ERROR
from tests.numerics import error

EXPERTS, CHOICES, HIDDEN, FEATURES = 4, 2, 256, 128
CLASSES = {
    "mixtral": MixtralExperts,
    "qwen3_moe": Qwen3MoeExperts,
    "olmoe": OlmoeExperts,
    "deepseek_v3": DeepseekV3Experts,
}
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": FEATURES, "moe_intermediate_size": FEATURES, "num_experts": EXPERTS,
    "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
}  # fmt: skip


def recipe(**linear):
    return recipe_from_config(FP8Config(linear={"backend": "reference", **linear}, monitor={"every": 0}))


def experts(architecture, classes=CLASSES, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**SIZES, **changes})
    config._experts_implementation = "eager"
    module = classes[architecture](config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module


def routed(tokens):
    torch.manual_seed(1)
    weights, index = torch.randn(tokens, EXPERTS).softmax(-1).topk(CHOICES)
    return torch.randn(tokens, HIDDEN).requires_grad_(), index, weights.detach().requires_grad_()


def run(module, tokens):
    x, index, weights = routed(tokens)
    module.zero_grad()
    y = module(x, index, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return y.detach(), x.grad, weights.grad, module.gate_up_proj.grad.clone(), module.down_proj.grad.clone()


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("tokens", [1, 150])
def test_modules_compute_what_they_do_in_high_precision(architecture, tokens):
    module = experts(architecture)
    expected = run(module, tokens)
    module.expert_products = products_of(module, recipe(), recipe())
    module.forward = functools.partial(multiply_experts, module)
    low, high = FP8_ERROR
    for found, wanted in zip(run(module, tokens), expected, strict=True):
        assert low < error(found, wanted) < high


@pytest.mark.parametrize(("word", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_the_activation_is_found_out(word, name):
    assert products_of(experts("mixtral", hidden_act=word), recipe(), recipe()).activation == name


def test_experts_that_are_not_known_say_why():
    known = recipe()
    assert "has_bias" in products_of(experts("gpt_oss", {"gpt_oss": GptOssExperts}), known, known)
    assert "act(gate)" in products_of(experts("mixtral", hidden_act="relu"), known, known)
    assert "multiples of 128" in products_of(experts("qwen3_moe", moe_intermediate_size=96), known, known)
    assert "128x128" in products_of(experts("mixtral"), recipe(weight={"granularity": "tensor"}), known)
    assert "has_gate = not set" in products_of(torch.nn.Linear(2, 2), known, known)


def test_a_gating_of_its_own_is_not_taken_for_the_usual_one():
    module = experts("mixtral")
    module._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0].clamp(max=2) * gate_up.chunk(2, -1)[1]
    assert "act(gate)" in products_of(module, recipe(), recipe())
