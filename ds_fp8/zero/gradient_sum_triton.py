"""add_rows of gradient_sum.py: one launch for all gradients of a message.

A program takes one span of one gradient. It finds the gradient through `owner`, and that gradient's numbers in a row of
`table`; both are kept on the device, for a bucket has the same gradients in every step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import TRITON_DTYPES
from ds_fp8.config.formats import BLOCK
from ds_fp8.zero.message import SPAN, Message, Target, span_count

WARPS = 8
"""Warps of a program: 16 elements a thread, whose codes of one row are one access."""
ALIGNMENT = 16
"""Elements that all places must be a multiple of for accesses of 16 bytes."""


@triton.jit(do_not_specialize=["divisor"])
def _add_rows(
    message, owner, table, gradient, squares, codes_in_row, row_bytes, divisor,
    ROWS: tl.constexpr, EXACT: tl.constexpr, ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    program = tl.program_id(0)
    fields = table + tl.load(owner + program) * 5
    first_program, column, start = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    numel, span = tl.load(fields + 3), tl.load(fields + 4)
    column = tl.multiple_of(column, 128)
    if ALIGNED:
        start, numel = tl.multiple_of(start, 16), tl.multiple_of(numel, 16)
    group = (program - first_program) * GROUPS + tl.arange(0, GROUPS)
    within = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = within < numel
    sums = tl.zeros([GROUPS, 128], tl.float32)
    for done in tl.static_range(ROWS):
        row = message + row_bytes.to(tl.int64) * done
        codes = tl.load(row + column + within, mask=inside, other=0).to(DTYPE, bitcast=True)
        scales = (row + codes_in_row).to(tl.pointer_type(tl.float32)) + column // 128
        scale = tl.load(scales + group, mask=group * 128 < numel, other=0.0)
        sums += codes.to(tl.float32) * scale[:, None]
    if EXACT:  # a power of two divides as its reciprocal multiplies
        sums *= 1.0 / divisor.to(tl.float32)
    else:
        sums = tl.div_rn(sums, tl.zeros_like(sums) + divisor.to(tl.float32))
    place = gradient + start + within
    if ACCUMULATE:
        sums += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    stored = sums.to(gradient.dtype.element_ty)
    tl.store(place, stored, mask=inside)
    square = stored.to(tl.float64)
    square = tl.where(inside, square * square, 0.0)
    tl.store(squares + span + program - first_program, tl.sum(square))


@functools.cache  # CUDA graphs read them for as long as they live
def _tables(targets: tuple[Target, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """Return (owner, table, programs, aligned) of a message's gradients."""
    counts = [span_count(target.numel) for target in targets]
    first = list(itertools.accumulate(counts, initial=0))
    rows = [(begin, *target) for begin, target in zip(first[:-1], targets, strict=True)]
    owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
    table = torch.tensor(rows, dtype=torch.int64)
    aligned = all(number % ALIGNMENT == 0 for target in targets for number in (target.start, target.numel))
    if device.type == "cuda":  # copied without making the host wait
        owner, table = (x.pin_memory().to(device, non_blocking=True) for x in (owner, table))
    return owner, table, first[-1], aligned


def add_rows(
    message: torch.Tensor,
    shape: Message,
    format: str,
    divisor: int,
    targets: Sequence[Target],
    gradient: torch.Tensor,
    squares: torch.Tensor,
    accumulate: bool,
) -> None:
    """Do add_rows of gradient_sum.py."""
    if not targets:  # a rank may have no part of any gradient
        return
    owner, table, programs, aligned = _tables(tuple(targets), message.device)
    _add_rows[(programs,)](
        message, owner, table, gradient, squares, shape.codes, shape.row_bytes, divisor,
        ROWS=shape.rows, EXACT=divisor & (divisor - 1) == 0, ACCUMULATE=accumulate, ALIGNED=aligned and gradient.data_ptr() % ALIGNMENT == 0, GROUPS=SPAN // BLOCK,
        DTYPE=TRITON_DTYPES[format], num_warps=WARPS,
    )
