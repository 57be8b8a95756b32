"""Grouped scaled products for mixtures of experts, without host syncs.

    grouped_matmul   y [R, N]       rows of group g:  y_g = a_g [.., K] · b_g [N, K]ᵀ      fprop and dgrad
    grouped_wgrad    dw [G, N, K]   of group g:       dw_g = dy_gᵀ [N, ..] · x_g [.., K]    over the group's rows

The rows of a group are adjacent and begin at a multiple of 128 (RowGroups), with zeros up to the next group. Scale
groups along the rows therefore never straddle two groups of rows.

Computed by Triton (grouped_triton.py) on a GPU, by plain torch on a CPU and with the backend "reference".
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import BLOCK, CastSpec
from ds_fp8.gemm import reference


class RowGroups(NamedTuple):
    """Rows of a matrix [R, ...] by group; R is a multiple of 128."""

    counts: torch.Tensor  # int32 [G], rows of each group
    starts: torch.Tensor  # int32 [G], first row of each group: ascending multiples of 128
    of_tile: torch.Tensor  # int32 [R/128], the group of each 128 rows; -1: none


def unsupported(a: CastSpec, b: CastSpec) -> str | None:
    """Return why operands with these casts (rows and weights, or columnwise dy and x) are unsupported, or None."""
    for cast in (a, b):
        if cast.emulated or cast.format != "e4m3":
            return f"products of experts multiply e4m3, not {cast}"
    if a.granularity != "1x128" or b.granularity not in ("1x128", "128x128"):
        return f"products of experts multiply 1x128 by 128x128 or 1x128, not {a.granularity} by {b.granularity}"
    return None


def grouped_matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    groups: RowGroups,
    *,
    backend: str = "reference",
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply the rows of each group of a [R, K] (1x128) by its matrix of b [G * N, K] (128x128): [R, N].

    Rows of no group are zeros, in a and in the result. Backends other than "reference" mean the Triton kernel. Operands
    must be supported, N and K multiples of 128.
    """
    number = len(groups.counts)
    if backend != "reference" and a.data.device.type == "cuda":
        from ds_fp8.gemm.grouped_triton import multiply_tiles

        return multiply_tiles(a, b, groups, out_dtype)
    # Group by group: syncs the host on a GPU.
    side = b.shape[0] // number
    result = torch.zeros(a.shape[0], side, dtype=out_dtype, device=a.data.device)
    for group, (start, count) in enumerate(_spans(groups)):
        if count:
            rows, of_b = slice(start, start + count), slice(group * side, (group + 1) * side)
            # N is a multiple of 128: full blocks of scales per matrix.
            blocks = slice(of_b.start // BLOCK, of_b.stop // BLOCK)
            ours = replace(a, data=a.data[rows], scale=a.scale[rows])
            matrix = replace(b, data=b.data[of_b], scale=b.scale[blocks])
            result[rows] = reference.scaled_matmul(ours, matrix, out_dtype)
    return result


def grouped_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    groups: RowGroups,
    *,
    backend: str = "reference",
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply columnwise dy [N, R] (1x128) and x [K, R] (128x128 or 1x128) over the rows of each group: [G, N, K].

    Rows of no group are zeros in dy. Backends and shapes as of grouped_matmul.
    """
    if backend != "reference" and dy.data.device.type == "cuda":
        from ds_fp8.gemm.grouped_triton import multiply_along_rows

        return multiply_along_rows(dy, x, groups, out_dtype)
    shape = len(groups.counts), dy.shape[0], x.shape[0]
    result = torch.zeros(shape, dtype=out_dtype, device=dy.data.device)
    for group, (start, count) in enumerate(_spans(groups)):
        if count:
            tiles = slice(start // BLOCK, -(-(start + count) // BLOCK))
            # To the end of the last tile: padding rows are zeros.
            rows = slice(start, tiles.stop * BLOCK)
            left, right = (replace(q, data=q.data[:, rows], scale=q.scale[:, tiles]) for q in (dy, x))
            result[group] = reference.scaled_matmul(left, right, out_dtype)
    return result


def _spans(groups: RowGroups) -> list[tuple[int, int]]:
    """Return (first row, rows) of each group; empty on the meta device."""
    if groups.starts.is_meta:
        return []
    return list(zip(groups.starts.tolist(), groups.counts.tolist(), strict=True))
