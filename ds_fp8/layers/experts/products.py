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
    Saved,
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


class SavedExperts(NamedTuple):
    """Tensors that `forward` saves for `backward`."""

    gate_up: Saved | None = None  # [R, 2F]; None: recomputed
    u_gate_up: torch.Tensor | None = None  # [R, r] of the adapter
    u_down: torch.Tensor | None = None  # [R, r] of the adapter


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
    activation: str  # one of gated_activation.ACTIVATIONS
    gate_up: LinearRecipe  # `unsupported` returns None for both
    down: LinearRecipe

    def forward(
        self,
        x: torch.Tensor,
        layout: ExpertLayout,
        factors: torch.Tensor,
        weights: ExpertWeights,
        save: bool,
        adapters: ExpertAdapters = NO_ADAPTERS,
    ) -> tuple[torch.Tensor, SavedExperts]:
        """Return (y [T, H] in x's dtype, tensors saved for backward) from x [T, H], T > 0.

        factors: FP32 [R], the router's weights.
        """
        if self.gate_up.monitor.active:
            self.gate_up.quantize_input(x)  # for the monitor, which would count permuted tokens k times
        save = save and self.gate_up.recompute != "mlp"
        p_quantized, p, saved = self._product(x, layout, factors, weights, save, adapters)
        rows = self._multiply(p_quantized, quantized_experts(weights.down, self.down), layout, self.down, x.dtype)
        y = unpermute(rows, layout)
        if adapters.down is not None:
            saved = saved._replace(u_down=adapters.down.add_to_tokens(y, p, layout))
        return y, saved

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        layout: ExpertLayout,
        factors: torch.Tensor,
        weights: ExpertWeights,
        saved: SavedExperts,
        adapters: ExpertAdapters = NO_ADAPTERS,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, factors, weights and adapters; None for those without."""
        recipe, down, dtype = self.gate_up, self.down, dy.dtype
        wants = [weight.requires_grad for weight in weights]
        of_gate_up = of_down = (None, None)
        gate_up = saved.gate_up
        if gate_up is None:
            *_, recomputed = self._product(x, layout, factors, weights, True, adapters)
            gate_up = recomputed.gate_up
        if down.monitor.active:
            down.quantize_grad_output(dy, wgrad=False)
        spec = down.grad_output
        along_tokens = "1x128" if wants[1] else None
        dy_rowwise, dy_columnwise = permute_quantize(dy, layout, spec.format, "1x128", along_tokens, spec.scale)
        dp = self._multiply(dy_rowwise, self._transposed(weights.down, down), layout, down, dtype)
        if adapters.down is not None:
            du, db = adapters.down.tokens_backward(dy, dp, saved.u_down, layout)
        uncast = adapters.gate_up is not None, adapters.down is not None
        gradients = gated_activation_backward(
            dp, gate_up, self.activation, recipe, down, row_factor=factors, wgrad=any(wants), uncast=uncast
        )
        del dp, gate_up, dy_rowwise
        if adapters.down is not None:
            of_down = adapters.down.a_backward(du, gradients.product_uncast, layout), db
        rows = self._multiply(gradients.dgate_up, self._transposed(weights.gate_up, recipe), layout, recipe, dtype)
        dx = unpermute(rows, layout)
        del rows
        if adapters.gate_up is not None:
            of_gate_up = adapters.gate_up.rows_backward(gradients.dgate_up_uncast, dx, x, saved.u_gate_up, layout)
        dgate_up = ddown = None
        if wants[1]:
            ddown = self._wgrad(dy_columnwise, gradients.product_columnwise, layout, down, weights.down.dtype)
        if wants[0]:
            spec = recipe.input
            _, x_columnwise = permute_quantize(x, layout, spec.format, None, recipe.wgrad_input, spec.scale)
            dgate_up = self._wgrad(gradients.dgate_up_columnwise, x_columnwise, layout, recipe, weights.gate_up.dtype)
        return dx, gradients.drow_factor, dgate_up, ddown, *of_gate_up, *of_down

    def _product(
        self,
        x: torch.Tensor,
        layout: ExpertLayout,
        factors: torch.Tensor,
        weights: ExpertWeights,
        save: bool,
        adapters: ExpertAdapters,
    ) -> tuple[QuantizedTensor, torch.Tensor | None, SavedExperts]:
        """Return p [R, F] quantized, p in x's dtype for down's adapter or None, and the saved tensors."""
        spec, u = self.gate_up.input, None
        rows, _ = permute_quantize(x, layout, spec.format, "1x128", None, spec.scale)
        weight = quantized_experts(weights.gate_up, self.gate_up)
        gate_up = self._multiply(rows, weight, layout, self.gate_up, x.dtype)
        if adapters.gate_up is not None:
            u = adapters.gate_up.add_to_rows(gate_up, x, layout)
        gated = gated_activation_forward(
            gate_up, self.activation, self.down, save, factors, product=adapters.down is not None
        )
        return gated.product, gated.uncast, SavedExperts(gated.saved, u)

    @staticmethod
    def _transposed(weight: nn.Parameter, recipe: LinearRecipe) -> QuantizedTensor:
        return transpose(quantized_experts(weight, recipe), len(weight))

    @staticmethod
    def _multiply(
        a: QuantizedTensor, b: QuantizedTensor, layout: ExpertLayout, recipe: LinearRecipe, dtype: torch.dtype
    ) -> torch.Tensor:
        return grouped_matmul(a, b, layout.groups, backend=recipe.backend, out_dtype=dtype)

    @staticmethod
    def _wgrad(
        dy: QuantizedTensor, x: QuantizedTensor, layout: ExpertLayout, recipe: LinearRecipe, dtype: torch.dtype
    ) -> torch.Tensor:
        return grouped_wgrad(dy, x, layout.groups, backend=recipe.backend, out_dtype=dtype)


class _ExpertProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, top_k_index, top_k_weights, gate_up, down, products: ExpertProducts, save: bool, *low_rank):
        # Not save_for_backward: ZeRO-3 reshards parameters after forward, and unshards them for backward.
        ctx.products, ctx.weights, ctx.routed = products, ExpertWeights(gate_up, down), top_k_index.numel() > 0
        ctx.weight_dtype, ctx.weight_shape = top_k_weights.dtype, top_k_weights.shape
        if not ctx.routed:
            ctx.save_for_backward(*low_rank)
            return torch.zeros_like(x)
        layout = expert_layout(top_k_index, len(gate_up))
        factors = row_factors(top_k_weights, layout)
        y, saved = products.forward(x, layout, factors, ctx.weights, save, ExpertAdapters.of_tensors(low_rank))
        if save:
            ctx.save_for_backward(x, factors, *layout, *low_rank, *saved[1:], *tensors_of(saved.gate_up))
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
        layout, adapters = ExpertLayout(*tensors[:5]), ExpertAdapters.of_tensors(tensors[5:9])
        saved = SavedExperts(saved_from(tensors[11:], ctx.products.down), *tensors[9:11])
        dx, dfactors, *others = ctx.products.backward(dy, x, layout, factors, ctx.weights, saved, adapters)
        dweights = pair_values(dfactors, layout).to(ctx.weight_dtype)
        return dx, None, dweights, *others[:2], None, None, *others[2:]


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
