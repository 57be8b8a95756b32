"""Linears and fused layers with emulated casts: what they cost beside BF16, and what the start report calls them."""

import pytest
import torch

from ds_fp8.casts import quantize, quantize_columnwise
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.gemm import scaled_matmul
from ds_fp8.layers.linear.linear import FP8Linear
from tests.layers.hugging_face import causal_lm, tokens
from tests.numerics import error
from tests.zero import models

IN_BF16 = {"param_gather": {"format": "bf16"}}
INT8 = {"format": "int8", "granularity": "row"}
# Sections, and the relative error of two layers against BF16 that they stay below
SECTIONS = {
    "mxfp8": ({"preset": "mxfp8"}, 0.04),
    "nvfp4": ({"preset": "nvfp4"}, 0.25),
    "halo": ({"preset": "halo"}, 0.03),
    "quartet": ({"preset": "quartet"}, 0.25),
    "int8 by rows": ({**IN_BF16, "linear": {"input": INT8, "weight": INT8, "grad_output": INT8}}, 0.03),
    "log8": ({**IN_BF16, "linear": {name: {"format": "log8"} for name in ("input", "weight", "grad_output")}}, 0.06),
}


def logits_and_gradient(model):
    ids = tokens()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    return output.logits.detach().float(), gradients


@pytest.mark.parametrize("fuse", ["auto", "off"])
@pytest.mark.parametrize(("section", "bound"), SECTIONS.values(), ids=SECTIONS)
def test_a_model_costs_what_its_format_costs(section, bound, fuse):
    exact, cast = causal_lm("qwen2"), causal_lm("qwen2")
    conversion = convert(cast, parse_fp8({"fp8": {**section, "fuse": fuse, "monitor": {"every": 0}}}))
    rotated = getattr(conversion.recipe, "rotations", ())
    assert bool(rotated) == (section.get("preset") in ("nvfp4", "halo", "quartet"))
    assert len(conversion.fusion.layers) == (2 if fuse == "auto" and not rotated else 0)
    assert conversion.recipe.backend == "reference"
    for result, expected in zip(logits_and_gradient(cast), logits_and_gradient(exact), strict=True):
        assert bound / 8 < error(result, expected) < 2 * bound


def test_weights_in_groups_are_cast_along_either_contraction():
    model = causal_lm("llama")
    convert(model, parse_fp8({"fp8": {"preset": "mxfp8", "fuse": "off", "monitor": {"every": 0}}}))
    linear = model.model.layers[0].self_attn.o_proj
    x = torch.randn(16, linear.in_features).bfloat16().requires_grad_()
    y = linear(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    words = "e4m3", "1x32", "pow2"
    weight = linear.weight.detach()
    assert torch.equal(y, scaled_matmul(quantize(x, *words), quantize(weight, *words)))
    assert torch.equal(x.grad, scaled_matmul(quantize(dy, *words), quantize_columnwise(weight, *words)))
    expected = scaled_matmul(quantize_columnwise(dy, *words), quantize_columnwise(x, *words))
    assert torch.equal(linear.weight.grad, expected)


def test_what_is_cast_anew_for_dgrad_is_not_gathered_in_its_format(ranks):
    overrides = {"*.down": {"weight": {"format": "int8", "granularity": "1x32"}}}
    assert ranks(2, gathered, {"linear": {"overrides": overrides}})[0] == [True, False] * 3


def gathered(section):
    engine = models.build(models.config({**section, "monitor": {"every": 0}}))
    models.train(engine, 1)
    linears = [module for module in engine.module.modules() if isinstance(module, FP8Linear)]
    return [engine.fp8.weights.in_fp8(linear.weight) for linear in linears]
