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
from typing import Any

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor, apply_factors, quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import SCALE_TYPES, CastSpec, is_of_groups
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.layers.attention.hadamard import Rotation, rotate, unrotate
from ds_fp8.layers.decoder.structure import MLP_PARTS
from ds_fp8.layers.linear.recipe import Factor, LinearRecipe, make_recipe
from ds_fp8.monitor.statistics import Rows
from ds_fp8.research.config import Recast, ResearchCasts
from ds_fp8.research.formats import ResearchSpec, cast_matrix, clipped

NO_ROTATION = '{"rotation": {"fprop": null, "dgrad": null, "wgrad": null}}'
"""An override that rotates nothing."""
MAX_EXPONENT = 60
"""Largest exponent of a factor: a weight times it stays far from the end of FP32."""


@dataclass(frozen=True)
class ResearchRecipe(LinearRecipe):
    """LinearRecipe with rotations and second casts; its methods do what those of LinearRecipe say."""

    wgrad_input_rotation: Rotation | None = None
    """Rotation of x [T, K], or with `second_cast` of its cast, as wgrad's operand."""
    wgrad_grad_output_rotation: Rotation | None = None
    second_cast: Recast | None = None

    smooth_swiglu: bool = False
    """Whether the down_proj of gated MLPs get Smooth-SwiGLU."""
    smooth: bool = False
    """Whether channels of x are divided by factors, and columns of w multiplied: in such a down_proj."""

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        every = self.input.rotation, self.grad_output.rotation, self.wgrad_input_rotation
        return tuple(rotation for rotation in every if rotation is not None)

    @property
    def why_not_grouped(self) -> str | None:
        casts = self.input, self.weight, self.grad_output
        if any(cast.rounding == "stochastic" or not SCALE_TYPES[cast.scale].needs_amax for cast in casts):
            return "their casts round to nearest with scales that follow the numbers"
        return "their operands are neither rotated nor cast again" if self.rotations or self.second_cast else None

    @property
    def why_not_fused(self) -> str | None:
        if self.second_cast is not None:
            return "fp8.linear.recast: casts that are fused into other operations are not cast again"
        if self.rotations:
            return "fp8.linear.rotation: casts that are fused into other operations rotate nothing"
        return None

    @property
    def why_all_tokens(self) -> str | None:
        return "Smooth-SwiGLU has factors of all tokens" if self.smooth else None

    @property
    def casts_weight_twice(self) -> bool:
        return is_of_groups(self.weight.granularity)

    @property
    def fuses_casts(self) -> bool:
        """Return whether kernels that compute a layer's input may cast it: factors need the amax of every channel."""
        return super().fuses_casts and not self.smooth

    def for_layer(self, name: str, layer: nn.Linear, model: nn.Module) -> LinearRecipe:
        self._check_blocks(name, layer)
        recipe = self.at(name)
        if not (self.smooth_swiglu and _is_down_proj(name, model)):
            return recipe
        if self.outlier_channels:
            raise UserError(
                "fp8.linear.smooth_swiglu and fp8.linear.outlier_channels both treat down_proj's outliers",
                key="fp8.linear.smooth_swiglu",
                remedy='"smooth_swiglu": false',
            )
        if self.rotations or self.second_cast is not None:
            raise UserError(
                "fp8.linear.smooth_swiglu and fp8.linear.rotation or recast both change down_proj's operands",
                key="fp8.linear.smooth_swiglu",
                remedy=f'"smooth_swiglu": false, or "overrides": {{"*.down_proj": {NO_ROTATION}}}, and of '
                '"recast" {"of": "high_precision"}',
            )
        return replace(recipe, smooth=True)

    def for_head(self) -> LinearRecipe:
        # Gradients that are divided by the tokens only afterwards would leave a fixed scale.
        if SCALE_TYPES[self.grad_output.scale].needs_amax:
            return self
        return replace(self, grad_output=replace(self.grad_output, scale="pow2"))

    def _check_blocks(self, name: str, layer: nn.Linear) -> None:
        sides = (
            (layer.in_features, [self.input.rotation, self.wgrad_input_rotation]),
            (layer.out_features, [self.grad_output.rotation]),
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

    def channel_factors(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what the channels of x [T, K] are divided by before their cast, or None."""
        return channel_factors(x) if self.smooth else None

    def keep_gate_up(self, gate_up: torch.Tensor) -> QuantizedTensor:
        if SCALE_TYPES[self.input.scale].needs_amax:
            return super().keep_gate_up(gate_up)
        return quantize(gate_up, "e4m3", "tensor", self.input.scale)

    def kept_gate_up(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        if SCALE_TYPES[self.input.scale].needs_amax:
            return super().kept_gate_up(data, scale)
        return QuantizedTensor(data, scale, "tensor", self.input.scale)

    def cast_weight(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        quantized = cast_matrix(weight, self.weight, None, column_factor)
        self.observe("weight", weight, quantized, None, column_factor)
        return quantized

    def cast_weight_columnwise(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        of_dy = self.grad_output.rotation
        # dy is rotated along N, its columns; of w [N, K] that dimension is the rows.
        rotation = None if of_dy is None or of_dy.axis == 0 else replace(of_dy, axis=0)
        if self.second_cast is not None:
            own = cast_matrix(weight, self.weight, None, column_factor)
            return self._cast_again(own, self.weight.granularity, rotation)
        return cast_matrix(weight, replace(self.weight, rotation=rotation), None, column_factor, columnwise=True)

    def kept_input(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        kept = super().kept_input(data, scale)
        return kept if self.second_cast is None else replace(kept, scale_type=self.second_cast.scale)

    def cast_input(self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None) -> QuantizedTensor:
        if self.input.plain:
            return super().cast_input(x, row_factor, column_factor)
        quantized = cast_matrix(x, self.input, row_factor, column_factor)
        self.observe("input", x, quantized, row_factor, column_factor)
        return quantized

    def cast_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        if self.second_cast is not None:
            cast = cast_matrix(x, self.input, row_factor, column_factor)
            return self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        spec = replace(self.input, granularity=self.wgrad_input, rotation=self.wgrad_input_rotation)
        return cast_matrix(x, spec, row_factor, column_factor, columnwise=True)

    def cast_input_both(self, x: torch.Tensor, column_factor: Factor = None) -> tuple[QuantizedTensor, QuantizedTensor]:
        if self.input.plain and self.wgrad_input_rotation is None and self.second_cast is None:
            return super().cast_input_both(x, column_factor)
        cast = cast_matrix(x, self.input, None, column_factor)
        if self.second_cast is not None:
            both = cast, self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        else:
            both = cast, self.cast_input_columnwise(x, column_factor=column_factor)
        self.observe("input", x, cast, None, column_factor)
        return both

    def cast_gradient(
        self, dy: torch.Tensor, rowwise: str | None, columnwise: str | None, column_factor: Factor = None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        if self.grad_output.plain and self.wgrad_grad_output_rotation is None:
            return super().cast_gradient(dy, rowwise, columnwise, column_factor)
        row = column = None
        if rowwise is not None:
            row = cast_matrix(dy, self.grad_output, None, column_factor)
        if columnwise is not None:
            spec = replace(self.grad_output, rotation=self.wgrad_grad_output_rotation)
            column = cast_matrix(dy, spec, None, column_factor, columnwise=True)
        return row, column

    def clipped_input(self, x: torch.Tensor, cast: QuantizedTensor) -> torch.Tensor | None:
        return self._clipped(x, self.input, cast)

    def _clipped(self, x: torch.Tensor, spec: CastSpec, cast: QuantizedTensor) -> torch.Tensor | None:
        wanted = self.second_cast is not None and self.second_cast.zero_clipped
        return clipped(rotate(x, spec.rotation), cast) if wanted else None

    def _cast_again(self, cast: QuantizedTensor, granularity: str, rotation: Rotation | None) -> QuantizedTensor:
        """Return what fprop multiplied [M, K] as dgrad or wgrad reads it: [K, M]."""
        again = ResearchSpec(cast.format, granularity, self.second_cast.scale, self.second_cast.rounding, rotation)
        return cast_matrix(cast.dequantize(torch.float32), again, columnwise=True)

    def dgrad_result(self, dx: torch.Tensor, tokens: int, clipped_input: torch.Tensor | None = None) -> torch.Tensor:
        of_dy = self.grad_output.rotation
        # First what was rotated last: tokens of the product, then the mask in fprop's rotated space, then that
        # rotation.
        if of_dy is not None and of_dy.axis == 0:
            dx = unrotate(dx, of_dy, tokens)
        if clipped_input is not None:
            dx = dx.masked_fill(clipped_input, 0)
        if self.casts_weight_twice and self.second_cast is None:
            return dx
        return unrotate(dx, self.weight.rotation)

    def wgrad_result(self, dw: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.second_cast is not None:
            # Cast once more here: keeping a mask of every weight between forward and backward would take a byte an
            # element.
            beyond = self._clipped(weight, self.weight, cast_matrix(weight, self.weight))
            return unrotate(dw if beyond is None else dw.masked_fill(beyond, 0), self.input.rotation)
        of_x = self.wgrad_input_rotation
        return dw if of_x is None or of_x.axis == 0 else unrotate(dw, of_x)

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


def _is_down_proj(name: str, model: nn.Module) -> bool:
    parent, _, leaf = name.removesuffix(".base_layer").rpartition(".")
    mlp = model.get_submodule(parent) if leaf == "down_proj" else None
    return mlp is not None and all(hasattr(mlp, part) for part in MLP_PARTS)


@make_recipe.register
def _(
    casts: ResearchCasts, config: FP8Config, input: CastSpec, weight: CastSpec, grad_output: CastSpec, **others: Any
) -> LinearRecipe:
    rotation = casts.rotation
    along_k, along_tokens = rotation.along(rotation.fprop, "tokens"), rotation.along(rotation.wgrad, "tokens")
    return ResearchRecipe(
        replace(input, rotation=along_k),
        replace(weight, rotation=along_k),
        replace(grad_output, rotation=rotation.along(rotation.dgrad, "tokens")),
        wgrad_input_rotation=along_tokens,
        wgrad_grad_output_rotation=along_tokens if rotation.wgrad == "tokens" else None,
        second_cast=casts.recast.spec,
        smooth_swiglu=getattr(config.linear, "smooth_swiglu", False),
        **others,
    )


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
