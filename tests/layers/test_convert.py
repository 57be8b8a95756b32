"""Surgery: what becomes FP8, what is left and why, and that nothing else about the model changes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import convert
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
