"""The scaled product in plain torch: decode both operands exactly, multiply, sum in FP32. Any device."""

from __future__ import annotations

import torch

from ds_fp8.quantize import QuantizedTensor


def unavailable() -> str | None:
    """Why this backend cannot run here: it always can."""
    return None


def unsupported(a_format: str, a_granularity: str, b_format: str, b_granularity: str) -> str | None:
    """Why a product of such operands is not to be had: all are."""
    return None


def scaled_matmul(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accumulation: bool = False
) -> torch.Tensor:
    """a [M, K] @ b [N, K]ᵀ -> [M, N], always summed in FP32.

    An FP8 element times a power of two is exact in BF16, so such operands are multiplied in BF16 (whose products every
    library sums in FP32), several times faster than FP32; other scales need FP32 operands.
    """
    exact_in_bf16 = a.scale_type == b.scale_type == "pow2" and out_dtype is torch.bfloat16
    operand = torch.bfloat16 if exact_in_bf16 else torch.float32
    return (a.dequantize(operand) @ b.dequantize(operand).t()).to(out_dtype)
