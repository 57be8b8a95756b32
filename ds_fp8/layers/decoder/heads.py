"""The heads of attention: how q, k and v lie in the product of their stacked projections, and the norms of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class HeadLayout:
    """Layout of q, k and v side by side in a matrix [B·S, (heads + 2 · kv_heads) · head_dim]."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the numbers of columns of q, k and v."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def split(self, qkv: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views q [B, heads, S, D], k and v [B, kv_heads, S, D] of the matrix, B = `batch`, S = `length`."""
        parts = qkv.view(batch, length, qkv.shape[-1]).split(self.sizes, -1)
        return tuple(part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)


class HeadNorms(NamedTuple):
    """RMSNorm of each head of q and k."""

    q: torch.Tensor
    """Weight [D]."""
    k: torch.Tensor
    """Weight [D]."""
    eps: float
