"""The recipe that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.linear import LinearCasts
from ds_fp8.gemm import select_backend
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.research_recipe import ResearchRecipe
from ds_fp8.monitor.cast_monitor import CastMonitor


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
    products = [
        (x, w),
        (dy, replace(w, granularity=dgrad_weight)),
        (dy, replace(x, granularity=wgrad_input)),
    ]
    common = {
        "wgrad_input": wgrad_input,
        "backend": select_backend(linear.backend, products),
        "fast_accumulation": linear.accumulation == "fast",
        "save": config.activations.save,
        "recompute": config.activations.recompute,
        "mlp_tile_tokens": config.activations.mlp_tile_tokens,
        "monitor": monitor or CastMonitor(config.monitor.every),
        "outlier_channels": casts.outlier_channels,
    }
    rotation = casts.rotation
    if not rotation.products and casts.recast.spec is None:
        return LinearRecipe(x, w, dy, **common)
    along_k, along_tokens = rotation.along(rotation.fprop, "tokens"), rotation.along(rotation.wgrad, "tokens")
    return ResearchRecipe(
        replace(x, rotation=along_k),
        replace(w, rotation=along_k),
        replace(dy, rotation=rotation.along(rotation.dgrad, "tokens")),
        wgrad_input_rotation=along_tokens,
        wgrad_grad_output_rotation=along_tokens if rotation.wgrad == "tokens" else None,
        second_cast=casts.recast.spec,
        **common,
    )
