"""Fused decoder layers: which models get them, that they compute what the layer did, and what they keep."""

import copy

import deepspeed
import pytest
import torch
from decoder_stacks import hold_in_fp8
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import _cur_sdpa_kernel_backends as enabled
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ds_fp8.layers.decoder.attention import FASTEST_FIRST, fastest_kernel_first
from ds_fp8.layers.decoder.decoder import FusedDecoderLayer, FusedMLP
from ds_fp8.layers.decoder.rotary import restore_inverse_frequencies
from ds_fp8.layers.linear.linear import FP8Linear
from tests.layers.hugging_face import causal_lm, fp8, tokens
from tests.numerics import error
from tests.ranks import on_ranks
from tests.zero import models

FUSED = {
    "qwen2": {},
    "qwen3": {},
    "llama with biases": {"attention_bias": True},
    "qwen2 with GELU": {"hidden_act": "gelu_pytorch_tanh"},
}
FP8_ERROR = 0.13  # Relative error of two layers in FP8 against BF16: the cost of FP8 itself


def model_of(name: str):
    return causal_lm(name.split()[0], **FUSED.get(name, {}))


def losses_and_gradients(model, **inputs):
    model.zero_grad()
    ids = tokens()
    output = model(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    return output.logits.detach().float(), {n: p.grad.float() for n, p in model.named_parameters()}


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def assert_costs_no_more(exact, plain, fused):
    """Fused layers are as near to BF16 as their linears alone."""
    assert list(fused.state_dict()) == list(exact.state_dict())
    (logits, gradients), (of_plain, plain_gradients), (of_fused, fused_gradients) = (
        losses_and_gradients(model) for model in (exact, plain, fused)
    )
    assert error(of_fused, logits) < max(FP8_ERROR, 1.1 * error(of_plain, logits))
    assert fused_gradients.keys() == gradients.keys()
    assert error(flat(fused_gradients), flat(gradients)) < 1.2 * error(flat(plain_gradients), flat(gradients))
    for key, gradient in gradients.items():
        # Of every parameter by itself: one wrong gradient would drown in the others.
        assert error(fused_gradients[key], gradient) < 2 * error(plain_gradients[key], gradient) + 0.03, key


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_model_costs_what_fp8_costs_and_no_more(name):
    exact, plain, fused = (copy.deepcopy(model_of(name)) for _ in range(3))
    fp8(plain, fuse="off")
    conversion = fp8(fused)
    assert conversion.fusion.layers == ["model.layers.0", "model.layers.1"]
    assert not conversion.fusion.left
    assert all(isinstance(layer, FusedDecoderLayer) for layer in fused.model.layers)
    assert_costs_no_more(exact, plain, fused)


@pytest.mark.parametrize(
    ("name", "preset"), [("qwen2", "infir2"), ("qwen3", "hybrid_fast"), ("qwen2", "rowwise"), ("qwen3", "tensorwise")]
)
def test_presets_and_weights_already_in_fp8(name, preset):
    exact, fused = (model_of(name) for _ in range(2))
    conversion = fp8(fused, preset=preset)
    assert len(conversion.fusion.layers) == 2
    cast_on_the_fly = losses_and_gradients(fused)
    hold_in_fp8([module.weight for module in fused.modules() if isinstance(module, FP8Linear)], conversion.recipe)
    logits, gradients = losses_and_gradients(fused)
    assert torch.equal(logits, cast_on_the_fly[0])
    assert all(torch.equal(gradients[key], gradient) for key, gradient in cast_on_the_fly[1].items())
    expected, expected_gradients = losses_and_gradients(exact)
    assert error(logits, expected) < FP8_ERROR
    assert error(flat(gradients), flat(expected_gradients)) < 1.2 * FP8_ERROR


@pytest.mark.parametrize(
    ("architecture", "changes", "mlps", "reason"),
    [
        ("gemma", {}, 2, "computes something else"),
        ("granite", {"residual_multiplier": 0.5}, 2, "computes something else"),
        ("gemma2", {}, 2, "also has post_feedforward_layernorm"),
        ("seed_oss", {"residual_dropout": 0.1}, 0, "computes something else"),
        ("stablelm", {}, 2, "a part of each head"),
        ("phi3", {}, 0, "has no k_proj"),
        ("llama", {"mlp_bias": True}, 0, "has a bias"),
        ("llama", {"intermediate_size": 200}, 0, "cannot be stacked"),
        ("llama", {"hidden_act": "relu"}, 0, "its activation is none of"),
        ("llama", {"hidden_act": "gelu_10"}, 0, "its activation is none of"),  # GELU clamped to 10
    ],
)
def test_any_other_structure_keeps_its_own_forward_and_says_why(architecture, changes, mlps, reason):
    """(What the fused MLPs compute: test_transformers_classes.py.)"""
    model = causal_lm(architecture, **changes)
    fusion = fp8(model).fusion
    assert fusion.layers == []
    assert len(fusion.mlps) == mlps == sum(isinstance(module, FusedMLP) for module in model.modules())
    assert any(reason in why for why in fusion.left.values()), fusion.left


def attention_given(**option):
    def change(layer):
        class More(type(layer.self_attn)):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **option, **kwargs)

        layer.self_attn.__class__ = More

    return change


def other_epsilon(name):
    """Let a norm have another epsilon than it says."""

    def change(layer):
        norm = layer.get_submodule(name)

        class Other(type(norm)):
            def forward(self, x):
                return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

        norm.__class__ = Other

    return change


def freeze_up(layer):
    layer.mlp.up_proj.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("llama", attention_given(softcap=20.0), "its attention is given"),
        ("llama", attention_given(sliding_window=3), "its attention is given"),
        *(("qwen3", other_epsilon(f"{name}_layernorm"), "") for name in ("input", "post_attention")),
        *(("qwen3", other_epsilon(f"self_attn.{name}_norm"), "") for name in "qk"),
        ("llama", freeze_up, "frozen"),
    ],
)
def test_a_layer_that_somebody_changed_is_not_fused(architecture, change, reason):
    model = causal_lm(architecture)
    change(model.model.layers[1])
    fusion = fp8(model).fusion
    assert fusion.layers == ["model.layers.0"]
    assert reason in fusion.left["model.layers.1"]


def test_an_mlp_whose_output_its_parent_changes_in_place_is_not_fused():
    """Autograd forbids it on the output of a ZeRO-3 leaf module."""
    model = causal_lm("llama4_text", num_local_experts=2, intermediate_size_mlp=256)
    fusion = fp8(model).fusion
    experts = [name for name, module in model.named_modules() if name.endswith(".shared_expert")]
    assert experts
    assert all("in place" in fusion.left[name] for name in experts)
    assert not any(isinstance(module, FusedMLP) for module in model.modules())


@pytest.mark.parametrize("save", ["fp8", "bf16"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma"])
def test_recomputing_the_mlp_changes_no_bit(architecture, save):
    """In a fused layer (qwen2) and in an MLP fused by itself (gemma)."""
    results = []
    for recompute in ("none", "mlp"):
        model = causal_lm(architecture)
        fp8(model, activations={"save": save, "recompute": recompute})
        results.append(losses_and_gradients(model))
    (logits, gradients), (again, again_gradients) = results
    assert torch.equal(logits, again)
    for key, gradient in gradients.items():
        same = architecture == "qwen2" or "gate_proj" in key or save == "bf16"
        assert torch.equal(again_gradients[key], gradient) if same else error(again_gradients[key], gradient) < 0.1


@pytest.mark.parametrize(("architecture", "reentrant"), [("qwen2", False), ("qwen3", True)])
def test_recomputing_whole_layers_changes_no_bit(architecture, reentrant):
    model = causal_lm(architecture)
    fp8(model)
    logits, gradients = losses_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, again_gradients = losses_and_gradients(model)
    assert torch.equal(again, logits)
    assert all(torch.equal(again_gradients[key], gradient) for key, gradient in gradients.items())


def kept_bytes(model) -> int:
    """Bytes of the distinct storages that autograd keeps of one layer for backward, parameters apart."""
    storages = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    layer = model.model.layers[0]
    x = torch.randn(1, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    rotation = model.model.rotary_emb(x, torch.arange(256)[None])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, position_embeddings=rotation, attention_mask=None)
    return sum(storage.nbytes() for storage in storages.values())


def test_a_fused_layer_keeps_less_with_every_step():
    tokens_, hidden, intermediate, qkv = 256, 256, 1024, 512
    sizes = {"intermediate_size": intermediate, "_attn_implementation": "sdpa"}
    kept = {}
    for name, section in {
        "bf16": None,
        "linears": {"fuse": "off"},
        "fused, bf16": {"activations": {"save": "bf16"}},
        "fused": {},
        "recompute": {"activations": {"recompute": "mlp"}},
    }.items():
        model = causal_lm("qwen2", **sizes)
        if section is not None:
            fp8(model, **section)
        kept[name] = kept_bytes(model)
    assert kept["recompute"] < kept["fused"] < kept["fused, bf16"] < kept["linears"]
    assert kept["fused"] < 0.4 * kept["bf16"]
    gate_up = tokens_ * 2 * intermediate
    assert kept["fused"] - kept["recompute"] == gate_up * (1 + 4 / 128)  # one byte an element, a scale per 128
    assert kept["fused, bf16"] - kept["recompute"] == 2 * gate_up
    # In BF16 x, the output of attention, their sum behind o_proj, q, k, v, cos and sin; in FP32 a number a token of
    # each norm and of each head's softmax.
    assert kept["recompute"] == tokens_ * (2 * (3 * hidden + qkv + 2 * 64) + 4 * (2 + 4))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_generation_with_a_cache_agrees_with_the_whole_sequence(architecture):
    model = causal_lm(architecture).eval()
    fp8(model)
    ids = tokens(1, 12)
    with torch.no_grad():
        whole = model(input_ids=ids).logits[:, -1].float()
        cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        step = model(input_ids=ids[:, -1:], past_key_values=cache).logits[:, -1].float()
        generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert error(step, whole) < 0.02
    assert generated.shape == (1, 15)


def test_attention_weights_are_given_when_asked_for():
    model = causal_lm("qwen2", attn_implementation="eager").eval()
    fp8(model)
    output = model(input_ids=tokens(), output_attentions=True, output_hidden_states=True)
    assert [weights.shape for weights in output.attentions] == [(2, 4, 16, 16)] * 2
    assert len(output.hidden_states) == 3


@pytest.mark.parametrize("length", [1, 5])
def test_few_tokens_and_a_padded_batch(length):
    exact, fused = causal_lm("qwen2").eval(), causal_lm("qwen2").eval()
    fp8(fused)
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    if length > 1:
        mask[0, :2] = 0
    kept = mask.bool()
    logits, expected = (model(input_ids=ids, attention_mask=mask).logits[kept].float() for model in (fused, exact))
    assert error(logits, expected) < FP8_ERROR
    assert fused(input_ids=ids[:0]).logits.shape == (0, length, 97)


def test_frozen_weights_get_no_gradient_and_change_no_other():
    model = causal_lm("qwen2")
    whole = copy.deepcopy(model)
    fp8(whole)
    _, gradients = losses_and_gradients(whole)
    first, second = model.model.layers
    attention = first.self_attn
    frozen = [attention.q_proj, attention.k_proj, attention.v_proj, second.mlp.down_proj, first.input_layernorm]
    for module in frozen:
        module.requires_grad_(False)
    fp8(model)
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad.float(), gradients[name]), name
        else:
            assert parameter.grad is None


@pytest.mark.parametrize(
    "chosen",
    [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], list(FASTEST_FIRST)],
    ids=lambda chosen: "+".join(kernel.name for kernel in chosen),
)
def test_kernels_that_the_user_disabled_stay_disabled(chosen):
    with sdpa_kernel(chosen):
        with fastest_kernel_first():
            assert set(enabled()) == set(chosen)
        assert set(enabled()) == set(chosen)


@pytest.mark.parametrize(("name", "fuse", "layers"), [("olmo2", "auto", 0), ("llama", "auto", 2), ("llama", "off", 0)])
def test_layers_that_are_not_fused_take_the_fastest_kernel_too(name, fuse, layers):
    seen = []

    def watched(module, *args, **kwargs):
        seen.append(enabled(with_priority=True))
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("watched", watched)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model = causal_lm(name, attn_implementation="watched")
    plain = enabled(with_priority=True)
    assert len(fp8(model, fuse=fuse).fusion.layers) == layers
    if layers:
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)  # the layer calls its modules from now on
    model = copy.deepcopy(model)
    model(input_ids=tokens())
    of_first = [kernel for kernel in FASTEST_FIRST if kernel in plain]
    assert seen[0] == (plain if fuse == "off" else of_first)
    assert enabled(with_priority=True) == plain
    fp8(model, fuse="off")
    assert not any("Fast" in type(module).__name__ for module in model.modules())


# ---------------------------------------------------------------- inverse frequencies that were rounded to BF16


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
