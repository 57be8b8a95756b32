"""Transformer Engine's counterparts of the library's casts, for casts.py: each a function to time, or None.

None where Transformer Engine cannot run here, or casts nothing like it: it has no cast with one scale per row, and none
with different granularities along the two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_fp8.gemm import unavailable
from ds_fp8.layers.decoder.heads import HeadLayout

Peer = Callable[[], Any] | None


def quantizer(format: str, rowwise: str | None, columnwise: str | None) -> Any | None:
    """Return a quantizer for these granularities along rows and columns (None: not along these), or None."""
    granularities = {rowwise, columnwise} - {None}
    if unavailable("transformer_engine") is not None or len(granularities) != 1:
        return None
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine_torch import DType

    dtype = DType.kFloat8E4M3 if format == "e4m3" else DType.kFloat8E5M2
    usage = {"rowwise": rowwise is not None, "columnwise": columnwise is not None}
    (granularity,) = granularities
    if granularity == "tensor":
        return Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), **usage)
    if granularity in ("1x128", "128x128"):
        return Float8BlockQuantizer(dtype, **usage, block_scaling_dim=1 if granularity == "1x128" else 2)
    return None


def cast(x: torch.Tensor, format: str, rowwise: str | None, columnwise: str | None) -> Peer:
    """Return a function that casts a matrix x."""
    casts = quantizer(format, rowwise, columnwise)
    return None if casts is None else lambda: casts(x)


def swiglu(gate_up: torch.Tensor, format: str, rowwise: str | None, columnwise: str | None) -> Peer:
    """Return a function that computes silu(gate) · up and its casts."""
    casts = quantizer(format, rowwise, columnwise)
    if casts is None:
        return None
    import transformer_engine_torch

    return lambda: transformer_engine_torch.swiglu(gate_up, casts)


def swiglu_backward(
    dproduct: torch.Tensor, gate_up: torch.Tensor, format: str, rowwise: str | None, columnwise: str | None
) -> Peer:
    """Return a function that computes the gradients of gate and up and their casts, from gate_up in BF16."""
    casts = quantizer(format, rowwise, columnwise)
    if casts is None:
        return None
    import transformer_engine_torch

    return lambda: transformer_engine_torch.dswiglu(dproduct, gate_up, casts)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, format: str, rowwise: str) -> Peer:
    """Return a function that computes RMSNorm and the row-wise cast of its result."""
    casts = quantizer(format, rowwise, None)
    if casts is None:
        return None
    import transformer_engine_torch
    from transformer_engine.pytorch.constants import TE_DType

    return lambda: transformer_engine_torch.rmsnorm_fwd(x, weight, eps, None, casts, TE_DType[x.dtype], 0, False)


def rope(qkv: torch.Tensor, layout: HeadLayout) -> Peer:
    """Return a function that rotates q and k of one sequence [S, N], without a bias."""
    if unavailable("transformer_engine") is not None:
        return None
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

    angles = RotaryPositionEmbedding(layout.head_dim)(max_seq_len=qkv.shape[0]).to(qkv.device)
    q, k, _ = (part.transpose(1, 2) for part in layout.split(qkv, 1, len(qkv)))  # [1, S, heads, D]
    return lambda: [apply_rotary_pos_emb(part, angles, tensor_format="bshd", fused=True) for part in (q, k)]
