"""Formats of attention in FP8, and the tensors that pass between its forward, its backward and their kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import FORMATS

FORWARD, BACKWARD = "e4m3", "e5m2"
"""Formats of q, k, v, p and o, and of do, ds, dq, dk and dv."""

P_SCALE = FORMATS[FORWARD].max
"""Factor of p before its cast."""


class Saved(NamedTuple):
    """Tensors that backward reads."""

    q: QuantizedTensor
    """[B, S, heads, D]."""
    k: QuantizedTensor
    """[B, S, kv_heads, D]."""
    v: QuantizedTensor
    """[B, S, kv_heads, D]."""
    o: QuantizedTensor
    """[B, S, heads, D]."""
    log_sums: torch.Tensor
    """log Σ_j exp(s), FP32 [B, heads, S], or in the form that the implementation has it."""
    scaling: float


class GradientScales(NamedTuple):
    """Dequantisation factors of what backward casts, FP32 without dimensions: powers of two."""

    ds: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
