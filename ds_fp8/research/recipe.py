"""ResearchRecipe: a linear layer's recipe whose operands are rotated, rounded at random, or cast a second time.

Rotations R (layers/attention/hadamard.py) come after the factors, and are named by the dimension they go along:

    fprop  in_features   y  = (x R)(w R)ᵀ            one weight w R for both products, so that dx = (dy · w R) Rᵀ
    dgrad  tokens        dx = R (Rᵀ dy · w)
           out_features  dx = (dy R)(Rᵀ w)           weights that are cast for each product only
    wgrad  tokens        dw = (Rᵀ dy)ᵀ (Rᵀ x)
           in_features   dw = (dyᵀ · x R) Rᵀ

Quartet (arXiv 2505.14669) casts what fprop multiplied again (`recast`), so that dx and dw, rounded
stochastically, are on average the gradients of the function that fprop computed; F is fprop's rotation, R the others':

    X = cast(x F)   W = cast(w F)   M = where that cast clips nothing, of X and of W
    dx = ((cast(dy R) · cast(Rᵀ W)) ⊙ M) Fᵀ        dw = ((cast(Rᵀ dy)ᵀ · cast(Rᵀ X)) ⊙ M) Fᵀ

Smooth-SwiGLU (Fishman et al., arXiv 2409.12517): the product of a gated MLP loses its outlier channels before its cast.

    p' [T, F] = p ⊘ s        cast for down_proj          y  = p' · down'ᵀ = p · downᵀ
    down'     = down ⊙ s     columns, before their cast  dp = dy · down' ⊘ s,  ddown = dyᵀ · p' ⊙ s

Long training aligns the gate and up rows of single channels f, whose product then grows with the square of the input:
one scale for all of p leaves no bits to the other channels. The factors s [F] are powers of two, so that nothing is
rounded but by the casts, and are computed again for every batch: no state, and nothing to agree on between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor, apply_factors, quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import RECIPES
from ds_fp8.layers.attention.hadamard import Rotation, rotate, unrotate
from ds_fp8.layers.decoder.structure import MLP_PARTS
from ds_fp8.layers.linear.linear import LAYERS, FP8Linear, Products
from ds_fp8.layers.linear.recipe import Factor, LinearRecipe
from ds_fp8.layers.linear.weights import UNSHARDED, dgrad_weight, fprop_weight, transposed_weight
from ds_fp8.monitor.statistics import Rows
from ds_fp8.research.config import RecastConfig, ResearchCasts, ResearchLinear
from ds_fp8.research.formats import ResearchSpec, cast_matrix
from ds_fp8.research.formats import clipped as elements_clipped

NO_ROTATION = '{"rotation": {"fprop": null, "dgrad": null, "wgrad": null}}'  # an override that rotates nothing
MAX_EXPONENT = 60  # largest exponent of a factor: a weight times it stays far from the end of FP32


@dataclass(frozen=True)
class ResearchRecipe(LinearRecipe):
    """LinearRecipe whose casts are rotated, rounded at random or made twice; its methods do what those of that say."""

    wgrad_input_rotation: Rotation | None = None  # of x [T, K], or with `second_cast` of its cast, as wgrad's operand
    wgrad_grad_output_rotation: Rotation | None = None
    second_cast: RecastConfig | None = None
    smooth_swiglu: bool = False  # whether the down_proj of gated MLPs get Smooth-SwiGLU
    smooth: bool = False  # whether channels of x are divided by factors, and columns of w multiplied by them

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        every = self.input.rotation, self.grad_output.rotation, self.wgrad_input_rotation
        return tuple(rotation for rotation in every if rotation is not None)

    @property
    def plain(self) -> bool:
        """Return whether core computes the same."""
        casts = self.input, self.weight, self.grad_output
        return all(cast.plain for cast in casts) and not (self.rotations or self.second_cast or self.smooth_swiglu)

    def quantize_weight(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        quantized = cast_matrix(weight, self.weight, None, column_factor)
        self.observe("weight", weight, quantized, None, column_factor)
        return quantized

    def quantize_weight_columnwise(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        of_dy = self.grad_output.rotation
        # dy is rotated along N, its columns; of w [N, K] that dimension is the rows.
        rotation = None if of_dy is None or of_dy.axis == 0 else replace(of_dy, axis=0)
        if self.second_cast is not None:
            own = cast_matrix(weight, self.weight, None, column_factor)
            return self._cast_again(own, self.weight.granularity, rotation)
        return cast_matrix(weight, replace(self.weight, rotation=rotation), None, column_factor, columnwise=True)

    def weight_times(self, weight: torch.Tensor, factors: torch.Tensor) -> QuantizedTensor:
        """Return fprop's operand of a weight [N, K] whose columns are multiplied by powers of two [K].

        Gathered bytes are multiplied and cast again; with power-of-two scales that loses no bits but of numbers that
        leave the format's range.
        """
        gathered, spec = getattr(weight, UNSHARDED, None), self.weight
        if gathered is None:
            return self.quantize_weight(weight, factors)
        # The monitor is not shown this cast: the gather showed it the one from the masters.
        return quantize(gathered.dequantize(), spec.format, spec.granularity, spec.scale, column_factor=factors)

    def saved_input(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        kept = super().saved_input(data, scale)
        return kept if self.second_cast is None else replace(kept, scale_type=self.second_cast.scale)

    def quantize_input(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        if self.input.plain:
            return super().quantize_input(x, row_factor, column_factor)
        quantized = cast_matrix(x, self.input, row_factor, column_factor)
        self.observe("input", x, quantized, row_factor, column_factor)
        return quantized

    def quantize_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        if self.second_cast is not None:
            cast = cast_matrix(x, self.input, row_factor, column_factor)
            return self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        spec = replace(self.input, granularity=self.wgrad_input, rotation=self.wgrad_input_rotation)
        return cast_matrix(x, spec, row_factor, column_factor, columnwise=True)

    def quantize_input_both(
        self, x: torch.Tensor, column_factor: Factor = None
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        plain = self.input.plain and self.wgrad_input_rotation is None and self.second_cast is None
        if plain and column_factor is None:
            return super().quantize_input_both(x)
        cast = cast_matrix(x, self.input, None, column_factor)
        if self.second_cast is not None:
            both = cast, self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        else:
            both = cast, self.quantize_input_columnwise(x, column_factor=column_factor)
        self.observe("input", x, cast, None, column_factor)
        return both

    def quantize_gradient(
        self, dy: torch.Tensor, rowwise: str | None, columnwise: str | None, column_factor: Factor = None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        if self.grad_output.plain and self.wgrad_grad_output_rotation is None:
            return super().quantize_gradient(dy, rowwise, columnwise, column_factor)
        row = column = None
        if rowwise is not None:
            row = cast_matrix(dy, self.grad_output, None, column_factor)
        if columnwise is not None:
            spec = replace(self.grad_output, rotation=self.wgrad_grad_output_rotation)
            column = cast_matrix(dy, spec, None, column_factor, columnwise=True)
        return row, column

    def clipped(self, x: torch.Tensor, spec: CastSpec, cast: QuantizedTensor) -> torch.Tensor | None:
        wanted = self.second_cast is not None and self.second_cast.clipped == "zero"
        return elements_clipped(rotate(x, spec.rotation), cast) if wanted else None

    def _cast_again(self, cast: QuantizedTensor, granularity: str, rotation: Rotation | None) -> QuantizedTensor:
        """Return what fprop multiplied [M, K] as dgrad or wgrad reads it: [K, M]."""
        again = ResearchSpec(cast.format, granularity, self.second_cast.scale, self.second_cast.rounding, rotation)
        return cast_matrix(cast.dequantize(torch.float32), again, columnwise=True)

    def observe(
        self,
        tensor_class: str,
        x: torch.Tensor | Rows,
        quantized: QuantizedTensor,
        row_factor: Factor = None,
        column_factor: Factor = None,
    ) -> None:
        rotation = getattr(self, tensor_class).rotation
        if self.monitor.active and rotation is not None:
            x, row_factor, column_factor = rotate(apply_factors(x, row_factor, column_factor), rotation), None, None
        super().observe(tensor_class, x, quantized, row_factor, column_factor)


class ResearchProducts(Products):
    """The three products with rotated or smoothed operands, and second casts."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: nn.Parameter, recipe: ResearchRecipe, save: str, dgrad: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        factors = channel_factors(x) if recipe.smooth else None
        inverse = None if factors is None else factors.reciprocal()
        wgrad = save != "nothing" and weight.requires_grad
        if wgrad and save == "fp8":
            cast, columnwise = recipe.quantize_input_both(x, inverse)
            saved = [columnwise.data, columnwise.scale]
        else:
            cast, saved = recipe.quantize_input(x, column_factor=inverse), [x] if wgrad else []
        beyond = recipe.clipped(x, recipe.input, cast) if save != "nothing" and dgrad else None
        w = fprop_weight([weight], recipe) if factors is None else recipe.weight_times(weight, factors)
        return recipe.multiply(recipe.with_outliers(cast, x), w, x.dtype), [factors, beyond, *saved]

    @staticmethod
    def backward(
        dy: torch.Tensor,
        weight: nn.Parameter,
        recipe: ResearchRecipe,
        save: str,
        saved: list[torch.Tensor | None],
        wants: tuple[bool, bool],
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (factors, beyond, *saved), dx, w, factor = saved, None, None, None
        inverse = None if factors is None else factors.reciprocal()
        if wants[0] and factors is None:
            w, factor = dgrad_weight([weight], recipe)
        elif wants[0] and recipe.quantizes_weight_twice:
            w = recipe.quantize_weight_columnwise(weight, factors)
        elif wants[0]:
            w, factor = transposed_weight(recipe.weight_times(weight, factors), recipe.transposed)
        cast, columnwise = recipe.quantize_grad_output(dy, *wants, factor)
        if wants[0]:
            dx = _unrotated_dgrad(recipe, recipe.multiply(cast, w, dtype), len(dy), beyond)
            # With factors s forward multiplied (x / s) by (W s): dx is divided by s, dw multiplied by it.
            dx = dx if factors is None else dx.mul_(inverse)
        if not wants[1]:
            return dx, None
        kept = recipe.saved_input if save == "fp8" else partial(recipe.quantize_input_columnwise, column_factor=inverse)
        dw = _unrotated_wgrad(recipe, recipe.multiply(columnwise, kept(*saved), weight.dtype), weight)
        return dx, dw if factors is None else dw.mul_(factors)


def _unrotated_dgrad(
    recipe: ResearchRecipe, dx: torch.Tensor, tokens: int, clipped_input: torch.Tensor | None
) -> torch.Tensor:
    of_dy = recipe.grad_output.rotation
    # First what was rotated last: tokens of the product, then the mask in fprop's rotated space, then that rotation.
    if of_dy is not None and of_dy.axis == 0:
        dx = unrotate(dx, of_dy, tokens)
    if clipped_input is not None:
        dx = dx.masked_fill(clipped_input, 0)
    return dx if recipe.quantizes_weight_twice and recipe.second_cast is None else unrotate(dx, recipe.weight.rotation)


def _unrotated_wgrad(recipe: ResearchRecipe, dw: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if recipe.second_cast is not None:
        # Cast once more here: keeping a mask of every weight between forward and backward would take a byte an element.
        beyond = recipe.clipped(weight, recipe.weight, cast_matrix(weight, recipe.weight))
        return unrotate(dw if beyond is None else dw.masked_fill(beyond, 0), recipe.input.rotation)
    of_x = recipe.wgrad_input_rotation
    return dw if of_x is None or of_x.axis == 0 else unrotate(dw, of_x)


class ResearchFP8Linear(FP8Linear):
    products = ResearchProducts

    @classmethod
    def swap_in(cls, layer: nn.Linear, name: str, recipe: ResearchRecipe, model: nn.Module) -> None:
        _check_blocks(recipe, name, layer)
        special = bool(recipe.rotations or recipe.second_cast)
        if recipe.smooth_swiglu and _is_down_proj(name, model):
            for found, problem, remedy in (
                (recipe.outlier_channels, "outlier_channels both treat down_proj's outliers", ""),
                (
                    *(special, "rotation or recast both change down_proj's operands"),
                    f', or "overrides": {{"*.down_proj": {NO_ROTATION}}}, and of "recast" {{"of": "high_precision"}}',
                ),
            ):
                if found:
                    problem, remedy = (
                        f"fp8.linear.smooth_swiglu and fp8.linear.{problem}",
                        f'"smooth_swiglu": false{remedy}',
                    )
                    raise UserError(problem, key="fp8.linear.smooth_swiglu", remedy=remedy)
            recipe = replace(recipe, smooth=True)
        # Of all other layers core multiplies what this recipe casts, and may fuse them.
        layer_class = super() if special or recipe.smooth else FP8Linear
        layer_class.swap_in(layer, name, recipe, model)


def _check_blocks(recipe: ResearchRecipe, name: str, layer: nn.Linear) -> None:
    sides = (
        (layer.in_features, [recipe.input.rotation, recipe.wgrad_input_rotation]),
        (layer.out_features, [recipe.grad_output.rotation]),
    )
    for features, rotations in sides:
        for rotation in rotations:
            if rotation is not None and rotation.axis == 1 and features % rotation.block:
                raise UserError(
                    f"{name} is {layer.out_features} x {layer.in_features}, and {features} features are not a "
                    f"multiple of blocks of {rotation.block}",
                    key="fp8.linear.rotation.block",
                    remedy=f'a smaller "block", or "overrides": {{"{name}": {NO_ROTATION}}}',
                )


def _is_down_proj(name: str, model: nn.Module) -> bool:
    parent, _, leaf = name.removesuffix(".base_layer").rpartition(".")
    mlp = model.get_submodule(parent) if leaf == "down_proj" else None
    return mlp is not None and all(hasattr(mlp, part) for part in MLP_PARTS)


def research_recipe(
    casts: ResearchCasts, config: FP8Config, input: CastSpec, weight: CastSpec, grad_output: CastSpec, **others: Any
) -> LinearRecipe:
    """Return the recipe of a section's casts: core's own where core computes them."""
    rotation = casts.rotation
    along_k, along_tokens = rotation.along(rotation.fprop, "tokens"), rotation.along(rotation.wgrad, "tokens")
    recipe = ResearchRecipe(
        replace(input, rotation=along_k),
        replace(weight, rotation=along_k),
        replace(grad_output, rotation=rotation.along(rotation.dgrad, "tokens")),
        wgrad_input_rotation=along_tokens,
        wgrad_grad_output_rotation=along_tokens if rotation.wgrad == "tokens" else None,
        second_cast=casts.recast if casts.recast.of == "fprop" else None,
        smooth_swiglu=getattr(config.linear, "smooth_swiglu", False),
        **others,
    )
    return LinearRecipe(input, weight, grad_output, **others) if recipe.plain else recipe


RECIPES.update(dict.fromkeys((ResearchCasts, ResearchLinear), research_recipe))
LAYERS[ResearchRecipe] = ResearchFP8Linear


def channel_factors(product: torch.Tensor) -> torch.Tensor:
    """Return the divisor of each channel of a product: the power of two by which it exceeds the typical channel.

    Args:
        product: [T, F], any floating point dtype.

    Returns:
        FP32 [F]: 2^floor(log2(amax of the channel / median amax of all)), and 1 for channels below, for those with NaN
        or Inf, which casts must see, and where half of all channels are zero.
    """
    if product.numel() == 0:
        return torch.ones(product.shape[-1], device=product.device)
    amax = product.detach().abs().amax(0).float()
    # The median is that of a typical channel, which a few outliers do not move.
    ratio = amax / amax.median()
    # ratio = m * 2^exponent with m in [0.5, 1): 2^(exponent - 1) is the power of two below, exactly.
    _, exponent = torch.frexp(ratio)
    factors = torch.ldexp(torch.ones_like(amax), (exponent - 1).clamp(0, MAX_EXPONENT))
    return torch.where(ratio.isfinite(), factors, 1.0)
