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
from ds_fp8.layers.linear.weights import dgrad_weight, fprop_weight


class Swapped(nn.Module):
    """A class to be put before a module's own class by `swapped_class`; its objects can be copied and pickled."""

    prefix = "FP8"  # of the name of the class made

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


class Products:
    """fprop, dgrad and wgrad of a linear layer, with x [T, K] and dy [T, N]."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: nn.Parameter, recipe: LinearRecipe, save: str, dgrad: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return (y [T, N], what `backward` reads); `save` is "fp8", "bf16" or "nothing"."""
        wgrad = save != "nothing" and weight.requires_grad
        # Both casts read x once. wgrad's is made now, although it is used in backward: x itself can then be freed.
        if wgrad and save == "fp8":
            cast, columnwise = recipe.quantize_input_both(x)
            saved = [columnwise.data, columnwise.scale]
        else:
            cast, saved = recipe.quantize_input(x), [x] if wgrad else []
        cast = recipe.with_outliers(cast, x)
        return recipe.multiply(cast, fprop_weight([weight], recipe), x.dtype), saved

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
        """Return (dx of `dtype`, dw), each as it is wanted."""
        # Before dy is cast: scales that belong to the contraction of dgrad are multiplied into dy.
        transposed, factor = dgrad_weight([weight], recipe) if wants[0] else (None, None)
        cast, columnwise = recipe.quantize_grad_output(dy, *wants, factor)
        dx = recipe.multiply(cast, transposed, dtype) if wants[0] else None
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
        # Adapters read x in BF16; what fused layers call this for, attention's output, is kept there anyway.
        whole = [x] if adapters and save != "nothing" else []
        ctx.save_for_backward(*low_rank, *whole, *saved)
        adapters.add(y_TN, low_rank)
        # The weight is kept as the parameter itself, not through save_for_backward: its storage is released after
        # forward, and backward finds the weights gathered by then.
        ctx.weight, ctx.products, ctx.recipe, ctx.save, ctx.adapters = weight, products, recipe, save, adapters
        ctx.input_shape, ctx.input_dtype = x.shape, x.dtype
        return y_TN

    @staticmethod
    @once_differentiable  # a cast has no derivative: a gradient of gradients is an error, not silently zero
    def backward(ctx, dy: torch.Tensor):
        adapters, wants, of_adapters = ctx.adapters, ctx.needs_input_grad[:2], []
        dy_TN, saved = dy.reshape(-1, dy.shape[-1]), list(ctx.saved_tensors)
        low_rank, saved = saved[: adapters.saved_count], saved[adapters.saved_count :]
        x, saved = (saved[0], saved[1:]) if adapters else (None, saved)
        dx, dw = ctx.products.backward(dy_TN, ctx.weight, ctx.recipe, ctx.save, saved, wants, ctx.input_dtype)
        if adapters:
            du, db = adapters.output_backward(dy_TN, low_rank)
            if wants[0]:
                adapters.add_to_input(dx, du, low_rank)
            da = adapters.a_backward(du, x.reshape(-1, x.shape[-1]), low_rank)
            of_adapters = adapters.in_order(da, db)
        dx = None if dx is None else dx.view(ctx.input_shape)
        return dx, dw, None, None, None, None, *of_adapters


NO_ADAPTERS = Adapters(())

# Decorator of the forwards of FP8 layers
runs_eagerly = torch.compiler.disable(
    reason="FP8 layers of ds_fp8 read weights that ZeRO-3 gathers at every step, so they stay outside of the graphs of "
    "torch.compile (remove fullgraph=True)"
)


class FP8Linear(nn.Linear):
    """nn.Linear computed in FP8; input [..., K], output [..., N] in the input's dtype, bias added in that dtype.

    Made by `ds_fp8.convert`, which sets `recipe`.
    """

    products: type[Products] = Products
    recipe: LinearRecipe
    own_class: type[nn.Linear] = nn.Linear  # before the conversion
    # True if the layer before keeps this input for its own backward, so that keeping it here too costs nothing.
    input_is_saved: bool = False

    @classmethod
    def swap_in(cls, layer: nn.Linear, name: str, recipe: LinearRecipe, model: nn.Module) -> None:
        """Let a layer of a model compute by a recipe. Raises UserError where the recipe does not fit the layer."""
        # The class from before the first conversion; a converted layer knows it already.
        layer.own_class = layer.own_class if isinstance(layer, FP8Linear) else type(layer)
        layer.__class__ = cls
        layer.recipe = recipe.at(name)

    @runs_eagerly
    def forward(self, input: torch.Tensor, adapters: Adapters = NO_ADAPTERS) -> torch.Tensor:
        keep = "bf16" if self.input_is_saved or self.recipe.save == "bf16" else "fp8"
        keep = keep if torch.is_grad_enabled() else "nothing"
        options = self.products, self.recipe, keep, adapters
        y = _FP8LinearFunction.apply(input, self.weight, *options, *adapters.parameters)
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


LAYERS: dict[type[LinearRecipe], type[FP8Linear]] = {}  # classes for other recipes than core's


def base_of(linear: nn.Module) -> nn.Module:
    """Return the linear below an adapter of PEFT's, or the linear itself."""
    return linear.base_layer if is_lora(linear) else linear


def call_with_adapters(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return what an FP8Linear, or plain LoRA around one, returns, as one operation."""
    return base_of(linear)(x, Adapters([linear]))
