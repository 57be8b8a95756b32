"""Stochastic rounding, the same on every device: random bits are a hash of a key and an element's index."""

from __future__ import annotations

import torch

from ds_fp8.formats import FORMATS

MULTIPLIERS = (0x9E3779B1, 0x7FEB352D, 0x846CA68B)
"""The golden ratio, which parts neighbouring indices, and the two multipliers of the 32-bit integer hash "lowbias32"
(Chris Wellons, Hash Prospector; public domain)."""
_WORD = 0xFFFFFFFF


def uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """Of every index (int64) a number k / 65536 in [0, 1), FP32, that depends on it and on the 31-bit `key` only.

    16 bits: added to an element in units of the grid, the sum is still exact.
    """
    step, first, second = MULTIPLIERS
    word = (index * step + key) & _WORD
    word = ((word ^ (word >> 16)) * first) & _WORD
    word = ((word ^ (word >> 15)) * second) & _WORD
    return ((word ^ (word >> 16)) >> 16).float() * 2.0**-16


def round_stochastically(x: torch.Tensor, draw: torch.Tensor, format: str) -> torch.Tensor:
    """x (FP32, within the format's range) on the grid of `format`, up or down with chances that keep its expectation.

    draw: numbers in [0, 1), the shape of x. NaN stays NaN.
    """
    target = FORMATS[format]
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^e of every element
    spacing = (binade * torch.finfo(target.dtype).eps).clamp_min(target.smallest_subnormal)
    return torch.copysign((x.abs() / spacing + draw).floor() * spacing, x)
