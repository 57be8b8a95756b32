"""The "fp8" section as plans, made here and nowhere else: a recipe for every kind of linear, GroupPlan, StepPlan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.linear import LinearCasts
from ds_fp8.config.plans import GradientReduction, GroupPlan, StepPlan
from ds_fp8.engine.optimizer import needs_own_optimizer
from ds_fp8.gemm import select_backend
from ds_fp8.layers.convert import Conversion, LayersPlan
from ds_fp8.layers.convert import convert as convert_layers
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.selection import Filter
from ds_fp8.monitor.cast_monitor import CastMonitor

RECIPES: dict[type[LinearCasts], Callable[..., LinearRecipe]] = {}  # of research, by its sections


@dataclass(frozen=True)
class Plans:
    """All plans of a configuration."""

    layers: LayersPlan
    group: GroupPlan
    step: StepPlan


def plans_of(config: FP8Config, monitor: CastMonitor | None = None) -> Plans:
    """Return the plans of an "fp8" section. Raises UserError where this machine cannot run its casts."""
    recipe = recipe_from_config(config, monitor)
    overrides = {
        pattern: None if casts == "bf16" else recipe_from_config(config, recipe.monitor, casts)
        for pattern, casts in config.linear.overrides.items()
    }
    how = config.linear.expert_products, config.attention.format, config.fuse == "auto"
    group = group_plan(config)
    return Plans(LayersPlan(recipe, overrides, group, *how), group, step_plan(config))


def group_plan(config: FP8Config) -> GroupPlan:
    linear = config.linear
    return GroupPlan(
        weight=linear.weight.spec,
        overrides={
            pattern: None if casts == "bf16" else casts.weight.spec for pattern, casts in linear.overrides.items()
        },
        skip=linear.skip,
        skip_is_given="skip" in linear.model_fields_set,
        gathers=config.param_gather.format != "bf16",
        frozen_unsharded=config.param_gather.frozen == "whole",
        coded_masters=config.enabled and config.optimizer.master != "fp32",
    )


def step_plan(config: FP8Config) -> StepPlan:
    reduce = config.grad_reduce
    return StepPlan(
        moments=config.optimizer.precision(),
        own_optimizer=needs_own_optimizer(config),
        reduction=GradientReduction(reduce.format, reduce.scale) if reduce.format != "bf16" else None,
        graph=config.graph,
        min_snr_db=config.monitor.min_snr_db,
        falls_back=config.monitor.fallback,
    )


def recipe_from_config(
    config: FP8Config, monitor: CastMonitor | None = None, casts: LinearCasts | None = None
) -> LinearRecipe:
    """Return the recipe of a configuration, resolved on this machine.

    Args:
        config: The whole "fp8" section.
        monitor: Counts what casts lose; by default one that `config.monitor` describes.
        casts: Those of the layers that an override means; by default those of `config.linear` itself.

    Raises:
        UserError: The configured backend cannot run these casts.
    """
    linear, casts = config.linear, casts or config.linear
    wgrad_input = casts.wgrad.input or casts.input.granularity
    x, w, dy = casts.input.spec, casts.weight.spec, casts.grad_output.spec
    dgrad_weight = "tensor" if w.granularity == "row" else w.granularity
    products = [(x, w), (dy, replace(w, granularity=dgrad_weight)), (dy, replace(x, granularity=wgrad_input))]
    options: dict[str, Any] = {
        "input": x,
        "weight": w,
        "grad_output": dy,
        "wgrad_input": wgrad_input,
        "backend": select_backend(linear.backend, products),
        "save": config.activations.save,
        "recompute": config.activations.recompute,
        "mlp_tile_tokens": config.activations.mlp_tile_tokens,
        "monitor": monitor or CastMonitor(config.monitor.every),
        "outlier_channels": casts.outlier_channels,
    }
    make = RECIPES.get(type(casts))
    return LinearRecipe(**options) if make is None else make(casts, config, **options)


def convert(
    model: nn.Module,
    config: FP8Config | None = None,
    monitor: CastMonitor | None = None,
    filter: Filter | None = None,
) -> Conversion:
    """Convert a model as ds_fp8.convert does, with the preset of `config` whatever the weights are."""
    return convert_layers(model, plans_of(config or FP8Config(), monitor).layers, filter)
