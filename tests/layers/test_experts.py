"""Experts stored as 3-D parameters: which can be gathered in FP8, and that they compute with the decoded weights."""

import copy
import gc
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch.utils.checkpoint import checkpoint

from ds_fp8.casts import quantize
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import PRESETS
from ds_fp8.engine.plans import convert, recipe_from_config
from ds_fp8.layers.convert import layer_of, restore
from ds_fp8.layers.decoder.attention import FastAttention
from ds_fp8.layers.decoder.decoder import FusedAttentionHalf
from ds_fp8.layers.experts.experts import FP8Experts, convert_experts, dequantize_rows, products_of
from ds_fp8.layers.experts.selection import multiplies_experts
from ds_fp8.layers.linear.linear import FP8Linear, Swapped
from ds_fp8.layers.linear.weights import UNSHARDED, placeholder
from tests.layers.hugging_face import fp8, tokens
from tests.layers.moe import EXPERTS, mixture
from tests.layers.test_decoder import FP8_ERROR, assert_costs_no_more
from tests.numerics import error

TOKENS = 24


def config(**sections):
    return FP8Config(linear={**sections.pop("linear", {}), "backend": "reference"}, **sections)


def gathered_in_fp8(module):
    """Put the weights of a converted module in the state that ZeRO-3 has them in while it computes."""
    for weight, recipe in module.recipes_of_weights():
        spec = recipe.weight
        rows = weight.detach().float().flatten(0, 1)
        setattr(weight, UNSHARDED, quantize(rows, spec.format, spec.granularity, spec.scale))
        weight.data = placeholder(weight.shape, weight.dtype, weight.device)


def pair(implementation):
    """(experts whose weights are gathered in FP8, the same with the decoded weights as parameters)."""
    model = mixture("qwen3_moe")
    model.config._experts_implementation = implementation
    twin = copy.deepcopy(model).model.layers[0].mlp.experts
    convert(model, config())
    experts = model.model.layers[0].mlp.experts
    gathered_in_fp8(experts)
    with torch.no_grad():
        for weight, own in zip(experts.parameters(), twin.parameters(), strict=True):
            own.copy_(dequantize_rows(weight).view(own.shape))
    return experts, twin


def inputs(reached=range(EXPERTS), count=TOKENS):
    """A batch of tokens whose two experts each are among `reached`."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 128, generator=generator).bfloat16().requires_grad_()
    reached = torch.tensor(list(reached))
    index = torch.stack([reached[torch.randperm(len(reached), generator=generator)[:2]] for _ in range(count)])
    share = torch.rand(count, 2, generator=generator).bfloat16().requires_grad_()
    return x, index, share


def results(experts, batch, call=None):
    """Output, and the gradients of input, shares and weights."""
    x, index, share = (part.detach().clone().requires_grad_(part.requires_grad) for part in batch)
    y = (call or (lambda *args: experts(*args)))(x, index, share)
    y.float().square().sum().backward()
    gradients = [x.grad, share.grad, *(weight.grad for weight in experts.parameters())]
    for weight in experts.parameters():
        weight.grad = None
    return [y.detach(), *gradients]


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("reached", [range(EXPERTS), (1, 3)])
def test_they_compute_with_the_decoded_weights(implementation, reached):
    experts, twin = pair(implementation)
    ours = results(experts, inputs(reached))
    assert all(map(torch.equal, ours, results(twin, inputs(reached))))
    for gradient in ours[-2:]:
        assert [bool(part.any()) for part in gradient] == [expert in reached for expert in range(EXPERTS)]
    assert all(weight.isnan().all() for weight in experts.parameters())


@pytest.mark.parametrize(("first", "rows"), [(0, None), (128, 256), (100, 200), (1000, 24)])
def test_weights_are_decoded_in_pieces(monkeypatch, first, rows):
    experts, twin = pair("grouped_mm")
    monkeypatch.setattr("ds_fp8.layers.experts.experts.CHUNK_ELEMENTS", 300 * 128)
    expected = twin.gate_up_proj.detach().flatten(0, 1)
    stop = len(expected) if rows is None else first + rows
    assert torch.equal(dequantize_rows(experts.gate_up_proj, first, rows), expected[first:stop])


def test_a_batch_without_tokens_has_zero_gradients():
    experts, _ = pair("grouped_mm")
    empty = torch.empty(0, 2, dtype=torch.int64)
    x = torch.empty(0, 128, dtype=torch.bfloat16, requires_grad=True)
    y = experts(x, empty, torch.empty(0, 2, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 128)
    for weight in experts.parameters():
        assert not weight.grad.any()
        assert weight.grad.shape == weight.shape


def adapted_pair(implementation, products="bf16", targets=("gate_up_proj", "down_proj"), **linear):
    """As `pair`, a layer's experts below PEFT's wrappers, with two adapters; PEFT's own as the twin's."""
    torch.manual_seed(0)
    model = mixture("qwen3_moe")
    model.config._experts_implementation = implementation
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=list(targets), init_lora_weights=False)
    model = get_peft_model(model, lora, "first")
    model.add_adapter("second", LoraConfig(**{**lora.to_dict(), "r": 2, "lora_alpha": 3, "use_rslora": True}))
    model = model.bfloat16()
    twin = copy.deepcopy(model)
    convert(model, config(linear={"expert_products": products, **linear}))
    experts, theirs = (one.base_model.model.model.layers[0].mlp.experts for one in (model, twin))
    base = experts.get_base_layer()
    gathered_in_fp8(base)
    with torch.no_grad():
        for name in base.expert_recipes:
            own = getattr(theirs.get_base_layer(), name)
            own.copy_(dequantize_rows(getattr(base, name)).view(own.shape))
    return (model, experts), (twin, theirs)


CHOSEN = {
    "one": lambda model: model.set_adapter("first"),
    "the other": lambda model: model.set_adapter("second"),
    "both": lambda model: model.base_model.set_adapter(["first", "second"]),
    "none": lambda model: model.disable_adapter_layers(),
}


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_adapters_of_decoded_experts_are_pefts(implementation, chosen):
    (model, ours), (twin, theirs) = adapted_pair(implementation)
    for one in (model, twin):
        CHOSEN[chosen](one)
    found, expected = results(ours, inputs((1, 3))), results(theirs, inputs((1, 3)))
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine is None) is (wanted is None)
        # The same sum, and gradients, with one adapter, whose scale is a power of two.
        assert mine is None or error(mine, wanted) <= (0 if chosen in ("one", "none") else 0.01)


@pytest.mark.parametrize("targets", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)])
@pytest.mark.parametrize("chosen", CHOSEN)
def test_adapters_of_multiplied_experts_are_pefts(chosen, targets):
    (model, ours), (twin, theirs) = adapted_pair("grouped_mm", "fp8", targets)
    for one in (model, twin):
        CHOSEN[chosen](one)
    found, expected = results(ours, inputs()), results(theirs, inputs())
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine is None) is (wanted is None)
        assert mine is None or 0.001 < error(mine, wanted) < FP8_ERROR


@pytest.mark.parametrize("products", ["fp8", "bf16"])
def test_an_adapter_beside_a_weight_that_stays_in_bf16(products):
    (_, ours), (_, theirs) = adapted_pair("grouped_mm", products, overrides={"*.experts.down_proj": "bf16"})
    assert set(ours.get_base_layer().expert_recipes) == {"gate_up_proj"}
    for _ in range(2):
        for mine, wanted in zip(results(ours, inputs()), results(theirs, inputs()), strict=True):
            assert (mine is None) is (wanted is None)
            assert mine is None or torch.equal(mine, wanted)


def test_experts_with_adapters_are_copied_and_restored():
    (model, ours), _ = adapted_pair("grouped_mm")
    expected = results(ours, inputs())
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again).__name__ == "ParamWrapper"
        for weight, own in zip(again.get_base_layer().parameters(), ours.get_base_layer().parameters(), strict=True):
            setattr(weight, UNSHARDED, getattr(own, UNSHARDED))
        for found, wanted in zip(results(again, inputs()), expected, strict=True):
            assert found is wanted is None or torch.equal(found, wanted)
    restore(model)
    assert type(ours) is type(ours.base_layer) is ParamWrapper
    assert not isinstance(ours.get_base_layer(), FP8Experts)


class LeftToOthers(torch.nn.Module):
    """Experts of which none is called: the tokens' own ones are on another rank."""

    has_gate = is_concatenated = True
    has_bias = is_transposed = False

    def __init__(self):
        super().__init__()
        self.up_experts = torch.nn.Parameter(torch.ones(2, 128, 128, dtype=torch.bfloat16))

    def forward(self, hidden_states):
        return torch.zeros_like(hidden_states)


def test_experts_that_are_not_called_have_zero_gradients():
    model = torch.nn.ModuleDict({"experts": LeftToOthers()})
    convert_experts(model, {}, lambda name: recipe_from_config(config()))
    x = torch.ones(3, 128, dtype=torch.bfloat16, requires_grad=True)
    model["experts"](x).sum().backward()
    assert not x.grad.any()
    gradient = model["experts"].up_experts.grad
    assert gradient.shape == (2, 128, 128)
    assert not gradient.any()


def test_recomputed_or_frozen_experts_change_no_bit():
    experts, twin = pair("grouped_mm")
    expected = results(experts, inputs())
    for reentrant in (True, False):

        def recomputed(*args, reentrant=reentrant):
            return checkpoint(experts, *args, use_reentrant=reentrant)

        assert all(map(torch.equal, results(experts, inputs(), recomputed), expected))
    for module in (experts, twin):
        module.requires_grad_(False)
    assert all(map(torch.equal, results(experts, inputs())[:3], results(twin, inputs())[:3]))
    assert all(weight.grad is None for weight in experts.parameters())


def held(shape, before=()):
    """Tensors of as many elements as `shape` that lie in memory, but for those that lay there before."""
    gc.collect()
    known = set(map(id, before))
    numel = torch.Size(shape).numel()
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype is torch.bfloat16]
    return [x for x in found if x.untyped_storage().nbytes() == 2 * numel and id(x) not in known]


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_no_decoded_weight_is_kept_for_backward(implementation):
    experts, twin = pair(implementation)
    del twin
    saved, before = [], held(experts.gate_up_proj.shape)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        y = experts(*inputs())
    assert saved, "the hooks around the experts are not called"
    assert max(saved) < 2 * experts.down_proj.numel()
    assert not held(experts.gate_up_proj.shape, before)
    y.sum().backward()
    assert experts.gate_up_proj.grad.any()


def test_hooks_around_recomputed_experts_save_nothing_of_them():
    """Gradient checkpointing keeps its inputs alone, though the experts save tensors by hooks of their own."""
    experts, _ = pair("grouped_mm")
    x, index, share = inputs(count=999)
    before = held((2 * 999, 256))
    y = checkpoint(experts, x, index, share, use_reentrant=False)
    assert not held((2 * 999, 256), before), "what the experts save for backward is kept"
    y.sum().backward()
    assert x.grad.any()


def test_weights_that_are_not_gathered_in_fp8_are_read_as_they_are():
    model = mixture("mixtral")
    expected = copy.deepcopy(model)(input_ids=tokens(), labels=tokens()).loss
    conversion = convert(model, config(fuse="off", linear={"skip": ["self_attn", "lm_head"]}))
    assert len(conversion.experts.converted) == 4
    assert not conversion.converted
    assert torch.equal(model(input_ids=tokens(), labels=tokens()).loss, expected)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("gpt_oss", {}, "stored transposed"),
        ("mixtral", {"intermediate_size": 192}, "matrices of 128 x 192 do not divide into 128x128 blocks"),
        ("llama4_text", {}, "Llama4TextExperts does not follow transformers' ExpertsInterface"),
    ],
)
def test_what_stays_in_bf16_has_a_reason(architecture, changes, reason):
    model = mixture(architecture, **changes)
    conversion = convert(model, config())
    assert reason in conversion.experts.left.values()
    left = [name for name, why in conversion.experts.left.items() if why == reason]
    assert left[0].startswith("model.layers.0.")
    assert "experts" in left[0]


def test_skip_and_overrides_mean_experts_by_their_names():
    linear = {"skip": ["layers.0.mlp.experts", "lm_head"], "overrides": {"*.experts.down_proj": "bf16"}}
    conversion = convert(model := mixture("qwen3_moe"), config(linear=linear))
    assert conversion.experts.converted == ["model.layers.1.mlp.experts.gate_up_proj"]
    assert conversion.experts.left == {
        "model.layers.0.mlp.experts.gate_up_proj": 'named by fp8.linear.skip "layers.0.mlp.experts"',
        "model.layers.0.mlp.experts.down_proj": 'named by fp8.linear.skip "layers.0.mlp.experts"',
        "model.layers.1.mlp.experts.down_proj": 'named by fp8.linear.overrides "*.experts.down_proj"',
    }
    assert not isinstance(model.model.layers[0].mlp.experts, FP8Experts)
    assert conversion.overrides["*.experts.down_proj"] == ["model.layers.1.mlp.experts.down_proj"]
    assert not conversion.unmatched
    linear = {"overrides": {"*.experts.down_proj": {"weight": {"format": "e5m2", "granularity": "tensor"}}}}
    convert(model := mixture("qwen3_moe"), config(linear=linear))
    recipes = model.model.layers[1].mlp.experts.expert_recipes
    assert str(recipes["down_proj"].weight) == "e5m2 128x128 pow2"
    assert str(recipes["gate_up_proj"].weight) == "e4m3 128x128 pow2"
    conversion = convert(model := mixture("qwen3_moe"), config(param_gather={"format": "bf16"}))
    assert set(conversion.experts.left.values()) == {'fp8.param_gather.format is "bf16"'}
    assert not any(isinstance(module, FP8Experts) for module in model.modules())


def test_they_go_back_are_converted_again_and_can_be_copied_and_pickled():
    model = mixture("olmoe")
    names, own = list(model.state_dict()), type(model.model.layers[0].mlp.experts)
    for products in ("fp8", "bf16"):
        assert len(convert(model, config(linear={"expert_products": products})).experts.converted) == 4
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts, own)
        assert isinstance(experts, FP8Experts)
        assert hasattr(experts, "expert_products") == (products == "fp8")
    expected = model(input_ids=tokens(), labels=tokens()).loss
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin.model.layers[0].mlp.experts, FP8Experts)
        assert torch.equal(twin(input_ids=tokens(), labels=tokens()).loss, expected)
    assert list(model.state_dict()) == names
    assert len(restore(experts)) == 2
    assert type(experts) is own
    assert "expert_recipes" not in vars(experts)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_the_attention_half_of_their_layers_is_fused(architecture):
    # Every token to every expert: rounding sends none elsewhere.
    exact, plain, fused = (mixture(architecture, num_experts_per_tok=EXPERTS) for _ in range(3))
    fp8(plain, fuse="off")
    fusion = fp8(fused).fusion
    assert fusion.attention_halves == ["model.layers.0", "model.layers.1"]
    assert not fusion.layers
    assert not fusion.left
    assert all(isinstance(layer, FusedAttentionHalf) for layer in fused.model.layers)
    assert_costs_no_more(exact, plain, fused)


def test_a_shared_expert_is_fused_inside_a_layer_whose_attention_half_is():
    model = mixture("qwen2_moe")
    fusion = fp8(model).fusion
    assert fusion.attention_halves == ["model.layers.0", "model.layers.1"]
    assert fusion.mlps == ["model.layers.0.mlp.shared_expert", "model.layers.1.mlp.shared_expert"]
    linear = model.model.layers[0].mlp.shared_expert.gate_proj
    assert layer_of(model, linear.recipe.name) == "model.layers.0.mlp.shared_expert"
    assert layer_of(model, "model.layers.0.self_attn.qkv_proj") == "model.layers.0"
    assert layer_of(model, "model.layers.0.mlp.experts") == "model.layers.0.mlp.experts"
    restore(model.model.layers[0])
    ids = tokens()
    assert model(input_ids=ids, labels=ids).loss.isfinite()
    swapped = [part for part in model.model.layers[0].modules() if isinstance(part, (Swapped, FP8Linear))]
    assert all(isinstance(part, FastAttention) for part in swapped)  # kernels of attention in BF16


def test_hooks_of_the_called_half_run_and_those_of_the_fused_one_unfuse_it():
    model = mixture("qwen3_moe")
    fp8(model)
    layer, seen = model.model.layers[0], []
    layer.mlp.gate.register_forward_hook(lambda *_: seen.append("gate"))
    layer.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    model(input_ids=tokens())
    assert seen == ["gate", "mlp"]
    assert layer.fused_parts.change() is None
    layer.self_attn.register_forward_hook(lambda *_: seen.append("attention"))
    with pytest.warns(UserWarning, match="self_attn has forward hooks"):
        model(input_ids=tokens())
    assert seen[2:] == ["attention", "gate", "mlp"]


def test_router_logits_and_the_auxiliary_loss_are_as_before():
    exact, model = (mixture("qwen3_moe", router_aux_loss_coef=0.5) for _ in range(2))
    fp8(model)
    expected, output = (m(input_ids=tokens(), labels=tokens(), output_router_logits=True) for m in (exact, model))
    assert len(output.router_logits) == 2
    assert output.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=0.05)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=0.05)


@pytest.mark.parametrize(
    ("architecture", "preset"),
    [("qwen3_moe", "infir2"), ("mixtral", "hybrid_fast"), ("olmoe", "precise"), ("deepseek_v3", "infir2")],
)
@pytest.mark.parametrize("reached", [range(EXPERTS), (1, 3)])
def test_products_in_fp8_are_those_of_decoded_weights_but_for_the_casts(architecture, preset, reached):
    model = mixture(architecture)
    both = []
    for each, products in ((model, "fp8"), (copy.deepcopy(model), "bf16")):
        section = {"backend": "reference", "expert_products": products}
        convert(each, FP8Config.from_preset(preset=preset, linear=section))
        both.append(each.model.layers[-1].mlp.experts)
        gathered_in_fp8(both[-1])
    ours, twin = (results(experts, inputs(reached)) for experts in both)
    for found, expected in zip(ours, twin, strict=True):
        assert 0.001 < error(found, expected) < 3 * FP8_ERROR
    for gradient in ours[-2:]:
        assert [bool(part.any()) for part in gradient] == [expert in reached for expert in range(EXPERTS)]


@pytest.mark.parametrize("preset", PRESETS)
def test_experts_of_presets_in_blocks_are_multiplied_in_fp8(preset):
    model = mixture("qwen3_moe")
    section = {"backend": "reference", "expert_products": "fp8"}
    conversion = convert(model, FP8Config.from_preset(preset, linear=section))
    assert bool(conversion.experts.multiplied) is (preset in ("infir2", "hybrid_fast", "precise", "compact"))
    for layer in model.model.layers:
        # Their codes are gathered without outlier blocks.
        assert all(not recipe.outlier_channels for recipe in getattr(layer.mlp.experts, "expert_recipes", {}).values())


def experts_of(architecture, **changes):
    return mixture(architecture, **changes).model.layers[0].mlp.experts


def known(**linear):
    recipe = recipe_from_config(config(linear=linear))
    return {"gate_up_proj": recipe, "down_proj": recipe}


@pytest.mark.parametrize(("word", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_the_activation_is_found_out(word, name):
    assert products_of(experts_of("mixtral", hidden_act=word), known()).activation == name


def test_experts_that_are_not_known_say_why():
    assert "has_bias" in products_of(experts_of("gpt_oss"), known())
    assert "act(gate)" in products_of(experts_of("mixtral", hidden_act="relu"), known())
    assert "128x128" in products_of(experts_of("mixtral"), known(weight={"granularity": "tensor"}))
    assert "has_gate = not set" in products_of(torch.nn.Linear(2, 2), known())
    module = experts_of("mixtral")
    module._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0].clamp(max=2) * gate_up.chunk(2, -1)[1]
    assert "act(gate)" in products_of(module, known())
    module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.detach().transpose(1, 2))
    assert "not [E, 2F, H]" in products_of(module, known())


def test_products_that_experts_cannot_have_are_said():
    model = mixture("qwen3_moe")
    section = {"backend": "reference", "expert_products": "fp8"}
    conversion = convert(model, FP8Config.from_preset(preset="rowwise", linear=section))
    assert conversion.experts.converted
    assert not conversion.experts.multiplied
    assert list(conversion.experts.dequantized) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    conversion = convert(mixture("qwen3_moe"), FP8Config(linear={**section, "smooth_swiglu": True}))
    assert all("smooth_swiglu" in reason for reason in conversion.experts.dequantized.values())
    assert len(conversion.experts.dequantized) == 2
    model = mixture("qwen3_moe")
    section["overrides"] = {"*.experts.down_proj": "bf16"}
    conversion = convert(model, FP8Config(linear=section))
    assert set(conversion.experts.dequantized.values()) == {"down_proj not gathered in FP8"}


def test_experts_are_multiplied_in_fp8_where_the_kernels_have_run():
    assert all(multiplies_experts("auto", backend) for backend in ("cublas", "deep_gemm"))
    assert not any(multiplies_experts("auto", backend) for backend in ("mxfp8", "reference"))
    assert multiplies_experts("fp8", "reference")
    assert not multiplies_experts("bf16", "cublas")


def test_experts_that_are_converted_again_lose_their_products():
    model = mixture("qwen3_moe")
    convert(model, config(linear={"expert_products": "fp8"}))
    assert hasattr(model.model.layers[0].mlp.experts, "expert_products")
    convert(model, config(linear={"expert_products": "bf16"}))
    assert not hasattr(model.model.layers[0].mlp.experts, "expert_products")
