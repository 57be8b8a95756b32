"""Quantized weights for FP8 GEMMs: one, or several with the same input, stacked.

With the all-gather in FP8 the unsharded quantized weight is `weight.fp8_gathered`, and `weight.data` a placeholder that
must not be read. q, k and v (gate and up) are multiplied as one matrix of stacked rows: all-gathers write them next to
each other (zero/collectives.py), so that the stack is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from ds_fp8.casts import QuantizedTensor, transpose
from ds_fp8.casts.outliers import extend_weight, residual_in, weight_residual
from ds_fp8.casts.quantization import block_scales, widened
from ds_fp8.config.formats import BLOCK, SCALE_TYPES, group_shape, is_of_blocks
from ds_fp8.layers.linear.recipe import LinearRecipe

# Attribute of a weight: its unsharded QuantizedTensor [N, K], or None while sharded
UNSHARDED = "fp8_gathered"

# Attribute of a weight that is all-gathered without its outlier block: quantized residuals [N, C] of the outlier
# channels
RESIDUAL = "fp8_residual"

# Attribute of a weight of a fused layer: unshards the layer for a backward that begins inside it, because its output
# has no gradient
BEFORE_BACKWARD = "fp8_before_backward"

# Attribute of weights that are multiplied as one: their WeightGroup, in stacking order
GROUP = "fp8_group"


class WeightGroup(tuple):
    # Pickled as empty: pickle cannot follow the cycle of parameters and groups. The next conversion sets it again.
    def __reduce__(self) -> tuple:
        return WeightGroup, ()


def group_of(weight: nn.Parameter) -> tuple[nn.Parameter, ...]:
    """Return all weights that are multiplied as one with this weight, in stacking order."""
    return getattr(weight, GROUP, ()) or (weight,)


def can_stack(rows: Sequence[int], granularity: str) -> bool:
    """Return whether matrices with these numbers of rows keep their scales in a stack: no block straddles two."""
    if not is_of_blocks(granularity):
        return True
    return all(count % group_shape(granularity)[0] == 0 for count in rows[:-1])


def stacked_weight(weights: Sequence[nn.Parameter], recipe: LinearRecipe) -> QuantizedTensor:
    """Return the weights [N_i, K] stacked as one quantized weight [sum N_i, K].

    Scales per tensor become scales per row, but constant scales stay. No block straddles two weights (`can_stack`).
    """
    # all-gathered in FP8, or quantized here from high precision
    operands = [getattr(weight, UNSHARDED, None) or recipe.quantize_weight(weight) for weight in weights]
    if len(operands) == 1:
        return operands[0]
    first = operands[0]
    # torch.cat supports bytes on every device, not FP8.
    data = _stacked([operand.data.view(torch.uint8) for operand in operands]).view(first.data.dtype)
    if first.granularity == "128x128":
        scales = [operand.scale for operand in operands]
        # Scales of weights that were all-gathered together are adjacent (zero/collectives.py): no copy.
        scale = _view_of_adjacent(scales)
        if scale is None:
            columns = scales[0].shape[1]
            # Rows of block scales are padded to 16 bytes, which torch.cat of the parts would not keep.
            scale = block_scales(sum(len(s) for s in scales), columns, data.device)
            torch.cat(scales, out=scale) if scale.is_contiguous() else scale.copy_(torch.cat(scales))
        return replace(first, data=data, scale=scale)
    if not SCALE_TYPES[first.scale_type].needs_amax:
        return replace(first, data=data)
    if first.granularity not in ("row", "tensor"):
        return replace(first, data=data, scale=torch.cat([operand.scale for operand in operands]))
    scale = _stacked([operand.scale.expand(operand.shape[0], 1) for operand in operands])
    return replace(first, data=data, scale=scale, granularity="row")


def fprop_weight(weights: Sequence[nn.Parameter], recipe: LinearRecipe) -> QuantizedTensor:
    """Return the quantized weight of fprop, stacked from weights [N_i, K], with its outlier block if there is one."""
    w = stacked_weight(weights, recipe)
    return w if recipe.outliers is None else _with_outliers(weights, w, recipe.outliers.channels)


def _with_outliers(weights: Sequence[nn.Parameter], w: QuantizedTensor, channels: torch.Tensor) -> QuantizedTensor:
    if (wide := widened(w, len(channels))) is not None:
        return wide
    residuals = [_residual(weight, len(channels)) for weight in weights]
    if all(residual is None for residual in residuals):
        # All weights in high precision: residuals are computed in every forward.
        residual = weight_residual(torch.cat([weight.detach() for weight in weights]), w, channels)
    elif len(residuals) == 1:
        residual = residuals[0]
    else:
        # Weights in high precision (small ones persist under ZeRO-3) mixed with sharded ones, whose data is a
        # placeholder.
        residual = torch.cat([
            weight_residual(weight.detach(), rows, channels).view(torch.uint8) if own is None else own.view(torch.uint8)
            for weight, own, rows in zip(weights, residuals, _rows_of(w, weights), strict=True)
        ])  # fmt: skip
    return extend_weight(w, residual, channels)


def _residual(weight: nn.Parameter, channels: int) -> torch.Tensor | None:
    """Return the quantized residuals [N, C] that were all-gathered with the weight; None of a high-precision weight."""
    quantized = getattr(weight, UNSHARDED, None)
    if quantized is None:
        # A weight that another module shares is all-gathered in BF16 and quantized here: RESIDUAL, of the quantized
        # shard, does not belong to it.
        return None
    wide = widened(quantized, channels)
    return getattr(weight, RESIDUAL, None) if wide is None else residual_in(wide, channels)


def _rows_of(operand: QuantizedTensor, weights: Sequence[torch.Tensor]) -> Iterator[QuantizedTensor]:
    """Yield the rows of each weight of a stack, whose heights are multiples of 128."""
    first = 0
    for weight in weights:
        stop = first + weight.shape[0]
        scale = operand.scale[first // BLOCK : -(-stop // BLOCK)]
        yield replace(operand, data=operand.data[first:stop], scale=scale)
        first = stop


def dgrad_weight(weights: Sequence[nn.Parameter], recipe: LinearRecipe) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """Return (quantized wᵀ [K, N] for dgrad, stacked from weights [N_i, K]; factor [N] of dy, or None)."""
    if recipe.quantizes_weight_twice:
        return recipe.quantize_weight_columnwise(torch.cat([weight.detach() for weight in weights])), None
    return transposed_weight(stacked_weight(weights, recipe), recipe.transposed)


def transposed_weight(
    w: QuantizedTensor, transposed: Callable[[QuantizedTensor], QuantizedTensor] = transpose
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """Return (wᵀ [K, N] for dgrad, factor [N] of dy or None) from the quantized w [N, K] of fprop.

    transposed: by default copies; `LinearRecipe.transposed` returns a view if the backend reads one.
    """
    if w.granularity != "row":
        return transposed(w), None
    #     dx[t, k] = sum_n dy[t, n] scale[n] data[n, k]
    # No GEMM applies scales along the contraction: they are multiplied into dy before it is quantized, and the data of
    # w get scale 1.
    ones = torch.ones((), device=w.scale.device)
    data = replace(w, scale=ones, granularity="tensor", scale_type="pow2")
    return transposed(data), w.scale.reshape(-1)


def split_rows(gradient: torch.Tensor, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    """Split the gradient of stacked parameters into views of rows; None for a parameter without requires_grad."""
    pieces = gradient.split([len(parameter) for parameter in parameters])
    return tuple(p if parameter.requires_grad else None for p, parameter in zip(pieces, parameters, strict=True))


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return NaN of the weight's shape with strides 0, one element in memory: a stray read yields NaN."""
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    view = _view_of_adjacent(parts)
    return torch.cat(parts) if view is None else view


def _view_of_adjacent(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices [N_i, K] as one view if they are adjacent in memory, else None."""
    first = parts[0]
    row = first.stride(0)
    offset = first.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.stride() != first.stride()
            or part.storage_offset() != offset
        ):
            return None
        # data_ptr alone would not do: adjacent matrices may have other strides.
        offset += part.shape[0] * row
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
