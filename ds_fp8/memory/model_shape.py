"""Shapes of a model for the estimates, read off the model built on the meta device and converted as in training.

Because the very code that converts and fuses decides here too, an estimate knows which layers will be fused, which
linears stay in BF16 and whether the loss does without logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.layers.convert import convert
from ds_fp8.layers.decoder.decoder import FusedAttentionHalf, FusedDecoderLayer, FusedMLP
from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.layers.experts.implementation import PRODUCTS
from ds_fp8.layers.experts.selection import multiplies_experts
from ds_fp8.layers.head.loss import fuse_loss
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.recipe import LinearRecipe

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLP = PROJECTIONS[4:]


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the model."""

    numel: int
    cast: CastSpec | None
    """Cast of the weight of an FP8 linear, or of experts gathered in FP8."""
    trainable: bool
    residuals: int = 0
    """Bytes of the residuals of its outlier channels, which every rank keeps."""

    @property
    def in_fp8(self) -> bool:
        """Return whether this is the weight of an FP8 linear, or of experts gathered in FP8."""
        return self.cast is not None


@dataclass(frozen=True)
class ExpertsShape:
    """Gated experts [E, 2I, H] and [E, H, I], of which every token goes to some."""

    chosen: int
    """Experts of a token, k."""
    intermediate: int
    """I"""
    count: int
    """E"""
    multiplied: bool
    """True if their products are FP8 ones of this package."""
    shared_gate: bool
    """True if the output of a shared expert is multiplied by a gate, as in Qwen2-MoE."""


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer with attention and a gated MLP, or experts. Sizes in elements; T tokens, H hidden."""

    hidden: int
    intermediate: int
    """F, beside experts that of the shared one, 0 where there is none."""
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: bool
    """True if q and k are normed by heads."""
    fp8: Mapping[str, LinearRecipe]
    """FP8 linears among PROJECTIONS, with their casts."""
    fused: bool
    """True if it runs as a FusedDecoderLayer."""
    fused_mlp: bool
    """True if its MLP alone runs fused."""
    parameters: tuple[ParameterShape, ...]
    experts: ExpertsShape | None = None
    fused_attention: bool = False
    """True if its attention half runs fused, and its MLP is called."""

    @property
    def query(self) -> int:
        """Return the features of q, and of the output of attention."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Return the features of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class ModelShape:
    """A causal language model: embeddings, decoder layers, final norm and head."""

    layers: tuple[LayerShape, ...]
    outside: tuple[ParameterShape, ...]
    """Parameters outside of the layers but for the head's: embeddings, norms."""
    head: ParameterShape | None
    """The head's weight; None where it is the embedding's."""
    vocabulary: int
    hidden: int
    embedding: int
    """Elements of the token embedding."""
    loss_without_logits: bool
    longest: int | None
    """max_position_embeddings, where there is such a limit."""

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """Return all of them, in the order of the model: embeddings and norms, layers, head."""
        inside = tuple(parameter for layer in self.layers for parameter in layer.parameters)
        return (*self.outside, *inside, *([self.head] if self.head else []))

    @property
    def numel(self) -> int:
        """Return the elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def head_numel(self) -> int:
        """Return the elements that the head multiplies with, its own or the embedding's."""
        return self.vocabulary * self.hidden


def model_shape(config: PretrainedConfig, fp8: FP8Config, device: str = "cuda") -> ModelShape:
    """Return the shape of the model that `config` describes, trained with `fp8` on "cuda" or "cpu".

    No weight is allocated.

    Raises:
        UserError: The layers are not attention (q, k, v, o) and a gated MLP (gate, up, down) or experts of
            transformers' interface, or `ds_fp8.convert` refuses the model.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if fp8.enabled:
        convert(model, _anywhere(fp8, device))
    loss_without_logits = fp8.fuses_loss and fuse_loss(model).fused
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers = {name: layer for name, layer in model.named_modules() if _is_layer(layer)}
    if not layers or head is None or embedding is None:
        raise UserError(
            f"there is no estimate for {type(model).__name__}: its layers are not attention with q, k, v and o_proj "
            "and an MLP with gate, up and down_proj or gated experts",
            key="model",
            remedy="measure it: ds-fp8 sweep",
        )
    inside = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    own_head = head.weight is not embedding.weight
    head_ids = {id(parameter) for parameter in head.parameters()} if own_head else set()
    in_fp8 = {id(module.weight): module.recipe for module in model.modules() if isinstance(module, FP8Linear)}
    experts = [module for module in model.modules() if isinstance(module, FP8Experts)]
    in_fp8 |= {id(weight): recipe for module in experts for weight, recipe in module.recipes_of_weights()}
    outside = [p for p in model.parameters() if id(p) not in inside | head_ids]
    return ModelShape(
        tuple(_layer_shape(layer, in_fp8, config) for layer in layers.values()),
        tuple(_shape(parameter, in_fp8) for parameter in outside),
        _shape(head.weight, in_fp8) if own_head else None,
        head.weight.shape[0],
        head.weight.shape[1],
        embedding.weight.numel(),
        loss_without_logits,
        getattr(config, "max_position_embeddings", None),
    )


def _anywhere(fp8: FP8Config, device: str) -> FP8Config:
    """Return the same for any machine: which backend multiplies does not change what is kept.

    But for two cases: Transformer Engine has no scales per row, which stacked weights with a scale each need, and
    experts are multiplied in FP8 beside some.
    """
    linear = fp8.linear
    backend = linear.backend
    if backend == "auto":
        backend = "cublas" if device == "cuda" else "reference"
    stacks = not (linear.backend == "transformer_engine" and linear.weight.granularity == "tensor")
    products = "fp8" if multiplies_experts(linear.expert_products, backend) else "bf16"
    changes = {"linear": linear.model_copy(update={"backend": "reference", "expert_products": products})}
    return fp8.model_copy(update=changes if stacks else {**changes, "fuse": "off"})


def _is_layer(module: nn.Module) -> bool:
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    return _has_linears(attention, PROJECTIONS[:4]) and (_has_linears(mlp, MLP) or _experts_of(mlp) is not None)


def _has_linears(module: nn.Module | None, names: Sequence[str]) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _experts_of(mlp: nn.Module | None) -> nn.Module | None:
    """Return the gated experts, as transformers' interface has them, of an MLP that consists of some, or None."""
    experts = getattr(mlp, "experts", None)
    return experts if getattr(experts, "has_gate", False) and hasattr(experts, "gate_up_proj") else None


def _layer_shape(layer: nn.Module, in_fp8: Mapping[int, LinearRecipe], config: PretrainedConfig) -> LayerShape:
    attention, mlp, experts = layer.self_attn, layer.mlp, _experts_of(layer.mlp)
    if experts is not None:  # beside them may be one for all tokens
        mlp = next((part for part in mlp.children() if _has_linears(part, MLP)), None)
    linears = {name: getattr(attention, name) for name in PROJECTIONS[:4]}
    if mlp is not None:
        linears |= {name: getattr(mlp, name) for name in MLP}
    head_dim = attention.head_dim
    half = isinstance(layer, FusedAttentionHalf)
    return LayerShape(
        hidden=linears["q_proj"].in_features,
        intermediate=0 if mlp is None else linears["down_proj"].in_features,
        heads=linears["q_proj"].out_features // head_dim,
        kv_heads=linears["k_proj"].out_features // head_dim,
        head_dim=head_dim,
        head_norms=hasattr(attention, "q_norm"),
        fp8={name: linear.recipe for name, linear in linears.items() if id(linear.weight) in in_fp8},
        fused=isinstance(layer, FusedDecoderLayer) and not half,
        fused_mlp=isinstance(mlp, FusedMLP),
        parameters=tuple(_shape(parameter, in_fp8) for parameter in layer.parameters()),
        experts=None if experts is None else _experts_shape(experts, layer.mlp, config),
        fused_attention=half,
    )


def _experts_shape(experts: nn.Module, around: nn.Module, config: PretrainedConfig) -> ExpertsShape:
    count, _, intermediate = experts.down_proj.shape
    chosen = config.get_text_config().num_experts_per_tok
    return ExpertsShape(chosen, intermediate, count, hasattr(experts, PRODUCTS), hasattr(around, "shared_expert_gate"))


def _shape(parameter: nn.Parameter, in_fp8: Mapping[int, LinearRecipe]) -> ParameterShape:
    recipe = in_fp8.get(id(parameter))
    if recipe is None:
        return ParameterShape(parameter.numel(), None, parameter.requires_grad)
    columns = parameter.shape[-1]
    residuals = parameter.numel() // columns * min(recipe.outlier_channels, columns)
    return ParameterShape(parameter.numel(), recipe.weight, parameter.requires_grad, residuals)
