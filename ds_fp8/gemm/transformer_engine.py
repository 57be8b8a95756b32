"""The scaled product through Transformer Engine's general_gemm, where it is installed.

It reaches the same cuBLASLt kernels as cublas.py for block and tensor scales and has no row-wise product; what it adds
is another library to compare with. The bytes and scales of both operands are handed over as they lie.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.formats import has_power_of_two_scales
from ds_fp8.gemm import cublas


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Return why this backend cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    reason = missing()
    if reason is not None:
        return reason
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    available, reason = FP8GlobalStateManager.is_fp8_block_scaling_available()
    return None if available else reason


def missing() -> str | None:
    """Return why Transformer Engine cannot be loaded, or None."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install ds-fp8[te])"
    try:
        importlib.import_module("transformer_engine.pytorch.quantization")
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine cannot be loaded: {str(error).splitlines()[0]}"
    return None


def unsupported(a_format: str, a_granularity: str, b_format: str, b_granularity: str) -> str | None:
    """Return why the operand pair is unsupported, or None."""
    if "row" in (a_granularity, b_granularity):
        return "Transformer Engine has no product with one scale per row"
    return cublas.unsupported(a_format, a_granularity, b_format, b_granularity)


def unsupported_scale(scale: str, granularity: str) -> str | None:
    """Return why scales of a type are unsupported, or None."""
    if granularity not in cublas.BLOCKWISE or has_power_of_two_scales(scale):
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0):
        # There Transformer Engine reads no more than the exponents of such scales.
        return f'block scales of type "{scale}" are not powers of two, which Blackwell needs (set "scale": "pow2")'
    return None


def scaled_matmul(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accumulation: bool = False
) -> torch.Tensor:
    """Multiply a [M, K] @ b [N, K]ᵀ -> [M, N] for operands that are supported and not empty."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    rows, columns = a.shape[0], b.shape[0]
    if a.granularity == b.granularity == "tensor":
        first, second = _per_tensor(a), _per_tensor(b)
    elif b.granularity == "128x128":
        first, second = _groups(a), _blocks(b)
    elif a.granularity == "128x128":
        first, second = _blocks(a), _groups(b)
    else:
        first, second = _groups(a), _groups(b)
    # general_gemm names its operands as BLAS does, column-major: its A is our b.
    result = general_gemm(second, first, out_dtype=out_dtype, layout="TN", use_split_accumulator=not fast_accumulation)
    result = result[0]
    return result if result.shape == (rows, columns) else result[:rows, :columns].contiguous()


def dtype(format: str):
    """Return Transformer Engine's name of a format, "e4m3" or "e5m2"."""
    import transformer_engine_torch as tex

    return tex.DType.kFloat8E4M3 if format == "e4m3" else tex.DType.kFloat8E5M2


def _bytes(q: QuantizedTensor) -> torch.Tensor:
    return cublas.aligned(q.data).view(torch.uint8)


def _per_tensor(q: QuantizedTensor):
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    return Float8TensorStorage(data=_bytes(q), fp8_scale_inv=q.scale.view(1), fp8_dtype=dtype(q.format))


def _groups(q: QuantizedTensor):
    return _blockwise(q, cublas.group_scale(q).t(), False)  # as memory: [K/128, R]


def _blocks(q: QuantizedTensor):
    return _blockwise(q, cublas.block_scale(q), True)  # [R/128, K/128 rounded up to 4]


def _blockwise(q: QuantizedTensor, scale: torch.Tensor, is_2d: bool):
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    quantizer = Float8BlockQuantizer(
        dtype(q.format), rowwise=True, columnwise=False, block_scaling_dim=2 if is_2d else 1
    )
    return Float8BlockwiseQTensorStorage(_bytes(q), scale, None, None, dtype(q.format), quantizer, is_2d)
