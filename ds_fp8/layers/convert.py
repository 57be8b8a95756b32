"""Conversion of a Hugging Face model in place: FP8Linear, FP8Experts, FP8 attention, fused decoder layers; and back.

selection.py, experts/selection.py and decoder/structure.py decide which layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.config.plans import GroupPlan
from ds_fp8.config.schema import nearest
from ds_fp8.layers.attention.format import (
    AttentionFormat,
    is_attention,
    restore_attention,
    runs_in_fp8,
    use_fp8_attention,
)
from ds_fp8.layers.decoder.attention import use_fastest_kernels, use_own_kernels
from ds_fp8.layers.decoder.decoder import Fused, FusedAttentionHalf, Fusion, fuse_decoder, unfuse
from ds_fp8.layers.experts.experts import ExpertsConversion, FP8Experts, convert_experts, restore_experts
from ds_fp8.layers.experts.routing import count_without_sync
from ds_fp8.layers.experts.selection import experts_left, multiplies_experts, names_of_experts
from ds_fp8.layers.head.loss import FusedHead, fuse_loss, withholds_logits
from ds_fp8.layers.linear.linear import LAYERS, FP8Linear
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.selection import (
    OVERRIDDEN,
    Filter,
    first_matches,
    in_expert_list,
    linear_layers,
    matches,
    unconverted,
)


@dataclass(frozen=True)
class LayersPlan:
    """The computation of a model's layers."""

    recipe: LinearRecipe
    overrides: Mapping[str, LinearRecipe | None]  # by pattern, the first match applies; None: BF16
    group: GroupPlan
    expert_products: str  # "auto", "bf16" or "fp8"
    attention: str  # "bf16", "e4m3" or "auto"
    fuses: bool


@dataclass(frozen=True)
class Conversion:
    """Result of `convert`: names of the linears in FP8, and of the others with the reason (`left`)."""

    recipe: LinearRecipe  # of layers without an override
    converted: list[str]
    left: dict[str, str]
    unmatched: list[str]  # the user's skip patterns that match no linear
    overrides: dict[str, list[str]]  # names of the layers by pattern of fp8.linear.overrides; the first match counts
    experts: ExpertsConversion
    attention: AttentionFormat | None  # None: BF16
    fusion: Fusion

    @property
    def leaf_classes(self) -> set[type]:
        return self.fusion.classes | self.experts.classes


def convert(model: nn.Module, plan: LayersPlan, filter: Filter | None = None) -> Conversion:
    """Convert a model to FP8 in place: its linears, experts, attention, and fused decoder layers.

    As ds_fp8.convert (engine/initialize.py), by a plan. An earlier conversion is undone first.

    Raises:
        UserError: An override matches no layer, no layer can run in FP8, or an MLP cannot be tiled.
    """
    recipe, group = plan.recipe, plan.group
    layers, experts = linear_layers(model), names_of_experts(model)
    named = [*layers, *experts]
    # Before anything changes: a model that is refused stays what an earlier conversion made of it.
    _check_patterns(plan.overrides, named)
    pattern_of, overrides = first_matches(named, plan.overrides), {pattern: [] for pattern in plan.overrides}

    def recipe_of(name: str) -> LinearRecipe:
        return plan.overrides[pattern_of[name]] if name in pattern_of else recipe

    restore(model)
    restore_attention(model)
    left = unconverted(model, group, filter)
    converted = [name for name in layers if name not in left]
    for name in converted:
        own = recipe_of(name)
        if in_expert_list(name):
            # outlier channels are chosen by all ranks together, and not every rank calls this layer
            own = replace(own, outlier_channels=0)
        LAYERS.get(type(own), FP8Linear).swap_in(layers[name], name, own, model)
    multiply = multiplies_experts(plan.expert_products, recipe.backend)
    converted_experts = convert_experts(model, experts_left(model, group), recipe_of, multiply)
    if experts:
        count_without_sync(model)
    reasons = left | converted_experts.left
    for name, pattern in pattern_of.items():
        if reasons.get(name, OVERRIDDEN).startswith(OVERRIDDEN):
            overrides[pattern].append(name)
    if not (converted or converted_experts.converted or any(why.startswith(OVERRIDDEN) for why in left.values())):
        raise _nothing_converted(left)
    attention, fusion = None, Fusion()
    if plan.attention != "bf16":
        attention = use_fp8_attention(model, plan.attention == "auto")
    # last: fused layers read the recipes of their linears, and the attention implementation
    if plan.fuses:
        use_fastest_kernels(model)
        fusion = fuse_decoder(model)
    if recipe.mlp_tile_tokens is not None:
        _check_tiles(model, fusion)
    # not the default patterns, whose layers many models do not have
    skips = group.skip if group.skip_is_given else ()
    unmatched = [pattern for pattern in skips if not any(matches(name, pattern) for name in named)]
    return Conversion(recipe, converted, left, unmatched, overrides, converted_experts, attention, fusion)


def _nothing_converted(left: dict[str, str]) -> UserError:
    first = {reason: name for name, reason in reversed(left.items())}
    reasons = "; ".join(f"{name}: {reason}" for reason, name in reversed(first.items()))
    skipped = "fp8.linear.skip" in reasons
    return UserError(
        "the model has no linear layer that can run in FP8" + (f" ({reasons})" if reasons else ""),
        key="fp8.linear.skip" if skipped else "fp8.enabled",
        remedy=('name fewer layers in "skip", or ' if skipped else "") + 'set "fp8": {"enabled": false}',
    )


def _check_tiles(model: nn.Module, fusion: Fusion) -> None:
    """Raise UserError for a decoder layer whose MLP is not tiled."""
    layers = [name for name, layer in model.named_modules() if hasattr(layer, "self_attn") and hasattr(layer, "mlp")]
    mlps = {name: f"{name}.mlp" for name in layers}
    untiled = next((name for name in layers if name not in fusion.layers and mlps[name] not in fusion.mlps), None)
    if untiled is None and layers:
        return
    reasons = [fusion.left[name] for name in (untiled, mlps.get(untiled)) if name in fusion.left]
    why = reasons[-1] if reasons else 'its MLP is not fused (with fp8.fuse "off", or kept in BF16)'
    raise UserError(
        f"the MLP of {untiled} cannot be computed in tiles: {why}"
        if layers
        else "the model has no layer that is fused",
        key="fp8.activations.mlp_tile_tokens",
        remedy='remove "mlp_tile_tokens", or change what the message names',
    )


def _check_patterns(overrides: Iterable[str], layers: Iterable[str]) -> None:
    for pattern in overrides:
        if not any(matches(name, pattern) for name in layers):
            parts = [name.split(".") for name in layers]
            usual = {
                ".".join([*each[:end], "*"]) for each in parts for end in range(1, len(each))
            }  # "model.layers.0.*"
            usual |= {f"*.{each[-1]}" for each in parts}
            raise UserError(
                f'fp8.linear.overrides "{pattern}" matches no linear layer of this model',
                key=f'fp8.linear.overrides["{pattern}"]',
                remedy=nearest(pattern, {*usual, *layers}),
            )


def layer_of(model: nn.Module, product: str) -> str:
    """Return the name of the fused layer or MLP, or else the module, that computes a product (LinearRecipe.name)."""
    for name, module in model.named_modules():
        part = "self_attn." if isinstance(module, FusedAttentionHalf) else ""
        if isinstance(module, Fused) and product.startswith(f"{name}.{part}"):
            return name
    return product


def stop_casting(model: nn.Module) -> None:
    """Undo the conversion of a model; the loss stays fused, with products in BF16."""
    restore(model)
    restore_attention(model)
    if withholds_logits(model):
        fuse_loss(model)


def drop_outlier_channels(model: nn.Module, in_bf16: Iterable[str]) -> list[nn.Parameter]:
    """Let linears compute without outlier channels, nothing fused, and the layers named in BF16.

    Returns the weights of the latter that were in FP8.
    """
    modules = dict(model.named_modules())
    for module in modules.values():
        if isinstance(module, Fused):
            unfuse(module)
    weights = [weight for name in in_bf16 if name in modules for weight in restore(modules[name])]
    for module in modules.values():
        if isinstance(module, FP8Linear):
            module.recipe = replace(module.recipe, outliers=None, outlier_channels=0)
    return weights


def casts(model: nn.Module) -> bool:
    """Return whether any part of a model computes in FP8."""
    return any(
        isinstance(module, (FP8Linear, FP8Experts))
        or (isinstance(module, FusedHead) and module.recipe is not None)
        or (is_attention(module) and runs_in_fp8(module))
        for module in model.modules()
    )


def restore(layer: nn.Module) -> list[nn.Parameter]:
    """Undo the conversion of a module's linears and experts, and its fusion; return the weights that were in FP8."""
    for module in list(layer.modules()):
        if isinstance(module, Fused):
            unfuse(module)
    use_own_kernels(layer)
    linears = [module for module in layer.modules() if isinstance(module, FP8Linear)]
    for linear in linears:
        linear.__class__ = linear.own_class
        for name in ("recipe", "input_is_saved", "own_class"):
            linear.__dict__.pop(name, None)
    experts = [module for module in layer.modules() if isinstance(module, FP8Experts)]
    return [linear.weight for linear in linears] + [weight for module in experts for weight in restore_experts(module)]
