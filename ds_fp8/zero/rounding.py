"""Stochastic rounding to an FP8 grid, the same on every device."""

from __future__ import annotations

import torch

from ds_fp8.formats import FORMATS


def round_stochastically(x: torch.Tensor, draw: torch.Tensor, format: str) -> torch.Tensor:
    """x (FP32, within the format's range) on the grid of `format`, up or down with chances that keep its expectation.

    draw: numbers in [0, 1), the shape of x. NaN stays NaN.
    """
    target = FORMATS[format]
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^e of every element
    spacing = (binade * torch.finfo(target.dtype).eps).clamp_min(target.smallest_subnormal)
    return torch.copysign((x.abs() / spacing + draw).floor() * spacing, x)
