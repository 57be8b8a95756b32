"""Adapters of a stage (train.lora): PEFT's LoRA, put into the model itself, which keeps its class and its names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ds_fp8.config.errors import UserError
from ds_fp8.layers.experts.adapters import of_experts, wraps_parameter
from ds_fp8.layers.linear.adapters import is_lora
from ds_fp8.train.stage import Lora

NAME = "default"


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze a model and give it adapters, drawn from torch's generator; B is zero."""
    try:
        from peft import LoraConfig
    except ImportError:
        problem = "train.lora needs PEFT, which is not installed"
        raise UserError(problem, key="train.lora", remedy="pip install peft") from None
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    try:
        model.add_adapter(config, NAME)
    except ValueError as error:
        problem = f"adapters are refused: {str(error).splitlines()[0]}"
        raise UserError(problem, key="train.lora.targets", remedy='"all-linear", or names such as ["q_proj"]') from None
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)  # PEFT makes them in FP32


def with_adapters_merged(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of the plain model, W + s B A rounded to W's dtype, from the one of `model`."""
    merged, modules = dict(state), dict(model.named_modules())
    for name, module in modules.items():
        if not (is_lora(module) or wraps_parameter(module)):
            continue
        base, own = name, getattr(module, "parameter_name", "weight")
        while f"{base}.base_layer" in modules:
            base += ".base_layer"
        a, b = (merged.pop(f"{name}.lora_{part}.{NAME}.weight").float() for part in "AB")
        weight, scale = merged[f"{base}.{own}"], module.scaling[NAME]
        if weight.dim() == 3:
            a, b = of_experts(a, b, len(weight))
        merged[f"{base}.{own}"] = (weight.float() + scale * (b @ a)).to(weight.dtype)
    return {name.replace(".base_layer", ""): tensor for name, tensor in merged.items()}
