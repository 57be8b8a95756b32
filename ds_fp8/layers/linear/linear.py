"""FP8Linear: nn.Linear with fprop, dgrad and wgrad in FP8.

    fprop  y  [T, N] = x  [T, K] · w  [N, K]ᵀ     x quantized along K, w in 128x128 blocks
    dgrad  dx [T, K] = dy [T, N] · w             dy quantized along N; w's blocks transpose without quantizing again
    wgrad  dw [N, K] = dyᵀ       · x             both quantized along the tokens T, from high precision

T tokens, N output and K input features. Scale groups lie along the contraction, so x and dy are quantized twice,
rowwise and columnwise, and the weight once. Saved for backward is the columnwise x alone, one byte an element: ZeRO-3
unshards the weight again.

Conversion swaps the class of the live module (`module.__class__ = FP8Linear`): parameters, names, hooks and checkpoint
keys stay.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.layers.linear.adapters import Adapters, is_lora
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import dgrad_weight, fprop_weight


class Swapped(nn.Module):
    """Mixin before a module's class (`swapped_class`); its modules can be copied and pickled."""

    prefix = "FP8"  # of the new class's name

    def __reduce_ex__(self, protocol: int) -> tuple:
        # pickle finds no class by name that was made at run time.
        return _empty, type(self).__bases__, self.__getstate__()


@functools.cache
def swapped_class(first: type[Swapped], own: type[nn.Module]) -> type[Swapped]:
    """Return the subclass of `first` and `own`: forward of `first`, parameters of `own`."""
    # Contains the old name: transformers' _no_split_modules lists class names.
    return type(f"{first.prefix}{own.__name__}", (first, own), {"__module__": own.__module__})


def _empty(first: type[Swapped], own: type[nn.Module]) -> Swapped:
    kind = swapped_class(first, own)
    return kind.__new__(kind)


class Products:
    """fprop, dgrad and wgrad of a linear layer, with x [T, K] and dy [T, N]."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: nn.Parameter, recipe: LinearRecipe, save: str, dgrad: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return (y [T, N], tensors saved for backward); `save` is "fp8", "bf16" or "nothing"."""
        wgrad = save != "nothing" and weight.requires_grad
        # One pass over x quantizes it both ways. wgrad's columnwise x is made now, so that x can be freed.
        if wgrad and save == "fp8":
            rowwise, columnwise = recipe.quantize_input_both(x)
            saved = [columnwise.data, columnwise.scale]
        else:
            rowwise, saved = recipe.quantize_input(x), [x] if wgrad else []
        rowwise = recipe.with_outliers(rowwise, x)
        return recipe.multiply(rowwise, fprop_weight([weight], recipe), x.dtype), saved

    @staticmethod
    def backward(
        dy: torch.Tensor,
        weight: nn.Parameter,
        recipe: LinearRecipe,
        save: str,
        saved: list[torch.Tensor | None],
        wants: tuple[bool, bool],
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (dx in `dtype`, dw); None for one that `wants` excludes."""
        # First: scales of w along dgrad's contraction become a factor of dy.
        transposed, factor = dgrad_weight([weight], recipe) if wants[0] else (None, None)
        rowwise, columnwise = recipe.quantize_grad_output(dy, *wants, factor)
        dx = recipe.multiply(rowwise, transposed, dtype) if wants[0] else None
        if not wants[1]:
            return dx, None
        x = recipe.saved_input(*saved) if save == "fp8" else recipe.quantize_input_columnwise(*saved)
        return dx, recipe.multiply(columnwise, x, weight.dtype)


class _FP8LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: torch.Tensor, weight: nn.Parameter, products: type[Products], recipe: LinearRecipe, save: str,
        adapters: Adapters, *_,
    ):  # fmt: skip
        x_TK = x.reshape(-1, x.shape[-1])
        y_TN, saved = products.forward(x_TK, weight, recipe, save, ctx.needs_input_grad[0])
        low_rank = adapters.project(x_TK)
        # wgrad of adapters reads x in BF16; attention's output, x in fused layers, is saved by attention anyway.
        input = [x] if adapters and save != "nothing" else []
        ctx.save_for_backward(*low_rank, *input, *saved)
        adapters.add(y_TN, low_rank)
        # ctx holds the parameter, not save_for_backward its tensor: the weight is resharded after forward and unsharded
        # before backward.
        ctx.weight, ctx.products, ctx.recipe, ctx.save, ctx.adapters = weight, products, recipe, save, adapters
        ctx.input_shape, ctx.input_dtype = x.shape, x.dtype
        return y_TN

    @staticmethod
    @once_differentiable  # rounding has no derivative: double backward raises instead of returning zeros
    def backward(ctx, dy: torch.Tensor):
        adapters, wants = ctx.adapters, ctx.needs_input_grad[:2]
        dy_TN, saved = dy.reshape(-1, dy.shape[-1]), list(ctx.saved_tensors)
        low_rank, saved = saved[: adapters.saved_count], saved[adapters.saved_count :]
        x, saved = (saved[0].reshape(-1, saved[0].shape[-1]), saved[1:]) if adapters else (None, saved)
        dx, dw = ctx.products.backward(dy_TN, ctx.weight, ctx.recipe, ctx.save, saved, wants, ctx.input_dtype)
        of_adapters = adapters.backward(dy_TN, dx, low_rank, x)
        dx = None if dx is None else dx.view(ctx.input_shape)
        return dx, dw, None, None, None, None, *of_adapters


NO_ADAPTERS = Adapters(())

# Decorator of the forwards of FP8 layers
runs_eagerly = torch.compiler.disable(
    reason="FP8 layers of ds_fp8 read weights that ZeRO-3 unshards in every step, which torch.compile cannot trace "
    "(remove fullgraph=True)"
)


class FP8Linear(nn.Linear):
    """nn.Linear in FP8: input [..., K], output [..., N] and bias in the input's dtype. Made by `ds_fp8.convert`."""

    products: type[Products] = Products
    recipe: LinearRecipe
    own_class: type[nn.Linear] = nn.Linear  # before the conversion
    # True if the previous layer saves this input for its backward: saving it in BF16 costs no memory then
    input_is_saved: bool = False

    @classmethod
    def swap_in(cls, layer: nn.Linear, name: str, recipe: LinearRecipe, model: nn.Module) -> None:
        """Convert a layer of a model. Raises UserError if the recipe does not support the layer."""
        # The class before the first conversion.
        layer.own_class = layer.own_class if isinstance(layer, FP8Linear) else type(layer)
        layer.__class__ = cls
        layer.recipe = recipe.at(name)

    @runs_eagerly
    def forward(self, input: torch.Tensor, adapters: Adapters = NO_ADAPTERS) -> torch.Tensor:
        save = "bf16" if self.input_is_saved or self.recipe.save == "bf16" else "fp8"
        save = save if torch.is_grad_enabled() else "nothing"
        options = self.products, self.recipe, save, adapters
        y = _FP8LinearFunction.apply(input, self.weight, *options, *adapters.parameters)
        # Outside of the autograd function, whose views must not be written in place (Llama 4 does, to the output of its
        # shared expert).
        y = y.view(*input.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        recipe = self.recipe
        casts = ", ".join(
            f"{name}={spec.format}/{spec.granularity}"
            for name, spec in (("input", recipe.input), ("weight", recipe.weight), ("grad_output", recipe.grad_output))
        )
        return f"{super().extra_repr()}, {casts}, backend={recipe.backend}"


LAYERS: dict[type[LinearRecipe], type[FP8Linear]] = {}  # layer classes of research recipes


def base_of(linear: nn.Module) -> nn.Module:
    """Return the base layer of a PEFT adapter, or the linear itself."""
    return linear.base_layer if is_lora(linear) else linear


def call_with_adapters(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute an FP8Linear, with plain LoRA if any, as one autograd function."""
    return base_of(linear)(x, Adapters([linear]))
