"""Experts of a mixture as one operation: FP8 products between permutations, with nothing that the host waits for.

    rows    [R, H]   = x [T, H], each token in the rows of its experts     cast as it is permuted
    gate_up [R, 2F]  = rows · gate_up_e [2F, H]ᵀ                            by expert e
    p       [R, F]   = router weight · act(gate) · up                       cast as it is computed
    y       [T, H]   = sum over the token's experts of p · down_e [H, F]ᵀ   by expert e

The router's weight is multiplied into p, before down: p is then all that down's wgrad needs, the weight's gradient is a
sum over p's features, and no output of an expert is kept. Between forward and backward there are x itself, which the
router keeps anyhow, and gate_up, as a gated MLP keeps it (`activations.save`, `activations.recompute`). A permuted x
in FP8 would be k bytes an element.

Adapters add their low-rank parts to gate_up and y in BF16 (adapters.py).

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
from ds_fp8.config.formats import BLOCK, SCALE_TYPES, CastSpec
from ds_fp8.gemm import grouped
from ds_fp8.gemm.grouped import grouped_matmul, grouped_wgrad
from ds_fp8.layers.experts.adapters import LowRank
from ds_fp8.layers.experts.layout import ExpertLayout, expert_layout, pair_values, permute_cast, row_factors, unpermute
from ds_fp8.layers.linear.gated_activation import (
    Saved,
    gated_activation_backward,
    gated_activation_cast,
    saved_from,
    tensors_of,
)
from ds_fp8.layers.linear.linear import LAYERS
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import GATHERED


class ExpertWeights(NamedTuple):
    gate_up: nn.Parameter
    """[E, 2F, H], the rows of gate before those of up."""
    down: nn.Parameter
    """[E, H, F]"""


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


class Kept(NamedTuple):
    """Tensors that `forward` keeps for `backward`."""

    gate_up: Saved | None = None
    """[R, 2F], if the recipe keeps it."""
    u_gate_up: torch.Tensor | None = None
    """[R, r], of its adapter, as of down's."""
    u_down: torch.Tensor | None = None


NO_ADAPTERS = ExpertAdapters()


def unsupported(recipe: LinearRecipe) -> str | None:
    casts = recipe.input, recipe.weight, recipe.grad_output
    if type(recipe) in LAYERS or not all(SCALE_TYPES[cast.scale].needs_amax for cast in casts):
        return "their casts round to nearest with scales that follow the numbers, neither rotated nor cast again"
    if recipe.outlier_channels:
        return "they have no outlier channels"
    if recipe.weight.granularity != "128x128":
        return f"their weights are cast 128x128, not {recipe.weight.granularity}"
    along_tokens = CastSpec(recipe.input.format, recipe.wgrad_input, recipe.input.scale)
    reasons = (
        grouped.unsupported(recipe.input, recipe.weight),
        grouped.unsupported(recipe.grad_output, recipe.weight),
        grouped.unsupported(recipe.grad_output, along_tokens),
    )
    return next((reason for reason in reasons if reason is not None), None)


def unsupported_shapes(gate_up: torch.Size, down: torch.Size) -> str | None:
    """Return why experts whose weights have these shapes, [E, 2F, H] and [E, H, F], cannot be multiplied, or None."""
    if len(gate_up) != 3 or len(down) != 3:
        return "their weights are not stacks of matrices, [E, N, K]"
    experts, hidden, features = down
    if tuple(gate_up) != (experts, 2 * features, hidden):
        return f"gate_up {tuple(gate_up)} and down {tuple(down)} are not [E, 2F, H] and [E, H, F]"
    if hidden % BLOCK or features % BLOCK:
        return f"hidden size {hidden} and intermediate size {features} are not both multiples of {BLOCK}"
    return None


def expert_operand(weight: torch.Tensor, recipe: LinearRecipe) -> QuantizedTensor:
    """Return the matrices [E, N, K] of all experts as one operand [E * N, K]: what the gather brought, or a cast."""
    gathered = getattr(weight, GATHERED, None)
    return recipe.cast_weight(weight.detach().flatten(0, 1)) if gathered is None else gathered


@dataclass(frozen=True)
class ExpertProducts:
    activation: str
    """One of gated_activation.ACTIVATIONS."""
    gate_up: LinearRecipe
    """Without what `unsupported` refuses, as `down`."""
    down: LinearRecipe

    def forward(
        self,
        x: torch.Tensor,
        layout: ExpertLayout,
        factors: torch.Tensor,
        weights: ExpertWeights,
        keep: bool,
        adapters: ExpertAdapters = NO_ADAPTERS,
    ) -> tuple[torch.Tensor, Kept]:
        """Return y [T, H] in x's dtype, and what backward needs, of x [T, H], T > 0.

        `factors`: FP32 [R], the router's weights. `keep`: whether gate_up is kept, if the recipe keeps it.
        """
        if self.gate_up.monitor.active:
            self.gate_up.cast_input(x)  # shown to the monitor; permuted, the same numbers are there k times
        keep = keep and self.gate_up.recompute != "mlp"
        cast, product, kept = self._product(x, layout, factors, weights, keep, adapters)
        rows = self._multiply(cast, expert_operand(weights.down, self.down), layout, self.down, x.dtype)
        y = unpermute(rows, layout)
        if adapters.down is not None:
            kept = kept._replace(u_down=adapters.down.add_to_tokens(y, product, layout))
        return y, kept

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        layout: ExpertLayout,
        factors: torch.Tensor,
        weights: ExpertWeights,
        kept: Kept,
        adapters: ExpertAdapters = NO_ADAPTERS,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, factors, weights and adapters (None where unwanted); `kept` as of forward."""
        recipe, down, dtype = self.gate_up, self.down, dy.dtype
        wants = [weight.requires_grad for weight in weights]
        of_gate_up = of_down = (None, None)
        saved = kept.gate_up
        if saved is None:
            *_, again = self._product(x, layout, factors, weights, True, adapters)
            saved = again.gate_up
        if down.monitor.active:
            down.cast_grad_output(dy, wgrad=False)
        spec = down.grad_output
        along_tokens = "1x128" if wants[1] else None
        dy_cast, dy_columnwise = permute_cast(dy, layout, spec.format, "1x128", along_tokens, spec.scale)
        dproduct = self._multiply(dy_cast, self._transposed(weights.down, down), layout, down, dtype)
        if adapters.down is not None:
            du, db = adapters.down.tokens_backward(dy, dproduct, kept.u_down, layout)
        uncast = adapters.gate_up is not None, adapters.down is not None
        casts = gated_activation_backward(
            dproduct, saved, self.activation, recipe, down, row_factor=factors, wgrad=any(wants), uncast=uncast
        )
        del dproduct, saved, dy_cast
        if adapters.down is not None:
            of_down = adapters.down.a_backward(du, casts.product_uncast, layout), db
        rows = self._multiply(casts.dgate_up, self._transposed(weights.gate_up, recipe), layout, recipe, dtype)
        dx = unpermute(rows, layout)
        del rows
        if adapters.gate_up is not None:
            of_gate_up = adapters.gate_up.rows_backward(casts.dgate_up_uncast, dx, x, kept.u_gate_up, layout)
        dgate_up = ddown = None
        if wants[1]:
            ddown = self._wgrad(dy_columnwise, casts.product_columnwise, layout, down, weights.down.dtype)
        if wants[0]:
            spec = recipe.input
            _, x_columnwise = permute_cast(x, layout, spec.format, None, recipe.wgrad_input, spec.scale)
            dgate_up = self._wgrad(casts.dgate_up_columnwise, x_columnwise, layout, recipe, weights.gate_up.dtype)
        return dx, casts.drow_factor, dgate_up, ddown, *of_gate_up, *of_down

    def _product(
        self,
        x: torch.Tensor,
        layout: ExpertLayout,
        factors: torch.Tensor,
        weights: ExpertWeights,
        keep: bool,
        adapters: ExpertAdapters,
    ) -> tuple[QuantizedTensor, torch.Tensor | None, Kept]:
        """Return down's operand [R, F], the same in x's dtype where its adapter reads it, and what is kept."""
        spec, u = self.gate_up.input, None
        rows, _ = permute_cast(x, layout, spec.format, "1x128", None, spec.scale)
        operand = expert_operand(weights.gate_up, self.gate_up)
        gate_up = self._multiply(rows, operand, layout, self.gate_up, x.dtype)
        if adapters.gate_up is not None:
            u = adapters.gate_up.add_to_rows(gate_up, x, layout)
        gated = gated_activation_cast(
            gate_up, self.activation, self.down, keep, factors, product=adapters.down is not None
        )
        return gated.product, gated.uncast, Kept(gated.saved, u)

    @staticmethod
    def _transposed(weight: nn.Parameter, recipe: LinearRecipe) -> QuantizedTensor:
        """Return the matrices [N, K] of all experts as dgrad reads them, [E * K, N]."""
        return transpose(expert_operand(weight, recipe), len(weight))

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
    def forward(ctx, x, top_k_index, top_k_weights, gate_up, down, products: ExpertProducts, keep: bool, *low_rank):
        # The weights are kept as the parameters themselves: their storage is released after forward, and backward
        # finds whatever has been gathered by then.
        ctx.products, ctx.weights, ctx.routed = products, ExpertWeights(gate_up, down), top_k_index.numel() > 0
        ctx.weight_dtype, ctx.weight_shape = top_k_weights.dtype, top_k_weights.shape
        if not ctx.routed:
            ctx.save_for_backward(*low_rank)
            return torch.zeros_like(x)
        layout = expert_layout(top_k_index, len(gate_up))
        factors = row_factors(top_k_weights, layout)
        y, kept = products.forward(x, layout, factors, ctx.weights, keep, ExpertAdapters.of_tensors(low_rank))
        if keep:
            ctx.save_for_backward(x, factors, *layout, *low_rank, *kept[1:], *tensors_of(kept.gate_up))
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
        kept = Kept(saved_from(tensors[11:], ctx.products.down), *tensors[9:11])
        dx, dfactors, *others = ctx.products.backward(dy, x, layout, factors, ctx.weights, kept, adapters)
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
    """Return the sum [T, H] of each token's experts, times the router's weights [T, k], in FP8; x [T, H].

    top_k_index: integer [T, k]; E or more is no expert. Experts without tokens get gradients of zeros. Weights are
    gathered in FP8 (`weight.fp8_gathered`: [E * N, K] in 128x128 blocks) or in high precision.
    """
    low_rank = (None if tensor is None else tensor.to(x.dtype) for tensor in adapters.tensors)
    keep = torch.is_grad_enabled()
    return _ExpertProducts.apply(x, top_k_index, top_k_weights, *weights, products, keep, *low_rank)
