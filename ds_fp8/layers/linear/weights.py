"""Weights as operands of FP8 products: one alone, or several stacked that share their input.

Under FP8 parameter gather a weight carries its gathered FP8 bytes as `weight.fp8_gathered`, and `weight.data` is a
placeholder that must not be read. q, k and v (gate and up) are multiplied as one matrix of their stacked rows; gathered
ones already lie so in memory (zero/collectives.py), and the stacked operand is a view.
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

# Attribute of a weight that holds its gathered QuantizedTensor [N, K] while ZeRO-3 has it available
UNSHARDED = "fp8_gathered"

# Attribute of a weight that ZeRO-3 shards and gathers without an outlier block: codes [N, C] of the residuals of its
# outlier channels' columns
RESIDUAL = "fp8_residual"

# Attribute of a weight that ZeRO-3 gathers with a whole layer: gathers the layer where a backward needs it and the
# layer's output had no gradient
BEFORE_BACKWARD = "fp8_before_backward"

# Attribute of the weights of one fused product: the WeightGroup of them all, in the order their rows are stacked
GROUP = "fp8_group"


class WeightGroup(tuple):
    # A pickled weight forgets it, because pickle cannot follow a cycle of parameters through themselves; the next
    # conversion sets it again.
    def __reduce__(self) -> tuple:
        return WeightGroup, ()


def gathered_for_backward(weight: nn.Parameter) -> None:
    """Gather the layer of a weight, where ZeRO-3 has not, for a backward that reads the layer's parameters."""
    gather = getattr(weight, BEFORE_BACKWARD, None)
    if gather is not None:
        gather()


def group_of(weight: nn.Parameter) -> tuple[nn.Parameter, ...]:
    """Return the weights of the fused product that this weight belongs to, or it alone."""
    return getattr(weight, GROUP, ()) or (weight,)


def weight_operand(weight: torch.Tensor, recipe: LinearRecipe) -> QuantizedTensor:
    """Return the FP8 weight [N, K]: what the gather brought, or a cast of a weight present in high precision."""
    gathered = getattr(weight, UNSHARDED, None)
    return recipe.quantize_weight(weight) if gathered is None else gathered


def can_stack(rows: Sequence[int], granularity: str) -> bool:
    """Return whether matrices of these numbers of rows keep their scales when stacked."""
    if not is_of_blocks(granularity):
        return True
    return all(count % group_shape(granularity)[0] == 0 for count in rows[:-1])


def stacked_operand(weights: Sequence[nn.Parameter], recipe: LinearRecipe) -> QuantizedTensor:
    """Return the rows of all weights [N_i, K] as one FP8 operand [sum N_i, K].

    Scales per tensor become scales per row, unless they need no amax: those are the same for all.

    Raises:
        ValueError: Blocks would straddle two weights (`can_stack`).
    """
    operands = [weight_operand(weight, recipe) for weight in weights]
    if len(operands) == 1:
        return operands[0]
    first = operands[0]
    if not can_stack([operand.shape[0] for operand in operands], first.granularity):
        raise ValueError(f"{first.granularity} blocks would straddle two stacked weights")
    # As bytes, which torch stacks on every device.
    data = _stacked([operand.data.view(torch.uint8) for operand in operands]).view(first.data.dtype)
    if first.granularity == "128x128":
        scales = [operand.scale for operand in operands]
        # Gathered weights of one product have their scales side by side (zero/collectives.py): no copy then.
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
    """Return fprop's operand of the stacked rows of weights [N_i, K], with its outlier block if there is one."""
    whole = stacked_operand(weights, recipe)
    return whole if recipe.outliers is None else _with_outliers(weights, whole, recipe.outliers.channels)


def _with_outliers(
    weights: Sequence[nn.Parameter], operand: QuantizedTensor, channels: torch.Tensor
) -> QuantizedTensor:
    if (whole := widened(operand, len(channels))) is not None:
        return whole
    residuals = [_residual(weight, len(channels)) for weight in weights]
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


def _residual(weight: nn.Parameter, channels: int) -> torch.Tensor | None:
    """Return the residual codes [N, C] of the codes that were gathered; None of a weight in high precision."""
    gathered = getattr(weight, UNSHARDED, None)
    if gathered is None:
        # A weight that another module reads, too, is gathered in BF16, and cast here: its codes and what they lost are
        # others, though the shard's residuals still lie beside it.
        return None
    whole = widened(gathered, channels)
    return getattr(weight, RESIDUAL, None) if whole is None else residual_in(whole, channels)


def _rows_of(operand: QuantizedTensor, weights: Sequence[torch.Tensor]) -> Iterator[QuantizedTensor]:
    """Yield the rows of each weight of a stack, whose heights are multiples of 128."""
    first = 0
    for weight in weights:
        stop = first + weight.shape[0]
        scale = operand.scale[first // BLOCK : -(-stop // BLOCK)]
        yield replace(operand, data=operand.data[first:stop], scale=scale)
        first = stop


def dgrad_weight(weights: Sequence[nn.Parameter], recipe: LinearRecipe) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """Return dgrad's operand [K, N] of the stacked rows of weights [N_i, K], and a factor [N] for dy or None."""
    if recipe.quantizes_weight_twice:
        return recipe.quantize_weight_columnwise(torch.cat([weight.detach() for weight in weights])), None
    return dgrad_operand(stacked_operand(weights, recipe), recipe.transposed)


def dgrad_operand(
    w: QuantizedTensor, transposed: Callable[[QuantizedTensor], QuantizedTensor] = transpose
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """Return (wᵀ [K, N], factor [N] to multiply into dy before its cast, or None) for fprop's operand w [N, K].

    `transposed` transposes a matrix: by default into a copy, with `LinearRecipe.transposed` as the backend needs it.
    """
    if w.granularity != "row":
        return transposed(w), None
    #     dx[t, k] = sum_n dy[t, n] scale[n] code[n, k]
    # The scales of w's rows lie along dgrad's contraction, where a product takes no scale a row. They go into dy before
    # its cast, and w's codes are multiplied as they are, with a scale of 1.
    ones = torch.ones((), device=w.scale.device)
    data = replace(w, scale=ones, granularity="tensor", scale_type="pow2")
    return transposed(data), w.scale.reshape(-1)


def split_rows(gradient: torch.Tensor, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of stacked parameters as one of each: views of its rows, None where none is wanted."""
    pieces = gradient.split([len(parameter) for parameter in parameters])
    return tuple(p if parameter.requires_grad else None for p, parameter in zip(pieces, parameters, strict=True))


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a stride-0 NaN of the weight's shape: autograd accepts it, a stray read is loud."""
    # One element in memory, whatever the shape: all strides are 0.
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    view = _view_of_adjacent(parts)
    return torch.cat(parts) if view is None else view


def _view_of_adjacent(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the matrices [N_i, K] as one view, if each begins in memory where the one before ends; else None."""
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
        # Not data_ptr of the part alone: two matrices may touch in memory and have other strides.
        offset += part.shape[0] * row
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
