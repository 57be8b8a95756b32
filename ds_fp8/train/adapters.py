"""Adapters of a stage (train.lora): PEFT's LoRA, put into the model itself, which keeps its class and its names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.layers.experts.adapters import per_expert
from ds_fp8.layers.experts.selection import names_of_experts
from ds_fp8.train.stage import Lora

NAME = "default"


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze a model and give it adapters, drawn from torch's generator; B is zero."""
    try:
        from peft import LoraConfig
    except ImportError:
        problem = "train.lora needs PEFT, which is not installed"
        raise UserError(problem, key="train.lora", remedy="pip install peft") from None
    targets, parameters = lora.targets, []
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    # PEFT calls a linear layer for one tensor; Llama 4's router is one that returns two.
    others = [name for name, module in linears.items() if type(module).forward is not nn.Linear.forward]
    if not isinstance(targets, str):
        others = []
        # Experts are parameters of their module, which PEFT is told apart from linears.
        experts = {_last(name) for name in names_of_experts(model)}
        names = {_last(name) for name in linears}
        parameters = [target for target in targets if _last(target) in experts]
        targets = [target for target in targets if target not in parameters or _last(target) in names]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=targets,
        target_parameters=parameters,
        exclude_modules=others or None,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    try:
        model.add_adapter(config, NAME)
    except ValueError as error:
        problem = f"adapters are refused: {first_line(error)}"
        raise UserError(problem, key="train.lora.targets", remedy='"all-linear", or names such as ["q_proj"]') from None
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)  # PEFT makes them in FP32


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def with_adapters_merged(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of the plain model, W + s B A rounded to W's dtype, from the one of `model`."""
    merged, modules = dict(state), dict(model.named_modules())
    for name, module in modules.items():
        if not hasattr(module, "lora_embedding_A"):  # as all of PEFT's LoRA layers have
            continue
        base, own, embeds = name, getattr(module, "parameter_name", "weight"), NAME in module.lora_embedding_A
        while f"{base}.base_layer" in modules:
            base += ".base_layer"
        names = (f"lora_embedding_{part}.{NAME}" if embeds else f"lora_{part}.{NAME}.weight" for part in "AB")
        a, b = (merged.pop(f"{name}.{part}").float() for part in names)
        weight = merged[f"{base}.{own}"]
        if weight.dim() == 3:
            a, b = per_expert(a, b, len(weight))
        product = module.scaling[NAME] * (b @ a)
        if embeds or module.fan_in_fan_out:  # Conv1D
            product = product.t()
        merged[f"{base}.{own}"] = (weight.float() + product).to(weight.dtype)
    return {name.replace(".base_layer", ""): tensor for name, tensor in merged.items()}


def ends_ties(model: PreTrainedModel, merged: Mapping[str, torch.Tensor]) -> bool:
    """Return whether weights that `model` shares differ once merged, as embeddings of which the head's have none."""
    ties = (getattr(model, "_tied_weights_keys", None) or {}).items()
    return any({a, b} <= merged.keys() and not torch.equal(merged[a], merged[b]) for a, b in ties)
