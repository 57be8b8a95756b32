"""Selection of the experts that are all-gathered and multiplied in FP8: 3-D parameters [E, N, K] of one module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ds_fp8.config.formats import BLOCK, CastSpec
from ds_fp8.config.plans import GroupPlan
from ds_fp8.layers.experts.adapters import wrappers_of, wraps_parameter
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.selection import first_matches, named_by_user

# attributes of experts of transformers' ExpertsInterface
INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")

GRANULARITY = "128x128"  # whatever the linears' is: blocks serve fprop and dgrad


def expert_weights(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the 3-D parameters by name that a module of experts (by its name or class) has itself."""
    if "expert" not in f"{name} {type(module).__name__}".lower():
        return {}
    found = {own: parameter for own, parameter in module._parameters.items() if parameter is not None}
    return {own: parameter for own, parameter in found.items() if len(shape_of(parameter)) == 3}


def names_of_experts(model: nn.Module) -> list[str]:
    return [
        f"{name}.{own}".lstrip(".") for name, module in model.named_modules() for own in expert_weights(name, module)
    ]


def experts_left(model: nn.Module, plan: GroupPlan) -> dict[str, str]:
    """Return the weights of experts that stay in BF16, by name with the reason."""
    names = names_of_experts(model)
    by_user, override_of = named_by_user(names, plan), first_matches(names, plan.overrides)
    modules, left = dict(model.named_modules()), {}
    users = Counter(id(parameter) for module in modules.values() for parameter in module._parameters.values())
    for full_name in names:
        name, _, own = full_name.rpartition(".")
        module = modules[name]
        weight, around = module._parameters[own], wrappers_of(name, modules)
        if not around and name:
            around = [modules[name.rpartition(".")[0]]]
        cast = plan.overrides[override_of[full_name]] if full_name in override_of else plan.weight
        reason = by_user.get(full_name)
        if not plan.gathers:
            reason = 'fp8.param_gather.format is "bf16"'
        reason = reason or cast_of_experts(cast).why_not_gathered or _objection(module, weight, around)
        if reason is None and users[id(weight)] > 1:
            reason = "shared with another module"
        if reason is not None:
            left[full_name] = reason
    return left


def _objection(module: nn.Module, weight: nn.Parameter, around: Sequence[nn.Module]) -> str | None:
    if any(not hasattr(module, attribute) for attribute in INTERFACE):
        return f"{type(module).__name__} does not follow transformers' ExpertsInterface"
    if module.is_transposed:
        return "stored transposed"
    if "forward" in vars(module):
        return "have a forward set on the instance"
    others = [part for part in around if type(part).__module__.startswith("peft.") and not wraps_parameter(part)]
    if "parametrizations" in module._modules or others:
        return "carry an adapter other than LoRA on their parameters"
    if shape_of(weight)[0] == 1 and any(map(wraps_parameter, around)):
        return "carry an adapter, and there is one expert"
    if not weight.is_floating_point():
        return f"stored as {str(weight.dtype).removeprefix('torch.')}"
    _, rows, columns = shape_of(weight)
    if rows % BLOCK or columns % BLOCK:
        return f"matrices of {rows} x {columns} do not divide into {GRANULARITY} blocks"
    return None


def cast_of_experts(cast: CastSpec) -> CastSpec:
    return cast.in_granularity(GRANULARITY)


def recipe_of_experts(recipe: LinearRecipe, name: str) -> LinearRecipe:
    """Return the recipe of experts from the linears': weights in blocks, no outlier channels."""
    weight = cast_of_experts(recipe.weight)
    return replace(recipe, weight=weight, name=name, outliers=None, outlier_channels=0)


def multiplies_experts(expert_products: str, backend: str) -> bool:
    # "auto": the grouped kernels are measured on Hopper, where these backends multiply blocks, and never ran on
    # Blackwell. Emulated, they are slower than dequantizing.
    return expert_products == "fp8" or (expert_products == "auto" and backend in ("cublas", "deep_gemm"))


def shape_of(parameter: torch.Tensor | None) -> torch.Size:
    """Return the full shape of a parameter, sharded by ZeRO-3 or not; empty for None."""
    return torch.Size() if parameter is None else getattr(parameter, "ds_shape", parameter.shape)
