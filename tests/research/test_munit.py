"""Munit scaling and Smooth-SwiGLU: unit variance, the formula, learning rates by width, saving and loading, no amax."""

import copy
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from decoder_stacks import hold_in_fp8
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.config.linear import LinearConfig
from ds_fp8.engine.plans import convert, recipe_from_config
from ds_fp8.export.plan import make_plan
from ds_fp8.layers.decoder.decoder import FusedMLP
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.research import munit
from ds_fp8.research.recipe import ResearchFP8Linear, channel_factors
from tests.layers.hugging_face import causal_lm, tokens
from tests.layers.linears import results_of
from tests.numerics import error

munit.register()
WIDE = {"hidden_size": 256, "intermediate_size": 768}
# Operators by which an amax can be found; |x| of single elements, in the search for infinities, is none
REDUCES_TO_THE_LARGEST = re.compile(r"aten::(_?aminmax|amax|max|maximum|.*norm|topk|sort)")


@pytest.mark.parametrize("model_type", munit.MODEL_TYPES)
def test_everything_begins_with_variance_1(model_type):
    model = causal_lm(model_type, torch.float32, num_hidden_layers=3, **WIDE)
    spread = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            assert module.weight[1:].std().item() == pytest.approx(1, abs=0.02), name  # row 0 is the padding's
        if isinstance(module, nn.Linear) or name.count(".") == 2:
            module.register_forward_hook(lambda module, x, y, name=name: spread.update({name: y.std().item()}))
    model(tokens(4, 64))
    for name, value in spread.items():
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")) or name.count(".") == 2:
            assert 0.8 < value < 1.25, (name, value)
        elif name.endswith(("o_proj", "down_proj")):
            assert 0.1 < value < 1.0, (name, value)  # means over the context, products of a SwiGLU: less
    assert spread["lm_head"] == pytest.approx(1 / 16, rel=0.1)


@pytest.mark.parametrize("model_type", munit.MODEL_TYPES)
def test_the_layer_is_the_formula(model_type):
    """Beside the same layer put together from its parts, with the weights divided beforehand."""
    model = causal_lm(model_type, torch.float32, munit_tau=0.3)
    plain = causal_lm(model_type.removeprefix("munit_"), torch.float32)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.copy_(ours)
        for layer in plain.model.layers:
            for linear in layer.modules():
                if isinstance(linear, nn.Linear):
                    linear.weight /= math.sqrt(linear.in_features)
                    if linear.bias is not None:
                        linear.bias /= math.sqrt(linear.in_features)
        ids = tokens(2, 8)
        h = plain.model.embed_tokens(ids)
        rotation = plain.model.rotary_emb(h, torch.arange(8)[None])
        mask = torch.full((8, 8), -torch.inf).triu(1)[None, None]
        for layer in plain.model.layers:
            branch = layer.self_attn(hidden_states=h, position_embeddings=rotation, attention_mask=mask)[0]
            h = math.sqrt(0.7) * h + math.sqrt(0.3) * layer.input_layernorm(branch)
            h = math.sqrt(0.7) * h + math.sqrt(0.3) * layer.post_attention_layernorm(layer.mlp(h))
        logits = plain.lm_head(plain.model.norm(h)) / model.config.hidden_size
        assert torch.allclose(model(ids).logits, logits, atol=1e-5)


def test_the_rate_of_the_layers_matrices_follows_their_fan_in():
    model = causal_lm("munit_qwen2", munit_base_width=64, **WIDE)
    groups = munit.parameter_groups(model, 0.5)
    rate = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rate) == len(list(model.parameters()))
    layer = model.model.layers[0]
    assert rate[id(layer.self_attn.q_proj.weight)] == 0.5 * math.sqrt(64 / 256)
    assert rate[id(layer.mlp.down_proj.weight)] == 0.5 * math.sqrt(64 / 768)
    for other in (layer.self_attn.q_proj.bias, layer.input_layernorm.weight, model.lm_head.weight):
        assert rate[id(other)] == 0.5


def test_a_saved_model_loads_again_and_says_what_it_is(tmp_path):
    model = causal_lm("munit_llama", munit_tau=0.25)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["munit_tau"]) == ("munit_llama", 0.25)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model.eval()(tokens()).logits)
    with pytest.raises(UserError, match="is not a llama"):
        make_plan(loaded, {}, LinearConfig(), "bf16")


@pytest.mark.parametrize("wrong", [{"tie_word_embeddings": True}, {"munit_tau": 0.0}, {"munit_tau": 1.0}])
def test_what_cannot_be(wrong):
    with pytest.raises(ValueError, match=r"munit"):
        AutoConfig.for_model("munit_llama", **wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels find amax within the cast")
@pytest.mark.parametrize(
    ("architecture", "preset"),
    [("munit_llama", None), ("munit_llama", "munit"), ("munit_llama", "tensorwise"), ("qwen2", "munit")],
)
def test_a_profile_shows_an_amax_for_every_cast_but_static_ones(architecture, preset):
    """Every operator of a forward and a backward pass: six casts for each of 14 linears, none that looks for an amax.

    The same profile of scales taken from the tensors shows all six: the search is able to find them. Layers of qwen2
    are fused.
    """
    model = causal_lm(architecture, **WIDE)
    if preset:
        fusion = ds_fp8.convert(model, FP8Config.from_preset(preset, monitor={"every": 0})).fusion
        assert bool(fusion.layers) == (architecture == "qwen2")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(tokens(4, 64), labels=tokens(4, 64)).loss.backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    largest = {key: count for key, count in counts.items() if REDUCES_TO_THE_LARGEST.fullmatch(key)}
    assert largest == ({"aten::amax": 6 * 14} if preset == "tensorwise" else {})
    assert ("_FP8LinearFunctionBackward" in counts) == bool(preset)


def test_the_preset_multiplies_all_layers_near_bf16():
    """A whole step: forward, backward, and the gradients beside those of BF16."""
    gradients, losses = {}, {}
    for enabled in (False, True):
        model = causal_lm("munit_llama", **WIDE)
        if enabled:
            conversion = ds_fp8.convert(model, FP8Config.from_preset("munit", monitor={"every": 0}))
            assert len(conversion.converted) == 14
            assert not conversion.fusion.classes
        loss = model(tokens(4, 64), labels=tokens(4, 64)).loss
        loss.backward()
        losses[enabled] = loss.item()
        gradients[enabled] = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    assert losses[True] == pytest.approx(losses[False], rel=0.005)
    for name, exact in gradients[False].items():
        similarity = torch.cosine_similarity(gradients[True][name].flatten(), exact.flatten(), 0)
        assert similarity > 0.98, (name, similarity)


# ---------------------------------------------------------------- Smooth-SwiGLU


CHANNEL = 3


def test_factors_are_powers_of_two_of_outliers_only():
    product = torch.ones(4, 8)
    product[2] = torch.tensor([1.0, 1.0, 0.25, 1.0, -8.0, 100.0, torch.inf, torch.nan])
    product[:, 2] = 0
    assert channel_factors(product[:, :6]).tolist() == [1, 1, 1, 1, 8, 64]
    assert channel_factors(product[:, :7]).tolist() == [1, 1, 1, 1, 8, 64, 1], "Inf is left to be seen by the cast"
    assert channel_factors(product).tolist() == [1] * 8, "with NaN there is no typical channel"
    assert channel_factors(torch.empty(0, 3)).tolist() == [1, 1, 1]
    assert channel_factors(torch.zeros(2, 3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("save", ["fp8", "bf16"])
def test_where_casts_are_exact_nothing_changes(save):
    """Powers of two within E4M3's range: outputs and gradients are those of nn.Linear, bit for bit."""
    generator = torch.Generator().manual_seed(0)

    def powers(*shape):
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return sign * 2.0 ** torch.randint(-2, 2, shape, generator=generator)

    x, dy, linear = powers(16, 32), powers(16, 8), nn.Linear(32, 8, bias=False)
    x[:, 5] *= 64
    with torch.no_grad():
        linear.weight.copy_(powers(8, 32))
        linear.weight[:, 5] /= 64
    smooth = copy.deepcopy(linear)
    casts = {"backend": "reference", "smooth_swiglu": True}
    fp8 = FP8Config.from_preset(linear=casts, activations={"save": save}, monitor={"every": 0})
    smooth.__class__, smooth.recipe = ResearchFP8Linear, replace(recipe_from_config(fp8), smooth=True)
    for result, expected in zip(results_of(smooth, x, dy), results_of(linear, x, dy), strict=True):
        assert torch.equal(result, expected)


def output_and_gradients(mlp, x, dy):
    leaf = x.clone().requires_grad_()
    mlp.zero_grad()
    y = mlp(leaf)
    y.backward(dy)
    parts = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return y.detach().float(), leaf.grad.float(), *(part.weight.grad.float() for part in parts)


@pytest.mark.parametrize("held", [False, True], ids=["cast when used", "gathered in FP8"])
@pytest.mark.parametrize(
    "section", [{}, {"fuse": "off"}, {"activations": {"save": "bf16"}}, {"activations": {"recompute": "mlp"}}]
)
def test_an_outlier_channel_no_longer_drowns_the_others(section, held):
    torch.manual_seed(0)
    direction = torch.randn(256).sign()
    x = (torch.randn(64, 256) + 8 * direction * (torch.rand(64, 1) < 0.1)).bfloat16()
    dy = torch.randn(64, 256).bfloat16()
    results = {}
    for name in ("plain", "smooth", "bf16"):
        model = causal_lm("gemma")  # its layers are not fused, its MLPs are
        mlp = model.model.layers[0].mlp
        with torch.no_grad():
            mlp.gate_proj.weight[CHANNEL] = mlp.up_proj.weight[CHANNEL] = direction * 0.5
            mlp.down_proj.weight[:, CHANNEL] *= 2.0**-12
        if name != "bf16":
            linear = {"backend": "reference", "smooth_swiglu": name == "smooth"}
            config = parse_fp8({"fp8": {"preset": "tensorwise", "linear": linear, "monitor": {"every": 0}, **section}})
            conversion = convert(model, config)
            assert isinstance(mlp, FusedMLP) == ("fuse" not in section and name == "plain")
            smoothed = [getattr(m.recipe, "smooth", False) for m in model.modules() if isinstance(m, FP8Linear)]
            assert sum(smoothed) == (2 if name == "smooth" else 0)
            if held:
                hold_in_fp8([part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)], conversion.recipe)
        results[name] = output_and_gradients(mlp, x, dy)
    others = torch.arange(384) != CHANNEL
    for part, (plain, smooth, exact) in enumerate(zip(*results.values(), strict=True)):
        if part == 4:  # the gradient of down_proj: the outlier's column is as large as its channel
            plain, smooth, exact = (gradient[:, others] for gradient in (plain, smooth, exact))
        assert error(smooth, exact) < (0.06 if part == 0 else 0.12)
        if part in (0, 4):  # what the product's cast goes into
            assert error(smooth, exact) < error(plain, exact) / 2.5
