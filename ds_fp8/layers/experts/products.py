"""Experts of a mixture as one operation: permutations and grouped FP8 products, without a device synchronization.

    rows    [R, H]   = x [T, H], permuted (layout.py)                       quantized as it is permuted
    gate_up [R, 2F]  = rows · gate_up_e [2F, H]ᵀ                            by expert e
    p       [R, F]   = router weight · act(gate) · up                       quantized as it is computed
    y       [T, H]   = sum over the token's experts of p · down_e [H, F]ᵀ   by expert e

The router's weight multiplies p, before down: down's wgrad needs p alone, the gradient of the router's weight is a sum
over p's features, and the experts' outputs are not saved. Saved for backward: x, which the router saves anyway (a
permuted x in FP8 would take k bytes an element), and gate_up as in a gated MLP (`activations.save`,
`activations.recompute`). LoRA is added to gate_up and y in BF16 (adapters.py).

T tokens, k choices of each, H hidden and F intermediate features, E experts, R rows (layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor, transpose
from ds_fp8.config.formats import SCALE_TYPES, CastSpec
from ds_fp8.gemm import grouped
from ds_fp8.gemm.grouped import grouped_matmul, grouped_wgrad
from ds_fp8.layers.experts.adapters import LowRank
from ds_fp8.layers.experts.layout import (
    ExpertLayout,
    expert_layout,
    pair_values,
    permute_quantize,
    row_factors,
    unpermute,
)
from ds_fp8.layers.linear.gated_activation import (
    GatedCast,
    gated_activation_backward,
    gated_activation_forward,
    saved_from,
    tensors_of,
)
from ds_fp8.layers.linear.linear import LAYERS
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import UNSHARDED


class ExpertWeights(NamedTuple):
    gate_up: nn.Parameter  # [E, 2F, H], gate's rows before up's
    down: nn.Parameter  # [E, H, F]


class ExpertAdapters(NamedTuple):
    gate_up: LowRank | None = None
    down: LowRank | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (*(self.gate_up or (None, None)), *(self.down or (None, None)))

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor | None]) -> ExpertAdapters:
        first, second = tensors[:2], tensors[2:]
        return cls(*(None if pair[0] is None else LowRank(*pair) for pair in (first, second)))


NO_ADAPTERS = ExpertAdapters()


def unsupported(recipe: LinearRecipe) -> str | None:
    """Return why grouped products cannot run with a recipe, or None."""
    casts = recipe.input, recipe.weight, recipe.grad_output
    if type(recipe) in LAYERS:
        return "they have no fp8.linear.rotation, recast, smooth_swiglu or stochastic rounding"
    if not all(SCALE_TYPES[cast.scale].needs_amax for cast in casts):
        return 'they have no scale "static"'
    if recipe.outlier_channels:
        return "they have no outlier channels"
    if recipe.weight.granularity != "128x128":
        return f"their weights are quantized 128x128, not {recipe.weight.granularity}"
    along_tokens = CastSpec(recipe.input.format, recipe.wgrad_input, recipe.input.scale)
    return (
        grouped.unsupported(recipe.input, recipe.weight)
        or grouped.unsupported(recipe.grad_output, recipe.weight)
        or grouped.unsupported(recipe.grad_output, along_tokens)
    )


def quantized_experts(weight: torch.Tensor, recipe: LinearRecipe) -> QuantizedTensor:
    """Return the weight [E, N, K] quantized as [E * N, K]: the unsharded FP8 weight, or quantized here."""
    unsharded = getattr(weight, UNSHARDED, None)
    return recipe.quantize_weight(weight.detach().flatten(0, 1)) if unsharded is None else unsharded


@dataclass(frozen=True)
class ExpertProducts:
    """Settings of the products of experts; the weights are separate arguments."""

    activation: str  # one of gated_activation.ACTIVATIONS
    gate_up: LinearRecipe  # `unsupported` returns None for both
    down: LinearRecipe

    def gated(
        self,
        x: torch.Tensor,
        layout: ExpertLayout,
        factors: torch.Tensor,
        weight: nn.Parameter,
        save: bool,
        adapters: ExpertAdapters,
    ) -> tuple[GatedCast, torch.Tensor | None]:
        """Return p [R, F], in x's dtype too for down's adapter, with gate_up to be saved; and u [R, r] of its adapter.

        factors: FP32 [R], the router's weights.
        """
        spec, u = self.gate_up.input, None
        rows, _ = permute_quantize(x, layout, spec.format, "1x128", None, spec.scale)
        gate_up = _multiply(rows, quantized_experts(weight, self.gate_up), layout, self.gate_up, x.dtype)
        if adapters.gate_up is not None:
            u = adapters.gate_up.add_to_rows(gate_up, x, layout)
        product = adapters.down is not None
        return gated_activation_forward(gate_up, self.activation, self.down, save, factors, product), u


def _multiply(
    a: QuantizedTensor, b: QuantizedTensor, layout: ExpertLayout, recipe: LinearRecipe, dtype: torch.dtype
) -> torch.Tensor:
    return grouped_matmul(a, b, layout.groups, backend=recipe.backend, out_dtype=dtype)


def _transposed(weight: nn.Parameter, recipe: LinearRecipe) -> QuantizedTensor:
    return transpose(quantized_experts(weight, recipe), len(weight))


class _ExpertProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, top_k_index, top_k_weights, gate_up, down, products: ExpertProducts, save: bool, *low_rank):
        # Not save_for_backward: ZeRO-3 reshards parameters after forward, and unshards them for backward.
        ctx.products, ctx.weights, ctx.routed = products, ExpertWeights(gate_up, down), top_k_index.numel() > 0
        ctx.weight_dtype, ctx.weight_shape = top_k_weights.dtype, top_k_weights.shape
        if not ctx.routed:
            ctx.save_for_backward(*low_rank)
            return torch.zeros_like(x)
        layout, adapters = expert_layout(top_k_index, len(gate_up)), ExpertAdapters.of_tensors(low_rank)
        factors, u_down = row_factors(top_k_weights, layout), None
        if products.gate_up.monitor.active:
            products.gate_up.quantize_input(x)  # for the monitor, which would count permuted tokens k times
        saves_gate_up = save and products.gate_up.recompute != "mlp"
        p, u_gate_up = products.gated(x, layout, factors, gate_up, saves_gate_up, adapters)
        rows = _multiply(p.product, quantized_experts(down, products.down), layout, products.down, x.dtype)
        y = unpermute(rows, layout)
        if adapters.down is not None:
            u_down = adapters.down.add_to_tokens(y, p.uncast, layout)
        if save:
            ctx.save_for_backward(x, factors, *layout, *low_rank, u_gate_up, u_down, *tensors_of(p.saved))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if not ctx.routed:
            zeros = [
                torch.zeros_like(w, memory_format=torch.contiguous_format)
                if w is not None and w.requires_grad
                else None
                for w in (*ctx.weights, *ctx.saved_tensors)
            ]
            dweights = dy.new_zeros(ctx.weight_shape, dtype=ctx.weight_dtype)
            return torch.zeros_like(dy), None, dweights, *zeros[:2], None, None, *zeros[2:]
        x, factors, *tensors = ctx.saved_tensors
        layout, (u_gate_up, u_down) = ExpertLayout(*tensors[:5]), tensors[9:11]
        of_gate_up, of_down = adapters = ExpertAdapters.of_tensors(tensors[5:9])
        products, weights, dtype = ctx.products, ctx.weights, dy.dtype
        recipe, down = products.gate_up, products.down
        wants = [weight.requires_grad for weight in weights]
        dgate_up = ddown = None
        dlow_rank = [None] * 4
        gate_up = saved_from(tensors[11:], down)
        if gate_up is None:
            gate_up = products.gated(x, layout, factors, weights.gate_up, True, adapters)[0].saved
        if down.monitor.active:
            down.quantize_grad_output(dy, wgrad=False)
        #     dp = dy · down_e;  dgate_up = act'(...) dp;  dx = dgate_up · gate_up_e           by expert e
        #     ddown_e = dyᵀ · p;  dgate_up_e = dgate_upᵀ · x           both sides quantized along the expert's rows
        spec, along_tokens = down.grad_output, "1x128" if wants[1] else None
        dy_rowwise, dy_columnwise = permute_quantize(dy, layout, spec.format, "1x128", along_tokens, spec.scale)
        dp = _multiply(dy_rowwise, _transposed(weights.down, down), layout, down, dtype)
        if of_down is not None:
            du, dlow_rank[3] = of_down.tokens_backward(dy, dp, u_down, layout)
        uncast = of_gate_up is not None, of_down is not None
        gradients = gated_activation_backward(
            dp, gate_up, products.activation, recipe, down, row_factor=factors, wgrad=any(wants), uncast=uncast
        )
        del dp, gate_up, dy_rowwise
        if of_down is not None:
            dlow_rank[2] = of_down.a_backward(du, gradients.product_uncast, layout)
        rows = _multiply(gradients.dgate_up, _transposed(weights.gate_up, recipe), layout, recipe, dtype)
        dx = unpermute(rows, layout)
        del rows
        if of_gate_up is not None:
            dlow_rank[:2] = of_gate_up.rows_backward(gradients.dgate_up_uncast, dx, x, u_gate_up, layout)
        if wants[1]:
            pair = dy_columnwise, gradients.product_columnwise
            ddown = grouped_wgrad(*pair, layout.groups, backend=down.backend, out_dtype=weights.down.dtype)
        if wants[0]:
            spec = recipe.input
            _, x_columnwise = permute_quantize(x, layout, spec.format, None, recipe.wgrad_input, spec.scale)
            pair = gradients.dgate_up_columnwise, x_columnwise
            dgate_up = grouped_wgrad(*pair, layout.groups, backend=recipe.backend, out_dtype=weights.gate_up.dtype)
        dweights = pair_values(gradients.drow_factor, layout).to(ctx.weight_dtype)
        return dx, None, dweights, dgate_up, ddown, None, None, *dlow_rank


def expert_products(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: ExpertWeights,
    products: ExpertProducts,
    adapters: ExpertAdapters = NO_ADAPTERS,
) -> torch.Tensor:
    """Return the sum [T, H] of each token's experts times the router's weights [T, k], computed in FP8 from x [T, H].

    top_k_index: integer [T, k]; choices of E or more are skipped. Experts without tokens get zero gradients. Weights
    are in FP8 (`weight.fp8_gathered`: [E * N, K] in 128x128 blocks) or in high precision.
    """
    low_rank = (None if tensor is None else tensor.to(x.dtype) for tensor in adapters.tensors)
    save = torch.is_grad_enabled()
    return _ExpertProducts.apply(x, top_k_index, top_k_weights, *weights, products, save, *low_rank)
