"""Quantization to and from FP8: Triton on a GPU, plain torch elsewhere, bitwise equal."""

from ds_fp8.casts.primitives import apply_factors, group_amax, quantize_with_scale, scale_from_amax
from ds_fp8.casts.quantization import QuantizedTensor, quantize, quantize_both, quantize_columnwise, transpose

__all__ = [
    "QuantizedTensor",
    "apply_factors",
    "group_amax",
    "quantize",
    "quantize_both",
    "quantize_columnwise",
    "quantize_with_scale",
    "scale_from_amax",
    "transpose",
]
