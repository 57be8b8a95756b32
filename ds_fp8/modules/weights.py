"""Weights as operands of FP8 products: one alone, or several stacked that share their input.

Under FP8 parameter gather a weight carries its gathered FP8 bytes as `weight.fp8_gathered`, and `weight.data` is a
placeholder that nobody may read. q, k and v (gate and up) are multiplied as one matrix of their stacked rows; gathered
together they already lie so in memory, and the stacked operand is a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ds_fp8.formats import BLOCK
from ds_fp8.modules.recipe import LinearRecipe
from ds_fp8.quantize import QuantizedTensor, transpose
from ds_fp8.quantize.tensor import block_scales

GATHERED = "fp8_gathered"
"""Attribute of a weight that holds its gathered QuantizedTensor [N, K] while ZeRO-3 has it available."""

GROUP = "fp8_group"
"""Attribute of the weights of one fused product: the tuple of them all, in the order their rows are stacked."""


def weight_operand(weight: torch.Tensor, recipe: LinearRecipe) -> QuantizedTensor:
    """The FP8 weight [N, K]: what the gather brought, or a cast of a weight that is present in high precision."""
    gathered = getattr(weight, GATHERED, None)
    return gathered if gathered is not None else recipe.cast_weight(weight)


def can_stack(rows: Sequence[int], granularity: str) -> bool:
    """Whether matrices of these numbers of rows keep their scales when stacked."""
    return granularity != "128x128" or all(count % BLOCK == 0 for count in rows[:-1])


def stacked_operand(weights: Sequence[nn.Parameter], recipe: LinearRecipe) -> QuantizedTensor:
    """The rows of all weights [N_i, K] as one FP8 operand [sum N_i, K]; scales per tensor become scales per row.

    Raises ValueError for weights whose blocks would straddle two of them (`can_stack`).
    """
    operands = [weight_operand(weight, recipe) for weight in weights]
    if len(operands) == 1:
        return operands[0]
    first = operands[0]
    if not can_stack([operand.shape[0] for operand in operands], first.granularity):
        raise ValueError("128x128 blocks would straddle two stacked weights")
    data = _stacked([operand.data.view(torch.uint8) for operand in operands]).view(first.data.dtype)
    if first.granularity == "128x128":
        scales = [operand.scale for operand in operands]
        scale = _view_of_adjacent(scales)
        if scale is None:
            columns = scales[0].shape[1]
            scale = block_scales(sum(len(s) for s in scales), columns, data.device)
            torch.cat(scales, out=scale) if scale.is_contiguous() else scale.copy_(torch.cat(scales))
        return QuantizedTensor(data, scale, "128x128", first.scale_type)
    scale = _stacked([operand.scale.expand(operand.shape[0], 1) for operand in operands])
    return QuantizedTensor(data, scale, "row", first.scale_type)


def dgrad_operand(w: QuantizedTensor) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """(wᵀ [K, N], factor [N] to multiply into dy before its cast, or None) for an operand w [N, K]."""
    if w.granularity != "row":
        return transpose(w), None
    codes = QuantizedTensor(w.data, torch.ones((), device=w.scale.device), "tensor", "pow2")
    return transpose(codes), w.scale.reshape(-1)


def split_rows(gradient: torch.Tensor, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    """The gradient of stacked parameters as one of each: views of its rows, None where none is wanted."""
    pieces = gradient.split([len(parameter) for parameter in parameters])
    return tuple(p if parameter.requires_grad else None for p, parameter in zip(pieces, parameters, strict=True))


def hold_in_fp8(weights: Iterable[nn.Parameter], recipe: LinearRecipe) -> None:
    """Replace high-precision weights by their FP8 casts, as ZeRO-3's FP8 gather leaves them between its hooks.

    A weight keeps shape and dtype, but reading its data gives NaN. Those of one fused product lie adjacent.
    """
    held: set[int] = set()
    for weight in weights:
        group = getattr(weight, GROUP, (weight,))
        if id(weight) in held:
            continue
        held.update(map(id, group))
        whole = stacked_operand([w.detach() for w in group], recipe)
        rows = [len(w) for w in group]
        unit = BLOCK if whole.granularity == "128x128" else 1
        scales = [whole.scale] if len(group) == 1 else whole.scale.split([-(-count // unit) for count in rows])
        for w, data, scale in zip(group, whole.data.split(rows), scales, strict=True):
            setattr(w, GATHERED, QuantizedTensor(data, scale, whole.granularity, whole.scale_type))
            w.data = placeholder(w.shape, w.dtype, w.device)


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One NaN seen as a whole weight: hooks and gradient accumulation are content, and whoever reads it gets NaN."""
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    view = _view_of_adjacent(parts)
    return torch.cat(parts) if view is None else view


def _view_of_adjacent(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """The matrices [N_i, K] as one view of their storage, where each begins where the one before ends; else None."""
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
        offset += part.shape[0] * row
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
