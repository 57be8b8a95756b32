"""The gated MLP as one operation: two products with the gated activation between them, and nothing in BF16 kept.

    gate_up [T, 2F] = n [T, H] · [gate; up] [2F, H]ᵀ       n cast once for both
    p       [T, F]  = act(gate) · up                        cast as it is computed
    y       [T, H]  = p · down [H, F]ᵀ

Backward reads n and p cast along the tokens, and forms both again: n from what its maker keeps, p from gate_up, which
is kept in FP8 (`activations.save`), in BF16, or not at all (`activations.recompute`: its product is computed again).

T tokens, H hidden and F intermediate features.

The gated MLP in tiles of tokens: what it computes with is there for one tile at a time, forward and backward.

gate_up [T, 2F] and its casts are the largest activations of a layer. A tile of t tokens has t/T of them; nothing of
them is kept, and backward computes gate_up again. Tiles are whole groups of 128 tokens, so that every cast has the
scales that it has for all tokens together: the output and the gradient of the input have the same bits. Gradients of
the weights are sums over the tiles, in FP32, and rounded once. Autograd gets one for each weight, as ever: ZeRO-3
reduces a gradient when it arrives.

T tokens, H hidden and F intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import SCALE_TYPES
from ds_fp8.gemm import why_not_in_fp32
from ds_fp8.layers.decoder.rms_norm import rms_norm_backward, rms_norm_cast, rms_norm_columnwise
from ds_fp8.layers.linear.gated_activation import Saved, gated_activation_backward, gated_activation_cast
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_weight, fprop_weight, scale_columns, split_rows


class MLPWeights(NamedTuple):
    """The three weights of a gated MLP."""

    gate: nn.Parameter
    """[F, H]"""
    up: nn.Parameter
    """[F, H]"""
    down: nn.Parameter
    """[H, F]"""


class Kept(NamedTuple):
    """Tensors that a gated MLP keeps for its backward."""

    saved: Saved | None
    """gate_up [T, 2F], or None where it is computed again."""
    factors: torch.Tensor | None
    """FP32 [F], LinearRecipe.channel_factors of the product."""


@dataclass(frozen=True)
class GatedMLP:
    """Settings of a gated MLP; its weights are separate arguments."""

    activation: str
    """One of activations.ACTIVATIONS."""
    gate_up: LinearRecipe
    """Recipe of the product of gate and up."""
    down: LinearRecipe
    """Recipe of the product of down."""

    def forward(
        self, n: QuantizedTensor, weights: MLPWeights, dtype: torch.dtype, keep: bool
    ) -> tuple[torch.Tensor, Kept]:
        """Return (y [T, H] of `dtype`, what is kept for backward) of the row-wise cast input n [T, H]."""
        gate_up = self._gate_up(n, weights, dtype)
        # Recomputed: backward gets n again from its maker, and pays one more product for 2F numbers a token less.
        keep = keep and self.gate_up.recompute != "mlp"
        product, saved, factors = gated_activation_cast(gate_up, self.activation, self.down, keep)
        # 2F numbers a token, the largest activation of a layer: it must be gone before the next product allocates.
        del gate_up
        y = self.down.multiply(product, fprop_weight(weights[2:], self.down, factors), dtype)
        return y, Kept(saved, factors)

    def backward(
        self,
        dy: torch.Tensor,
        weights: MLPWeights,
        kept: Kept,
        n_rowwise: Callable[[], QuantizedTensor],
        n_columnwise: Callable[[], QuantizedTensor],
        wgrad_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Return (dn [T, H], gradients of the weights that have one) from dy [T, H]; the functions cast n again.

        Gradients have the dtype of their weights, unless `wgrad_dtype` says another.
        """
        recipe, dtype = self.gate_up, dy.dtype
        saved, factors = kept
        inverse = None if factors is None else factors.reciprocal()
        wants = [weight.requires_grad for weight in weights]
        if saved is None:
            saved = self._gate_up(n_rowwise(), weights, dtype)
            if recipe.save == "fp8":
                saved = gated_activation_cast(saved, self.activation, self.down).saved  # what "none" would have kept
        #     dproduct = dy Wdown';  dgate_up = act'(...) dproduct;  dn = dgate_up Wgate_up
        #     dWdown = dy' product;  dWgate_up = dgate_up' n                  operands cast along the tokens
        # With factors s, forward multiplied (product / s) by (Wdown s): dproduct is divided by s, dWdown multiplied.
        down, factor = dgrad_weight([weights.down], self.down, factors)
        dy_cast, dy_columnwise = self.down.cast_grad_output(dy, True, wants[2], factor)
        dproduct = scale_columns(self.down.multiply(dy_cast, down, dtype), inverse)
        # A view of both weights where ZeRO-3 gathered them side by side: no stacked copy.
        gate_up, factor = dgrad_weight(weights[:2], recipe)
        casts = gated_activation_backward(dproduct, saved, self.activation, recipe, self.down, factor, inverse)
        # Before dn and the gradients of the weights are allocated: this is the peak of a layer's backward.
        del dproduct, saved, down
        dn = recipe.multiply(casts.dgate_up, gate_up, dtype)
        ddown = dgate = dup = None
        if wants[2]:
            ddown = self.down.multiply(dy_columnwise, casts.product_columnwise, wgrad_dtype or weights.down.dtype)
            ddown = scale_columns(ddown, factors)
        if wants[0] or wants[1]:
            # One product for both weights. n is cast along the tokens only here, and freed with the expression.
            stacked = recipe.multiply(casts.dgate_up_columnwise, n_columnwise(), wgrad_dtype or weights.gate.dtype)
            dgate, dup = split_rows(stacked, weights[:2])
        return dn, (dgate, dup, ddown)

    def _gate_up(self, n: QuantizedTensor, weights: MLPWeights, dtype: torch.dtype) -> torch.Tensor:
        return self.gate_up.multiply(n, fprop_weight(weights[:2], self.gate_up), dtype)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, mlp: GatedMLP, keep: bool):
        recipe, weights, x_TH = mlp.gate_up, MLPWeights(gate, up, down), x.reshape(-1, x.shape[-1])
        # Recomputing needs x row-wise as well as column-wise, which only x itself has.
        in_fp8 = keep and recipe.save == "fp8" and recipe.recompute == "none"
        cast, columnwise = recipe.cast_input_both(x_TH) if in_fp8 else (recipe.cast_input(x_TH), None)
        y, kept = mlp.forward(recipe.with_outliers(cast, x_TH), weights, x.dtype, keep)
        ctx.mlp, ctx.weights, ctx.in_fp8 = mlp, weights, in_fp8
        if keep:
            ctx.save_for_backward(*(_pack(columnwise) if in_fp8 else (x, None)), *_pack_kept(kept))
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        first, second, *kept = ctx.saved_tensors
        mlp, recipe = ctx.mlp, ctx.mlp.gate_up

        def x_rowwise() -> QuantizedTensor:
            x_TH = first.reshape(-1, first.shape[-1])
            return recipe.with_outliers(recipe.cast_input(x_TH), x_TH)

        def x_columnwise() -> QuantizedTensor:
            if ctx.in_fp8:
                return recipe.kept_input(first, second)
            return recipe.cast_input_columnwise(first.reshape(-1, first.shape[-1]))

        dy_TH = dy.reshape(-1, dy.shape[-1])
        dx, gradients = mlp.backward(dy_TH, ctx.weights, _unpack(kept, mlp.down), x_rowwise, x_columnwise)
        return dx.view(dy.shape), *gradients, None, None


class _NormedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, norm, gate, up, down, mlp: GatedMLP, eps: float, keep: bool):
        weights, H = MLPWeights(gate, up, down), x.shape[-1]
        hidden, rstd, cast = rms_norm_cast(x.reshape(-1, H), norm, eps, mlp.gate_up, residual.reshape(-1, H))
        y, kept = mlp.forward(cast, weights, x.dtype, keep)
        ctx.mlp, ctx.weights, ctx.norm = mlp, weights, norm
        if keep:
            ctx.save_for_backward(hidden, rstd, *_pack_kept(kept))
        # In place: nobody else holds the product's result.
        return y.add_(hidden).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hidden, rstd, *kept = ctx.saved_tensors
        mlp, norm, recipe = ctx.mlp, ctx.norm, ctx.mlp.gate_up
        dy_TH = dy.reshape(-1, dy.shape[-1])
        dn, gradients = mlp.backward(
            dy_TH,
            ctx.weights,
            _unpack(kept, mlp.down),
            lambda: recipe.with_outliers(recipe.cast_input(hidden, rstd, norm), hidden, rstd, norm),
            lambda: rms_norm_columnwise(hidden, norm, rstd, recipe),
        )
        dhidden, dnorm = rms_norm_backward(dn, hidden, norm, rstd, dy_TH)
        dhidden = dhidden.view(dy.shape)
        # hidden = x + residual: both get the same gradient, one tensor for two inputs.
        return dhidden, dhidden, dnorm if norm.requires_grad else None, *gradients, None, None, None


def gated_mlp(x: torch.Tensor, weights: MLPWeights, mlp: GatedMLP) -> torch.Tensor:
    """Return down(act(gate(x)) · up(x)) for x [..., H], in FP8."""
    return _GatedMLP.apply(x, *weights, mlp, torch.is_grad_enabled())


def normed_mlp(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weights: MLPWeights, mlp: GatedMLP
) -> torch.Tensor:
    """Return h + MLP(RMSNorm(h)) with h = x + residual, all [..., H]; norm weight [H].

    Keeps h for backward, and gate_up as configured.
    """
    return _NormedMLP.apply(x, residual, norm, *weights, mlp, eps, torch.is_grad_enabled())


def _pack(saved: Saved | None) -> tuple[torch.Tensor, ...]:
    if saved is None:
        return ()
    return (saved.data, saved.scale) if isinstance(saved, QuantizedTensor) else (saved,)


def _pack_kept(kept: Kept) -> tuple[torch.Tensor | None, ...]:
    return kept.factors, *_pack(kept.saved)


def _unpack(tensors: list[torch.Tensor], down: LinearRecipe) -> Kept:
    """Return the tensors that `_pack_kept` took apart."""
    factors, *saved = tensors
    if len(saved) == 2:
        return Kept(down.kept_gate_up(*saved), factors)
    return Kept(saved[0] if saved else None, factors)


def tiled_gated_mlp(x: torch.Tensor, weights: MLPWeights, mlp: GatedMLP) -> torch.Tensor:
    """Return what `gated_mlp` does, computed in tiles."""
    return _TiledMLP.apply(x, None, None, *weights, mlp, 0.0)


def tiled_normed_mlp(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weights: MLPWeights, mlp: GatedMLP
) -> torch.Tensor:
    """Return what `normed_mlp` does, computed in tiles. Keeps h = x + residual for backward."""
    return _TiledMLP.apply(x, residual, norm, *weights, mlp, eps)


def why_not_tiled(recipe: LinearRecipe) -> str | None:
    """Return why a product of this recipe cannot be computed in tiles of tokens, or None."""
    if (why := recipe.why_all_tokens) is not None:
        return why
    for granularity, scale in (
        (recipe.input.granularity, recipe.input.scale),
        (recipe.wgrad_input, recipe.input.scale),
        (recipe.grad_output.granularity, recipe.grad_output.scale),
    ):
        if granularity in ("tensor", "row") and SCALE_TYPES[scale].needs_amax:
            return f'a scale of granularity "{granularity}" is that of all tokens; use "1x128", as preset "infir2" does'
    return why_not_in_fp32(recipe.backend, recipe.grad_output, replace(recipe.input, granularity=recipe.wgrad_input))


class _TiledMLP(torch.autograd.Function):
    """The MLP of x, or with a norm that of RMSNorm(x + residual), to which x + residual is added."""

    @staticmethod
    def forward(ctx, x, residual, norm, gate, up, down, mlp: GatedMLP, eps: float):
        recipe, weights = mlp.gate_up, MLPWeights(gate, up, down)
        x_TH = x.reshape(-1, x.shape[-1])
        y, hidden, rstd = torch.empty_like(x_TH), x_TH, None
        if norm is not None:
            residual = residual.reshape(x_TH.shape)
            hidden, rstd = torch.empty_like(x_TH), torch.empty(len(x_TH), device=x.device)
        for rows in _tiles(len(x_TH), recipe):
            if norm is None:
                cast = recipe.with_outliers(recipe.cast_input(x_TH[rows]), x_TH[rows])
            else:
                hidden[rows], rstd[rows], cast = rms_norm_cast(x_TH[rows], norm, eps, recipe, residual[rows])
            output = mlp.forward(cast, weights, x.dtype, keep=False)[0]
            y[rows] = output if norm is None else output.add_(hidden[rows])
            del cast, output
        ctx.mlp, ctx.weights, ctx.norm = mlp, weights, norm
        ctx.save_for_backward(hidden, rstd)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hidden, rstd = ctx.saved_tensors
        mlp, weights, norm, recipe = ctx.mlp, ctx.weights, ctx.norm, ctx.mlp.gate_up
        dy_TH = dy.reshape(-1, dy.shape[-1])
        dn, sums = torch.empty_like(dy_TH), [None, None, None]
        for rows in _tiles(len(dy_TH), recipe):
            h, factors = hidden[rows], (None, None) if norm is None else (rstd[rows], norm)
            dn[rows], gradients = mlp.backward(
                dy_TH[rows],
                weights,
                Kept(None, None),
                lambda h=h, factors=factors: recipe.with_outliers(recipe.cast_input(h, *factors), h, *factors),
                lambda h=h, factors=factors: recipe.cast_input_columnwise(h, *factors),
                torch.float32,
            )
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, gradients, strict=True)]
            del gradients
        gradients = [x if x is None else x.to(weight.dtype) for x, weight in zip(sums, weights, strict=True)]
        if norm is None:
            return dn.view(dy.shape), None, None, *gradients, None, None
        dhidden, dnorm = rms_norm_backward(dn, hidden, norm, rstd, dy_TH)
        dhidden = dhidden.view(dy.shape)
        return dhidden, dhidden, dnorm if norm.requires_grad else None, *gradients, None, None


def _tiles(tokens: int, recipe: LinearRecipe) -> Iterator[slice]:
    """Yield the rows of every tile; the last may be smaller."""
    for start in range(0, max(1, tokens), recipe.mlp_tile_tokens):
        yield slice(start, min(start + recipe.mlp_tile_tokens, tokens))
