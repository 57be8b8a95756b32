"""Master weights in scaled FP16, two launches a tensor: the largest magnitude, then every element rounded.

scale = the power of two not below amax / 65504
code  = FP16(x / scale)                          to nearest, or stochastically
x     = code scale                               in place, or the codes written elsewhere
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl

from ds_fp8.formats import SMALLEST_SCALE
from ds_fp8.optim.codec_kernels import magnitude_bits, scale_of_group
from ds_fp8.optim.codecs import CODECS, SCALE_MASKS
from ds_fp8.optim.moment import Layout, Moment
from ds_fp8.quantize.kernels import random_word, round_stochastically

ELEMENTS = 2048
"""Of one program."""


@triton.jit
def _amax(x, amax, numel, ELEMENTS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    bits = magnitude_bits(tl.load(x + place, mask=place < numel, other=0.0))
    tl.atomic_max(amax, tl.max(bits, 0), sem="relaxed")


@triton.jit(do_not_specialize=["first", "seed"])
def _round(
    x,
    codes,
    scale,
    amax,
    numel,
    first,
    seed,
    CODES: tl.constexpr,
    NOISE: tl.constexpr,
    MAX: tl.constexpr,
    MASK: tl.constexpr,
    SMALLEST: tl.constexpr,
    EPSILON: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    factor = scale_of_group(tl.load(amax) + tl.zeros([ELEMENTS], tl.int32), MAX, MASK, SMALLEST)
    number = tl.load(x + place, mask=place < numel, other=0.0)
    number = tl.where(magnitude_bits(number) == 0, 0.0, number)
    in_units = tl.div_rn(number, factor)
    if NOISE:
        draw = (random_word(first + place, seed) >> 16).to(tl.float32) * (1.0 / 65536)
        in_units = round_stochastically(in_units, draw, EPSILON, SUBNORMAL)
    code = in_units.to(tl.float16)
    if CODES:
        tl.store(codes + place, code, mask=place < numel)
        tl.store(scale + place, factor, mask=place == 0)
    else:
        tl.store(x + place, code.to(tl.float32) * factor, mask=place < numel)


def round_masters(
    numbers: torch.Tensor,
    layout: Layout,
    seed: int | None,
    into: Moment | None = None,
    exact: Collection[int] = (),
) -> None:
    """round_masters of masters.py."""
    codec = CODECS["fp16"]
    amax = torch.zeros(layout.groups, dtype=torch.int32, device=numbers.device)
    for elements, groups in layout.pieces():
        if groups.start in exact:
            continue
        numel = elements.stop - elements.start
        grid = (triton.cdiv(numel, ELEMENTS),)
        x, largest = numbers[elements], amax[groups]
        _amax[grid](x, largest, numel, ELEMENTS=ELEMENTS)
        codes, scale = (None, None) if into is None else (into.codes[elements], into.scale[groups])
        _round[grid](
            x, codes, scale, largest, numel, elements.start, seed or 0,
            CODES=into is not None, NOISE=seed is not None, MAX=codec.max, MASK=SCALE_MASKS[layout.scale_type],
            SMALLEST=SMALLEST_SCALE, EPSILON=2.0**-codec.mantissa_bits, SUBNORMAL=codec.smallest, ELEMENTS=ELEMENTS,
        )  # fmt: skip
