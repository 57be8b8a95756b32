"""Scaled matrix products: one interface, and the backends that compute it.

    scaled_matmul(a [M, K], b [N, K]) = (a.data * a.scale) @ (b.data * b.scale)ᵀ -> [M, N]

Both operands lie with the contraction K as their last dimension, the only layout Hopper's FP8 units take; fprop, dgrad
and wgrad are three calls with different operands (see ds_fp8.modules.linear).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_fp8.errors import UserError
from ds_fp8.gemm import reference
from ds_fp8.quantize import QuantizedTensor

__all__ = ["BACKENDS", "scaled_matmul", "select_backend"]

BACKENDS: dict[str, Callable[..., torch.Tensor]] = {"reference": reference.scaled_matmul}
DESCRIPTIONS = {"reference": "emulated: FP8 operands multiplied as BF16 (exact for pow2 scales) or FP32, FP32 sums"}


def select_backend(name: str) -> str:
    """The backend that `name` ("auto" or a backend's name) stands for on this machine. Raises UserError otherwise."""
    if name == "auto":
        return "reference"
    if name not in BACKENDS:
        raise UserError(
            f'unknown GEMM backend "{name}"', key="fp8.linear.backend", remedy=f"use auto or {', '.join(BACKENDS)}"
        )
    return name


def scaled_matmul(
    a: QuantizedTensor, b: QuantizedTensor, *, backend: str = "reference", out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, summed in FP32 and rounded once to `out_dtype` [M, N].

    Raises ValueError naming the operand when the shapes do not fit.
    """
    if a.data.dim() != 2 or b.data.dim() != 2:
        raise ValueError(f"operands must be matrices, got a {tuple(a.shape)} and b {tuple(b.shape)}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"the contraction differs: a {tuple(a.shape)}, b {tuple(b.shape)} (both need it last)")
    return BACKENDS[backend](a, b, out_dtype)
