"""The gated MLP as one operation: two products, with the gated activation and all quantizations fused between them.

    gate_up [T, 2F] = n [T, H] · [gate; up] [2F, H]ᵀ       n quantized once for both
    p       [T, F]  = act(gate) · up                        quantized in the kernel that computes it
    y       [T, H]  = p · down [H, F]ᵀ

LoRA adds its low-rank products to gate_up and y (layers/linear/adapters.py). n is x, or RMSNorm(h) with
h = x + residual; then h is added to y. Backward quantizes n and p along the tokens: n is recomputed from the saved h
and rstd, p from gate_up, which is saved in FP8 or BF16 (`activations.save`) or recomputed by its product
(`activations.recompute`). The inputs of frozen weights are not quantized along the tokens.

With `activations.mlp_tile_tokens` gate_up and its quantized forms, the largest activations of a layer, exist for one
tile of tokens at a time, and none is saved. A tile is a multiple of 128 tokens, so that all scales, the output and the
input's gradient have the bits of the untiled MLP. Weight gradients are summed over the tiles in FP32 and rounded once;
autograd gets one per weight, because ZeRO-3 reduces a gradient when it arrives.

T tokens, H hidden and F intermediate features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import SCALE_TYPES
from ds_fp8.gemm import why_not_in_fp32
from ds_fp8.layers.decoder.rms_norm import rms_norm_backward, rms_norm_quantize
from ds_fp8.layers.linear.adapters import Adapters, SavedAdapters
from ds_fp8.layers.linear.gated_activation import (
    Saved,
    gated_activation_backward,
    gated_activation_forward,
    saved_from,
    tensors_of,
)
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_weight, fprop_weight, split_rows


class MLPWeights(NamedTuple):
    gate: nn.Parameter  # [F, H]
    up: nn.Parameter  # [F, H]
    down: nn.Parameter  # [H, F]


class MLPInput(NamedTuple):
    """The factors of n [T, H] in high precision: n = x, or x · rstd · norm."""

    x: torch.Tensor | None  # [T, H]; None if neither adapters nor backward read it
    rstd: torch.Tensor | None = None
    norm: torch.Tensor | None = None


class MLPAdapters(NamedTuple):
    gate_up: Adapters
    down: Adapters

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.gate_up.parameters + self.down.parameters


NO_INPUT = MLPInput(None)
NO_MLP_ADAPTERS = MLPAdapters(Adapters(()), Adapters(()))


class SavedMLP(NamedTuple):
    """Tensors that a gated MLP saves for backward, apart from its input."""

    gate_up: Saved | None = None  # [T, 2F]; None: recomputed
    gate_up_adapters: SavedAdapters = ()
    down_adapters: SavedAdapters = ()

    @classmethod
    def of_tensors(cls, tensors: list, adapters: MLPAdapters, down: LinearRecipe) -> SavedMLP:
        first, second = adapters.gate_up.saved_count, adapters.gate_up.saved_count + adapters.down.saved_count
        return cls(saved_from(tensors[second:], down), tensors[:first], tensors[first:second])

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return *self.gate_up_adapters, *self.down_adapters, *tensors_of(self.gate_up)


@dataclass(frozen=True)
class GatedMLP:
    """Settings of a gated MLP; its weights are separate arguments."""

    activation: str  # one of gated_activation.ACTIVATIONS
    gate_up: LinearRecipe
    down: LinearRecipe

    def forward(
        self,
        quantized: QuantizedTensor,
        weights: MLPWeights,
        dtype: torch.dtype,
        save: bool,
        adapters: MLPAdapters = NO_MLP_ADAPTERS,
        n: MLPInput = NO_INPUT,
    ) -> tuple[torch.Tensor, SavedMLP]:
        """Return (y [T, H] of `dtype`, tensors saved for backward) from n, `quantized` rowwise; adapters read n."""
        gate_up_adapters = adapters.gate_up.project(*n)
        gate_up = adapters.gate_up.add(self._gate_up(quantized, weights, dtype), gate_up_adapters)
        save = save and self.gate_up.recompute != "mlp"
        p_quantized, saved, p = gated_activation_forward(
            gate_up, self.activation, self.down, save, product=bool(adapters.down)
        )
        down_adapters = adapters.down.project(p)
        # 2F numbers a token, the largest activation of a layer: freed before the next product allocates.
        del gate_up, p
        y = self.down.multiply(p_quantized, fprop_weight(weights[2:], self.down), dtype)
        return adapters.down.add(y, down_adapters), SavedMLP(saved, gate_up_adapters, down_adapters)

    def backward(
        self,
        dy: torch.Tensor,
        weights: MLPWeights,
        saved: SavedMLP,
        n: MLPInput | QuantizedTensor,
        wgrad_dtype: torch.dtype | None = None,
        adapters: MLPAdapters = NO_MLP_ADAPTERS,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Return (dn [T, H], gradients of the weights and adapters) from dy [T, H].

        n: the input, to be quantized again, or as forward saved it, quantized columnwise [H, T]. Weight gradients have
        `wgrad_dtype`, or the weights' dtype.
        """
        recipe, dtype = self.gate_up, dy.dtype
        n_columnwise, n = (n, NO_INPUT) if isinstance(n, QuantizedTensor) else (None, n)
        gate_up = saved.gate_up
        wants = [weight.requires_grad for weight in weights]
        if gate_up is None:
            gate_up = self._gate_up(recipe.quantize_input_with_outliers(*n), weights, dtype)
            gate_up = adapters.gate_up.add(gate_up, saved.gate_up_adapters)
            if recipe.save == "fp8":
                # rounded as recompute "none" saves it: the gradients have the same bits
                gate_up = gated_activation_forward(gate_up, self.activation, self.down).saved
        #     dp = dy Wdown';  dgate_up = act'(...) dp;  dn = dgate_up Wgate_up
        #     dWdown = dy' p;  dWgate_up = dgate_up' n                  both sides quantized along the tokens
        w_down, factor = dgrad_weight([weights.down], self.down)
        dy_quantized, dy_columnwise = self.down.quantize_grad_output(dy, True, wants[2], factor)
        dp = self.down.multiply(dy_quantized, w_down, dtype)
        du_down, db_down = adapters.down.output_backward(dy, saved.down_adapters)
        adapters.down.add_to_input(dp, du_down, saved.down_adapters)
        # A view of both weights where their all-gather put them side by side: no stacked copy.
        w_gate_up, factor = dgrad_weight(weights[:2], recipe)
        gradients = gated_activation_backward(
            dp,
            gate_up,
            self.activation,
            recipe,
            self.down,
            factor,
            wgrad=any(wants),
            uncast=(bool(adapters.gate_up), bool(adapters.down)),
        )
        # Before dn and the weight gradients are allocated: this is the peak of a layer's backward.
        del dp, gate_up, w_down
        dn = recipe.multiply(gradients.dgate_up, w_gate_up, dtype)
        of_adapters = []
        if adapters.parameters:
            of_adapters = adapters.gate_up.backward(gradients.dgate_up_uncast, dn, saved.gate_up_adapters, *n)
            da_down = adapters.down.a_backward(du_down, gradients.product_uncast, saved.down_adapters)
            of_adapters += adapters.down.in_order(da_down, db_down)
        ddown = dgate = dup = None
        if wants[2]:
            ddown = self.down.multiply(dy_columnwise, gradients.product_columnwise, wgrad_dtype or weights.down.dtype)
        if wants[0] or wants[1]:
            # One product for both weights; n is quantized along the tokens as late as here.
            n_columnwise = n_columnwise or recipe.quantize_input_columnwise(*n)
            stacked = recipe.multiply(gradients.dgate_up_columnwise, n_columnwise, wgrad_dtype or weights.gate.dtype)
            dgate, dup = split_rows(stacked, weights[:2])
        return dn, (dgate, dup, ddown, *of_adapters)

    def _gate_up(self, n: QuantizedTensor, weights: MLPWeights, dtype: torch.dtype) -> torch.Tensor:
        return self.gate_up.multiply(n, fprop_weight(weights[:2], self.gate_up), dtype)


class _UntiledMLP(torch.autograd.Function):
    """MLP(x), or with a norm h + MLP(RMSNorm(h)), h = x + residual."""

    @staticmethod
    def forward(
        ctx, x, residual, norm, gate, up, down, mlp: GatedMLP, eps: float, save: bool, adapters: MLPAdapters, *_
    ):
        recipe, weights, x_TH = mlp.gate_up, MLPWeights(gate, up, down), x.reshape(-1, x.shape[-1])
        wants_wgrad = gate.requires_grad or up.requires_grad
        # Adapters and a recomputed gate_up read n rowwise in backward; a columnwise n serves wgrad only.
        needs_x = recipe.recompute == "mlp" or bool(adapters.gate_up)
        n_in_fp8 = norm is None and save and recipe.save == "fp8" and wants_wgrad and not needs_x
        if norm is not None:
            hidden, rstd, quantized = rms_norm_quantize(x_TH, norm, eps, recipe, residual.reshape(x_TH.shape))
            n, saved_input = MLPInput(hidden, rstd, norm), (hidden, rstd)
        elif n_in_fp8:
            quantized, columnwise = recipe.quantize_input_both(x_TH)
            quantized, saved_input = recipe.with_outliers(quantized, x_TH), (columnwise.data, columnwise.scale)
            n = MLPInput(x_TH)
        else:
            quantized, n = recipe.quantize_input_with_outliers(x_TH), MLPInput(x_TH)
            saved_input = (x_TH if needs_x or wants_wgrad else None), None
        y, saved = mlp.forward(quantized, weights, x.dtype, save, adapters, n)
        ctx.mlp, ctx.weights, ctx.norm, ctx.n_in_fp8, ctx.adapters = mlp, weights, norm, n_in_fp8, adapters
        if save:
            ctx.save_for_backward(*saved_input, *saved.tensors)
        # In place: the product's result has no other owner.
        return (y if norm is None else y.add_(hidden)).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hidden, rstd, *tensors = ctx.saved_tensors
        mlp, norm, adapters = ctx.mlp, ctx.norm, ctx.adapters
        n = mlp.gate_up.saved_input(hidden, rstd) if ctx.n_in_fp8 else MLPInput(hidden, rstd, norm)
        saved = SavedMLP.of_tensors(tensors, adapters, mlp.down)
        dn, gradients = mlp.backward(dy.reshape(-1, dy.shape[-1]), ctx.weights, saved, n, adapters=adapters)
        of_weights, of_adapters = gradients[:3], gradients[3:]
        return *_input_gradients(dn, dy, hidden, rstd, norm), *of_weights, None, None, None, None, *of_adapters


class _TiledMLP(torch.autograd.Function):
    """_UntiledMLP in tiles of tokens; saves x, or h = x + residual."""

    @staticmethod
    def forward(ctx, x, residual, norm, gate, up, down, mlp: GatedMLP, eps: float, save: bool, _: MLPAdapters):
        recipe, weights = mlp.gate_up, MLPWeights(gate, up, down)
        x_TH = x.reshape(-1, x.shape[-1])
        y, hidden, rstd = torch.empty_like(x_TH), x_TH, None
        if norm is not None:
            residual = residual.reshape(x_TH.shape)
            hidden, rstd = torch.empty_like(x_TH), torch.empty(len(x_TH), device=x.device)
        for rows in _tiles(len(x_TH), recipe):
            if norm is None:
                quantized = recipe.quantize_input_with_outliers(x_TH[rows])
            else:
                hidden[rows], rstd[rows], quantized = rms_norm_quantize(x_TH[rows], norm, eps, recipe, residual[rows])
            output = mlp.forward(quantized, weights, x.dtype, save=False)[0]
            y[rows] = output if norm is None else output.add_(hidden[rows])
            del quantized, output
        ctx.mlp, ctx.weights, ctx.norm = mlp, weights, norm
        if save:
            ctx.save_for_backward(hidden, rstd)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hidden, rstd = ctx.saved_tensors
        weights, norm = ctx.weights, ctx.norm
        dy_TH = dy.reshape(-1, dy.shape[-1])
        dn, sums = torch.empty_like(dy_TH), [None, None, None]
        for rows in _tiles(len(dy_TH), ctx.mlp.gate_up):
            n = MLPInput(hidden[rows], None if rstd is None else rstd[rows], norm)
            dn[rows], gradients = ctx.mlp.backward(dy_TH[rows], weights, SavedMLP(), n, torch.float32)
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, gradients, strict=True)]
            del gradients
        gradients = [x if x is None else x.to(weight.dtype) for x, weight in zip(sums, weights, strict=True)]
        return *_input_gradients(dn, dy, hidden, rstd, norm), *gradients, None, None, None, None


def gated_mlp(
    x: torch.Tensor,
    weights: MLPWeights,
    mlp: GatedMLP,
    adapters: MLPAdapters = NO_MLP_ADAPTERS,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Compute down(act(gate(x)) · up(x)) for x [..., H] in FP8; with a norm [H] h + MLP(RMSNorm(h)), h = x + residual.

    Saves x or h for backward, and gate_up as configured.
    """
    function = _UntiledMLP if mlp.gate_up.mlp_tile_tokens is None else _TiledMLP
    save = torch.is_grad_enabled()
    return function.apply(x, residual, norm, *weights, mlp, eps, save, adapters, *adapters.parameters)


def _input_gradients(
    dn: torch.Tensor, dy: torch.Tensor, hidden: torch.Tensor, rstd: torch.Tensor, norm: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if norm is None:
        return dn.view(dy.shape), None, None
    dhidden, dnorm = rms_norm_backward(dn, hidden, norm, rstd, dy.reshape(dn.shape))
    # hidden = x + residual: one gradient tensor for both
    dhidden = dhidden.view(dy.shape)
    return dhidden, dhidden, dnorm if norm.requires_grad else None


def why_not_tiled(recipe: LinearRecipe) -> str | None:
    for granularity, scale in (
        (recipe.input.granularity, recipe.input.scale),
        (recipe.wgrad_input, recipe.input.scale),
        (recipe.grad_output.granularity, recipe.grad_output.scale),
    ):
        if granularity in ("tensor", "row") and SCALE_TYPES[scale].needs_amax:
            return f'granularity "{granularity}" has one scale for all tokens; use "1x128", as preset "infir2" does'
    return why_not_in_fp32(recipe.backend, recipe.grad_output, replace(recipe.input, granularity=recipe.wgrad_input))


def _tiles(tokens: int, recipe: LinearRecipe) -> Iterator[slice]:
    for start in range(0, max(1, tokens), recipe.mlp_tile_tokens):
        yield slice(start, min(start + recipe.mlp_tile_tokens, tokens))
