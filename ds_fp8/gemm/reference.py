"""The scaled product in plain torch: dequantize both operands exactly, multiply, sum in FP32. Any device."""

from __future__ import annotations

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import FORMATS, SCALE_TYPES


def unavailable() -> str | None:
    return None


def unsupported(a_format: str, a_granularity: str, b_format: str, b_granularity: str) -> str | None:
    return None


def scaled_matmul(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply a [M, K] @ b [N, K]ᵀ -> [M, N] with FP32 sums.

    Operands that are exact in BF16, FP8 and most emulated formats with scales that are powers of two, are multiplied in
    BF16, several times faster than FP32.
    """
    exact_in_bf16 = out_dtype is torch.bfloat16 and all(
        SCALE_TYPES[q.scale_type].powers_of_two and FORMATS[q.format].exact_in_bf16 for q in (a, b)
    )
    operand = torch.bfloat16 if exact_in_bf16 else torch.float32
    return (a.dequantize(operand) @ b.dequantize(operand).t()).to(out_dtype)
