"""Gradients of the linears of a model, and linears whose backward rounds no dy, for the exact ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_fp8.casts import rotate
from ds_fp8.layers.linear import FP8Linear
from ds_fp8.layers.recipe import LinearRecipe
from ds_fp8.layers.research_recipe import ResearchRecipe
from ds_fp8.layers.weights import dgrad_weight


class _ExactProducts(torch.autograd.Function):
    """A linear that forward quantizes and backward differentiates without rounding dy.

    `own`: whether dgrad and wgrad read (the weight, the input) as the recipe casts them for these products, or as
    fprop read them.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, recipe: LinearRecipe, own: tuple[bool, bool]):
        x_TK = x.flatten(0, -2)
        read_x, read_w = recipe.cast_input(x_TK).dequantize(), recipe.cast_weight(weight).dequantize()
        ctx.save_for_backward(x_TK, weight, read_x, read_w)
        ctx.recipe, ctx.own = recipe, own
        return (read_x @ read_w.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        x_TK, weight, read_x, read_w = ctx.saved_tensors
        dy_TN, (own_weight, own_input) = dy.flatten(0, -2), ctx.own
        dx = dy_TN @ (dgrad_weight([weight], ctx.recipe)[0].dequantize().t() if own_weight else read_w)
        if own_input:
            rotates = isinstance(ctx.recipe, ResearchRecipe)
            rotated = rotate(dy_TN, ctx.recipe.wgrad_grad_output_rotation) if rotates else dy_TN
            dw = rotated.t() @ ctx.recipe.cast_input_columnwise(x_TK).dequantize().t()
        else:
            dw = dy_TN.t() @ read_x
        return dx.view(*dy.shape[:-1], -1), dw, None, None


class ExactProducts(FP8Linear):
    """An FP8Linear whose backward rounds no dy; `own` as of the function."""

    own: tuple[bool, bool]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input · weightᵀ of the quantized operands."""
        return _ExactProducts.apply(input, self.weight, self.recipe, self.own)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of the decoder layers by name, converted or not."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and name != "lm_head"}


def gradients(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the gradients of the mean loss of tokens [rows, length], all `linears` one after the other: FP32 [N]."""
    weights = [layer.weight for layer in linears(model).values()]
    loss = model(input_ids=tokens, labels=tokens).loss
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, weights)])


def with_exact_products(model: nn.Module, own_weight: bool, own_input: bool) -> nn.Module:
    """Return a copy of a converted model that rounds no dy."""
    model = copy.deepcopy(model)
    for layer in linears(model).values():
        if isinstance(layer, FP8Linear):
            layer.__class__, layer.own = ExactProducts, (own_weight, own_input)
    return model


def operands(model: nn.Module, tokens: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (x [T, K], dy [T, N]) of every linear of a model without casts."""
    found, hooks = {}, []
    for name, layer in linears(model).items():

        def keep(layer: nn.Module, args: Any, y: torch.Tensor, name: str = name) -> None:
            x = args[0].detach().flatten(0, -2)
            y.register_hook(lambda dy: found.update({name: (x, dy.flatten(0, -2))}))

        hooks.append(layer.register_forward_hook(keep))
    gradients(model, tokens)
    for hook in hooks:
        hook.remove()
    return {name: found[name] for name in linears(model)}
