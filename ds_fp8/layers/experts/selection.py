"""Selection of experts: which are gathered and multiplied in FP8, by which recipe, and why the others are not.

Experts are 3-D parameters [E, N, K] of one module, as transformers stores them.
"""

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

INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes of the experts that transformers can compute in several ways (its ExpertsInterface)."""

GRANULARITY = "128x128"
"""Elements of experts that share a scale, whatever the linears' is: such blocks serve both products of a weight."""


def expert_weights(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of experts that a module of this name has itself, by their own names: 3-D parameters."""
    if "expert" not in f"{name} {type(module).__name__}".lower():
        return {}
    found = {own: parameter for own, parameter in module._parameters.items() if parameter is not None}
    return {own: parameter for own, parameter in found.items() if len(shape_of(parameter)) == 3}


def names_of_experts(model: nn.Module) -> list[str]:
    return [
        f"{name}.{own}".lstrip(".") for name, module in model.named_modules() for own in expert_weights(name, module)
    ]


def experts_left(model: nn.Module, plan: GroupPlan) -> dict[str, str]:
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
        return f"{type(module).__name__} is not of transformers' interface of experts"
    if module.is_transposed:
        return "stored transposed"
    if "forward" in vars(module):
        return "have a forward set on the instance"
    others = [part for part in around if type(part).__module__.startswith("peft.") and not wraps_parameter(part)]
    if "parametrizations" in module._modules or others:
        return "carry an adapter that is no LoRA of their parameters"
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


def recipe_of_experts(recipe: LinearRecipe, site: str) -> LinearRecipe:
    """Return the recipe of experts where linears have `recipe`: weights in blocks, and no outlier channels."""
    weight = cast_of_experts(recipe.weight)
    return replace(recipe, weight=weight, site=site, outliers=None, outlier_channels=0)


def multiplies_experts(expert_products: str, backend: str) -> bool:
    # On Hopper, where these backends multiply blocks, the kernels of groups have been measured; on Blackwell they have
    # not run. Where linears are emulated they are slower than decoding.
    return expert_products == "fp8" or (expert_products == "auto" and backend in ("cublas", "deep_gemm"))


def backend_of_experts(expert_products: str, backend: str) -> str:
    # DeepGEMM's products of groups have not run: they must be asked for.
    return "cublas" if expert_products == "auto" and backend == "deep_gemm" else backend


def shape_of(parameter: torch.Tensor | None) -> torch.Size:
    """Return the shape of a parameter, also of one that deepspeed.zero.Init has partitioned; empty for None."""
    return torch.Size() if parameter is None else getattr(parameter, "ds_shape", parameter.shape)
