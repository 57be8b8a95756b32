"""The gated MLP as one operation: two products with the gated activation between them, and nothing in BF16 kept.

    gate_up [T, 2F] = n [T, H] · [gate; up] [2F, H]ᵀ       n cast once for both
    p       [T, F]  = act(gate) · up                        cast as it is computed
    y       [T, H]  = p · down [H, F]ᵀ

Backward reads n and p cast along the tokens, and forms both again: n from what its maker keeps, p from gate_up, which
is kept in FP8 (`activations.save`), in BF16, or not at all (`activations.recompute`: its product is computed again).

T tokens, H hidden and F intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.modules.gated_activation import Saved, gated_activation_backward, gated_activation_cast
from ds_fp8.modules.recipe import LinearRecipe
from ds_fp8.modules.rms_norm import rms_norm_backward, rms_norm_cast, rms_norm_columnwise
from ds_fp8.modules.weights import dgrad_operand, split_rows, stacked_operand, weight_operand
from ds_fp8.quantize import QuantizedTensor


class MLPWeights(NamedTuple):
    """The three weights of a gated MLP."""

    gate: nn.Parameter
    """[F, H]"""
    up: nn.Parameter
    """[F, H]"""
    down: nn.Parameter
    """[H, F]"""


@dataclass(frozen=True)
class GatedMLP:
    """What a gated MLP computes with, besides its weights."""

    activation: str
    """One of gated_activation.ACTIVATIONS."""
    recipe: LinearRecipe

    @cached_property
    def gate_up(self) -> LinearRecipe:
        """The recipe at the product of gate and up."""
        return self.recipe.at(f"{self.recipe.site}.gate_up_proj")

    @cached_property
    def down(self) -> LinearRecipe:
        """The recipe at the product of down."""
        return self.recipe.at(f"{self.recipe.site}.down_proj")

    def forward(
        self, n: QuantizedTensor, weights: MLPWeights, dtype: torch.dtype, keep: bool
    ) -> tuple[torch.Tensor, Saved | None]:
        """(y [T, H] of `dtype`, gate_up as kept for backward) of the row-wise cast input n [T, H]."""
        gate_up = self._gate_up(n, weights, dtype)
        keep = keep and self.recipe.recompute != "mlp"
        product, saved = gated_activation_cast(gate_up, self.activation, self.down, keep)
        del gate_up
        return self.recipe.multiply(product, weight_operand(weights.down, self.down), dtype), saved

    def backward(
        self,
        dy: torch.Tensor,
        weights: MLPWeights,
        saved: Saved | None,
        n_rowwise: Callable[[], QuantizedTensor],
        n_columnwise: Callable[[], QuantizedTensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """(dn [T, H], gradients of the weights that have one) from dy [T, H]; n cast anew by the two functions."""
        recipe, dtype = self.gate_up, dy.dtype
        wants = [weight.requires_grad for weight in weights]
        if saved is None:
            saved = self._gate_up(n_rowwise(), weights, dtype)
            if recipe.save == "fp8":
                saved = gated_activation_cast(saved, self.activation, self.down)[1]  # what "none" would have kept
        down, factor = dgrad_operand(weight_operand(weights.down, self.down))
        dy_cast, dy_columnwise = self.down.cast_grad_output(dy, True, wants[2], factor)
        dproduct = recipe.multiply(dy_cast, down, dtype)
        gate_up, factor = dgrad_operand(stacked_operand(weights[:2], recipe))
        casts = gated_activation_backward(dproduct, saved, self.activation, recipe, factor)
        del dproduct, saved, down
        dn = recipe.multiply(casts.dgate_up, gate_up, dtype)
        ddown = recipe.multiply(dy_columnwise, casts.product_columnwise, weights.down.dtype) if wants[2] else None
        dgate = dup = None
        if wants[0] or wants[1]:
            stacked = recipe.multiply(casts.dgate_up_columnwise, n_columnwise(), weights.gate.dtype)
            dgate, dup = split_rows(stacked, weights[:2])
        return dn, (dgate, dup, ddown)

    def _gate_up(self, n: QuantizedTensor, weights: MLPWeights, dtype: torch.dtype) -> torch.Tensor:
        return self.recipe.multiply(n, stacked_operand(weights[:2], self.gate_up), dtype)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, mlp: GatedMLP, keep: bool):
        recipe, weights, x_TH = mlp.gate_up, MLPWeights(gate, up, down), x.reshape(-1, x.shape[-1])
        # Recomputing needs x row-wise as well as column-wise, which only x itself has.
        in_fp8 = keep and recipe.save == "fp8" and recipe.recompute == "none"
        cast, columnwise = recipe.cast_input_both(x_TH) if in_fp8 else (recipe.cast_input(x_TH), None)
        y, saved = mlp.forward(cast, weights, x.dtype, keep)
        ctx.mlp, ctx.weights, ctx.in_fp8 = mlp, weights, in_fp8
        if keep:
            ctx.save_for_backward(*(_pack(columnwise) if in_fp8 else (x, None)), *_pack(saved))
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        first, second, *saved = ctx.saved_tensors
        mlp, recipe = ctx.mlp, ctx.mlp.gate_up

        def x_rowwise() -> QuantizedTensor:
            return recipe.cast_input(first.reshape(-1, first.shape[-1]))

        def x_columnwise() -> QuantizedTensor:
            if ctx.in_fp8:
                return QuantizedTensor(first, second, recipe.wgrad_input, recipe.input.scale)
            return recipe.cast_input_columnwise(first.reshape(-1, first.shape[-1]))

        dy_TH = dy.reshape(-1, dy.shape[-1])
        dx, gradients = mlp.backward(dy_TH, ctx.weights, _unpack(saved), x_rowwise, x_columnwise)
        return dx.view(dy.shape), *gradients, None, None


class _NormedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, norm, gate, up, down, mlp: GatedMLP, eps: float, keep: bool):
        weights, H = MLPWeights(gate, up, down), x.shape[-1]
        hidden, rstd, cast = rms_norm_cast(x.reshape(-1, H), norm, eps, mlp.gate_up, residual.reshape(-1, H))
        y, saved = mlp.forward(cast, weights, x.dtype, keep)
        ctx.mlp, ctx.weights, ctx.norm = mlp, weights, norm
        if keep:
            ctx.save_for_backward(hidden, rstd, *_pack(saved))
        return y.add_(hidden).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hidden, rstd, *saved = ctx.saved_tensors
        mlp, norm, recipe = ctx.mlp, ctx.norm, ctx.mlp.gate_up
        dy_TH = dy.reshape(-1, dy.shape[-1])
        dn, gradients = mlp.backward(
            dy_TH,
            ctx.weights,
            _unpack(saved),
            lambda: recipe.cast_input(hidden, rstd, norm),
            lambda: rms_norm_columnwise(hidden, norm, rstd, recipe),
        )
        dhidden, dnorm = rms_norm_backward(dn, hidden, norm, rstd, dy_TH)
        dhidden = dhidden.view(dy.shape)
        return dhidden, dhidden, dnorm if norm.requires_grad else None, *gradients, None, None, None


def gated_mlp(x: torch.Tensor, weights: MLPWeights, mlp: GatedMLP) -> torch.Tensor:
    """down(act(gate(x)) · up(x)) for x [..., H], in FP8."""
    return _GatedMLP.apply(x, *weights, mlp, torch.is_grad_enabled())


def normed_mlp(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weights: MLPWeights, mlp: GatedMLP
) -> torch.Tensor:
    """h + MLP(RMSNorm(h)) with h = x + residual, all [..., H]; norm weight [H]. Keeps h, and gate_up as configured."""
    return _NormedMLP.apply(x, residual, norm, *weights, mlp, eps, torch.is_grad_enabled())


def _pack(saved: Saved | None) -> tuple[torch.Tensor, ...]:
    if saved is None:
        return ()
    return (saved.data, saved.scale) if isinstance(saved, QuantizedTensor) else (saved,)


def _unpack(tensors: list[torch.Tensor]) -> Saved | None:
    """gate_up from what `_pack` made of it."""
    if len(tensors) == 2:
        return QuantizedTensor(*tensors, "1x128", "pow2")
    return tensors[0] if tensors else None
