"""The scaled product on FP8 tensor cores, through torch.nn.functional.scaled_mm (cuBLASLt).

cuBLASLt supports four pairs of granularities; every other pair is expressed as one of them by repeating scales:

    a           b           runs as
    tensor      tensor      one scale each
    row         row         one scale per row of a and per row of b; also for tensor x row
    1x128       128x128     also with a and b exchanged
    1x128       1x128       also every pair of another granularity with one of these

Operands are E4M3; one may be E5M2 with scales per tensor or per row. Dimensions are padded with zeros to multiples of
16, the alignment of cuBLASLt.

Scales per tensor and per row run on later GPUs, too; block scales need Hopper and cuBLASLt 12.9. Trial products find
out what this machine supports (`why_not_multiplied`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.quantization import block_scales
from ds_fp8.config.formats import BLOCK

ALIGNMENT = 16
BLOCKWISE = ("1x128", "128x128")


def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"{torch.cuda.get_device_name()} has no FP8 units (compute capability 8.9 is needed)"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm (torch >= 2.10 is needed)"
    return None


def unsupported(a_format: str, a_granularity: str, b_format: str, b_granularity: str) -> str | None:
    if a_format == b_format == "e5m2":
        return "Hopper cannot multiply two E5M2 operands"
    if "e5m2" in (a_format, b_format) and {a_granularity, b_granularity} & set(BLOCKWISE):
        return "cuBLASLt has no block-scaled product with an E5M2 operand (use e4m3, or granularity row or tensor)"
    return None


def scaled_matmul(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply a [M, K] @ b [N, K]ᵀ -> [M, N]; operands are supported and not empty."""
    rows, columns = a.shape[0], b.shape[0]
    kinds = F.ScalingType
    pair = {a.granularity, b.granularity}
    if pair == {"tensor"}:
        scaling = (a.scale, kinds.TensorWise, b.scale, kinds.TensorWise)
    elif not pair & set(BLOCKWISE):
        scaling = (_row_scale(a), kinds.RowWise, _row_scale(b).t(), kinds.RowWise)  # also tensor by row
    elif b.granularity == "128x128":
        # torch expects the scales of b transposed, like b, and reads their layout from the strides.
        scaling = (group_scale(a), kinds.BlockWise1x128, block_scale(b).t(), kinds.BlockWise128x128)
    elif a.granularity == "128x128":
        scaling = (block_scale(a).t(), kinds.BlockWise128x128, group_scale(b), kinds.BlockWise1x128)
    else:
        scaling = (group_scale(a), kinds.BlockWise1x128, group_scale(b), kinds.BlockWise1x128)
    # aligned(b.data).t() is a view: cuBLASLt reads both operands with the contraction contiguous ("TN").
    result = F.scaled_mm(
        aligned(a.data), aligned(b.data).t(), *scaling, output_dtype=out_dtype, use_fast_accum=False
    )  # fmt: skip
    # Without the padding; contiguous, since a slice would hold the padded memory.
    return result if result.shape == (rows, columns) else result[:rows, :columns].contiguous()


def _round_up(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def aligned(data: torch.Tensor) -> torch.Tensor:
    """Return FP8 [R, K] contiguous, both dimensions zero-padded to the alignment."""
    rows, columns = (_round_up(length) for length in data.shape)
    if (rows, columns) == tuple(data.shape):
        return data.contiguous()
    # Bytes, since torch cannot pad FP8; byte 0 is 0.0 in every format.
    padded = torch.zeros(rows, columns, dtype=torch.uint8, device=data.device)
    padded[: data.shape[0], : data.shape[1]] = data.view(torch.uint8)
    return padded.view(data.dtype)


def _row_scale(q: QuantizedTensor) -> torch.Tensor:
    return _padded_rows(q.scale.expand(q.shape[0], 1)).contiguous()


def group_scale(q: QuantizedTensor) -> torch.Tensor:
    """Return the scales [R, K/128] with strides (1, R), R padded to the alignment."""
    groups = -(-q.shape[1] // BLOCK)
    scale = q.scale
    if q.granularity == "128x128":
        # As 1x128: the scale of a block for each of its 128 rows.
        scale = scale.repeat_interleave(BLOCK, 0)[: q.shape[0]]
    # cuBLASLt reads 1x128 scales with stride 1 along the rows.
    scale = _padded_rows(scale.expand(q.shape[0], groups))
    if scale.stride() != (1, len(scale)):
        # contiguous() would keep the stride of a single group.
        scale = torch.empty(groups, len(scale), device=scale.device).copy_(scale.t()).t()
    return scale


def _padded_rows(scale: torch.Tensor) -> torch.Tensor:
    missing = _round_up(scale.shape[0]) - scale.shape[0]
    # 1 for padding: uninitialised scales could be NaN, and 0 * NaN is NaN.
    return torch.cat([scale, scale.new_ones(missing, scale.shape[1])]) if missing else scale


def block_scale(q: QuantizedTensor) -> torch.Tensor:
    """Return the scales [R/128, L], contiguous, L = K/128 rounded up to a multiple of 4: the layout of block_scales."""
    rows, columns = q.scale.shape
    length = -(-columns // 4) * 4
    scale = q.scale
    # cuBLASLt reads rows of scales 16 bytes at a time, past K/128: the padding must be allocated, its values do not
    # matter. Kernels and all-gathers write this layout; other scales are copied.
    if scale.stride() != (length, 1) or scale.untyped_storage().nbytes() < 4 * (scale.storage_offset() + rows * length):
        scale = block_scales(rows, columns, q.scale.device).copy_(q.scale)
    return scale.as_strided((rows, length), (length, 1))
