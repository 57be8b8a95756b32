"""What is attached to the submodules of a fused layer runs, whenever it came."""

import warnings

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from peft import LNTuningConfig, LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

import ds_fp8
from ds_fp8.config.fp8 import parse_fp8
from tests.layers.hugging_face import causal_lm, fp8, tokens
from tests.numerics import error
from tests.ranks import on_ranks
from tests.zero import models

MORE = 0.03  # What a gradient's error against BF16's may have above 1.5 times that of unfused layers in FP8


def fp8_model(architecture="llama", **section):
    model = causal_lm(architecture)
    return model, fp8(model, **section)


def losses_and_gradients(model):
    output = model(input_ids=tokens(), labels=tokens())
    output.loss.backward()
    return output.logits.detach(), [p.grad for p in model.parameters()]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


calls = []


def with_forward_hook(layer):
    layer.mlp.up_proj.register_forward_hook(lambda *_: calls.append("hook"))


def with_pre_hook(layer):
    layer.post_attention_layernorm.register_forward_pre_hook(lambda *_: calls.append("pre-hook"))


def with_backward_hook(layer):
    layer.mlp.register_full_backward_hook(lambda *_: calls.append("backward hook"))


def with_replaced_forward(layer):
    own = layer.mlp.down_proj.forward
    layer.mlp.down_proj.forward = lambda x: calls.append("forward") or own(x)


def with_replaced_module(layer):
    class Counted(type(layer.input_layernorm)):
        def forward(self, x):
            calls.append("class")
            return super().forward(x)

    layer.input_layernorm.__class__ = Counted


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


ATTACHMENTS = [with_forward_hook, with_pre_hook, with_backward_hook, with_replaced_forward, with_replaced_module]


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
@pytest.mark.parametrize("attach", ATTACHMENTS)
def test_what_comes_after_fusing_is_called_and_said_once(attach, architecture):
    """In a fused layer (llama) and in an MLP fused by itself (gemma), whose norms nobody replaces."""
    plain, _ = fp8_model(architecture, fuse="off")
    fused, conversion = fp8_model(architecture)
    assert conversion.fusion.layers or conversion.fusion.mlps
    assert plain.model.layers[0].mlp.down_proj.recipe == fused.model.layers[0].mlp.down_proj.recipe
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to say as yet
        losses_and_gradients(fused)
    fused.zero_grad()
    for layer in fused.model.layers:
        attach(layer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        logits, gradients = losses_and_gradients(fused)
        losses_and_gradients(fused)
    assert len(calls) == 4  # two layers, twice
    in_an_mlp = attach not in (with_pre_hook, with_replaced_module, with_backward_hook)
    assert len(said) == (1 if architecture == "llama" or in_an_mlp else 0)
    if said:
        assert "one by one, still in FP8" in str(said[0].message)
    if architecture == "llama":
        expected, plain_gradients = losses_and_gradients(plain)
        assert torch.equal(logits, expected)
        assert len(gradients) == len(plain_gradients)


def test_a_removed_hook_lets_the_layer_run_fused_again():
    model, _ = fp8_model()
    expected = model(input_ids=tokens()).logits
    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: calls.append("hook"))
    with pytest.warns(UserWarning, match=r"mlp\.up_proj has forward hooks"):
        model(input_ids=tokens())
    handle.remove()
    assert torch.equal(model(input_ids=tokens()).logits, expected)
    assert calls == ["hook"]


def test_a_parametrized_weight_is_used_as_it_is_computed():
    model, _ = fp8_model()
    expected, _ = fp8_model(fuse="off")
    for each in (model, expected):
        parametrize.register_parametrization(each.model.layers[0].self_attn.q_proj, "weight", Doubled(), unsafe=True)
    with pytest.warns(UserWarning, match=r"self_attn\.q_proj"):
        logits = model(input_ids=tokens()).logits
    # The other layer stays fused: the same but for rounding.
    plain = expected(input_ids=tokens()).logits
    assert (logits - plain).float().norm() < 0.05 * plain.float().norm()


@pytest.mark.parametrize("attach", [with_forward_hook, with_backward_hook, with_replaced_forward])
def test_what_came_before_fusing_keeps_the_layer_unfused_with_the_reason(attach):
    model = causal_lm("llama")
    attach(model.model.layers[0])
    fusion = fp8(model).fusion
    assert fusion.layers == ["model.layers.1"]
    assert "a fused forward skips" in fusion.left["model.layers.0"]
    calls.clear()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert len(calls) == 1


NORMS = ["input_layernorm", "post_attention_layernorm"]
ON_NORMS = {
    "LNTuning": (LNTuningConfig(target_modules=NORMS, task_type="CAUSAL_LM"), {0, 1}),
    "norms of some layers": (
        LoraConfig(
            target_modules=["q_proj"], layers_to_transform=[0], modules_to_save=NORMS[:1], task_type="CAUSAL_LM"
        ),
        {0, 1},
    ),
    "a norm of one layer": (LNTuningConfig(target_modules=["0.post_attention_layernorm"], task_type="CAUSAL_LM"), {0}),
}


@pytest.mark.parametrize(("adapter", "left"), ON_NORMS.values(), ids=ON_NORMS)
def test_layers_whose_norms_carry_an_adapter_are_not_fused_and_train_it(adapter, left):
    plain, fused = (get_peft_model(causal_lm("llama"), adapter) for _ in range(2))
    fused.load_state_dict(plain.state_dict())
    fusion = fp8(fused).fusion
    assert {int(name.split("layers.")[1].split(".")[0]) for name in fusion.left if name.endswith(("0", "1"))} == left
    assert all("adapter" in fusion.left[name] for name in fusion.left)
    assert len(fusion.layers) == 2 - len(left)
    for model in (plain, fused):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    for (name, p), q in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None and q.grad.any():
            assert error(p.grad.float(), q.grad.float()) < 0.2, name


def test_a_forward_of_liger_on_the_instance_is_not_reported_as_fused():
    model = causal_lm("llama")
    for layer in model.model.layers:
        layer.mlp.forward = layer.mlp.forward
    fusion = fp8(model).fusion
    assert fusion.layers == fusion.mlps == []
    assert all("set on the instance" in reason for reason in fusion.left.values())
    assert len(fusion.left) == 4


def trained_adapters(section, converted_before=False):
    """(losses of two steps, for every step the whole gradients by name, the report); section: None for BF16."""
    model = causal_lm("llama")
    if converted_before:
        ds_fp8.convert(model, parse_fp8({"fp8": section}))
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    engine = models.engine(section, model, stage3_param_persistence_threshold=0)
    assert not any("base_layer" in n and p.requires_grad for n, p in engine.module.named_parameters())
    losses, gradients = [], []
    for step in range(2):
        loss = models.loss_of(engine, torch.roll(tokens(), step) + torch.distributed.get_rank())
        engine.backward(loss)
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        gradients.append({name: safe_get_full_grad(p).clone() for name, p in named})
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, gradients, engine.fp8.report


@on_ranks(2)
def test_fused_lora_under_zero_3_trains_every_adapter_as_peft_does():
    section = {"preset": "precise", "monitor": {"every": 1}, "linear": {"backend": "reference"}}
    (bf16, exact, _), (_, unfused, _) = (trained_adapters(each) for each in (None, {"fuse": "off", **section}))
    losses, gradients, report = trained_adapters(section)
    before, _, of_before = trained_adapters(section, True)
    assert (losses, of_before["not_fused"], report["not_fused"]) == (before, {}, {})
    assert report["fused_layers"] == 2
    assert report["frozen_weights_with_bf16"] == (0, report["fp8_gathered_parameters"])
    assert report["fp8_gathered_parameters"] == 2 * (256 * (2 * 256 + 2 * 128) + 3 * 256 * 384)
    assert losses == pytest.approx(bf16, rel=0.02)
    for found, plain, wanted in zip(gradients, unfused, exact, strict=True):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert wanted[name].any()
            assert error(found[name], wanted[name]) < 1.5 * error(plain[name], wanted[name]) + MORE, name
