"""Rows of groups with given counts, for tests of grouped products and of what surrounds them."""

from collections.abc import Sequence

import torch

from ds_fp8.config.formats import BLOCK
from ds_fp8.gemm.grouped import RowGroups

# Rows of each group: none, one, around a tile, all in one group
AWKWARD = [(1,), (0, 1, 127, 128, 129), (300, 0, 0), (0, 0, 5), (0, 0), (1,) * 9]


def row_groups(counts: Sequence[int], unused: int = 1) -> RowGroups:
    """Return groups of so many rows, with `unused` tiles behind them."""
    tiles = [-(-count // BLOCK) for count in counts]
    starts = [BLOCK * sum(tiles[:group]) for group in range(len(tiles))]
    of_tile = [group for group, number in enumerate(tiles) for _ in range(number)] + [-1] * unused
    return RowGroups(*(torch.tensor(values, dtype=torch.int32) for values in (counts, starts, of_tile)))


def spans(groups: RowGroups) -> list[slice]:
    """Return the rows of each group."""
    return [
        slice(start, start + count) for start, count in zip(groups.starts.tolist(), groups.counts.tolist(), strict=True)
    ]


def random_rows(groups: RowGroups, columns: int, std: float = 1.0) -> torch.Tensor:
    """Return FP32 [R, columns], random in the rows of groups and zero elsewhere."""
    rows = torch.zeros(len(groups.of_tile) * BLOCK, columns)
    for span in spans(groups):
        rows[span] = torch.randn(rows[span].shape) * std
    return rows
