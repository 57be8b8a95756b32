"""The contract of conversion: which linear layers run in FP8, and the reason for each that does not."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.engine.report import EXPERTS, coverage
from ds_fp8.layers.linear.linear import FP8Linear
from tests.layers.hugging_face import causal_lm, tokens


def converted(model, filter=None, **linear):
    return convert(model, parse_fp8({"fp8": {"linear": linear, "monitor": {"every": 0}}}), filter=filter)


class Transposed(nn.Linear):
    """As Falcon's: written otherwise, computing the same."""

    def forward(self, input):
        return input @ self.weight.T if self.bias is None else input @ self.weight.T + self.bias


class Unchanged(nn.Linear):
    pass


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 1.01


class Clamped(nn.Linear):
    def forward(self, input):
        return super().forward(input).clamp(-20, 20)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(4, 4))
        self.in_proj, self.x_proj, self.dt_proj = (nn.Linear(512, 512) for _ in range(3))


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("up", nn.Linear(512, 512), None),
        ("up", Unchanged(512, 512), None),
        ("up", Transposed(512, 512, bias=False), None),
        ("up", Scaled(512, 512), "is a Scaled, which overrides forward"),
        ("up", Clamped(512, 512), "is a Clamped, which overrides forward"),
        ("up", parametrizations.weight_norm(nn.Linear(512, 512)), "its weight is computed from others"),
        ("up", nn.MultiheadAttention(512, 4), "reads its weight without calling it"),
        ("score", nn.Linear(512, 127), "narrower than 128 features"),
        ("dt", nn.Linear(8, 512), "narrower than 128 features"),
        ("wide", nn.Linear(512, 128), None),
        ("router", nn.Linear(512, 256), "a router or gate"),
        ("gate", nn.Linear(512, 128), "a router or gate"),
        ("gate", nn.Linear(512, 1024), None),
        ("gate_proj", nn.Linear(512, 256), None),
        ("lora_A", nn.ModuleDict({"default": nn.Linear(512, 256)}), "an adapter"),
    ],
)
def test_each_layer_is_converted_or_has_its_reason(name, layer, reason):
    model = nn.ModuleDict({"other": nn.Linear(512, 512), name: layer})
    result = converted(model)
    names = [n for n, m in model.named_modules() if n.startswith(name) and isinstance(m, nn.Linear)]
    assert len(names) == 1
    if reason is None:
        assert names[0] in result.converted
    else:
        assert reason in result.left[names[0]]
        assert not isinstance(model.get_submodule(names[0]), FP8Linear)


def test_state_space_projections_stay_and_the_rest_of_a_mixer_does_not():
    result = converted(Mixer())
    assert result.converted == ["in_proj"]
    assert all("state-space" in result.left[name] for name in ("x_proj", "dt_proj"))


def test_a_converted_subclass_computes_what_it_did_and_goes_back_to_its_class():
    layer = Transposed(512, 256).bfloat16()
    model = nn.Sequential(layer)
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    expected = model(x).float()
    converted(model)
    assert (model(x).float() - expected).norm() < 0.06 * expected.norm()
    converted(nn.ModuleList([model, nn.Linear(512, 512)]), skip=["0"])
    assert type(layer) is Transposed
    assert torch.equal(model(x).float(), expected)


def test_a_filter_sees_what_skip_leaves_and_is_remembered():
    model = causal_lm("llama")
    seen = {}

    def first_layer(name, layer):
        seen[name] = layer
        return "layers.0." in name

    result = converted(model, first_layer)
    assert "lm_head" not in seen
    assert all(model.get_submodule(name) is layer for name, layer in seen.items())
    assert len(seen) == 14
    assert len(result.converted) == 7
    assert all("layers.0." in name for name in result.converted)
    again = converted(model)  # as ds_fp8.initialize does
    assert again.converted == result.converted
    assert again.left == result.left
    assert len(converted(model, lambda name, layer: True).converted) == 14


@pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
def test_lm_head_means_the_head_whatever_its_name(architecture):
    model = causal_lm(architecture, vocab_size=320)
    head = next(name for name, m in model.named_modules() if m is model.get_output_embeddings())
    assert "lm_head" in converted(model).left[head]
    assert head in converted(model, skip=[]).converted


def adapters(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


LORA = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "MLP": {"target_modules": ["down_proj"]},
    "all": {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("order", ["adapters first", "conversion first", "conversion around"])
@pytest.mark.parametrize("targets", LORA)
def test_adapters_stay_bf16_and_every_one_gets_its_gradient(targets, order):
    """Beside a model that computes its frozen linears in FP8 too, and is not fused."""

    def build(fuse):
        model = causal_lm("llama")
        section = parse_fp8({"fp8": {"fuse": fuse, "monitor": {"every": 0}}})
        if order != "adapters first":
            convert(model, section)
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=8, init_lora_weights=False, **LORA[targets])).bfloat16()
        conversion = convert(model, section) if order != "conversion first" else None
        ids = tokens()
        model(input_ids=ids, labels=ids).loss.backward()
        return model, conversion

    fused, conversion = build("auto")
    plain, _ = build("off")
    assert sum(isinstance(m, FP8Linear) for m in fused.modules()) == 14
    assert not any(isinstance(m, FP8Linear) for n, m in fused.named_modules() if "lora_" in n or "modules_to_save" in n)
    expected = adapters(plain)
    assert adapters(fused).keys() == expected.keys()
    for name, parameter in adapters(fused).items():
        gradient, reference = parameter.grad.float(), expected[name].grad.float()
        assert reference.count_nonzero(), name
        assert (gradient - reference).norm() < 0.12 * reference.norm(), name
    if conversion is not None:
        assert len(conversion.fusion.layers) == 2
        assert not conversion.fusion.left
        reasons = {reason for name, reason in conversion.left.items() if "lora_" in name}
        assert reasons == {"an adapter"}


def test_every_parameter_is_accounted_for_and_experts_come_first():
    model = causal_lm("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, vocab_size=320)
    result = coverage(model, converted(model).left)
    kept = result["kept_in_bf16"]
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["fp8_parameters"] == sum(m.weight.numel() for m in model.modules() if isinstance(m, FP8Linear))
    assert result["fp8_parameters"] + sum(part["parameters"] for part in kept) == result["parameters"]
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    assert kept[0]["reason"].startswith(EXPERTS)
    assert kept[0]["parameters"] == sum(p.numel() for p in experts)
    by_reason = {part["reason"]: part["parameters"] for part in kept}
    assert by_reason["embeddings"] == by_reason['named by fp8.linear.skip "lm_head"'] == 320 * 256
    assert by_reason["a router or gate"] == 2 * 4 * 256


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_are_counted_once(tied):
    model = causal_lm("llama", tie_word_embeddings=tied)
    assert coverage(model, converted(model).left)["parameters"] == sum(p.numel() for p in model.parameters())
