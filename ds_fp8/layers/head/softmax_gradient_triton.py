"""The softmax gradient in Triton, in place or quantized; cross_entropy.py has the references.

In place: one program a row, two reads and one write of the logits. Quantized: the rows' normalisers first, then tiles
of 128 x 128; two reads, and two writes of half the size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.primitives_triton import (
    GROUP,
    empty_result,
    format_arguments,
    result_arguments,
    store_cast_columnwise,
    store_cast_rowwise,
)
from ds_fp8.config.formats import BLOCK as TILE
from ds_fp8.config.formats import CastSpec

BLOCK, WARPS = 16384, 32  # logits that a program holds at once, and its warps

_LOWEST = tl.constexpr(-2.0e38)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(
    logits, targets, losses, normalisers, outside, stride, V,
    IGNORED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    target = tl.load(targets + row)
    # 64 bits: 14k tokens of 152k logits pass 2^31
    logits += row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        if normalisers is not None:
            tl.store(normalisers + row, 0.0)
        if GRADIENT:
            for i in range(BLOCKS):
                k = i * BLOCK + lanes
                tl.store(logits + k, tl.zeros([BLOCK], logits.dtype.element_ty), mask=k < V)
        return
    #     largest, total = running maximum and sum of exp(x - largest), lane by lane
    #     loss = log(sum exp(x)) - x[target]
    #     dx   = exp(x - logsumexp) - (k == target)             in place, in a second pass
    has_logit = (target >= 0) & (target < V)
    if not has_logit:
        tl.atomic_add(outside, 1)
        tl.store(outside + 1, target)
        tl.store(outside + 2, V)
    # read before the gradient overwrites it
    at_target = tl.load(logits + target, mask=has_logit, other=float("nan")).to(tl.float32)
    # a maximum and a sum per lane: a reduction in every iteration would cost a barrier
    largest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(BLOCKS):
        k = i * BLOCK + lanes
        x = tl.load(logits + k, mask=k < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        # exp2 is one instruction, exp is exp2 of a product
        total = total * tl.exp2((largest - larger) * _LOG2E) + tl.exp2((x - larger) * _LOG2E)
        largest = larger
    maximum = tl.max(largest, 0)
    normaliser = maximum + tl.log(tl.sum(total * tl.exp2((largest - maximum) * _LOG2E), 0))
    normaliser = tl.where(has_logit, normaliser, float("nan"))  # makes the row's gradients NaN
    tl.store(losses + row, normaliser - at_target)
    if normalisers is not None:
        tl.store(normalisers + row, normaliser)
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the target's logit
        for i in range(BLOCKS):
            k = (BLOCKS - 1 - i) * BLOCK + lanes  # backwards: the last block is still in the cache
            x = tl.load(logits + k, mask=k < V, other=0.0).to(tl.float32)
            p = tl.exp2((x - normaliser) * _LOG2E)
            p = tl.where(k == target, p - 1.0, p)
            tl.store(logits + k, p.to(logits.dtype.element_ty), mask=k < V)


def softmax_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignored: int,
    outside: torch.Tensor,
    gradient: bool,
    normalisers: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """Return the loss of each row of logits [C, V], FP32 [C]; with `gradient` the logits become their gradient.

    normalisers: FP32 [C], output: logsumexp of each row, zero if ignored. outside: cross_entropy.label_errors.
    """
    tokens, vocabulary = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    block = min(block, triton.next_power_of_2(vocabulary))
    _rows[(tokens,)](
        logits, targets, losses, normalisers, outside, logits.stride(0), vocabulary,
        IGNORED=ignored, GRADIENT=gradient, BLOCK=block, BLOCKS=triton.cdiv(vocabulary, block),
        num_warps=max(1, min(WARPS, block // 256)),
    )
    return losses


@triton.jit
def _gradient(logits, targets, normalisers, m, k, stride, IGNORED: tl.constexpr):
    """Return the FP32 gradient at rows m and columns k: exp(x - normaliser) - (k == target), zero in ignored rows."""
    x = tl.load(logits + m[:, None].to(tl.int64) * stride + k[None, :]).to(tl.float32)
    target, normaliser = tl.load(targets + m)[:, None], tl.load(normalisers + m)[:, None]
    p = tl.exp2((x - normaliser) * _LOG2E)
    p = tl.where(k[None, :] == target, p - 1.0, p)
    return tl.where(target == IGNORED, 0.0, p)


@triton.jit
def _quantize_tiles(
    logits, targets, normalisers, C, V, T, offset, stride,
    row_data, row_scale, row_along, row_across, column_data, column_scale, column_along, column_across,
    IGNORED: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    first_m = tl.program_id(1) * 128
    # rows 4i to 4i + 3 in four tensors: four FP8 values of neighbouring tokens are one 32-bit word
    m = first_m + 4 * tl.arange(0, 32)
    x0 = _gradient(logits, targets, normalisers, m, k, stride, IGNORED)
    x1 = _gradient(logits, targets, normalisers, m + 1, k, stride, IGNORED)
    x2 = _gradient(logits, targets, normalisers, m + 2, k, stride, IGNORED)
    x3 = _gradient(logits, targets, normalisers, m + 3, k, stride, IGNORED)
    if row_data is not None:
        store_cast_rowwise(
            x0, x1, x2, x3, first_m, k, C, V, row_data, V, row_scale, None, row_along, row_across,
            GROUP, DTYPE, LARGEST, SMALLEST, POW2,
        )
    if column_data is not None:
        store_cast_columnwise(
            x0, x1, x2, x3, offset + first_m, k, T, V, column_data, column_scale, None, column_along, column_across,
            GROUP, DTYPE, LARGEST, SMALLEST, POW2,
        )


def softmax_gradient_quantize(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignored: int,
    outside: torch.Tensor,
    spec: CastSpec,
    wants_row: bool,
    columns: QuantizedTensor | None,
    offset: int,
) -> tuple[torch.Tensor, QuantizedTensor | None]:
    """Quantize the gradient of logits [C, V] for dgrad and wgrad, without BF16 in memory; C, V are multiples of 128.

    columns: output [V, T] for wgrad, 1x128 along the tokens, at tokens `offset` (a multiple of 128) to `offset` + C.

    Returns:
        (losses FP32 [C], gradient [C, V] for dgrad in groups of 1x128; None unless wants_row).
    """
    tokens, vocabulary = logits.shape
    normalisers = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    losses = softmax_gradient(logits, targets, ignored, outside, False, normalisers)
    if not wants_row and columns is None:
        return losses, None
    row = empty_result(tokens, vocabulary, spec.format, "1x128", spec.scale, logits.device) if wants_row else None
    of_tokens = columns.shape[1] if columns is not None else tokens
    _quantize_tiles[(vocabulary // TILE, tokens // TILE)](
        logits, targets, normalisers, tokens, vocabulary, of_tokens, offset, logits.stride(0),
        *result_arguments(row), *result_arguments(columns),
        IGNORED=ignored, num_warps=4, **format_arguments(spec.format, spec.scale),
    )
    return losses, row
