"""The gated MLP in tiles of tokens beside the whole: the same bits but for the sums of the weights' gradients."""

from dataclasses import replace

import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import convert, recipe_from_config
from ds_fp8.layers.decoder import gated_mlp as tiled_mlp
from ds_fp8.layers.decoder.gated_mlp import GatedMLP, MLPWeights, gated_mlp
from tests.layers.hugging_face import causal_lm, tokens
from tests.memory.workloads import most_allocated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, F = 256, 384
# Relative: sums of FP32 in another order, of which a few are rounded to BF16 the other way. Sums of BF16 numbers are
# 5e-3 away.
ROUNDED = 2e-4
# Relative, on a GPU, whose products of other shapes may sum in another order: casts behind them round otherwise. One
# code in 50 that falls to its neighbour, 1/16 to 1/8 away, makes 1.5e-2 of a gradient; 1.53e-2 was seen on an H200.
FLIPPED = 2e-2
WEIGHTS = ("gate", "up", "down")


def results(tile, preset="infir2", length=640, normed=True, frozen=(), **section):
    """Output and gradients by name of an MLP, in tiles or whole."""
    recipe = replace(recipe_from_config(FP8Config.from_preset(preset, **section)), mlp_tile_tokens=tile)
    mlp = GatedMLP("silu", recipe.at("gate_up"), recipe.at("down"))
    torch.manual_seed(0)

    def random(*shape, scale=1.0):
        return (scale * torch.randn(*shape)).bfloat16().to(DEVICE).requires_grad_()

    given = {"x": random(2, length // 2, H), "residual": random(2, length // 2, H), "norm": random(H)}
    weights = {"gate": random(F, H, scale=0.1), "up": random(F, H, scale=0.1), "down": random(H, F, scale=0.1)}
    for name in frozen:
        weights[name].requires_grad_(False)
    group = MLPWeights(*weights.values())
    norm = {"residual": given["residual"], "norm": given["norm"], "eps": 1e-6} if normed else {}
    y = gated_mlp(given["x"], group, mlp, **norm)
    y.backward(torch.randn(y.shape).bfloat16().to(DEVICE) * torch.linspace(0.1, 3, H).to(DEVICE))
    gradients = {name: leaf.grad for name, leaf in (given | weights).items()}
    return {"y": y.detach(), **gradients}


def assert_alike(tiled, whole):
    for name, expected in whole.items():
        if expected is None:
            assert tiled[name] is None, name
        elif name in WEIGHTS or DEVICE == "cuda":
            assert tiled[name].dtype is expected.dtype
            error = (tiled[name].float() - expected.float()).norm() / expected.float().norm()
            assert error < (ROUNDED if DEVICE == "cpu" else FLIPPED), (name, error)
        else:
            assert torch.equal(tiled[name], expected), name


@pytest.mark.parametrize(
    ("preset", "length", "normed"),
    [("infir2", 640, True), ("hybrid_fast", 256, False), ("infir2", 100, False), ("hybrid_fast", 300, True)],
)
def test_tiles_change_no_bit_but_those_of_sums(preset, length, normed):
    whole = results(None, preset, length, normed)
    for tile in (128, 256, 1024):
        assert_alike(results(tile, preset, length, normed), whole)


@pytest.mark.parametrize("activations", [{"save": "bf16"}, {"recompute": "mlp"}])
def test_what_the_whole_keeps_does_not_matter(activations):
    assert_alike(results(128, activations=activations), results(None, activations=activations))


@pytest.mark.parametrize("frozen", [("gate", "up", "down"), ("down",), ("gate", "up")])
def test_frozen_weights_get_no_gradient(frozen):
    assert_alike(results(128, frozen=frozen), results(None, frozen=frozen))


def test_sums_over_many_tiles_are_in_fp32():
    assert_alike(results(128, length=1024), results(None, length=1024))


def test_every_weight_gets_one_gradient():
    """ZeRO-3 reduces a gradient when autograd has accumulated it: several a backward would be reduced too early."""
    model = causal_lm("llama").to(DEVICE)
    convert(model, parse_fp8({"fp8": {"activations": {"mlp_tile_tokens": 128}}}))
    counts = dict.fromkeys((name for name, _ in model.named_parameters()), 0)

    def count(name):
        counts[name] += 1

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: count(name))
    ids = tokens(4, 100).to(DEVICE)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert set(counts.values()) == {1}


@pytest.mark.skipif(DEVICE == "cuda", reason="the profiler counts memory of the CPU")
def test_the_peak_is_that_of_a_tile():
    """Of one MLP, where the casts of backward are emulated in FP32."""
    length = 1024
    whole, tiled = (most_allocated(lambda tile=tile: results(tile, length=length)) for tile in (None, 128))
    assert whole - tiled > 0.8 * 40 * length * F  # bytes an element of the product


@pytest.mark.parametrize(("architecture", "recompute"), [("llama", True), ("gemma", False)])
def test_fused_models_compute_in_tiles(architecture, recompute, monkeypatch):
    seen, tiles = [], tiled_mlp._tiles
    monkeypatch.setattr(tiled_mlp, "_tiles", lambda *args: seen.append(args[0]) or tiles(*args))

    def gradients(fp8=True, **activations):
        model = causal_lm(architecture).to(DEVICE)
        if fp8:
            convert(model, parse_fp8({"fp8": {"activations": activations}}))
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = tokens(4, 100).to(DEVICE)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters()}

    (loss, ours), (expected, whole) = gradients(mlp_tile_tokens=128), gradients()
    assert seen == [400] * (6 if recompute else 4)
    if DEVICE == "cuda":
        # Products of tiles sum in another order there (FLIPPED): as near to BF16's gradients as the whole is.
        _, exact = gradients(fp8=False)
        for name, gradient in exact.items():
            tiled_error, whole_error = ((found[name].float() - gradient.float()).norm() for found in (ours, whole))
            assert tiled_error < 1.1 * whole_error, name
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
        return
    assert torch.equal(loss, expected)
    for name, gradient in whole.items():
        if ".mlp." in name:
            assert (ours[name].float() - gradient.float()).norm() < ROUNDED * gradient.float().norm(), name
        else:
            assert torch.equal(ours[name], gradient), name


@pytest.mark.parametrize("tokens", [100, 129, 1])
def test_tiles_are_whole_groups_of_tokens(tokens):
    with pytest.raises(UserError, match="would cut groups of 128 tokens") as error:
        parse_fp8({"fp8": {"activations": {"mlp_tile_tokens": tokens}}})
    assert error.value.key == "fp8.activations.mlp_tile_tokens"
    assert '"mlp_tile_tokens": 128' in error.value.remedy


@pytest.mark.parametrize(
    ("architecture", "section", "why"),
    [
        ("llama", {"preset": "rowwise"}, 'granularity "row" has one scale for all tokens'),
        ("llama", {"linear": {"smooth_swiglu": True}}, "smooth_swiglu are computed one by one"),
        ("llama", {"fuse": "off"}, 'fp8.fuse "off"'),
        ("llama", {"linear": {"overrides": {"layers.1.mlp": "bf16"}}}, "model.layers.1"),
        ("qwen3_moe", {}, "the MLP of model.layers.0"),
        ("gpt_neox", {}, "no layer that is fused"),
    ],
)
def test_layers_that_are_not_fused_are_named(architecture, section, why):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if "moe" in architecture else {}
    with pytest.raises(UserError, match=r"(in tiles|is fused)") as error:
        convert(
            causal_lm(architecture, **experts), parse_fp8({"fp8": {**section, "activations": {"mlp_tile_tokens": 128}}})
        )
    assert why in str(error.value)
    assert error.value.key == "fp8.activations.mlp_tile_tokens"
