"""RowGroups: rows of a matrix by the group that multiplies them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowGroups(NamedTuple):
    """Rows of a matrix [R, ...] by group; R is a multiple of 128."""

    counts: torch.Tensor
    """int32 [G], the rows of each group."""
    starts: torch.Tensor
    """int32 [G], the first row of each group: multiples of 128, in the order of the groups."""
    of_tile: torch.Tensor
    """int32 [R/128], the group of each 128 rows; -1 where they belong to none."""
