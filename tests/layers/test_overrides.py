"""fp8.linear.overrides: what a pattern means, and that every part of the package computes with what it says."""

import json

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from ds_fp8.casts import quantize, quantize_columnwise
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.export.plan import make_plan
from ds_fp8.gemm import scaled_matmul
from ds_fp8.layers.decoder.decoder import FusedDecoderLayer, FusedMLP
from ds_fp8.layers.decoder.gated_mlp import gated_mlp
from ds_fp8.layers.linear.linear import FP8Linear
from tests.layers.hugging_face import causal_lm, tokens
from tests.ranks import on_ranks
from tests.zero import models

TENSOR = {"granularity": "tensor"}


def parsed(overrides, **section):
    linear = {"backend": "reference", "overrides": overrides, **section.pop("linear", {})}
    return parse_fp8({"fp8": {"monitor": {"every": 0}, "linear": linear, **section}}, "stage.json")


def test_an_override_changes_what_it_names_and_the_first_match_decides():
    fp8 = parsed(
        {
            "model.layers.1.mlp.down_proj": {"input": {"format": "e5m2"}},
            "*.down_proj": {"weight": TENSOR},
            "layers.0": "bf16",
            "q_proj": "bf16",
        },
        preset="rowwise",
        fuse="off",
    )
    model = causal_lm("llama")
    conversion = convert(model, fp8)
    first, second = model.model.layers
    assert str(second.mlp.down_proj.recipe.input) == "e5m2 row pow2"
    assert str(second.mlp.down_proj.recipe.weight) == "e4m3 row pow2"
    assert str(first.mlp.down_proj.recipe.weight) == "e4m3 tensor pow2"
    assert second.mlp.gate_proj.recipe == conversion.recipe
    assert {name: len(linears) for name, linears in conversion.overrides.items()} == {
        "model.layers.1.mlp.down_proj": 1,
        "*.down_proj": 1,
        "layers.0": 6,
        "q_proj": 1,
    }
    assert conversion.left["model.layers.0.self_attn.q_proj"] == 'named by fp8.linear.overrides "layers.0"'
    assert not isinstance(second.self_attn.q_proj, FP8Linear)


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        ({"*.down_prj": "bf16"}, 'fp8.linear.overrides["*.down_prj"]', 'Did you mean "*.down_proj"?'),
        ({"model.layer.0.*": "bf16"}, '["model.layer.0.*"]', 'Did you mean "model.layers.0.*"?'),
        ({"q_proj": "fp16"}, 'fp8.linear.overrides["q_proj"]', '"bf16", or casts'),
        ({"q_proj": {"inputs": TENSOR}}, 'fp8.linear.overrides["q_proj"].inputs', 'Did you mean "input"?'),
        ({"q_proj": {"skip": ["x"]}}, 'fp8.linear.overrides["q_proj"].skip', "Known keys: grad_output"),
        ({"q_proj": {"weight": {"granularity": "1x128"}}}, '["q_proj"].weight.granularity', "change the value"),
    ],
)
def test_mistakes_name_file_key_and_remedy(overrides, key, remedy):
    model = causal_lm("llama")
    convert(model, parsed({}))
    with pytest.raises(UserError) as caught:
        convert(model, parsed(overrides))
    assert all(isinstance(layer, FusedDecoderLayer) for layer in model.model.layers), "as it was before"
    assert key in caught.value.key
    assert remedy in caught.value.remedy


def test_patterns_mean_the_layers_that_peft_has_wrapped():
    model = get_peft_model(causal_lm("llama"), LoraConfig(target_modules=["down_proj"]))
    conversion = convert(model, parsed({"model.layers.0.*.down_proj": {"input": TENSOR}, "*.up_proj": "bf16"}))
    assert [len(linears) for linears in conversion.overrides.values()] == [1, 2]


def test_a_fused_mlp_casts_down_proj_in_its_own_way():
    """Bit for bit what the three products make of casts taken by hand."""
    own = {"input": {"format": "e5m2", "granularity": "row"}, "weight": TENSOR, "wgrad": {"input": "tensor"}}
    model = causal_lm("llama")
    convert(model, parsed({"*.down_proj": own}, activations={"save": "bf16"}))
    layer = model.model.layers[0]
    assert isinstance(layer, FusedDecoderLayer)
    mlp = layer.mlp
    x = torch.randn(32, 256).bfloat16().requires_grad_()
    weights = [nn.Parameter(part.weight.detach()) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    y = gated_mlp(x, weights, layer.fused_mlp)
    dy = torch.randn_like(y)
    (ddown,) = torch.autograd.grad(y, weights[2], dy)

    gate_up = scaled_matmul(quantize(x.detach()), quantize(torch.cat(weights[:2]), "e4m3", "128x128"))
    gate, up = gate_up.float().chunk(2, -1)
    product = F.silu(gate) * up
    assert torch.equal(y, scaled_matmul(quantize(product, "e5m2", "row"), quantize(weights[2], "e4m3", "tensor")))
    expected = scaled_matmul(quantize_columnwise(dy), quantize_columnwise(product, "e5m2", "tensor"))
    assert torch.equal(ddown, expected)


def test_parts_that_cannot_be_fused_are_called_one_by_one_and_the_reason_is_given():
    model = causal_lm("llama")
    conversion = convert(model, parsed({"*.v_proj": {"input": TENSOR}, "layers.1.mlp.up_proj": {"weight": TENSOR}}))
    different = "quantizes linears of one product in different ways"
    assert [name for name, why in conversion.fusion.left.items() if different in why] == [
        "model.layers.0",
        "model.layers.1",
        "model.layers.1.mlp",
    ]
    assert isinstance(model.model.layers[0].mlp, FusedMLP)
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    assert loss.isfinite()


@on_ranks(2)
def test_weights_are_gathered_as_their_override_casts_them():
    overrides = {
        "layers.0.up": {"weight": TENSOR},
        "layers.1.*": {"weight": {"format": "e5m2", "granularity": "row"}},
        "layers.0.down": "bf16",
    }
    engine = models.engine({"linear": {"overrides": overrides}})
    models.train(engine, 1)
    assert models.wrong_casts(engine) == []
    assert {name: str(linear.recipe.weight) for name, linear in models.fp8_linears(engine).items()} == {
        "layers.0.up": "e4m3 tensor pow2",
        "layers.1.up": "e5m2 row pow2",
        "layers.1.down": "e5m2 row pow2",
    }
    report = engine.fp8.report["overrides"]
    assert [(part["pattern"], part["linears"]) for part in report] == list(zip(overrides, (1, 2, 1), strict=True))
    assert report[1]["casts"].startswith("input e4m3 1x128 pow2, weight e5m2 row pow2")
    assert report[2]["casts"] == "bf16"
    json.dumps(report)


def test_exports_keep_in_bf16_what_an_override_casts_in_another_way():
    fp8 = parsed({"*.down_proj": {"weight": TENSOR}, "*.o_proj": {"input": TENSOR}})
    plan = make_plan(causal_lm("llama"), {"lm_head": "skipped"}, fp8.linear, "fp8")
    assert [name for name in plan.left if name != "lm_head"] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert "trained with its weight in e4m3 tensor pow2" in plan.left["model.layers.0.mlp.down_proj"]
