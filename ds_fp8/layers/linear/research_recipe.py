"""ResearchRecipe: a linear layer's recipe whose operands are rotated, or cast a second time for backward.

Rotations R (casts/rotation.py) come after the factors, and are named by the dimension they go along:

    fprop  in_features   y  = (x R)(w R)ᵀ            one weight w R for both products, so that dx = (dy · w R) Rᵀ
    dgrad  tokens        dx = R (Rᵀ dy · w)
           out_features  dx = (dy R)(Rᵀ w)           weights that are cast for each product only
    wgrad  tokens        dw = (Rᵀ dy)ᵀ (Rᵀ x)
           in_features   dw = (dyᵀ · x R) Rᵀ

Quartet (arXiv 2505.14669) casts what fprop multiplied again (`recast`), so that dx and dw, rounded
stochastically, are on average the gradients of the function that fprop computed; F is fprop's rotation, R the others':

    X = cast(x F)   W = cast(w F)   M = where that cast clips nothing, of X and of W
    dx = ((cast(dy R) · cast(Rᵀ W)) ⊙ M) Fᵀ        dw = ((cast(Rᵀ dy)ᵀ · cast(Rᵀ X)) ⊙ M) Fᵀ
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ds_fp8.casts import (
    QuantizedTensor,
    apply_factors,
    clipped,
    quantize_both,
    quantize_columnwise,
    rotate,
    unrotate,
)
from ds_fp8.config.formats import ALONG_CONTRACTION, CastSpec, Recast, Rotation
from ds_fp8.layers.linear.recipe import Factor, LinearRecipe, cast_rowwise
from ds_fp8.monitor.statistics import Rows


@dataclass(frozen=True)
class ResearchRecipe(LinearRecipe):
    """LinearRecipe with rotations and second casts; its methods do what those of LinearRecipe say."""

    wgrad_input_rotation: Rotation | None = None
    """Rotation of x [T, K], or with `second_cast` of its cast, as wgrad's operand."""
    wgrad_grad_output_rotation: Rotation | None = None
    second_cast: Recast | None = None

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """Return the rotations of all operands."""
        every = self.input.rotation, self.grad_output.rotation, self.wgrad_input_rotation
        return tuple(rotation for rotation in every if rotation is not None)

    @property
    def recast(self) -> Recast | None:
        """Return how fprop's x and w are cast a second time, or None."""
        return self.second_cast

    def cast_weight_columnwise(self, weight: torch.Tensor, column_factor: Factor = None) -> QuantizedTensor:
        """Return the cast of a weight [N, K] that is present in high precision, as dgrad reads it: [K, N]."""
        spec = self.weight
        words = spec.format, spec.granularity, spec.scale
        of_dy = self.grad_output.rotation
        # dy is rotated along N, its columns; of w [N, K] that dimension is the rows.
        rotation = None if of_dy is None or of_dy.axis == 0 else replace(of_dy, axis=0)
        if self.recast is not None:
            return self._cast_again(cast_rowwise(weight, spec, None, column_factor), spec.granularity, rotation)
        return quantize_columnwise(
            weight, *words, column_factor=column_factor, rounding=spec.rounding, rotation=rotation
        )

    def kept_input(self, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Return x as wgrad reads it, from the codes and scales that were kept of it."""
        kept = super().kept_input(data, scale)
        return kept if self.recast is None else replace(kept, scale_type=self.recast.scale)

    def cast_input_columnwise(
        self, x: torch.Tensor, row_factor: Factor = None, column_factor: Factor = None
    ) -> QuantizedTensor:
        """Cast x [T, K], times its factors, as wgrad reads it: [K, T]."""
        spec = self.input
        if self.recast is not None:
            cast = cast_rowwise(x, spec, row_factor, column_factor)
            return self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        return quantize_columnwise(
            x,
            spec.format,
            self.wgrad_input,
            spec.scale,
            row_factor=row_factor,
            column_factor=column_factor,
            rounding=spec.rounding,
            rotation=self.wgrad_input_rotation,
        )

    def cast_input_both(self, x: torch.Tensor, column_factor: Factor = None) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Cast x [T, K], times its factors, as fprop reads it, and as wgrad does, in one pass."""
        spec = self.input
        if self.recast is not None:
            cast = self.cast_input(x, column_factor=column_factor)
            return cast, self._cast_again(cast, self.wgrad_input, self.wgrad_input_rotation)
        words = spec.format, spec.granularity, self.wgrad_input, spec.scale
        rotations = spec.rotation, self.wgrad_input_rotation
        both = quantize_both(x, *words, None, column_factor, spec.rounding, *rotations)
        self.observe("input", x, both[0], None, column_factor)
        return both

    def _grad_output_cast(self, dy: torch.Tensor) -> functools.partial:
        rotations = {
            "row_rotation": self.grad_output.rotation,
            "column_rotation": self.wgrad_grad_output_rotation,
        }
        return functools.partial(super()._grad_output_cast(dy), **rotations)

    def clipped_input(self, x: torch.Tensor, cast: QuantizedTensor) -> torch.Tensor | None:
        """Return which elements of fprop's cast of x get no gradient, bool [T, K]; None if all of them do."""
        return self._clipped(x, self.input, cast)

    def _clipped(self, x: torch.Tensor, spec: CastSpec, cast: QuantizedTensor) -> torch.Tensor | None:
        wanted = self.recast is not None and self.recast.zero_clipped
        return clipped(rotate(x, spec.rotation), cast) if wanted else None

    def _cast_again(self, cast: QuantizedTensor, granularity: str, rotation: Rotation | None) -> QuantizedTensor:
        """Return what fprop multiplied [M, K] as dgrad or wgrad reads it: [K, M]."""
        words = cast.format, granularity, self.recast.scale
        numbers = cast.dequantize(torch.float32)
        return quantize_columnwise(numbers, *words, rounding=self.recast.rounding, rotation=rotation)

    def dgrad_result(self, dx: torch.Tensor, tokens: int, clipped_input: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient of the input as it is without rotations.

        Args:
            dx: [tokens, K], dgrad's product.
            tokens: Number of its rows.
            clipped_input: What the method of this name returned for the input.
        """
        of_dy = self.grad_output.rotation
        # First what was rotated last: tokens of the product, then the mask in fprop's rotated space, then that
        # rotation.
        if of_dy is not None and of_dy.axis == 0:
            dx = unrotate(dx, of_dy, tokens)
        if clipped_input is not None:
            dx = dx.masked_fill(clipped_input, 0)
        if self.weight.granularity in ALONG_CONTRACTION and self.recast is None:
            return dx
        return unrotate(dx, self.weight.rotation)

    def wgrad_result(self, dw: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight as it is without rotations.

        Args:
            dw: [N, K], wgrad's product.
            weight: [N, K]; read only where there is a `recast`, in high precision.
        """
        if self.recast is not None:
            # Cast once more here: keeping a mask of every weight between forward and backward would take a byte an
            # element.
            beyond = self._clipped(weight, self.weight, cast_rowwise(weight, self.weight))
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
        """Count what the cast of x, times its factors and rotated, lost; costs nothing outside measured steps."""
        rotation = getattr(self, tensor_class).rotation
        if self.monitor.active and rotation is not None:
            x, row_factor, column_factor = rotate(apply_factors(x, row_factor, column_factor), rotation), None, None
        super().observe(tensor_class, x, quantized, row_factor, column_factor)
