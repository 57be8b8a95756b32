"""Folders with FP8 weights, evaluated as servers compute with them."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.commands.evaluate import _load
from ds_fp8.train.served_model import load_served_model
from ds_fp8.train.stored_model import ModelSource, load_stored_model, stored_config
from tests.export.trained import logits, train_and_export
from tests.integrations.programs import small_model
from tests.numerics import error
from tests.refusals import refused

OPTIONS = {"dtype": torch.bfloat16}
PRESETS = {
    "fp8": ({"fuse": "off"}, "128x128", "1x128", "pow2"),
    "compressed-tensors": ({}, "128x128", "1x128", "fp32"),
    "by row": ({"preset": "rowwise"}, "row", "row", "fp32"),
    "by tensor": ({"preset": "tensorwise"}, "tensor", "row", "fp32"),
}


def decoded(folder):
    """The model in BF16 with the weights that the codes stand for."""
    source = ModelSource("model.path", str(folder))
    return load_stored_model(source, stored_config(source), OPTIONS).eval()


def by_hand(folder, weight, inputs, scale):
    """The model in BF16, each of its linears replaced by the product of decoded codes and decoded inputs in FP32."""
    stored = load_file(folder / "model.safetensors")
    model = decoded(folder)
    for name, layer in model.named_modules():
        codes = stored.get(f"{name}.weight")
        if codes is None or codes.dtype != torch.float8_e4m3fn:
            continue
        scales = next(
            stored[f"{name}.weight{end}"] for end in ("_scale_inv", "_scale") if f"{name}.weight{end}" in stored
        )
        numbers = QuantizedTensor(codes, scales.float(), weight).dequantize(torch.float32)

        def forward(x, numbers=numbers, bias=layer.bias):
            cast = quantize(x.flatten(0, -2), "e4m3", inputs, scale).dequantize(torch.float32)
            y = F.linear(cast, numbers).to(x.dtype).view(*x.shape[:-1], -1)
            return y if bias is None else y + bias

        layer.forward = forward
    return model


@pytest.mark.parametrize("case", PRESETS)
def test_it_computes_as_products_of_codes_and_cast_inputs(ranks, tmp_path, case):
    fp8, weight, inputs, scale = PRESETS[case]
    layout = "fp8" if case == "fp8" else "compressed-tensors"
    trained_logits, _ = ranks(1, train_and_export, tmp_path, fp8, [layout], 1 << 30, {"kind": "qwen2"})[0]
    folder = tmp_path / layout
    model, serving = load_served_model(folder, "cpu", OPTIONS)
    assert len(serving.layers) == 14
    assert serving.decoded == []
    assert serving.inputs == f"e4m3 {inputs} {scale}"
    found = logits(model)
    assert error(found, logits(by_hand(folder, weight, inputs, scale))) < 2e-3
    in_bf16 = logits(decoded(folder))
    assert error(in_bf16, found) > 1e-2  # inputs are cast
    if case == "fp8":  # training multiplies the same codes by the same casts
        assert error(found, trained_logits) < error(in_bf16, trained_logits) / 3


def test_what_is_not_computed_as_served_is_named(ranks, tmp_path):
    ranks(2, train_and_export, tmp_path, {}, ["fp8", "bf16"], 1 << 30, {})
    assert load_served_model(tmp_path / "bf16", "cpu", OPTIONS)[1] is None
    config = tmp_path / "fp8" / "config.json"
    section = json.loads(config.read_text())
    section["quantization_config"]["activation_scheme"] = "static"
    config.write_text(json.dumps(section))
    model, serving = load_served_model(tmp_path / "fp8", "cpu", OPTIONS)
    assert (serving.layers, len(serving.decoded), serving.inputs) == ([], 14, None)
    assert "static" in serving.note
    assert logits(model).isfinite().all()


def test_weights_that_a_folder_lacks_are_not_drawn_at_random(tmp_path):
    """A folder in BF16 whose config.json tells of a layer more than it holds."""
    small_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3, "layer_types": None}))
    with refused(r"incomplete: model\.layers\.2") as caught:
        _load(tmp_path, "sdpa")
    assert "config.json" in caught.value.remedy
