"""Triton kernels of gradient_wire: pack and sum_rows read and write every byte once.

A program takes 32 groups of 128 elements. In `_pack` they belong to the slice of one rank; in `_sum_rows` they are those
places of all rows, which it adds in FP32 in the order of the ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import TRITON_DTYPES, amax_bits, scale_of, to_fp8
from ds_fp8.config.formats import BLOCK, FORMATS, SMALLEST_SCALE
from ds_fp8.zero.message import CastOptions, Message, Slices

GROUPS = 32
"""Groups of 128 that one program takes."""


@triton.jit(do_not_specialize=["rows"])
def _pack(
    gradient, tensor_scale, clipped, message, numel, length, padded, column, width, codes_in_row, row_bytes, rows,
    TENSOR: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):
    #     x     = gradient[rank's slice]
    #     scale = 2^ceil(log2(amax / largest)) a group        or one a tensor, found from earlier steps
    #     code  = round(x / scale)
    #     message[row of rank] = codes | scales               one row a rank: what an all-to-all sends
    rank = tl.program_id(1)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    within = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    # Slices of ceil(numel / ranks): the last ones may be short or empty, and are padded to whole groups with zeros, so
    # that every row of the message has one length.
    index = rank.to(tl.int64) * length + within
    inside = (within < length) & (index < numel)
    x = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32)
    if TENSOR:
        scale = tl.load(tensor_scale) + tl.zeros([GROUPS], tl.float32)
        in_units = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
        outside = tl.abs(in_units) > LARGEST
        count = tl.sum(tl.sum(outside.to(tl.int32), 1), 0)
        # Few programs have anything to report, and an atomic of each would queue at one address.
        if count > 0:
            tl.atomic_add(clipped, count, sem="relaxed")
        in_units = tl.where(outside, tl.where(x < 0, -LARGEST, LARGEST), in_units)
    else:
        scale, reciprocal = scale_of(amax_bits(x, 1), LARGEST, SMALLEST, True)
        in_units = x * reciprocal[:, None]
    codes = to_fp8(in_units, 1.0, DTYPE)

    first = (rank // rows).to(tl.int64) * width + column
    row = message + (rank % rows).to(tl.int64) * row_bytes
    tl.store(row + first + within, codes.to(tl.uint8, bitcast=True), mask=within < padded)
    # Scales behind all codes of the row: both are read in runs as long as the row is.
    scales = (row + codes_in_row).to(tl.pointer_type(tl.float32))
    tl.store(scales + first // 128 + group, scale, mask=group * 128 < padded)


@triton.jit(do_not_specialize=["rows", "divisor"])
def _sum_rows(message, total, codes_in_row, row_bytes, rows, divisor, GROUPS: tl.constexpr, DTYPE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    #     sums = 0;  for each rank, in order:  sums += code * scale        FP32
    #     total = sums / divisor
    # In the order of the ranks on every rank, so that the sum has the same bits whoever computes it.
    sums = tl.zeros([GROUPS, 128], tl.float32)
    done = 0
    while done < rows:
        row = message + done * row_bytes.to(tl.int64)
        codes = tl.load(row + place, mask=place < codes_in_row, other=0).to(DTYPE, bitcast=True)
        scales = (row + codes_in_row).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + group, mask=group * 128 < codes_in_row, other=0.0)
        sums += codes.to(tl.float32) * scale[:, None]
        done += 1
    sums = tl.div_rn(sums, tl.zeros_like(sums) + divisor.to(tl.float32))
    tl.store(total + place, sums, mask=place < codes_in_row)


def pack(gradient: torch.Tensor, message: torch.Tensor, shape: Message, slices: Slices, options: CastOptions) -> None:
    """Do pack of gradient_wire.py."""
    target = FORMATS[options.format]
    world = shape.rows * shape.places
    # The second axis is the rank: at most 65535 programs there, and the first axis takes a large gradient's groups.
    _pack[(triton.cdiv(slices.padded, GROUPS * BLOCK), world)](
        gradient.contiguous(), options.scale, options.clipped, message,
        gradient.numel(), slices.length, slices.padded, slices.column, shape.width, shape.codes, shape.row_bytes,
        shape.rows, TENSOR=options.scale is not None, GROUPS=GROUPS, DTYPE=TRITON_DTYPES[options.format],
        LARGEST=target.max, SMALLEST=SMALLEST_SCALE, num_warps=4,
    )


def sum_rows(message: torch.Tensor, shape: Message, format: str, divisor: int) -> torch.Tensor:
    """Do sum_rows of gradient_wire.py."""
    total = torch.empty(shape.codes, device=message.device)
    _sum_rows[(triton.cdiv(shape.codes, GROUPS * BLOCK),)](
        message, total, shape.codes, shape.row_bytes, shape.rows, divisor, GROUPS=GROUPS, DTYPE=TRITON_DTYPES[format], num_warps=4
    )
    return total
