"""Changes of q, k and v before their casts to FP8 that attention itself does not notice.

    softmax_j(q · (k_j - c)) = softmax_j(q · k_j)         for any c: q · c is the same for every key
    Σ_j p_ij (v_j - c) + c   = Σ_j p_ij v_j               rows of p sum to 1
    (q R) · (k R)            = q · k                      R Rᵀ = 1

Gradients follow: Σ_j ds_ij = 0, and dq and dk are rotated back. A code of FP8 has a relative error, so that an offset
common to all tokens (a bias of k_proj; features that rotary embeddings turn slowly) costs accuracy without carrying
information: the means over the tokens are taken off, of keys as SageAttention does (arXiv 2410.02367, section 4.2), of
values likewise. And where one feature is most of a score, its error is: a Hadamard transform of each head with random
signs spreads it over all features (FlashAttention-3, arXiv 2407.08608, section 3.3).
"""

from __future__ import annotations

import torch

from ds_fp8.layers.attention.hadamard import ROTATION_BLOCKS, Rotation, rotate, unrotate

SEED = 0
"""Of the signs: the same in every layer, for every step and rank."""
PIECE = 16384
"""Tokens that are summed at a time: at 1024 features their copy takes 134 MB."""


def sum_over_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x [B, heads, S, D] over its tokens, FP64 [B, heads, 1, D]."""
    # FP64: partial sums of several ranks, in any order, round to the same BF16 mean. In pieces, for torch makes an FP64
    # copy of what it sums.
    return sum(piece.sum(2, keepdim=True, dtype=torch.float64) for piece in x.split(PIECE, 2))


def mean_over_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of x [B, heads, S, D] over its tokens in x's dtype, [B, heads, 1, D]."""
    return (sum_over_tokens(x) / x.shape[2]).to(x.dtype)


def add_mean_of_values(output: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Add the mean of the values to attention's output, in place.

    Args:
        output: [B, S, heads, D], contiguous.
        mean: [B, kv_heads, 1, D]; consecutive heads share one of k and v.
    """
    by_kv_head = output.unflatten(2, (mean.shape[1], -1))  # [B, S, kv_heads, heads / kv_heads, D]
    by_kv_head += mean.transpose(1, 2).unsqueeze(3)
    return output


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Rotate each head of x [B, heads, S, D]; as it is where D is no power of two that `Rotation` has.

    Returns:
        x's shape and dtype, in memory as [B, S, heads, D].
    """
    rotation = _rotation(x.shape[-1])
    if rotation is None:
        return x
    by_token = x.transpose(1, 2)
    # A token at a time, in kernels whose sums have one order: on whichever rank a token lies, the bits are the same.
    return rotate(by_token.flatten(2).flatten(0, 1), rotation, x.dtype).view(by_token.shape).transpose(1, 2)


def rotate_back(dx: torch.Tensor) -> torch.Tensor:
    """Undo `rotate_heads` on gradients [..., D], contiguous."""
    rotation = _rotation(dx.shape[-1])
    return dx if rotation is None else unrotate(dx.flatten(0, -2), rotation).view(dx.shape)


def _rotation(features: int) -> Rotation | None:
    return Rotation(features, SEED) if features in ROTATION_BLOCKS else None
