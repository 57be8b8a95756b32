"""Convert a Hugging Face model in place: linears become FP8Linear, experts FP8Experts, and decoder layers are fused.

Which layers, selection.py decides; which decoder layers, decoder.py. One layer goes back by `restore`.

Find the products of a converted model that DeepGEMM computes, so that their kernels are compiled beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

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
from ds_fp8.layers.decoder.decoder import FusedAttentionHalf, FusedDecoderLayer, FusedMLP, Fusion, fuse_decoder, unfuse
from ds_fp8.layers.experts.experts import ExpertsConversion, FP8Experts, convert_experts, restore_experts
from ds_fp8.layers.experts.routing import count_without_waiting
from ds_fp8.layers.experts.selection import backend_of_experts, experts_left, multiplies_experts, names_of_experts
from ds_fp8.layers.head.loss import FusedHead, fuse_loss, withholds_logits
from ds_fp8.layers.linear.linear import LAYERS, FP8Linear
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.selection import (
    OVERRIDDEN,
    Filter,
    first_matches,
    linear_layers,
    matches,
    of_listed_expert,
    unconverted,
)


@dataclass(frozen=True)
class LayersPlan:
    """How the layers of a model compute."""

    recipe: LinearRecipe
    overrides: Mapping[str, LinearRecipe | None]  # by pattern, the first match applies; None: BF16
    group: GroupPlan
    expert_products: str  # "auto", "bf16" or "fp8"
    attention: str  # "bf16", "e4m3" or "auto"
    fuses: bool


@dataclass(frozen=True)
class Override:
    """The recipe that one pattern of fp8.linear.overrides gives, and the layers it applies to."""

    recipe: LinearRecipe | None
    """None: BF16."""
    linears: list[str] = field(default_factory=list)
    """Names of the layers that it gave FP8 with its casts, or kept in BF16."""


@dataclass(frozen=True)
class Conversion:
    """Result of `convert`: names of the linears that became FP8, and of those that did not with the reason."""

    recipe: LinearRecipe
    """Recipe of the layers that no override matches."""
    converted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    """Skip patterns of the user's that name no linear."""
    overrides: dict[str, Override] = field(default_factory=dict)
    """By pattern, in the order they are tried."""
    fusion: Fusion = field(default_factory=Fusion)
    attention: AttentionFormat | None = None
    """None: attention is not in FP8."""
    experts: ExpertsConversion = field(default_factory=ExpertsConversion)
    """3-D parameters that ZeRO-3 can gather in FP8."""

    @property
    def leaf_classes(self) -> set[type]:
        return self.fusion.classes | self.experts.classes


def convert(model: nn.Module, plan: LayersPlan, filter: Filter | None = None) -> Conversion:
    """Let the linear layers of a model compute in FP8, in place, and fuse its decoder layers where they can be.

    As ds_fp8.convert does (engine/initialize.py).
    """
    recipe, group = plan.recipe, plan.group
    layers, experts = linear_layers(model), names_of_experts(model)
    named = [*layers, *experts]
    # Before anything changes: a model that is refused stays what an earlier conversion made of it.
    _check_patterns(plan.overrides, named)
    _unfuse(model)
    use_own_kernels(model)
    for module in list(model.modules()):
        if isinstance(module, FP8Experts):
            restore_experts(module)
    restore_attention(model)
    overrides = {pattern: Override(own) for pattern, own in plan.overrides.items()}
    override_of = {name: overrides[p] for name, p in first_matches(layers, overrides).items()}
    result = Conversion(recipe, left=unconverted(model, group, filter), overrides=overrides)
    for name, layer in layers.items():
        if name not in result.left:
            own = override_of[name].recipe if name in override_of else recipe
            if of_listed_expert(name):
                # All ranks look for outlier channels together, and not all of them may call this layer.
                own = replace(own, outlier_channels=0)
            LAYERS.get(type(own), FP8Linear).swap_in(layer, name, own, model)
            result.converted.append(name)
        elif isinstance(layer, FP8Linear):
            restore(layer)
    of_experts = {name: overrides[pattern] for name, pattern in first_matches(experts, overrides).items()}
    multiply = multiplies_experts(plan.expert_products, recipe.backend)

    def recipe_of_experts(name: str) -> LinearRecipe:
        own = of_experts[name].recipe if name in of_experts else recipe
        return replace(own, backend=backend_of_experts(plan.expert_products, own.backend))

    converted = convert_experts(model, experts_left(model, group), recipe_of_experts, multiply)
    result = replace(result, experts=converted)
    if experts:
        count_without_waiting(model)
    left = result.left | converted.left
    for name, override in (override_of | of_experts).items():
        if left.get(name, OVERRIDDEN).startswith(OVERRIDDEN):
            override.linears.append(name)
    # Only the user's own patterns: the default names layers that many models do not have.
    if group.skip_is_given:
        result.unmatched.extend(p for p in group.skip if not any(matches(name, p) for name in named))
    chosen = any(reason.startswith(OVERRIDDEN) for reason in result.left.values())
    if not (result.converted or converted.converted or chosen):
        first = {reason: name for name, reason in reversed(result.left.items())}
        reasons = "; ".join(f"{name}: {reason}" for reason, name in reversed(first.items()))
        raise UserError(
            "the model has no linear layer that can run in FP8" + (f" ({reasons})" if reasons else ""),
            key="fp8.linear.skip" if "fp8.linear.skip" in reasons else "fp8.enabled",
            remedy=('name fewer layers in "skip", or ' if "fp8.linear.skip" in reasons else "")
            + 'set "fp8": {"enabled": false}',
        )
    if plan.attention != "bf16":
        result = replace(result, attention=use_fp8_attention(model, plan.attention == "auto"))
    # Last: fused layers read the recipes of their linears, and the attention implementation of their configuration.
    if plan.fuses:
        use_fastest_kernels(model)
        result = replace(result, fusion=fuse_decoder(model))
    if recipe.mlp_tile_tokens is not None:
        _check_tiles(model, result.fusion)
    return result


def _check_tiles(model: nn.Module, fusion: Fusion) -> None:
    """Raise UserError for a decoder layer whose MLP is not computed in tiles, though the configuration says so."""
    layers = [name for name, layer in model.named_modules() if hasattr(layer, "self_attn") and hasattr(layer, "mlp")]
    mlps = {name: f"{name}.mlp" for name in layers}
    whole = next((name for name in layers if name not in fusion.layers and mlps[name] not in fusion.mlps), None)
    if whole is None and layers:
        return
    reasons = [fusion.left[name] for name in (whole, mlps.get(whole)) if name in fusion.left]
    why = reasons[-1] if reasons else 'its MLP is not fused (with fp8.fuse "off", or kept in BF16)'
    raise UserError(
        f"the MLP of {whole} cannot be computed in tiles: {why}" if layers else "the model has no layer that is fused",
        key="fp8.activations.mlp_tile_tokens",
        remedy='remove "mlp_tile_tokens", or change what the message names',
    )


def _check_patterns(overrides: Iterable[str], layers: Iterable[str]) -> None:
    for pattern in overrides:
        if not any(matches(name, pattern) for name in layers):
            raise UserError(
                f'fp8.linear.overrides "{pattern}" matches no linear layer of this model',
                key=f'fp8.linear.overrides["{pattern}"]',
                remedy=nearest(pattern, {*_patterns(layers), *layers}),
            )


def _patterns(names: Iterable[str]) -> set[str]:
    """Return "*.q_proj", "model.layers.0.*" and the like: the patterns that most users mean."""
    parts = [name.split(".") for name in names]
    inside = {".".join([*each[:end], "*"]) for each in parts for end in range(1, len(each))}
    return inside | {f"*.{each[-1]}" for each in parts}


def layer_of(model: nn.Module, site: str) -> str:
    """Return the name of the layer that computes at a site: a fused decoder layer or MLP, or the module itself."""
    for name, module in model.named_modules():
        part = "self_attn." if isinstance(module, FusedAttentionHalf) else ""
        if isinstance(module, (FusedDecoderLayer, FusedMLP)) and site.startswith(f"{name}.{part}"):
            return name
    return site


def stop_casting(model: nn.Module) -> None:
    """Let a converted model compute in its own precision again: linears, decoder layers, attention and head."""
    restore(model)
    restore_attention(model)
    # The head's products go back to BF16, and the loss stays fused.
    if withholds_logits(model):
        fuse_loss(model)


def casts(model: nn.Module) -> bool:
    return any(
        isinstance(module, (FP8Linear, FP8Experts))
        or (isinstance(module, FusedHead) and module.recipe is not None)
        or (is_attention(module) and runs_in_fp8(module))
        for module in model.modules()
    )


def restore(layer: nn.Module) -> list[nn.Parameter]:
    """Let a layer compute in its own precision again, by its own class; returns the weights that were FP8's."""
    _unfuse(layer)
    use_own_kernels(layer)
    linears = [module for module in layer.modules() if isinstance(module, FP8Linear)]
    for linear in linears:
        linear.__class__ = linear.own_class
        for name in ("recipe", "input_is_saved", "own_class"):
            linear.__dict__.pop(name, None)
    experts = [module for module in layer.modules() if isinstance(module, FP8Experts)]
    return [linear.weight for linear in linears] + [weight for module in experts for weight in restore_experts(module)]


def _unfuse(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, (FusedDecoderLayer, FusedMLP)):
            unfuse(module)
