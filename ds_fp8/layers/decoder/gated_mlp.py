"""The gated MLP as one operation: two products with the gated activation between them, and nothing in BF16 kept.

    gate_up [T, 2F] = n [T, H] · [gate; up] [2F, H]ᵀ       n cast once for both
    p       [T, F]  = act(gate) · up                        cast as it is computed
    y       [T, H]  = p · down [H, F]ᵀ

Low-rank products of adapters are added to gate_up and y (layers/linear/adapters.py), in the same places.
n is x, or RMSNorm(h) with h = x + residual, and then h is added to y. Backward reads n and p cast along the tokens, and
forms both again: n from what forward kept, p from gate_up, which is kept in FP8 (`activations.save`), in BF16, or not
at all (`activations.recompute`: its product is computed again). Nothing of frozen weights' inputs is cast along tokens.

In tiles of tokens (`activations.mlp_tile_tokens`) gate_up and its casts, the largest activations of a layer, are there
for one tile at a time; nothing of them is kept. Tiles are whole groups of 128 tokens, so that every cast has the scales
that it has for all tokens together: the output and the gradient of the input have the same bits. Gradients of the
weights are sums over the tiles, in FP32, and rounded once. Autograd gets one for each weight, as ever: ZeRO-3 reduces a
gradient when it arrives.

T tokens, H hidden and F intermediate features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import SCALE_TYPES
from ds_fp8.gemm import why_not_in_fp32
from ds_fp8.layers.decoder.rms_norm import rms_norm_backward, rms_norm_cast
from ds_fp8.layers.linear.adapters import Adapters, Kept
from ds_fp8.layers.linear.gated_activation import (
    Saved,
    gated_activation_backward,
    gated_activation_cast,
    saved_from,
    tensors_of,
)
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_weight, fprop_weight, split_rows


class MLPWeights(NamedTuple):
    gate: nn.Parameter
    """[F, H]"""
    up: nn.Parameter
    """[F, H]"""
    down: nn.Parameter
    """[H, F]"""


class Source(NamedTuple):
    """n in high precision, which is in memory only in parts: x, or x · rstd · norm."""

    x: torch.Tensor | None
    """[T, H], or None where nothing reads it any more."""
    rstd: torch.Tensor | None = None
    norm: torch.Tensor | None = None


class MLPAdapters(NamedTuple):
    """Adapters of a gated MLP, with the tensors that `forward` keeps of them."""

    gate_up: Adapters
    down: Adapters

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.gate_up.parameters + self.down.parameters


NO_SOURCE = Source(None)
NO_MLP_ADAPTERS = MLPAdapters(Adapters(()), Adapters(()))


class KeptOfMLP(NamedTuple):
    """Tensors that a gated MLP keeps for its backward."""

    saved: Saved | None
    """gate_up [T, 2F], or None where it is computed again."""
    gate_up: Kept = ()
    """Of the adapters."""
    down: Kept = ()

    @classmethod
    def of_tensors(cls, tensors: list, adapters: MLPAdapters, down: LinearRecipe) -> KeptOfMLP:
        first, second = adapters.gate_up.kept, adapters.gate_up.kept + adapters.down.kept
        return cls(saved_from(tensors[second:], down), tensors[:first], tensors[first:second])

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return *self.gate_up, *self.down, *tensors_of(self.saved)


Cast = Callable[[], QuantizedTensor]
"""Casts the input of the MLP again, for backward."""


@dataclass(frozen=True)
class GatedMLP:
    """Settings of a gated MLP; its weights are separate arguments."""

    activation: str
    """One of gated_activation.ACTIVATIONS."""
    gate_up: LinearRecipe
    down: LinearRecipe

    def forward(
        self,
        n: QuantizedTensor,
        weights: MLPWeights,
        dtype: torch.dtype,
        keep: bool,
        adapters: MLPAdapters = NO_MLP_ADAPTERS,
        source: Source = NO_SOURCE,
    ) -> tuple[torch.Tensor, KeptOfMLP]:
        """Return (y [T, H] of `dtype`, what is kept for backward) of the row-wise cast input n [T, H].

        `source` is n as well, which adapters read.
        """
        of_gate_up = adapters.gate_up.project(*source)
        gate_up = adapters.gate_up.add(self._gate_up(n, weights, dtype), of_gate_up)
        # Recomputed: backward gets n again from its maker, and pays one more product for 2F numbers a token less.
        keep = keep and self.gate_up.recompute != "mlp"
        wanted = bool(adapters.down)
        cast, saved, product = gated_activation_cast(gate_up, self.activation, self.down, keep, product=wanted)
        of_down = adapters.down.project(product)
        # 2F numbers a token, the largest activation of a layer: it must be gone before the next product allocates.
        del gate_up, product
        y = adapters.down.add(self.down.multiply(cast, fprop_weight(weights[2:], self.down), dtype), of_down)
        return y, KeptOfMLP(saved, of_gate_up, of_down)

    def backward(
        self,
        dy: torch.Tensor,
        weights: MLPWeights,
        kept: KeptOfMLP,
        n_rowwise: Cast,
        n_columnwise: Cast,
        wgrad_dtype: torch.dtype | None = None,
        adapters: MLPAdapters = NO_MLP_ADAPTERS,
        source: Source = NO_SOURCE,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Return (dn [T, H], gradients of the weights and of the adapters) from dy [T, H]; the functions cast n again.

        Gradients have the dtype of their weights, unless `wgrad_dtype` says another.
        """
        recipe, dtype = self.gate_up, dy.dtype
        saved = kept.saved
        wants = [weight.requires_grad for weight in weights]
        if saved is None:
            saved = adapters.gate_up.add(self._gate_up(n_rowwise(), weights, dtype), kept.gate_up)
            if recipe.save == "fp8":
                saved = gated_activation_cast(saved, self.activation, self.down).saved  # what "none" would have kept
        #     dproduct = dy Wdown';  dgate_up = act'(...) dproduct;  dn = dgate_up Wgate_up
        #     dWdown = dy' product;  dWgate_up = dgate_up' n                  operands cast along the tokens
        down, factor = dgrad_weight([weights.down], self.down)
        dy_cast, dy_columnwise = self.down.cast_grad_output(dy, True, wants[2], factor)
        dproduct = self.down.multiply(dy_cast, down, dtype)
        du_down, db_down = adapters.down.output_backward(dy, kept.down)
        adapters.down.add_to_input(dproduct, du_down, kept.down)
        # A view of both weights where ZeRO-3 gathered them side by side: no stacked copy.
        gate_up, factor = dgrad_weight(weights[:2], recipe)
        casts = gated_activation_backward(
            dproduct,
            saved,
            self.activation,
            recipe,
            self.down,
            factor,
            wgrad=any(wants),
            uncast=(bool(adapters.gate_up), bool(adapters.down)),
        )
        # Before dn and the gradients of the weights are allocated: this is the peak of a layer's backward.
        del dproduct, saved, down
        dn = recipe.multiply(casts.dgate_up, gate_up, dtype)
        of_adapters = []
        if adapters.parameters:
            of_adapters = adapters.gate_up.backward(casts.dgate_up_uncast, dn, kept.gate_up, *source)
            da_down = adapters.down.a_backward(du_down, casts.product_uncast, kept.down)
            of_adapters += adapters.down.in_order(da_down, db_down)
        ddown = dgate = dup = None
        if wants[2]:
            ddown = self.down.multiply(dy_columnwise, casts.product_columnwise, wgrad_dtype or weights.down.dtype)
        if wants[0] or wants[1]:
            # One product for both weights. n is cast along the tokens only here, and freed with the expression.
            stacked = recipe.multiply(casts.dgate_up_columnwise, n_columnwise(), wgrad_dtype or weights.gate.dtype)
            dgate, dup = split_rows(stacked, weights[:2])
        return dn, (dgate, dup, ddown, *of_adapters)

    def _gate_up(self, n: QuantizedTensor, weights: MLPWeights, dtype: torch.dtype) -> torch.Tensor:
        return self.gate_up.multiply(n, fprop_weight(weights[:2], self.gate_up), dtype)


class _WholeMLP(torch.autograd.Function):
    """The MLP of x, or with a norm that of RMSNorm(x + residual), to which x + residual is added."""

    @staticmethod
    def forward(
        ctx, x, residual, norm, gate, up, down, mlp: GatedMLP, eps: float, keep: bool, adapters: MLPAdapters, *_
    ):
        recipe, weights, x_TH = mlp.gate_up, MLPWeights(gate, up, down), x.reshape(-1, x.shape[-1])
        wants_wgrad = gate.requires_grad or up.requires_grad
        # Recomputing needs x row-wise as well as column-wise, which only x itself has, as adapters need it.
        needs_x = recipe.recompute == "mlp" or bool(adapters.gate_up)
        in_fp8 = norm is None and keep and recipe.save == "fp8" and wants_wgrad and not needs_x
        if norm is not None:
            hidden, rstd, cast = rms_norm_cast(x_TH, norm, eps, recipe, residual.reshape(x_TH.shape))
            source, saved = Source(hidden, rstd, norm), (hidden, rstd)
        elif in_fp8:
            cast, columnwise = recipe.cast_input_both(x_TH)
            cast, saved = recipe.with_outliers(cast, x_TH), (columnwise.data, columnwise.scale)
            source = Source(x_TH)
        else:
            cast, source = recipe.cast_whole_input(x_TH), Source(x_TH)
            saved = (x_TH if needs_x or wants_wgrad else None), None
        y, kept = mlp.forward(cast, weights, x.dtype, keep, adapters, source)
        ctx.mlp, ctx.weights, ctx.norm, ctx.in_fp8, ctx.adapters = mlp, weights, norm, in_fp8, adapters
        if keep:
            ctx.save_for_backward(*saved, *kept.tensors)
        # In place: nobody else holds the product's result.
        return (y if norm is None else y.add_(hidden)).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hidden, rstd, *tensors = ctx.saved_tensors
        mlp, norm, recipe, dy_TH = ctx.mlp, ctx.norm, ctx.mlp.gate_up, dy.reshape(-1, dy.shape[-1])
        again = _cast_again(recipe, hidden, rstd, norm)
        if ctx.in_fp8:
            again = None, functools.partial(recipe.kept_input, hidden, rstd)
        kept, source = KeptOfMLP.of_tensors(tensors, ctx.adapters, mlp.down), Source(hidden, rstd, norm)
        dn, gradients = mlp.backward(dy_TH, ctx.weights, kept, *again, adapters=ctx.adapters, source=source)
        of_weights, of_adapters = gradients[:3], gradients[3:]
        return *_input_gradients(dn, dy, hidden, rstd, norm), *of_weights, None, None, None, None, *of_adapters


class _TiledMLP(torch.autograd.Function):
    """The same in tiles. It keeps x, or h = x + residual."""

    @staticmethod
    def forward(ctx, x, residual, norm, gate, up, down, mlp: GatedMLP, eps: float, keep: bool, _: MLPAdapters):
        recipe, weights = mlp.gate_up, MLPWeights(gate, up, down)
        x_TH = x.reshape(-1, x.shape[-1])
        y, hidden, rstd = torch.empty_like(x_TH), x_TH, None
        if norm is not None:
            residual = residual.reshape(x_TH.shape)
            hidden, rstd = torch.empty_like(x_TH), torch.empty(len(x_TH), device=x.device)
        for rows in _tiles(len(x_TH), recipe):
            if norm is None:
                cast = recipe.cast_whole_input(x_TH[rows])
            else:
                hidden[rows], rstd[rows], cast = rms_norm_cast(x_TH[rows], norm, eps, recipe, residual[rows])
            output = mlp.forward(cast, weights, x.dtype, keep=False)[0]
            y[rows] = output if norm is None else output.add_(hidden[rows])
            del cast, output
        ctx.mlp, ctx.weights, ctx.norm = mlp, weights, norm
        if keep:
            ctx.save_for_backward(hidden, rstd)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hidden, rstd = ctx.saved_tensors
        weights, norm, recipe = ctx.weights, ctx.norm, ctx.mlp.gate_up
        dy_TH = dy.reshape(-1, dy.shape[-1])
        dn, sums = torch.empty_like(dy_TH), [None, None, None]
        for rows in _tiles(len(dy_TH), recipe):
            again = _cast_again(recipe, hidden[rows], None if rstd is None else rstd[rows], norm)
            dn[rows], gradients = ctx.mlp.backward(dy_TH[rows], weights, KeptOfMLP(None), *again, torch.float32)
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, gradients, strict=True)]
            del gradients
        gradients = [x if x is None else x.to(weight.dtype) for x, weight in zip(sums, weights, strict=True)]
        return *_input_gradients(dn, dy, hidden, rstd, norm), *gradients, None, None, None, None


def gated_mlp(
    x: torch.Tensor, weights: MLPWeights, mlp: GatedMLP, adapters: MLPAdapters = NO_MLP_ADAPTERS
) -> torch.Tensor:
    """Return down(act(gate(x)) · up(x)) for x [..., H], in FP8."""
    keep = torch.is_grad_enabled()
    return _function(mlp).apply(x, None, None, *weights, mlp, 0.0, keep, adapters, *adapters.parameters)


def normed_mlp(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weights: MLPWeights,
    mlp: GatedMLP,
    adapters: MLPAdapters = NO_MLP_ADAPTERS,
) -> torch.Tensor:
    """Return h + MLP(RMSNorm(h)) with h = x + residual, all [..., H]; norm weight [H].

    Keeps h for backward, and gate_up as configured.
    """
    keep = torch.is_grad_enabled()
    return _function(mlp).apply(x, residual, norm, *weights, mlp, eps, keep, adapters, *adapters.parameters)


def _function(mlp: GatedMLP) -> type[torch.autograd.Function]:
    return _WholeMLP if mlp.gate_up.mlp_tile_tokens is None else _TiledMLP


def _cast_again(
    recipe: LinearRecipe, hidden: torch.Tensor, rstd: torch.Tensor | None, norm: torch.Tensor | None
) -> tuple[Cast, Cast]:
    """Return what casts the MLP's input for backward, along the features and along the tokens."""
    arguments = hidden, rstd, norm
    return (
        functools.partial(recipe.cast_whole_input, *arguments),
        functools.partial(recipe.cast_input_columnwise, *arguments),
    )


def _input_gradients(
    dn: torch.Tensor, dy: torch.Tensor, hidden: torch.Tensor, rstd: torch.Tensor, norm: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if norm is None:
        return dn.view(dy.shape), None, None
    dhidden, dnorm = rms_norm_backward(dn, hidden, norm, rstd, dy.reshape(dn.shape))
    # hidden = x + residual: both get the same gradient, one tensor for two inputs.
    dhidden = dhidden.view(dy.shape)
    return dhidden, dhidden, dnorm if norm.requires_grad else None


def why_not_tiled(recipe: LinearRecipe) -> str | None:
    for granularity, scale in (
        (recipe.input.granularity, recipe.input.scale),
        (recipe.wgrad_input, recipe.input.scale),
        (recipe.grad_output.granularity, recipe.grad_output.scale),
    ):
        if granularity in ("tensor", "row") and SCALE_TYPES[scale].needs_amax:
            return f'a scale of granularity "{granularity}" is that of all tokens; use "1x128", as preset "infir2" does'
    return why_not_in_fp32(recipe.backend, recipe.grad_output, replace(recipe.input, granularity=recipe.wgrad_input))


def _tiles(tokens: int, recipe: LinearRecipe) -> Iterator[slice]:
    """Yield the rows of every tile; the last may be smaller."""
    for start in range(0, max(1, tokens), recipe.mlp_tile_tokens):
        yield slice(start, min(start + recipe.mlp_tile_tokens, tokens))
