"""FP8Linear: nn.Linear whose three products run on FP8 operands.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x cast along K, w in 128x128 blocks
    dgrad  dx [T, K] = dy [T, N] · w             dy cast along N; w's blocks transpose without another cast
    wgrad  dw [N, K] = dyᵀ       · x             both cast along the tokens T, each from high precision

T tokens, N output and K input features. Groups of a cast lie along the contraction of the product it feeds, so x and
dy are each cast twice (row-wise and column-wise) and the weight once. Between forward and backward only the
column-wise copy of x is kept, one byte an element, and no copy of the weight: ZeRO-3 gathers it again.

The class is swapped in under a live module (`module.__class__ = FP8Linear`), so parameters, their names, hooks and
checkpoint keys stay what they were.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.layers.linear.adapters import Adapters, is_lora
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_weight, fprop_weight, scale_columns


class Swapped(nn.Module):
    """A class to be put before a module's own class by `swapped_class`; its objects can be copied and pickled."""

    prefix = "FP8"
    """Of the name of the class made."""

    def __reduce_ex__(self, protocol: int) -> tuple:
        # The class was made at run time, so that pickle would not find it by its name.
        return _empty, type(self).__bases__, self.__getstate__()


@functools.cache
def swapped_class(first: type[Swapped], own: type[nn.Module]) -> type[Swapped]:
    """Return the class of modules of class `own` that get the forward of `first`, and keep parameters and names."""
    # The name is kept within it: Hugging Face finds layers that must not be split by the names of their classes.
    return type(f"{first.prefix}{own.__name__}", (first, own), {"__module__": own.__module__})


def _empty(first: type[Swapped], own: type[nn.Module]) -> Swapped:
    kind = swapped_class(first, own)
    return kind.__new__(kind)


class _FP8LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: nn.Parameter, recipe: LinearRecipe, save: str, adapters: Adapters, *_):
        x_TK = x.reshape(-1, x.shape[-1])
        needs_wgrad = save != "nothing" and weight.requires_grad
        factors = recipe.channel_factors(x_TK)
        inverse = None if factors is None else factors.reciprocal()
        # Both casts read x once. wgrad's is made now, although it is used in backward: x itself can then be freed.
        if needs_wgrad and save == "fp8":
            x_cast, x_KT = recipe.cast_input_both(x_TK, inverse)
            saved = [x_KT.data, x_KT.scale]
        else:
            x_cast = recipe.cast_input(x_TK, column_factor=inverse)
            saved = [x] if needs_wgrad else []
        beyond = recipe.clipped_input(x_TK, x_cast) if save != "nothing" and ctx.needs_input_grad[0] else None
        low_rank = adapters.project(x_TK)
        # Adapters read x in BF16; what fused layers call this for, attention's output, is kept there anyway.
        whole = [x] if adapters and save != "nothing" else []
        ctx.save_for_backward(factors, beyond, *low_rank, *whole, *saved)
        x_cast = recipe.with_outliers(x_cast, x_TK)
        y_TN = recipe.multiply(x_cast, fprop_weight([weight], recipe, factors), x.dtype)
        adapters.add(y_TN, low_rank)
        # The weight is kept as the parameter itself, not through save_for_backward: its storage is released after
        # forward, and backward finds the weights gathered by then.
        ctx.weight, ctx.recipe, ctx.save, ctx.input_shape, ctx.input_dtype = weight, recipe, save, x.shape, x.dtype
        ctx.adapters = adapters
        return y_TN

    @staticmethod
    @once_differentiable  # a cast has no derivative: a gradient of gradients is an error, not silently zero
    def backward(ctx, dy: torch.Tensor):
        recipe, weight, adapters = ctx.recipe, ctx.weight, ctx.adapters
        dy_TN = dy.reshape(-1, dy.shape[-1])
        factors, beyond, *saved = ctx.saved_tensors
        low_rank, saved = saved[: adapters.kept], saved[adapters.kept :]
        inverse = None if factors is None else factors.reciprocal()
        dx = dw = w_KN = factor = None
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        if needs_dgrad:
            # Before dy is cast: scales that belong to the contraction of dgrad are multiplied into dy.
            w_KN, factor = dgrad_weight([weight], recipe, factors)
        dy_cast, dy_NT = recipe.cast_grad_output(dy_TN, needs_dgrad, needs_wgrad, factor)
        if needs_dgrad:
            dx = recipe.dgrad_result(recipe.multiply(dy_cast, w_KN, ctx.input_dtype), len(dy_TN), beyond)
            # With factors s forward multiplied (x / s) by (W s): dx is divided by s, dw multiplied by it.
            dx = scale_columns(dx, inverse)
        of_adapters = []
        if adapters:
            x, *saved = saved
            x_TK = x.reshape(-1, x.shape[-1])
            du, db = adapters.output_backward(dy_TN, low_rank)
            if needs_dgrad:
                adapters.add_to_input(dx, du, low_rank)
            of_adapters = adapters.in_order(adapters.a_backward(du, x_TK, low_rank), db)
        dx = None if dx is None else dx.view(ctx.input_shape)
        if needs_wgrad:
            if ctx.save == "fp8":
                x_KT = recipe.kept_input(*saved)
            else:
                (x,) = saved
                x_KT = recipe.cast_input_columnwise(x.reshape(-1, x.shape[-1]), column_factor=inverse)
            dw = recipe.wgrad_result(recipe.multiply(dy_NT, x_KT, weight.dtype), weight)
            dw = scale_columns(dw, factors)
        return dx, dw, None, None, None, *of_adapters


NO_ADAPTERS = Adapters(())

runs_eagerly = torch.compiler.disable(
    reason="FP8 layers of ds_fp8 read weights that ZeRO-3 gathers at every step, so they stay outside of the graphs of "
    "torch.compile (remove fullgraph=True)"
)
"""Decorator of the forwards of FP8 layers."""


class FP8Linear(nn.Linear):
    """nn.Linear computed in FP8; input [..., K], output [..., N] in the input's dtype, bias added in that dtype.

    Made by `ds_fp8.convert`, which sets `recipe`.
    """

    recipe: LinearRecipe
    own_class: type[nn.Linear] = nn.Linear
    """The class before the conversion."""
    input_is_saved: bool = False
    """True if the layer before keeps this input for its own backward, so that keeping it here too costs nothing."""

    @runs_eagerly
    def forward(self, input: torch.Tensor, adapters: Adapters = NO_ADAPTERS) -> torch.Tensor:
        keep = "bf16" if self.input_is_saved or self.recipe.save == "bf16" else "fp8"
        keep = keep if torch.is_grad_enabled() else "nothing"
        y = _FP8LinearFunction.apply(input, self.weight, self.recipe, keep, adapters, *adapters.parameters)
        # Here, and not in the function: autograd lets nobody change the view that a function returned (Llama 4 adds to
        # the output of its shared expert).
        y = y.view(*input.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        recipe = self.recipe
        casts = ", ".join(
            f"{name}={spec.format}/{spec.granularity}"
            for name, spec in (("input", recipe.input), ("weight", recipe.weight), ("grad_output", recipe.grad_output))
        )
        return f"{super().extra_repr()}, {casts}, backend={recipe.backend}"


def base_of(linear: nn.Module) -> nn.Module:
    """Return the linear below an adapter of PEFT's, or the linear itself."""
    return linear.base_layer if is_lora(linear) else linear


def call_with_adapters(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return what an FP8Linear, or plain LoRA around one, returns, as one operation."""
    return base_of(linear)(x, Adapters([linear]))
