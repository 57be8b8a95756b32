"""Permutation of routed tokens to the rows of grouped products, and back.

Every token t has k choices of an expert. The pairs (token, choice), numbered t * k + choice, are sorted by expert, and
each expert's rows begin at a multiple of 128:

    row        0 .. c_0 - 1    ..127       128 .. 128 + c_1 - 1    ..255      ...         .. R - 1
    expert     0               padding     1                       padding    2           padding

The counts c_e are known on the device only, so R is the worst case: T * k, plus 127 for every expert that can have a
token.

    permute     rows[r] = x[source[r] // k]                 zeros in padding; quantized as it is written
    unpermute   y[t]    = sum over c of rows[place[t, c]]   in FP32, c in ascending order, rounded once

Each is the other's backward. Quantized rows have the bits of quantize_both of the permuted matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_fp8.casts import QuantizedTensor, quantize_both
from ds_fp8.config.formats import BLOCK
from ds_fp8.gemm.grouped import RowGroups


class ExpertLayout(NamedTuple):
    """Rows of the grouped products: their pairs (token, choice) and their experts."""

    source: torch.Tensor  # int32 [R], the pair t * k + choice of each row; -1 in padding
    place: torch.Tensor  # int32 [T, k], the row of each pair; -1 for a choice outside the experts
    counts: torch.Tensor  # int32 [E], as in RowGroups
    starts: torch.Tensor  # int32 [E], as in RowGroups
    of_tile: torch.Tensor  # int32 [R/128], the expert of each 128 rows; -1: none

    @property
    def groups(self) -> RowGroups:
        return RowGroups(self.counts, self.starts, self.of_tile)

    @property
    def choices(self) -> int:
        return self.place.shape[1]

    @property
    def ends(self) -> torch.Tensor:
        """Return int32 [E], the end of each expert's rows, padding (zeros) included."""
        return torch.nn.functional.pad(self.starts[1:], (0, 1), value=len(self.source))

    @property
    def expert_of_row(self) -> torch.Tensor:
        """Return int64 [R]; 0 in tiles without an expert."""
        return self.of_tile.clamp_min(0).long()[:, None].expand(-1, BLOCK).reshape(-1)


def worst_case_rows(pairs: int, experts: int) -> int:
    """Return the largest number of rows of `pairs` (token, choice), a multiple of 128."""
    return max(pairs + min(pairs, experts) * (BLOCK - 1), BLOCK) // BLOCK * BLOCK


def expert_layout(top_k_index: torch.Tensor, experts: int) -> ExpertLayout:
    """Return the layout of top_k_index [T, k], by token within an expert, without a device synchronization.

    A choice of `experts` or more gets no row: expert parallelism marks pairs of other ranks this way.
    """
    if top_k_index.device.type == "cuda" and top_k_index.numel():
        from ds_fp8.layers.experts.layout_triton import lay_out

        return ExpertLayout(*lay_out(top_k_index, experts, worst_case_rows(top_k_index.numel(), experts)))
    pairs, device = top_k_index.numel(), top_k_index.device
    rows = worst_case_rows(pairs, experts)
    # stable: by token within an expert, as in the kernel
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    numbers = torch.arange(experts + 1, dtype=chosen.dtype, device=device)
    first = torch.searchsorted(chosen, numbers)  # of each expert among the sorted pairs
    counts = first.diff()
    padded = (counts + (BLOCK - 1)) // BLOCK * BLOCK
    ends = padded.cumsum(0)
    starts = ends - padded

    expert = chosen.clamp(0, experts - 1)
    sorted_place = starts[expert] + torch.arange(pairs, device=device) - first[expert]
    # one more row takes the choices outside the experts
    sorted_place = torch.where((chosen >= 0) & (chosen < experts), sorted_place, rows)
    source = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
    source.scatter_(0, sorted_place, order.int())
    place = torch.empty_like(sorted_place).scatter_(0, order, sorted_place)
    place = torch.where(place < rows, place, -1).int().view(top_k_index.shape)

    tiles = torch.arange(0, rows, BLOCK, device=device)
    # the first expert whose rows end behind the tile's first row
    of_tile = torch.searchsorted(ends, tiles, right=True)
    of_tile = torch.where(of_tile < experts, of_tile, -1)
    return ExpertLayout(source[:rows], place, counts.int(), starts.int(), of_tile.int())


def permute_quantize(
    x: torch.Tensor,
    layout: ExpertLayout,
    format: str = "e4m3",
    rowwise: str | None = "1x128",
    columnwise: str | None = None,
    scale: str = "pow2",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Return the permuted tokens x [T, H], T > 0, quantized rowwise [R, H] and columnwise [H, R], in one pass.

    Granularities: rowwise "1x128", columnwise "1x128" or "128x128", or None.
    """
    if x.device.type == "cuda":
        from ds_fp8.layers.experts.layout_triton import permute_tiles

        return permute_tiles(x, layout.source, layout.choices, format, rowwise, columnwise, scale)
    return quantize_both(permute(x, layout), format, rowwise, columnwise, scale)


def permute(x: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return the rows [R, H] of the tokens x [T, H], T > 0; zeros in padding."""
    # padding (source -1) reads token 0 and is zeroed: no index on the host
    token = layout.source.clamp_min(0) // layout.choices
    return x.detach()[token].masked_fill(layout.source[:, None] < 0, 0)


def unpermute(rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return the sum [T, H] of the rows [R, H] of each token."""
    if rows.device.type == "cuda":
        from ds_fp8.layers.experts.layout_triton import sum_rows

        return sum_rows(rows, layout.place)
    total = torch.zeros(len(layout.place), rows.shape[1], device=rows.device)
    # one choice after the other, in the kernel's order
    for place in layout.place.unbind(1):
        total += rows[place.clamp_min(0)].float().masked_fill_(place[:, None] < 0, 0)
    return total.to(rows.dtype)


def row_factors(weights: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return the router weights [T, k] by row, FP32 [R]; 0 in padding."""
    pairs = weights.detach().reshape(-1)
    return pairs[layout.source.clamp_min(0)].float().masked_fill_(layout.source < 0, 0)


def pair_values(rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """Return values [R] of rows by pair, [T, k]; 0 for pairs without a row."""
    return rows[layout.place.clamp_min(0)].masked_fill_(layout.place < 0, 0)
