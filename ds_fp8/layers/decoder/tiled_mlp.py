"""The gated MLP in tiles of tokens: what it computes with is there for one tile at a time, forward and backward.

gate_up [T, 2F] and its casts are the largest activations of a layer. A tile of t tokens has t/T of them; nothing of
them is kept, and backward computes gate_up again. Tiles are whole groups of 128 tokens, so that every cast has the
scales that it has for all tokens together: the output and the gradient of the input have the same bits. Gradients of
the weights are sums over the tiles, in FP32, and rounded once. Autograd gets one for each weight, as ever: ZeRO-3
reduces a gradient when it arrives.

T tokens, H hidden and F intermediate features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.autograd.function import once_differentiable

from ds_fp8.config.formats import SCALE_TYPES
from ds_fp8.gemm import why_not_in_fp32
from ds_fp8.layers.decoder.gated_mlp import GatedMLP, Kept, MLPWeights
from ds_fp8.layers.decoder.rms_norm import rms_norm_backward, rms_norm_cast
from ds_fp8.layers.linear.outliers import with_outliers
from ds_fp8.layers.linear.recipe import LinearRecipe


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
                cast = with_outliers(recipe, recipe.cast_input(x_TH[rows]), x_TH[rows])
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
                lambda h=h, factors=factors: with_outliers(recipe, recipe.cast_input(h, *factors), h, *factors),
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
