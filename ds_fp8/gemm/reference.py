"""The scaled product in plain torch: decode both operands exactly, multiply, sum in FP32. Any device."""

from __future__ import annotations

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import FORMATS, has_power_of_two_scales


def unavailable() -> str | None:
    return None


def unsupported(a_format: str, a_granularity: str, b_format: str, b_granularity: str) -> str | None:
    return None


def scaled_matmul(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply a [M, K] @ b [N, K]ᵀ -> [M, N], always summed in FP32.

    An FP8 element, and most emulated ones, times a power of two is exact in BF16, so such operands are multiplied in
    BF16 (whose products every library sums in FP32), several times faster than FP32; others need FP32 operands.
    """
    exact_in_bf16 = out_dtype is torch.bfloat16 and all(
        has_power_of_two_scales(q.scale_type) and FORMATS[q.format].exact_in_bf16 for q in (a, b)
    )
    # BF16 has E4M3's and E5M2's mantissas and FP32's exponents: codes times powers of two lose nothing.
    operand = torch.bfloat16 if exact_in_bf16 else torch.float32
    return (a.dequantize(operand) @ b.dequantize(operand).t()).to(out_dtype)
