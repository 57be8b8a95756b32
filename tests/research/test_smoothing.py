"""Smooth-SwiGLU: the function is unchanged, and a product with an outlier channel survives one scale a tensor."""

import copy
from dataclasses import replace

import pytest
import torch
from decoder_stacks import hold_in_fp8
from torch import nn

from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import convert, recipe_from_config
from ds_fp8.layers.decoder.decoder import FusedMLP
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.research.recipe import ResearchFP8Linear, channel_factors
from tests.layers.hugging_face import causal_lm
from tests.layers.linears import results_of
from tests.numerics import error

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
