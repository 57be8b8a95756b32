"""Between tokens and the rows of experts: permutation with the casts that follow it, and the sum that undoes it.

    permute     rows[r] = x[source[r] // k]                 zeros where a row has no token, cast as it is written
    unpermute   y[t]    = sum over c of rows[place[t, c]]   in FP32, c in ascending order, rounded once

Each is the other's backward. A cast of permuted rows has the bits of quantize_both of the permuted matrix.
"""

from __future__ import annotations

import torch

from ds_fp8.casts import QuantizedTensor, quantize_both
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.experts.layout import ExpertLayout

Casts = tuple[QuantizedTensor | None, QuantizedTensor | None]


def permute_cast(
    x: torch.Tensor,
    layout: ExpertLayout,
    format: str = "e4m3",
    rowwise: str | None = "1x128",
    columnwise: str | None = None,
    scale: str = "pow2",
) -> Casts:
    """Cast the tokens x [T, H] as rows of experts, [R, H] along H and [H, R] along the rows, in one pass.

    Args:
        x: The tokens; H is a multiple of 128, T > 0.
        layout: The rows.
        format: As for `quantize`.
        rowwise: "1x128", or None if the first result is not wanted.
        columnwise: "1x128" or "128x128", or None if the second one is not wanted.
        scale: "pow2", "fp32" or "fitted".
    """
    if x.shape[1] % BLOCK:
        raise ValueError(f"experts' inputs have a multiple of {BLOCK} features, not {x.shape[1]}")
    if x.device.type == "cuda":
        from ds_fp8.layers.experts.permutation_triton import permute_tiles

        return permute_tiles(x, layout, format, rowwise, columnwise, scale)
    return permute_cast_reference(x, layout, format, rowwise, columnwise, scale)


def permute_cast_reference(
    x: torch.Tensor, layout: ExpertLayout, format: str, rowwise: str | None, columnwise: str | None, scale: str
) -> Casts:
    """Compute permute_cast in plain torch, by way of the permuted matrix."""
    return quantize_both(permute(x, layout), format, rowwise, columnwise, scale)


def permute(x: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return the tokens x [T, H] as rows of experts [R, H]; zeros where a row has none. T > 0."""
    # Rows without a token have source -1. They read token 0 and are zeroed, which needs no index on the host.
    token = layout.source.clamp_min(0) // layout.choices
    return x.detach()[token].masked_fill(layout.source[:, None] < 0, 0)


def unpermute(rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return the sum [T, H] of the rows [R, H] of each token."""
    if rows.device.type == "cuda":
        from ds_fp8.layers.experts.permutation_triton import sum_rows

        return sum_rows(rows, layout)
    return unpermute_reference(rows, layout)


def unpermute_reference(rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Compute unpermute in plain torch."""
    total = torch.zeros(len(layout.place), rows.shape[1], device=rows.device)
    # One choice after the other: the order of the sum is fixed, and equal to the kernel's.
    for place in layout.place.unbind(1):
        total += rows[place.clamp_min(0)].float().masked_fill_(place[:, None] < 0, 0)
    return total.to(rows.dtype)


def row_factors(weights: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return the FP32 router weight [R] of each row, from those [T, k] of each pair; 0 where a row has none."""
    pairs = weights.detach().reshape(-1)
    return pairs[layout.source.clamp_min(0)].float().masked_fill_(layout.source < 0, 0)


def pair_values(rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return the values [T, k] of each pair from those [R] of each row; 0 of pairs that have none."""
    return rows[layout.place.clamp_min(0)].masked_fill_(layout.place < 0, 0)
