"""Encoding and decoding of emulated formats in Triton, bit-equal to emulated.py, for every format the same kernels.

Each element looks for its place among the format's midpoints, or magnitudes, by bisection, which reads them from the
cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 1024
"""Of one program."""


@triton.jit
def _encode(x, codes, limits, numel, COUNT: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Write the code of each element, found by bisection of COUNT midpoints, at most 2^STEPS - 1."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < numel
    number = tl.load(x + place, mask=inside, other=0.0)
    magnitude = tl.abs(number)
    index = tl.zeros([SIZE], tl.int32)
    for step in tl.static_range(STEPS):
        further = index + (1 << (STEPS - 1 - step))
        limit = tl.load(limits + further - 1, mask=further <= COUNT, other=float("inf"))
        # not (<=), so that NaN goes all the way
        beyond = (magnitude <= limit) == 0
        index = tl.where(beyond & (further <= COUNT), further, index)
    limit = tl.load(limits + index, mask=index < COUNT, other=-1.0)
    index += ((magnitude == limit) & (index % 2 == 1)).to(tl.int32)
    sign = (number.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    tl.store(codes + place, (index | (sign << (BITS - 1))).to(tl.uint8), mask=inside)


@triton.jit
def _encode_stochastically(
    x, draws, codes, magnitudes, numel, LAST: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr
):
    """Write the code of a neighbour of each element, the upper one where its draw is below the share of the way to it.

    LAST: Index of the largest magnitude, at most 2^STEPS.
    """
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < numel
    number = tl.load(x + place, mask=inside, other=0.0)
    draw = tl.load(draws + place, mask=inside, other=0.0)
    magnitude = tl.minimum(tl.abs(number), tl.load(magnitudes + LAST))
    index = tl.zeros([SIZE], tl.int32)
    for step in tl.static_range(STEPS):
        further = index + (1 << (STEPS - 1 - step))
        limit = tl.load(magnitudes + further, mask=further < LAST, other=float("inf"))
        index = tl.where((magnitude >= limit) & (further < LAST), further, index)
    lower = tl.load(magnitudes + index)
    upper = tl.load(magnitudes + index + 1)
    index += (draw < tl.div_rn(magnitude - lower, upper - lower)).to(tl.int32)
    sign = (number.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    tl.store(codes + place, (index | (sign << (BITS - 1))).to(tl.uint8), mask=inside)


@triton.jit
def _decode(codes, table, numbers, numel, SIZE: tl.constexpr):
    """Write the number of each code, which is its place in the table of 256."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < numel
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    tl.store(numbers + place, tl.load(table + code), mask=inside)


def encode_elements(x: torch.Tensor, limits: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the uint8 codes of FP32 numbers x, of any shape.

    limits: FP32, midpoints between the format's magnitudes. bits: Of the format.
    """
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if x.numel():
        _encode[(triton.cdiv(x.numel(), ELEMENTS),)](
            x, codes, limits, x.numel(), COUNT=len(limits), STEPS=len(limits).bit_length(), BITS=bits, SIZE=ELEMENTS
        )
    return codes


def encode_elements_stochastically(
    x: torch.Tensor, draw: torch.Tensor, magnitudes: torch.Tensor, bits: int
) -> torch.Tensor:
    """Return the uint8 codes of FP32 numbers x, of any shape, each of one of its neighbours.

    draw: FP32 in [0, 1), the shape of x. magnitudes: FP32, those of the format. bits: Of the format.
    """
    x, draw = x.contiguous(), draw.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    last = len(magnitudes) - 1
    if x.numel():
        _encode_stochastically[(triton.cdiv(x.numel(), ELEMENTS),)](
            x, draw, codes, magnitudes, x.numel(), LAST=last, STEPS=(last - 1).bit_length(), BITS=bits, SIZE=ELEMENTS
        )
    return codes


def decode_elements(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the numbers of uint8 codes, of their shape, in the dtype of `table`, which has one for each of 256."""
    codes = codes.contiguous()
    numbers = torch.empty(codes.shape, dtype=table.dtype, device=codes.device)
    if codes.numel():
        _decode[(triton.cdiv(codes.numel(), ELEMENTS),)](codes, table, numbers, codes.numel(), SIZE=ELEMENTS)
    return numbers
