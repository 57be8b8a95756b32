"""Operands of fprop with their outlier blocks, as a recipe has them; casts/outliers.py has the maths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.outliers import extend_input, extend_input_reference, extend_weight, weight_residual
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.linear.activations import activate
from ds_fp8.layers.linear.recipe import LinearRecipe

RESIDUAL = "fp8_residual"
"""Attribute of a weight that ZeRO-3 shards: codes [N, C] of the residuals of its outlier channels' columns."""


def with_outliers(
    recipe: LinearRecipe,
    cast: QuantizedTensor,
    source: torch.Tensor,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Return fprop's input with its outlier block, or as it is where the recipe has none.

    Args:
        recipe: Recipe of the product.
        cast: [T, K], the cast of `source` times its factors.
        source: [T, K] in high precision.
        row_factor: [T], or None.
        column_factor: [K], or None.
    """
    if recipe.outliers is None:
        return cast
    channels = recipe.outliers.observe(cast, recipe.monitor.active)
    return extend_input(cast, source, channels, row_factor, column_factor)


def product_with_outliers(
    recipe: LinearRecipe, cast: QuantizedTensor, gate_up: torch.Tensor, activation: str
) -> QuantizedTensor:
    """Return act(gate) · up as fprop reads it, with its outlier block, or as it is where the recipe has none.

    Args:
        recipe: Recipe of down_proj.
        cast: [T, F], the cast of the product.
        gate_up: [T, 2F] that it was computed from.
        activation: Name of the activation.
    """
    if recipe.outliers is None:
        return cast
    channels = recipe.outliers.observe(cast, recipe.monitor.active)
    if cast.data.device.type == "cuda":
        from ds_fp8.layers.linear.outliers_triton import extend_product_tiles

        return extend_product_tiles(cast, gate_up, activation, channels)
    gate, up = (half[:, channels.long()].float() for half in gate_up.chunk(2, -1))
    return extend_input_reference(cast, activate(gate, activation) * up, channels)


def weights_with_outliers(
    weights: Sequence[torch.Tensor], gathered: Sequence[bool], operand: QuantizedTensor, recipe: LinearRecipe
) -> QuantizedTensor:
    """Return fprop's stacked weights [N, K] with their outlier block, or as they are where the recipe has none.

    Args:
        weights: The weights [N_i, K], gathered in FP8 with their residuals beside them, or present in high precision.
        gathered: Of each weight, whether it is gathered in FP8.
        operand: Their rows, cast.
        recipe: Recipe of the product.
    """
    if recipe.outliers is None:
        return operand
    channels = recipe.outliers.channels
    # Residuals belong to the codes that were gathered. A weight that another module reads, too, is gathered in BF16,
    # and cast here: its codes and what they lost are others, though the shard's residuals still lie beside it.
    residuals = [
        getattr(weight, RESIDUAL, None) if in_fp8 else None for weight, in_fp8 in zip(weights, gathered, strict=True)
    ]
    if all(residual is None for residual in residuals):
        # Weights that are present in high precision: their residuals are computed in every forward.
        residual = weight_residual(torch.cat([weight.detach() for weight in weights]), operand, channels)
    elif len(residuals) == 1:
        residual = residuals[0]
    else:
        # Of a stack some may be present (small ones persist under ZeRO-3) and others not: those hold no numbers.
        residual = torch.cat([
            weight_residual(weight.detach(), rows, channels).view(torch.uint8) if own is None else own.view(torch.uint8)
            for weight, own, rows in zip(weights, residuals, _rows_of(operand, weights), strict=True)
        ])  # fmt: skip
    return extend_weight(operand, residual, channels)


def _rows_of(operand: QuantizedTensor, weights: Sequence[torch.Tensor]) -> Iterator[QuantizedTensor]:
    """Yield the rows of each weight of a stack, whose heights are multiples of 128."""
    first = 0
    for weight in weights:
        stop = first + weight.shape[0]
        scale = operand.scale[first // BLOCK : -(-stop // BLOCK)]
        yield replace(operand, data=operand.data[first:stop], scale=scale)
        first = stop
