"""Encoding of emulated formats in Triton, bit-equal to codecs.py, for every format the same kernel.

Each element looks for its place among the format's midpoints by bisection, which reads them from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 1024  # elements of one program


@triton.jit
def _encode(x, codes, limits, numel, COUNT: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Write the code of each element, found by bisection of COUNT midpoints, at most 2^STEPS - 1."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < numel
    number = tl.load(x + place, mask=inside, other=0.0)
    magnitude = tl.abs(number)
    index = tl.zeros([SIZE], tl.int32)
    #     index = number of midpoints below |x|          bisection: STEPS reads, whatever the format
    #     code  = index, or the even neighbour where |x| is a midpoint
    # A midpoint belongs to both neighbours. Codes count magnitudes upwards, so an even code has an even last bit, too.
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


def encode_elements(x: torch.Tensor, limits: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the uint8 codes of FP32 numbers; limits: FP32 midpoints between the format's magnitudes."""
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if x.numel():
        _encode[(triton.cdiv(x.numel(), ELEMENTS),)](
            x, codes, limits, x.numel(), COUNT=len(limits), STEPS=len(limits).bit_length(), BITS=bits, SIZE=ELEMENTS
        )
    return codes
