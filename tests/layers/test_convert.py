"""Surgery: what becomes FP8, what is left and why, and that nothing else about the model changes."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.engine.report import EXPERTS, coverage
from ds_fp8.layers.convert import matches
from ds_fp8.layers.linear.linear import FP8Linear
from tests.layers.copies import assert_independent_copy, copied
from tests.layers.hugging_face import causal_lm, fp8, tokens


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(40, 40)
        self.side = nn.Linear(40, 24, bias=False)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 40)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(40, 50, bias=False)


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def converted(model: nn.Module, skip=None):
    return convert(model, parse_fp8({"fp8": {} if skip is None else {"linear": {"skip": skip}}}))


ALL = {f"layers.{layer}.{name}" for layer in range(2) for name in ("q_proj", "side")} | {"lm_head"}


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ([], set()),
        (["lm_head"], {"lm_head"}),
        (["layers.0.side"], {"layers.0.side"}),
        (["side"], {"layers.0.side", "layers.1.side"}),
        (["layers.1"], {"layers.1.side", "layers.1.q_proj"}),
        (["*_proj"], {"layers.0.q_proj", "layers.1.q_proj"}),
        (["layers.[0]*"], {"layers.0.side", "layers.0.q_proj"}),
        (["sid", "head", "layer"], set()),
        (["side", "lm_head", "lm_haed"], {"layers.0.side", "layers.1.side", "lm_head"}),
    ],
)
def test_skip_names_whole_names_parts_and_globs(skip, left):
    model = Small()
    result = converted(model, skip)
    assert set(result.left) == left
    assert set(result.converted) == ALL - left
    assert result.unmatched == [pattern for pattern in skip if pattern in ("sid", "head", "layer", "lm_haed")]
    assert {name for name, module in model.named_modules() if isinstance(module, FP8Linear)} == ALL - left
    for name, reason in result.left.items():
        assert any(f'"{pattern}"' in reason and matches(name, pattern) for pattern in skip)


def test_parameters_stay_the_same_objects_under_the_same_names():
    model = Small()
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    converted(model)
    assert list(model.state_dict()) == list(state)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    model.load_state_dict(state, strict=True)


def test_tied_weights_are_left_with_the_reason():
    model = Small()
    model.lm_head.weight = model.embed.weight
    result = converted(model, skip=[])
    assert type(model.lm_head) is nn.Linear
    assert "embed" in result.left["lm_head"]
    assert set(result.converted) == ALL - {"lm_head"}
    model = Small()
    model.layers[1].side.weight = model.layers[0].side.weight
    assert set(converted(model).left) == {"lm_head", "layers.0.side", "layers.1.side"}


@pytest.mark.parametrize(
    ("model", "skip"), [(Small(), ["*"]), (nn.Sequential(nn.ReLU()), []), (nn.Sequential(Doubled(4, 4)), [])]
)
def test_a_model_with_nothing_to_convert_is_an_error(model, skip):
    with pytest.raises(UserError) as error:
        converted(model, skip)
    # Naming fewer layers to skip helps only where some are named.
    assert error.value.key == ("fp8.linear.skip" if skip else "fp8.enabled")
    assert ("skip" in error.value.remedy) == bool(skip)
    assert error.value.remedy


def test_converting_again_replaces_the_recipe():
    model = Small()
    converted(model)
    result = convert(model, parse_fp8({"fp8": {"preset": "tensorwise"}}))
    assert set(result.converted) == ALL - {"lm_head"}
    assert model.layers[0].side.recipe == result.recipe
    assert result.recipe.input.granularity == "tensor"


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("llama", False)])
def test_a_hugging_face_model(architecture, tied, tmp_path):
    model, ids = causal_lm(architecture, tie_word_embeddings=tied), tokens()
    keys = list(model.state_dict())
    with torch.no_grad():
        before = model(ids, labels=ids).loss
    result = converted(model)

    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert set(result.converted) == {f"model.layers.{layer}.{part}" for layer in range(2) for part in parts}
    assert set(result.left) == {"lm_head"}
    assert list(model.state_dict()) == keys

    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(before.item(), rel=0.02)
    assert loss.item() != before.item()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(model.get_submodule(name).weight.grad.count_nonzero() for name in result.converted)

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not any(isinstance(module, FP8Linear) for module in loaded.modules())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("llama", "pickle"),
        ("llama", "deepcopy"),
        ("llama", "torch.save"),
        ("gemma", "pickle"),
        ("gpt_neox", "deepcopy"),
    ],
)
def test_a_converted_model_can_be_copied(architecture, how):
    """Whole layers fused, only MLPs, and none."""
    model = causal_lm(architecture)
    conversion = converted(model)
    other = copied(model, how)
    assert_independent_copy(model, other)
    assert {type(m.recipe) for m in other.modules() if isinstance(m, FP8Linear)} == {type(conversion.recipe)}
    results = []
    for each in (model, other):
        output = each(input_ids=tokens(), labels=tokens())
        output.loss.backward()
        results.append((output.logits, {name: p.grad for name, p in each.named_parameters()}))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[1][1][name], gradient) for name, gradient in results[0][1].items())
    assert converted(other).converted == conversion.converted
    assert converted(other).fusion.layers == conversion.fusion.layers


def test_a_copied_layer_takes_no_model_along():
    model = causal_lm("llama")
    conversion = converted(model)
    conversion.recipe.monitor.attach(model, ["a"], torch.device("cpu"), lambda sums, peaks: None)
    layer = model.model.layers[0]
    assert len(pickle.dumps(layer)) < 1.1 * sum(p.nbytes for p in layer.parameters())
    monitor = pickle.loads(pickle.dumps(layer)).mlp.down_proj.recipe.monitor
    assert not monitor.active, "nobody would read what a copy measures"


def test_a_conversion_without_an_engine_measures_nothing():
    """Nobody would end its step, and read the figures."""
    assert not ds_fp8.convert(Small(), FP8Config(monitor={"every": 1})).recipe.monitor.active


@pytest.fixture
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forget_graphs")
def test_a_compiled_model_computes_the_same_with_one_break_a_layer():
    """FP8 layers run as they are between the graphs, and say why."""
    model = causal_lm("llama").model
    fp8(model)

    def trained(forward):
        model.zero_grad()
        hidden = forward(input_ids=tokens(), use_cache=False).last_hidden_state
        hidden.float().square().sum().backward()
        return [hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected, counter = trained(model), CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for _ in range(2):
        results = trained(compiled)
        assert torch.equal(results[0], expected[0])
        for gradient, other in zip(results[1:], expected[1:], strict=True):
            # Compiling sums gradients in another order, in BF16 too, which a cast then rounds otherwise.
            assert (gradient - other).float().norm() < 0.06 * other.float().norm()
    assert 1 <= counter.frame_count <= len(model.layers) + 1


@pytest.mark.usefixtures("forget_graphs")
def test_a_single_graph_is_refused_with_the_reason():
    model = causal_lm("llama").model
    fp8(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="FP8 layers of ds_fp8"):
        compiled(input_ids=tokens())


# ---------------------------------------- which linear layers run in FP8, and the reason for each that does not


def converted_with(model, filter=None, **linear):
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
    result = converted_with(model)
    names = [n for n, m in model.named_modules() if n.startswith(name) and isinstance(m, nn.Linear)]
    assert len(names) == 1
    if reason is None:
        assert names[0] in result.converted
    else:
        assert reason in result.left[names[0]]
        assert not isinstance(model.get_submodule(names[0]), FP8Linear)


def test_state_space_projections_stay_and_the_rest_of_a_mixer_does_not():
    result = converted_with(Mixer())
    assert result.converted == ["in_proj"]
    assert all("state-space" in result.left[name] for name in ("x_proj", "dt_proj"))


def test_a_converted_subclass_computes_what_it_did_and_goes_back_to_its_class():
    layer = Transposed(512, 256).bfloat16()
    model = nn.Sequential(layer)
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    expected = model(x).float()
    converted_with(model)
    assert (model(x).float() - expected).norm() < 0.06 * expected.norm()
    converted_with(nn.ModuleList([model, nn.Linear(512, 512)]), skip=["0"])
    assert type(layer) is Transposed
    assert torch.equal(model(x).float(), expected)


def test_a_filter_sees_what_skip_leaves_and_is_remembered():
    model = causal_lm("llama")
    seen = {}

    def first_layer(name, layer):
        seen[name] = layer
        return "layers.0." in name

    result = converted_with(model, first_layer)
    assert "lm_head" not in seen
    assert all(model.get_submodule(name) is layer for name, layer in seen.items())
    assert len(seen) == 14
    assert len(result.converted) == 7
    assert all("layers.0." in name for name in result.converted)
    again = converted_with(model)  # as ds_fp8.initialize does
    assert again.converted == result.converted
    assert again.left == result.left
    assert len(converted_with(model, lambda name, layer: True).converted) == 14


@pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
def test_lm_head_means_the_head_whatever_its_name(architecture):
    model = causal_lm(architecture, vocab_size=320)
    head = next(name for name, m in model.named_modules() if m is model.get_output_embeddings())
    assert "lm_head" in converted_with(model).left[head]
    assert head in converted_with(model, skip=[]).converted


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
    result = coverage(model, converted_with(model).left)
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
    assert coverage(model, converted_with(model).left)["parameters"] == sum(p.numel() for p in model.parameters())
