"""Linears, fused layers and engines with emulated casts: what they cost beside BF16, and what the start report says."""

import pytest
import torch

from ds_fp8.casts import quantize, quantize_columnwise
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.gemm import scaled_matmul
from ds_fp8.layers.linear.linear import FP8Linear
from tests.layers.hugging_face import causal_lm, tokens
from tests.numerics import error
from tests.ranks import on_ranks
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


@on_ranks(2)
def test_what_is_cast_anew_for_dgrad_is_not_gathered_in_its_format():
    overrides = {"*.down": {"weight": {"format": "int8", "granularity": "1x32"}}}
    engine = models.build(models.config({"linear": {"overrides": overrides}, "monitor": {"every": 0}}))
    models.train(engine, 1)
    linears = [module for module in engine.module.modules() if isinstance(module, FP8Linear)]
    assert [engine.fp8.weights.in_fp8(linear.weight) for linear in linears] == [True, False] * 2


# -------------------- engines


EMULATED = {
    "linear": {"weight": {"format": "int8", "granularity": "row", "scale": "fp32"}, "input": {"format": "e3m4"}},
    "param_gather": {"format": "int8"},
    "grad_reduce": {"format": "log8"},
    "optimizer": {"exp_avg": "e3m4", "exp_avg_sq": "log8"},
    "monitor": {"every": 2},
}


@on_ranks(2)
def test_training_resumes_stays_near_bf16_and_calls_itself_emulated(tmp_path):
    engine = models.build(models.config(EMULATED))
    losses = models.train(engine, 4)
    engine.save_checkpoint(tmp_path, tag="middle")
    losses += models.train(engine, 2, start=4)
    measured, wire, report = engine.fp8.health.last.measurement, engine.fp8.wire.take(), engine.fp8.report
    resumed = models.build(models.config(EMULATED))
    resumed.load_checkpoint(tmp_path, tag="middle")
    assert models.train(resumed, 2, start=4) == losses[4:]
    reference = models.build(models.config({"enabled": False}))
    plain = models.train(reference, 6)
    assert losses[-1] < 0.95 * losses[0]
    assert losses == pytest.approx(plain, rel=0.02)
    assert losses != plain
    assert min(figures.snr_db for figures in measured["grad_weight"].values()) > 20
    emulated = ["e3m4 1x128 pow2", "int8 row fp32", "log8 gradients on the wire", "e3m4 exp_avg", "log8 exp_avg_sq"]
    assert report["emulated"] == emulated
    note = f"emulated, in one byte an element: {', '.join(emulated)}; nothing here computes with them natively"
    assert note in report["notes"]
    assert report["param_gather"] == "int8"
    sent = reference.fp8.wire.take()
    assert all(wire[key] < 0.62 * sent[key] for key in sent if sent[key]), wire  # embedding and head are BF16
    assert report["moment_bytes_per_parameter"] < 2.1
