"""Find the products of a converted model that DeepGEMM computes, so that their kernels are compiled beforehand."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ds_fp8.gemm.deep_gemm_kernels import Layer
from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.layers.experts.implementation import PRODUCTS, shape_of
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.layers.linear.weights import group_of


def deep_gemm_layers(model: nn.Module) -> set[Layer]:
    """Return the layers of a converted model that multiply by DeepGEMM: stacked weights (q, k, v; gate, up) are one."""
    return {*_linears(model), *_experts(model)}


def _linears(model: nn.Module) -> Iterator[Layer]:
    linears = {id(module.weight): module for module in model.modules() if isinstance(module, FP8Linear)}
    for linear in linears.values():
        if _multiplies(linear.recipe):
            stacked = [linears[id(weight)] for weight in group_of(linear.weight) if id(weight) in linears]
            wgrad = linear.recipe.wgrad_input == "128x128" and linear.weight.requires_grad
            yield Layer(sum(part.out_features for part in stacked), linear.in_features, wgrad)


def _experts(model: nn.Module) -> Iterator[Layer]:
    for module in model.modules():
        if isinstance(module, FP8Experts) and hasattr(module, PRODUCTS):
            for weight, recipe in module.recipes_of_weights():
                if _multiplies(recipe):
                    number, outputs, inputs = shape_of(weight)
                    yield Layer(outputs, inputs, groups=number)


def _multiplies(recipe: LinearRecipe) -> bool:
    blocks = recipe.input.granularity == recipe.grad_output.granularity == "1x128"
    return recipe.backend == "deep_gemm" and blocks and recipe.weight.granularity == "128x128"
