"""Smooth-SwiGLU: the product of a gated MLP loses its outlier channels before its cast (Fishman et al., 2409.12517).

    p' [T, F] = p ⊘ s        cast for down_proj          y  = p' · down'ᵀ = p · downᵀ
    down'     = down ⊙ s     columns, before their cast  dp = dy · down' ⊘ s,  ddown = dyᵀ · p' ⊙ s

The function is unchanged. Long training aligns the gate and up rows of single channels f, whose product then grows with
the square of the input: one scale for all of p leaves no bits to the other channels. The factors s [F] are powers of
two, so that nothing is rounded but by the casts, and are computed again for every batch: no state, and nothing to agree
on between ranks, each of which casts down with its own.
"""

from __future__ import annotations

import torch

MAX_EXPONENT = 60
"""Largest exponent of a factor: a weight times it stays far from the end of FP32."""


def channel_factors(product: torch.Tensor) -> torch.Tensor:
    """Return the divisor of each channel of a product: the power of two by which it exceeds the typical channel.

    Args:
        product: [T, F], any floating point dtype.

    Returns:
        FP32 [F]: 2^floor(log2(amax of the channel / median amax of all)), and 1 for channels below, for those with NaN
        or Inf, which casts must see, and where half of all channels are zero.
    """
    if product.numel() == 0:
        return torch.ones(product.shape[-1], device=product.device)
    amax = product.detach().abs().amax(0).float()
    # The median is that of a typical channel, which a few outliers do not move.
    ratio = amax / amax.median()
    # ratio = m * 2^exponent with m in [0.5, 1): 2^(exponent - 1) is the power of two below, exactly.
    _, exponent = torch.frexp(ratio)
    factors = torch.ldexp(torch.ones_like(amax), (exponent - 1).clamp(0, MAX_EXPONENT))
    return torch.where(ratio.isfinite(), factors, 1.0)
