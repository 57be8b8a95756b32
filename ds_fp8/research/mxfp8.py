"""The block-scaled product on Blackwell, as MXFP8 through Transformer Engine. Never run on such a GPU.

An MXFP8 operand has one E8M0 scale, a power of two, for every 32 elements along its contraction. Codes in groups of
1x128 or blocks of 128x128 with power-of-two scales are such operands as they are, once each scale is repeated: 4 times
along the contraction, and a block's for each of its rows. Codes and numbers stay the same.

Blackwell reads operands whose contraction goes along the rows of memory or along its columns, so a transposed matrix is
a view, and gathered blocks serve both products of a weight without a copy:

    a            b            layout of general_gemm, which names operands as BLAS does: its A is our b, its B our a
    as it lies   as it lies   TN, both rowwise
    as it lies   transposed   NN, b columnwise
    transposed   transposed   NT, both columnwise

The fourth pair is not to be had: there a is copied. Codes are padded with zeros to multiples of 32, the group that
Transformer Engine reckons with. Scales are handed over unswizzled; general_gemm brings them into cuBLASLt's order.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_fp8.casts import QuantizedTensor, quantize, transpose
from ds_fp8.config.errors import first_line
from ds_fp8.config.formats import BLOCK, SCALE_TYPES
from ds_fp8.gemm import reference

GROUP = 32  # elements along the contraction that share an E8M0 scale
BLOCKWISE = ("1x128", "128x128")
READS_TRANSPOSED = True  # a transposed view is multiplied where it lies


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.cuda.get_device_capability() < (10, 0):
        return f"{torch.cuda.get_device_name()} has no MXFP8 units (compute capability 10.0 is needed)"
    reason = missing()
    if reason is not None:
        return reason
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    available, reason = FP8GlobalStateManager.is_mxfp8_available()
    return differs(torch.device("cuda")) if available else reason


def missing() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install ds-fp8[te])"
    try:
        importlib.import_module("transformer_engine.pytorch.quantization")
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine cannot be loaded: {first_line(error)}"
    return None


def differs(device: torch.device) -> str | None:
    """Multiply small operands in every layout; return how products fail or differ from the reference's, or None."""
    generator = torch.Generator().manual_seed(0)
    # 160 is a multiple of 32 and not of 128: ragged blocks are tried as well.
    x, w = (torch.randn(160, 160, generator=generator).to(device) for _ in range(2))
    groups, blocks = quantize(x), quantize(w, granularity="128x128")
    turned = transpose(blocks).t()  # the same numbers, lying transposed
    for a, b in ((groups, blocks), (groups, turned), (turned, turned)):
        expected = reference.scaled_matmul(a, b, torch.float32)
        try:
            found = scaled_matmul(a, b, torch.float32)
        except (ImportError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
            return f"Transformer Engine's MXFP8 product fails: {first_line(error)}"
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()):
            return "Transformer Engine's MXFP8 product differs from the reference's"
    return None


def unsupported(a_format: str, a_granularity: str, b_format: str, b_granularity: str) -> str | None:
    if a_format == b_format == "e5m2":
        return "Blackwell cannot multiply two E5M2 operands"
    if not {a_granularity, b_granularity} <= set(BLOCKWISE):
        return "MXFP8 products are for 1x128 and 128x128 scales (cublas multiplies operands scaled per row or tensor)"
    return None


def unsupported_scale(scale: str, granularity: str) -> str | None:
    if SCALE_TYPES[scale].powers_of_two:
        return None
    return f'MXFP8 needs scales that are powers of two, unlike those of type "{scale}" (set "scale": "pow2")'


def scaled_matmul(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    rows, columns = a.shape[0], b.shape[0]
    b_columnwise = _lies_transposed(b)
    #     TN  a rowwise,    b rowwise          NN  a rowwise,    b columnwise
    #     NT  a columnwise, b columnwise       the fourth is missing: a is copied
    a_columnwise = b_columnwise and _lies_transposed(a)
    layout = ("N" if b_columnwise else "T") + ("T" if a_columnwise else "N")
    # BLAS is column-major: its first operand is our second, and the result needs no transposition then.
    first, second = storage(operand(a, a_columnwise)), storage(operand(b, b_columnwise))
    result = general_gemm(second, first, out_dtype=out_dtype, layout=layout, use_split_accumulator=True)[0]
    return result if result.shape == (rows, columns) else result[:rows, :columns].contiguous()


@dataclass(frozen=True)
class Operand:
    """A matrix [R, K], contracted along K, as Transformer Engine's MXFP8 storage keeps it."""

    codes: torch.Tensor  # uint8, contiguous, padded to multiples of 32: [R, K], or [K, R] if `columnwise`
    # E8M0 as uint8, contiguous: [R, K/32] padded to multiples of (128, 4), or its transpose if `columnwise`
    scales: torch.Tensor
    columnwise: bool
    format: str


def operand(q: QuantizedTensor, columnwise: bool) -> Operand:
    """Return a matrix [R, K] with power-of-two scales of 1x128 or 128x128 as an MXFP8 operand of the same numbers.

    columnwise: whether memory is to hold its transpose; nothing is copied if it does so already.
    """
    # Codes of the transpose are the same bytes, and scales of blocks the same numbers the other way round.
    codes, scales = q.data.view(torch.uint8), _scales(q)
    return Operand(
        _padded(codes.t() if columnwise else codes, GROUP).contiguous(),
        (scales.t() if columnwise else scales).contiguous(),
        columnwise,
        q.format,
    )


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Return FP32 powers of two from 2^-126 upwards as E8M0 bytes: their biased exponents; NaN is 255 in both."""
    # E8M0 is the exponent field of an FP32 number: a power of two loses nothing. NaN is 255 in both.
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def _scales(q: QuantizedTensor) -> torch.Tensor:
    """Return the E8M0 scale of every row's every 32 columns: [R, K/32], padded to multiples of (128, 4)."""
    # 4 groups of 32 have the scale of their group of 128.
    scales = e8m0(q.scale).repeat_interleave(BLOCK // GROUP, 1)
    if q.granularity == "128x128":
        return scales.repeat_interleave(BLOCK, 0)
    return F.pad(scales, (0, 0, 0, -len(scales) % BLOCK))


def _padded(codes: torch.Tensor, multiple: int) -> torch.Tensor:
    rows, columns = (-length % multiple for length in codes.shape)
    return F.pad(codes, (0, columns, 0, rows)) if rows or columns else codes


def _lies_transposed(q: QuantizedTensor) -> bool:
    return not q.data.is_contiguous() and q.data.t().is_contiguous()


def storage(found: Operand):
    """Return an operand as an MXFP8TensorStorage, which has one of its two directions."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    dtype = tex.DType.kFloat8E4M3 if found.format == "e4m3" else tex.DType.kFloat8E5M2
    pair, none = (found.codes, found.scales), (None, None)
    rowwise, columnwise = (none, pair) if found.columnwise else (pair, none)
    return MXFP8TensorStorage(*rowwise, *columnwise, dtype, None, False)
