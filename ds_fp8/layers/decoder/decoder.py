"""Fused decoder layers: a Hugging Face layer keeps its parameters, names and signature, and gets a fused forward.

    q, k, v, x = normed_heads(x)                     RMSNorm -> stacked q, k, v -> rotation
    o          = o_proj(attention(q, k, v))          FP8Linear; attention saves its output, so o_proj saves no input
    y          = gated_mlp(o, residual = x)          add -> RMSNorm -> gated MLP -> add

LoRA (PEFT) is fused too, with the adapters that are active when the forward begins.

structure.py decides by the parts of a layer and by trial runs whether this is its computation. In a layer with experts
the attention half is fused and the experts are called. A layer of another structure keeps its forward; its MLP alone is
fused if it is a gated one.

The module's class is replaced by a subclass of it. The fused forward falls back to the original one for attention
weights and for attachments to submodules (structure.py). ZeRO-3 must treat the layer as a leaf module
(`Fusion.classes`), because the fused forward does not call its submodules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_fp8.layers.attention.format import is_exchanged, runs_in_fp8
from ds_fp8.layers.decoder.attention import NormedHeads, attend, normed_heads
from ds_fp8.layers.decoder.gated_mlp import GatedMLP, MLPAdapters, MLPWeights, gated_mlp, why_not_tiled
from ds_fp8.layers.decoder.structure import (
    MLP_HALF,
    MLP_PARTS,
    PartsSnapshot,
    Unfusable,
    changes_in_place,
    gated_activation_of,
    head_layout_of,
    norm_eps,
    verify_layer,
    verify_mlp,
)
from ds_fp8.layers.experts.selection import expert_weights
from ds_fp8.layers.linear.adapters import Adapters
from ds_fp8.layers.linear.linear import FP8Linear, Swapped, base_of, call_with_adapters, runs_eagerly, swapped_class
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import GROUP, WeightGroup, can_stack


@dataclass(frozen=True)
class Fusion:
    """Result of `fuse_decoder`: names of the fused layers and MLPs, and of the others with the reason (`left`)."""

    layers: list[str] = field(default_factory=list)
    attention_halves: list[str] = field(default_factory=list)  # layers with a called MLP
    mlps: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    classes: set[type] = field(default_factory=set)  # of the fused modules: ZeRO-3 leaf modules


class Fused(Swapped):
    fused_parts: PartsSnapshot


class FusedDecoderLayer(Fused):
    fused_heads: NormedHeads
    fused_mlp: GatedMLP
    fused_returns_tuple: bool

    @runs_eagerly
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        attention = self.self_attn
        wants_weights = kwargs.get("output_attentions") or getattr(attention.config, "output_attentions", False)
        if wants_weights or position_embeddings is None or self.fused_parts.changed():
            return super().forward(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        q, k, v, residual = normed_heads(
            hidden_states,
            self.input_layernorm.weight,
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (None, None) if q_norm is None else (q_norm.weight, k_norm.weight),
            position_embeddings,
            self.fused_heads,
        )
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, attention.layer_idx)
        output = attend(attention, q, k, v, attention_mask, position_ids=position_ids, use_cache=use_cache, **kwargs)
        y = self._mlp_half(call_with_adapters(attention.o_proj, output), residual)
        return (y,) if self.fused_returns_tuple else y

    def _mlp_half(self, output: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        mlp, norm = self.mlp, self.post_attention_layernorm
        return gated_mlp(
            output, weights_of(mlp), self.fused_mlp, adapters_of(mlp), residual, norm.weight, norm_eps(norm)
        )


class FusedAttentionHalf(FusedDecoderLayer):
    """A layer with fused attention and a called MLP (router and experts)."""

    def _mlp_half(self, output: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = residual + output
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FusedMLP(Fused):
    fused_mlp: GatedMLP

    @runs_eagerly
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused_parts.changed():
            return super().forward(x)
        return gated_mlp(x, weights_of(self), self.fused_mlp, adapters_of(self))


def weights_of(mlp: nn.Module) -> MLPWeights:
    return MLPWeights(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)


def adapters_of(mlp: nn.Module) -> MLPAdapters:
    return MLPAdapters(Adapters((mlp.gate_proj, mlp.up_proj)), Adapters((mlp.down_proj,)))


def fuse_decoder(model: nn.Module) -> Fusion:
    """Fuse the decoder layers of a model in place, or their gated MLPs alone; their linears are FP8Linear already."""
    fusion = Fusion()
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "self_attn") and hasattr(layer, "mlp") and not isinstance(layer, FusedDecoderLayer):
            half = any(expert_weights(own, module) for own, module in layer.mlp.named_modules())
            try:
                _fuse_layer(layer, name, half)
            except Unfusable as reason:
                fusion.left[name] = str(reason)
                continue
            (fusion.attention_halves if half else fusion.layers).append(name)
            fusion.classes.add(type(layer))
    for name, mlp in list(model.named_modules()):
        inside = any(name.startswith(f"{layer}.") for layer in fusion.layers)
        if inside or not all(hasattr(mlp, part) for part in MLP_PARTS):
            continue
        try:
            if changes_in_place(model.get_submodule(name.rpartition(".")[0])):
                raise Unfusable(
                    "its parent computes in place, which autograd forbids on the output of a ZeRO-3 leaf module"
                )
            _fuse_mlp(mlp, name)
        except Unfusable as reason:
            fusion.left.setdefault(name, str(reason))
            continue
        fusion.mlps.append(name)
        fusion.classes.add(type(mlp))
    return fusion


def _fuse_layer(layer: nn.Module, name: str, half: bool) -> None:
    _check_own_forward(layer)
    layout = head_layout_of(layer.self_attn)
    activation = None if half else gated_activation_of(layer.mlp)
    projections = [base_of(getattr(layer.self_attn, part)) for part in ("q_proj", "k_proj", "v_proj")]
    heads_recipe = _stacked_recipe(projections).at(f"{name}.self_attn.qkv_proj")
    if not half:
        _check_mlp(layer.mlp)
    returns_tuple = verify_layer(layer, layout, activation)

    head_norm = getattr(layer.self_attn, "q_norm", None)
    layer.fused_heads = NormedHeads(
        layout, norm_eps(layer.input_layernorm), 0.0 if head_norm is None else norm_eps(head_norm), heads_recipe
    )
    for projection in projections:
        projection.recipe = heads_recipe
    layer.fused_returns_tuple = returns_tuple
    layer.fused_parts = PartsSnapshot(layer, MLP_HALF if half else ())
    # FP8 attention saves its output in FP8, and sequence parallelism that of other heads: o_proj saves its own input.
    base_of(layer.self_attn.o_proj).input_is_saved = not (runs_in_fp8(layer.self_attn) or is_exchanged(layer.self_attn))
    _group(projections)
    if not half:
        layer.fused_mlp = _fused_part(layer.mlp, f"{name}.mlp", activation)
    layer.__class__ = swapped_class(FusedAttentionHalf if half else FusedDecoderLayer, type(layer))


def _fuse_mlp(mlp: nn.Module, name: str) -> None:
    _check_own_forward(mlp)
    activation = gated_activation_of(mlp)
    _check_mlp(mlp)
    verify_mlp(mlp, activation)
    mlp.fused_mlp = _fused_part(mlp, name, activation)
    mlp.fused_parts = PartsSnapshot(mlp)
    mlp.__class__ = swapped_class(FusedMLP, type(mlp))


def _fused_part(mlp: nn.Module, name: str, activation: str) -> GatedMLP:
    gate, up, down_proj = _bases(mlp)
    gate_up, down = gate.recipe.at(f"{name}.gate_up_proj"), down_proj.recipe.at(f"{name}.down_proj")
    gate.recipe = up.recipe = gate_up
    down_proj.recipe = down
    _group([gate, up])
    return GatedMLP(activation, gate_up, down)


def unfuse(module: nn.Module) -> None:
    """Undo the fusion of a layer or MLP; its linears stay FP8Linear."""
    for name in ("fused_heads", "fused_mlp", "fused_returns_tuple", "fused_parts"):
        module.__dict__.pop(name, None)
    fused = module.self_attn if isinstance(module, FusedAttentionHalf) else module
    for part in fused.modules():
        if isinstance(part, FP8Linear):
            part.input_is_saved = False
            part.weight.__dict__.pop(GROUP, None)
    _, module.__class__ = type(module).__bases__


def _check_own_forward(module: nn.Module) -> None:
    if "forward" in vars(module):
        raise Unfusable("its forward is set on the instance (as Liger does)")


def _bases(mlp: nn.Module) -> tuple[FP8Linear, ...]:
    return tuple(base_of(part) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def _check_mlp(mlp: nn.Module) -> None:
    gate, up, down_proj = _bases(mlp)
    gate_up, down = _stacked_recipe([gate, up]), down_proj.recipe
    _check_linear(down_proj)
    if gate_up.mlp_tile_tokens is not None:
        carries = any(hasattr(mlp.get_submodule(part), "base_layer") for part in MLP_PARTS)
        why = "an MLP with an adapter is not computed in tiles" if carries else None
        why = why or why_not_tiled(gate_up) or why_not_tiled(down)
        if why is not None:
            raise Unfusable(why)


def _check_linear(linear: FP8Linear) -> None:
    if type(linear) is not FP8Linear:
        raise Unfusable("linears with fp8.linear.rotation, recast or smooth_swiglu are computed one by one")


def _stacked_recipe(linears: Sequence[FP8Linear]) -> LinearRecipe:
    """Return the common recipe of linears that become one product."""
    rows = [linear.out_features for linear in linears]
    weights, recipe = [linear.weight for linear in linears], linears[0].recipe
    if any(linear.recipe != recipe for linear in linears):
        raise Unfusable("fp8.linear.overrides quantizes linears of one product in different ways")
    _check_linear(linears[0])
    if not can_stack(rows, recipe.weight.granularity):
        heights, blocks = ", ".join(map(str, rows)), recipe.weight.granularity
        raise Unfusable(f"weights of {heights} rows cannot be stacked: {blocks} blocks would straddle")
    if len({weight.requires_grad for weight in weights}) > 1:
        raise Unfusable("one product would have frozen and trained weights")
    return recipe


def _group(linears: Sequence[nn.Linear]) -> None:
    weights = [linear.weight for linear in linears]
    for weight in weights:
        setattr(weight, GROUP, WeightGroup(weights))
