"""Load a folder with FP8 weights to compute as a server does: FP8 products of stored weights and quantized inputs.

Linear layers with FP8 weights in the folder become FP8Linear; their weights are data and scales of the files, and
inputs are quantized as the "quantization_config" says, which vLLM and SGLang follow:

    fp8                 blocks of 128x128, inputs in groups of 128; powers of two where scale_fmt is ue8m0, else FP32
    compressed-tensors  blocks with inputs in groups of 128, or output channels or tensors with inputs by token; FP32

On a GPU with FP8 units they multiply; elsewhere the reference does. Everything else is in BF16, as in a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import UNSHARDED, placeholder
from ds_fp8.layers.selection import linear_layers
from ds_fp8.train.stored_model import (
    COMPRESSED_TENSORS,
    ModelSource,
    check_trainable,
    load_quantized,
    quantization_of,
    stored_config,
)


@dataclass(frozen=True)
class Serving:
    """Products of a model with FP8 weights: which are computed as served, and which are not."""

    inputs: str | None  # Cast of the inputs; None: they are not cast
    layers: list[str] = field(default_factory=list)  # Names of the linear layers with FP8 weights
    decoded: list[str] = field(default_factory=list)  # Names of stored weights in FP8 that are multiplied in BF16 here
    note: str | None = None  # Why some weights are in BF16

    def __str__(self) -> str:
        served = f"{len(self.layers)} linear layers as served, inputs cast {self.inputs}" if self.layers else ""
        decoded = f"{len(self.decoded)} weights decoded, their inputs not cast: {self.note}" if self.decoded else ""
        return "; ".join(filter(None, (served, decoded)))


def load_served_model(
    folder: Path, device: str | torch.device, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, Serving | None]:
    """Load the model of a Hugging Face folder as a server computes with it, and how it computes with its FP8 weights.

    `options` are further arguments of from_pretrained.
    """
    source = ModelSource("FOLDER", str(folder))
    quantization, config = quantization_of(source), stored_config(source)
    check_trainable(source, config)
    with ExitStack() as opened:
        model, weights = load_quantized(source, config, dict(options), opened)
        model = model.to(device).eval()
        if not weights:
            return model, None
        section, why = _casts(quantization)
        if section is None:
            return model, Serving(None, decoded=list(weights), note=why)
        linears = linear_layers(model)
        found = {name.removesuffix(".weight"): stored for name, stored in weights.items()}
        found = {name: stored for name, stored in found.items() if name in linears}
        recipe = recipe_from_config(FP8Config.from_preset(linear=section, monitor={"every": 0}, **_ALL_IN_BF16))
        for name, stored in found.items():
            _serve(linears[name], stored.data[...].to(device), stored.scales[...].float().to(device), recipe.at(name))
        decoded = [name for name in weights if name.removesuffix(".weight") not in found]
        note = f"{type(model).__name__} has no linear layer of their names" if decoded else None
        return model, Serving(str(recipe.input), list(found), decoded, note)


_ALL_IN_BF16: dict[str, Any] = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}


def _casts(quantization: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return the "linear" section with a server's casts, or None and the reason why it cannot be computed here."""
    method = quantization.get("quant_method")
    if method not in ("fp8", COMPRESSED_TENSORS):
        return None, f"how a server casts the inputs of {method or 'a folder that states no method'} is not known here"
    if method == "fp8":
        block, scheme = quantization.get("weight_block_size"), quantization.get("activation_scheme", "dynamic")
        if list(block or ()) != [128, 128] or scheme != "dynamic":
            return None, f"weight_block_size {block} with {scheme} activations is not computed here"
        return _section("128x128", "1x128", "pow2" if quantization.get("scale_fmt") == "ue8m0" else "fp32"), None
    groups = list(quantization["config_groups"].values())
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    if inputs is None:
        return None, "a server does the same"
    strategies = weights.get("strategy"), inputs.get("strategy")
    known = {("block", "group"): ("128x128", "1x128"), ("channel", "token"): ("row", "row")}
    known[("tensor", "token")] = ("tensor", "row")
    blocks = weights.get("block_structure") or [128, 128], inputs.get("group_size") or 128
    if len(groups) > 1 or strategies not in known or not inputs.get("dynamic") or blocks != ([128, 128], 128):
        return None, f"weights by {strategies[0]} and inputs by {strategies[1]} of this kind are not computed here"
    return _section(*known[strategies], "fp32"), None


def _section(weight: str, inputs: str, scale: str) -> dict[str, Any]:
    cast = {"format": "e4m3", "granularity": inputs, "scale": scale}
    return {
        "input": cast,
        "weight": {"format": "e4m3", "granularity": weight, "scale": "fp32"},
        "grad_output": cast,  # nothing is trained, and one backend must multiply all
    }


def _serve(layer: nn.Linear, data: torch.Tensor, scale: torch.Tensor, recipe: LinearRecipe) -> None:
    if recipe.weight.granularity != "128x128":
        scale = scale.reshape(() if recipe.weight.granularity == "tensor" else (-1, 1))
    # As a conversion does it (layers/convert.py), with weights of the file in place of unsharded ones.
    layer.own_class = type(layer)
    layer.__class__ = FP8Linear
    layer.recipe = recipe
    setattr(layer.weight, UNSHARDED, QuantizedTensor(data, scale, recipe.weight.granularity, recipe.weight.scale))
    # The decoded weight is freed, and a stray read of it is NaN.
    layer.weight.data = placeholder(layer.weight.shape, layer.weight.dtype, layer.weight.device)
