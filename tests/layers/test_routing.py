"""Routing of mixtures of experts: recorded, replayed, compared."""

import warnings

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.layers.experts import routing
from ds_fp8.layers.experts.routing import LOSS, count_without_sync
from tests.layers.hugging_face import causal_lm, tokens
from tests.layers.moe import EXPERTS, mixture

ARCHITECTURES = {
    "mixtral": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {},
    "deepseek_v3 in groups": {"n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    "gpt_oss": {},
}


def changed_tokens(first, second):
    """Share of the tokens with other sets of experts, by layer."""
    pairs = {name: (chosen.sort(1).values, second[name].sort(1).values) for name, chosen in first.items()}
    return {name: (ours != theirs).any(1).double().mean().item() for name, (ours, theirs) in pairs.items()}


def model_of(name, dtype=torch.float32, **changes):
    model = mixture(name.split()[0], dtype, **ARCHITECTURES[name], **changes)
    with torch.no_grad():  # some architectures begin with routers of zeros
        for module in around_experts(model):
            router = getattr(module, "gate", None) or module.router
            torch.nn.init.normal_(router.weight, std=0.2)
    return model


def around_experts(model):
    return [model.get_submodule(name.rpartition(".")[0]) for name in routing.mixtures(model)]


def step(model, ids=None):
    """Logits and gradients by name of one step."""
    ids = tokens() if ids is None else ids
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def experts_called(model):
    """A mapping that the next forward fills: what the experts of each layer are called with, experts and weights."""
    seen = {}
    for name, module in routing.mixtures(model).items():
        module.register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: [x.detach().clone() for x in args[1:3]]})
        )
    return seen


@pytest.mark.parametrize(("name", "adapted"), [*((name, False) for name in ARCHITECTURES), ("qwen3_moe", True)])
def test_replaying_a_models_own_routing_changes_no_bit(name, adapted):
    model = model_of(name)
    if adapted:
        inject_adapter_in_model(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False), model)
    seen = experts_called(model)
    with routing.record(model) as routes:
        logits, gradients = step(model)
    assert routes.keys() == routing.mixtures(model).keys() == seen.keys()
    for layer, chosen in routes.items():
        assert chosen.shape == (tokens().numel(), 2)
        assert torch.equal(chosen, seen[layer][0])
    with routing.replay(model, routes):
        again, gradients_again = step(model)
    assert torch.equal(again, logits)
    assert all(torch.equal(gradients_again[key], gradient) for key, gradient in gradients.items())
    assert not any(routing.is_routed(module) for module in model.modules())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_routing_gives_its_experts_with_weights_of_the_routers_own_scores(name):
    model = model_of(name)
    with routing.record(model) as own:
        step(model)
    routes = {layer: chosen.flip(0).to(torch.int16) for layer, chosen in own.items()}
    assert all(share > 0.3 for share in changed_tokens(own, routes).values())
    seen = experts_called(model)
    with routing.replay(model, routes):
        _, gradients = step(model)
    for layer, (experts, weights) in seen.items():
        assert torch.equal(experts, routes[layer].long())
        assert weights.isfinite().all()
        assert (weights > 0).all()
    for module in around_experts(model):
        router = getattr(module, "gate", None) or module.router
        gradient = next(g for key, g in gradients.items() if model.get_parameter(key) is router.weight)
        assert gradient.abs().max() > 0


OTHERS = """
    afmoe cohere2_moe deepseek_v2 ernie4_5_moe glm4_moe granitemoe hunyuan_v1_moe jamba minimax_m2 qwen3_next
""".split()  # noqa: SIM905
"""Architectures whose layers find experts in other ways: without a router of its own, with biases, with sigmoids."""


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures_are_recorded_and_replayed(architecture):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    ids, logits = tokens(), []
    seen = experts_called(model)
    with torch.no_grad():
        with routing.record(model) as routes:
            logits.append(model(input_ids=ids, use_cache=False).logits)
        assert routes.keys() == seen.keys()
        other = {layer: chosen.flip(0) for layer, chosen in routes.items()}
        for given in (routes, other):
            with routing.replay(model, given):
                logits.append(model(input_ids=ids, use_cache=False).logits)
            assert all(torch.equal(seen[layer][0].view_as(chosen), chosen) for layer, chosen in given.items())
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_weights_of_replayed_experts_are_those_of_the_formula():
    model = model_of("mixtral")
    with routing.record(model) as own:
        step(model)
    routes = {layer: chosen.flip(0) for layer, chosen in own.items()}
    block = model.model.layers[0].mlp
    inputs = []
    block.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().flatten(0, 1)))
    seen = experts_called(model)
    with routing.replay(model, list(routes.values())):
        step(model)
    layer = "model.layers.0.mlp.experts"
    probabilities = (inputs[-1] @ block.gate.weight.T).softmax(-1).gather(1, routes[layer])
    assert torch.allclose(seen[layer][1], probabilities / probabilities.sum(1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_route_as_replayed_and_are_recorded_once(reentrant):
    model = model_of("qwen3_moe")
    with routing.record(model) as plain:
        step(model)
    routes = {layer: (chosen + 1) % EXPERTS for layer, chosen in plain.items()}
    with routing.replay(model, routes):
        _, gradients = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with routing.record(model) as recomputed:
        step(model)
    assert all(torch.equal(recomputed[layer], chosen) for layer, chosen in plain.items())
    with routing.replay(model, routes):
        _, again = step(model)
    assert all(torch.equal(again[key], gradient) for key, gradient in gradients.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_that_recomputes_outside_the_context_is_refused(reentrant):
    model, ids = model_of("olmoe"), tokens()
    with routing.record(model) as routes:
        step(model)
    with routing.replay(model, routes):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()  # nothing is computed again
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with routing.replay(model, routes):
        loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(UserError, match="outside the context"):
        loss.backward()


def test_several_forwards_are_recorded_one_after_the_other():
    model = model_of("mixtral").eval()
    parts = tokens(3)[:1], tokens(3)[1:]
    routes = []
    for batches in (parts, parts[:1], parts[1:]):
        with routing.record(model) as found, torch.no_grad():
            for ids in batches:
                model(input_ids=ids)
        routes.append(found)
    both, *single = routes
    assert all(torch.equal(chosen, torch.cat([part[layer] for part in single])) for layer, chosen in both.items())


def test_fp8_beside_bf16():
    """Share of the tokens that go to other experts where the same weights are multiplied in FP8."""
    bf16, fp8 = model_of("qwen3_moe", torch.bfloat16), model_of("qwen3_moe", torch.bfloat16)
    ds_fp8.convert(fp8, ds_fp8.FP8Config.from_preset("tensorwise"))
    routes = []
    for model in (bf16, fp8):
        with routing.record(model) as found, torch.no_grad():
            model(input_ids=tokens(4, 32))
        routes.append(found)
    shares = changed_tokens(*routes)
    assert list(shares) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert 0 < max(shares.values()) < 0.3
    with routing.replay(fp8, routes[0]), torch.no_grad(), warnings.catch_warnings(action="error"):
        fp8(input_ids=tokens(4, 32))  # layers stay fused, or they would warn


# ---------------------------------------------------------------- what is refused


def changed(**layers):
    """What changes routes of a Mixtral: values by the number of a layer."""
    return lambda routes: {**routes, **{f"model.layers.{key[1:]}.mlp.experts": value for key, value in layers.items()}}


ROWS = tokens().numel()
REFUSED = {
    "other tokens": (changed(_1=torch.tensor([[0, 1]] * 7)), "7 x 2, and its router chooses 2 experts for each of 32"),
    "an expert that is not there": (changed(_0=torch.tensor([[0, EXPERTS]] * ROWS)), "outside 0 to 3"),
    "padding": (changed(_0=torch.tensor([[0, -1]] * ROWS)), "outside 0 to 3"),
    "one expert twice": (changed(_1=torch.tensor([[2, 2]] * ROWS)), "one expert twice"),
    "fractions": (changed(_1=torch.ones(ROWS, 2)), "layers.1.mlp.experts are not an integer tensor"),
    "no tensor": (changed(_0=[[0, 1]] * ROWS), "model.layers.0.mlp.experts are not an integer tensor"),
    "no such layer": (changed(_2=torch.ones(ROWS, 2)), "the model has no experts model.layers.2.mlp.experts"),
    "a layer less": (lambda routes: dict(list(routes.items())[:1]), "routes of model.layers.1.mlp.experts are missing"),
    "a list of one layer": (lambda routes: list(routes.values())[:1], "routes of 1 layers, and the model has 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_routes_that_do_not_fit_are_refused(case):
    change, words = REFUSED[case]
    model = model_of("mixtral")
    with routing.record(model) as routes:
        expected, _ = step(model)
    with pytest.raises(UserError, match=words) as error, routing.replay(model, change(routes)):
        step(model)
    assert error.value.remedy
    assert torch.equal(step(model)[0], expected), "the model is as before"


def test_a_context_without_a_forward_of_the_model_is_refused():
    model = model_of("mixtral")
    with routing.record(model) as routes:
        step(model)
    with (
        pytest.raises(UserError, match=r"no forward of model\.layers\.0\.mlp\.experts ran"),
        routing.replay(model, routes),
    ):
        pass
    with pytest.raises(UserError, match="already"), routing.replay(model, routes), routing.record(model):
        step(model)


def test_models_that_cannot_be_recorded_are_named():
    with pytest.raises(UserError, match="has no experts"), routing.record(causal_lm("qwen2")):
        pass
    phimoe = causal_lm("phimoe", torch.float32, num_local_experts=EXPERTS, num_experts_per_tok=2)
    with pytest.raises(UserError, match=r"without torch\.topk"), routing.record(phimoe):
        step(phimoe)


WITH_LOSS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("architecture", WITH_LOSS)
def test_the_loss_and_its_gradients_do_not_change(architecture, masked, monkeypatch):
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0

    def results():
        model = mixture(architecture, torch.float32, output_router_logits=True, router_aux_loss_coef=0.5)
        if changed:
            count_without_sync(model)
            function = getattr(module, LOSS)
            count_without_sync(model)
            assert getattr(module, LOSS) is function, "replaced once"
        output = model(input_ids=ids, labels=ids, attention_mask=mask if masked else None, use_cache=False)
        output.loss.backward()
        return output.aux_loss, [p.grad for p in model.parameters() if p.grad is not None]

    module = __import__(mixture(architecture).__module__, fromlist=[LOSS])
    monkeypatch.setattr(module, LOSS, getattr(module, LOSS))  # the file's function comes back
    changed = False
    expected, gradients = results()
    changed = True
    monkeypatch.setattr(torch.Tensor, "bincount", None)
    found, ours = results()
    assert torch.equal(found, expected)
    assert expected.item() > 0
    assert all(map(torch.equal, ours, gradients))
