"""Steps of quantization in Triton: amax, scale, rounding, stores; bitwise equal to primitives.py.

An amax is passed as the bits of its FP32 number, which order like magnitudes, NaN above Inf: integer reductions
keep NaN.

Layouts: data is contiguous, [M, K] rowwise and [K, M] columnwise. Scales of 1x128 are stored group-major ([K/128, M]
as memory, seen as [M, K/128]), as cuBLAS and TMA want them; 128x128 scales pad each row to a multiple of 4.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives import MULTIPLIERS
from ds_fp8.casts.quantization import QuantizedTensor, block_scales
from ds_fp8.config.formats import BLOCK, FORMATS, SCALE_TYPES, SMALLEST_SCALE

# Granularity of a result: none, a scale per 1x128 group, per tile, per row, per tensor
NONE, GROUP, TILE, ROW, TENSOR = (tl.constexpr(i) for i in range(5))
MODES = {None: 0, "1x128": 1, "128x128": 2, "row": 3, "tensor": 4}
# Whether kernels are compiled: Triton's interpreter runs no inline assembly
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_STEP, _FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs; 4 in Triton's interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def random_word(index, key):
    """Return 32 random bits; `uniform` of primitives.py uses the upper half."""
    # Counter-based: independent of the tiling, and without state. Two rounds of multiply and xor-shift decorrelate
    # neighbouring indices.
    word = index.to(tl.uint32) * _STEP + key.to(tl.uint32)
    word = (word ^ (word >> 16)) * _FIRST
    word = (word ^ (word >> 15)) * _SECOND
    return word ^ (word >> 16)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| in FP32, which order like the numbers, NaN above Inf."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def larger(a, b):
    """Return the elementwise maximum, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """Return the bits of the largest magnitude along an axis, int32."""
    if COMPILED:
        # Float maximum includes abs; with integers it takes one instruction more.
        return tl.reduce(tl.abs(x), axis, larger).to(tl.int32, bitcast=True)
    return tl.max(magnitude_bits(x), axis)  # the interpreter runs tl.reduce element by element in Python


@triton.jit
def raise_amax(amax, bits, at, length, MODE: tl.constexpr):
    """Atomic max of a tile's bits into int32 `amax`: per row `at` < length (ROW), or into element 0 (TENSOR)."""
    if MODE == ROW:
        # Relaxed: the amax is read in the next launch. Maxima do not depend on the order of programs: reproducible.
        tl.atomic_max(amax + at, bits, mask=at < length, sem="relaxed")
    elif MODE == TENSOR:
        tl.atomic_max(amax, tl.max(bits, 0), sem="relaxed")


@triton.jit
def reciprocal_of(x):
    """Return 1 / x rounded to nearest even, for x from 2^-126 to 2^125: tl.div_rn without its guards."""
    if COMPILED:
        # One Newton step, as CUDA does for these x.
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return tl.fma(y, tl.fma(-x, y, tl.zeros_like(x) + 1.0), y)
    return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def over_largest(amax, largest: tl.constexpr):
    """Return amax / largest rounded to nearest even, largest = 7 * 2^n; below 2^-126 possibly another subnormal."""
    if COMPILED:
        # Markstein 1990: from the reciprocal rounded to nearest; verified for all mantissas of amax.
        inverse = tl.zeros_like(amax) + 1.0 / largest
        quotient = amax * inverse
        return tl.fma(tl.fma(-quotient, tl.zeros_like(amax) + largest, amax), inverse, quotient)
    return tl.div_rn(amax, tl.zeros_like(amax) + largest)


@triton.jit
def scale_of(bits, largest: tl.constexpr, smallest_scale: tl.constexpr, POW2: tl.constexpr):
    """Return (scale, 1 / scale) of scale_from_amax in primitives.py, from the bits of the amax.

    The largest value of both formats is 1.75 * 2^E. With amax = m * 2^e the power of two not below amax / largest is
    2^(e - E), or twice that when m > 1.75: a carry out of the mantissa.
    """
    amax = bits.to(tl.float32, bitcast=True)
    overflow = bits >= 0x7F800000
    if POW2:
        E: tl.constexpr = 8 if largest < 500 else 15
        # mantissa m in [1, 2): 0x1FFFFF carries into the exponent if m > 1.75, the first mantissa that exceeds the
        # largest
        #    scale   = 2^(ceil(log2(amax / largest)))     without a logarithm or a division
        #    divisor = 2^-(its exponent)                  the same bits mirrored around 127, exactly
        # The floor at 1 << 23 is the smallest normal number: subnormal scales would have no normal reciprocal.
        exponent = ((bits + 0x1FFFFF) & 0x7F800000) - (E << 23)
        exponent = tl.where(bits == 0, 127 << 23, tl.maximum(exponent, 1 << 23))
        scale = exponent.to(tl.float32, bitcast=True)
        reciprocal = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    else:
        # Not "/": approximate division differs from torch in the last bit, and then data would, too.
        scale = tl.maximum(over_largest(amax, largest), smallest_scale)
        scale = tl.where(bits == 0, 1.0, scale)
        # One reciprocal per group and one product per element: a division each would double the time.
        reciprocal = reciprocal_of(scale)
    return tl.where(overflow, float("nan"), scale), tl.where(overflow, float("nan"), reciprocal)


@triton.jit
def to_fp8(x, reciprocal, dtype: tl.constexpr):
    """Return x / scale rounded to nearest even; NaN stays NaN. `reciprocal` broadcasts, as from scale_of.

    Nothing saturates: the scale is made from an amax of at least |x|.
    """
    return (x * reciprocal).to(dtype)


TRITON_DTYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


def format_arguments(format: str, scale: str) -> dict[str, object]:
    """Return the constexpr arguments of every quantizing kernel."""
    return {
        # Some kernels get formats that they do not write, which may have no Triton type.
        "DTYPE": TRITON_DTYPES.get(format, tl.float8e4nv),
        "LARGEST": FORMATS[format].max,
        "SMALLEST": SMALLEST_SCALE,
        "POW2": int(SCALE_TYPES[scale].powers_of_two),
    }


_PACK = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
# Four FP32 numbers, rounded to nearest even, as the bytes of a word
_PACK_E4M3, _PACK_E5M2 = tl.constexpr(_PACK.format("e4m3")), tl.constexpr(_PACK.format("e5m2"))


@triton.jit
def store_cast(
    tile, along, across, num_along, num_across, data, pitch, scale, amax, scale_along, scale_across,
    AXIS: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    POW2: tl.constexpr, EVEN: tl.constexpr,
):
    """Quantize a tile and store it in a result [num_across, num_along] whose contraction is `AXIS` of the tile.

    tile: FP32, [across, along] where AXIS is 1, else [along, across], which are the indices of its elements in the
    result. data, pitch: contiguous along the contraction, and its row stride. amax: bits
    per row across (ROW) or of the tensor; not read by GROUP and TILE. scale_along, scale_across: Strides of
    the scales per group along, and per row across (TILE: per block of rows). EVEN: Whether the tile lies inside the
    result.
    """
    #     bits[r]  = max over the group of |tile[r, :]|      GROUP and TILE: the tile holds full groups
    #     scale, d = scale_of(bits)
    #     data     = round(tile / scale)
    if MODE == GROUP:
        bits = amax_bits(tile, AXIS)
    elif MODE == TILE:
        bits = tl.max(amax_bits(tile, AXIS), 0) + tl.zeros_like(across)
    elif MODE == ROW:
        bits = tl.load(amax + across, mask=across < num_across, other=0)
    else:
        bits = tl.load(amax) + tl.zeros_like(across)
    factor, reciprocal = scale_of(bits, LARGEST, SMALLEST, POW2)
    _store_scale(factor, along, across, num_across, scale, scale_along, scale_across, MODE)
    quantized = to_fp8(tile, tl.expand_dims(reciprocal, AXIS), DTYPE)
    if AXIS == 1:
        # int64: logits of 16k tokens and a large vocabulary have 2^31 elements.
        address = data + across[:, None].to(tl.int64) * pitch + along[None, :]
        inside = (across < num_across)[:, None] & (along < num_along)[None, :]
    else:
        address = data + across[None, :].to(tl.int64) * pitch + along[:, None]
        inside = (across < num_across)[None, :] & (along < num_along)[:, None]
    if EVEN:
        tl.store(address, quantized)
    else:
        tl.store(address, quantized, mask=inside)


@triton.jit
def _store_scale(factor, along, across, num_across, scale, scale_along, scale_across, MODE: tl.constexpr):
    group = tl.min(along, 0) // 128
    if MODE == GROUP:
        tl.store(scale + group * scale_along + across * scale_across, factor, mask=across < num_across)
    elif MODE == TILE:
        first = tl.min(across, 0)
        block = scale + group * scale_along + first // 128 * scale_across
        # One lane writes: all others have the same number and address.
        tl.store(block + tl.zeros_like(across), factor, mask=across == first)
    elif MODE == ROW:
        # All programs along the row have it; the first writes.
        tl.store(scale + across, factor, mask=(across < num_across) & (group == 0))
    else:
        tl.store(scale + tl.zeros_like(across), factor, mask=(across == 0) & (group == 0))


@triton.jit
def store_cast_rowwise(
    x0, x1, x2, x3, first_m, k, M, K, data, pitch, scale, amax, scale_along, scale_across,
    MODE: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """store_cast along axis 1 for a full tile given as for store_cast_columnwise."""
    m = first_m + 4 * tl.arange(0, 32)
    store_cast(
        x0, k, m, K, M, data, pitch, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    store_cast(
        x1, k, m + 1, K, M, data, pitch, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    store_cast(
        x2, k, m + 2, K, M, data, pitch, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    store_cast(
        x3, k, m + 3, K, M, data, pitch, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )


@triton.jit
def store_cast_columnwise(
    x0, x1, x2, x3, first_m, k, M, K, data, scale, amax, scale_along, scale_across,
    MODE: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """store_cast along axis 0 for a full tile given as its rows 4i, 4i + 1, 4i + 2 and 4i + 3, each [32, 128].

    Four bytes that become adjacent are packed into a word before the transpose, which costs a quarter of transposing
    bytes. M is a multiple of 4.
    """
    if MODE == GROUP or MODE == TILE:
        # Rows 4i .. 4i + 3 are four registers of one thread: their maximum needs no shuffle, and the four bytes of a
        # column make one word:
        #     word[i, k] = byte(x0) | byte(x1) << 8 | byte(x2) << 16 | byte(x3) << 24     tokens 4i .. 4i + 3 of column k
        #     data[k, first_m / 4 + i] = word                                            4 neighbours of the transpose
        bits = amax_bits(larger(larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3))), 0)
        if MODE == TILE:
            bits = tl.max(bits, 0) + tl.zeros_like(k)
    elif MODE == ROW:
        bits = tl.load(amax + k)
    else:
        bits = tl.load(amax) + tl.zeros_like(k)
    factor, reciprocal = scale_of(bits, LARGEST, SMALLEST, POW2)
    _store_scale(factor, first_m + tl.zeros_like(k), k, K, scale, scale_along, scale_across, MODE)
    word = _pack_four(x0, x1, x2, x3, reciprocal[None, :], DTYPE)
    # The result has rows of M bytes, M / 4 words: why M must be a multiple of 4.
    address = (
        data.to(tl.pointer_type(tl.int32))
        + k[None, :].to(tl.int64) * (M // 4)
        + (first_m // 4 + tl.arange(0, 32))[:, None]
    )
    tl.store(address, word)


@triton.jit
def _pack_four(x0, x1, x2, x3, reciprocal, DTYPE: tl.constexpr):
    """Return x0, x1, x2 and x3 in FP8 as the bytes of an int32, x0 the lowest."""
    # In assembly: ptxas 12.8 miscompiles the shifted half of a packed FP8 pair (it merges bits of the stack pointer)
    # for FP32 scales along the tokens. Pairs that are moved into a word unshifted are correct.
    if COMPILED:
        to_e4m3: tl.constexpr = DTYPE == tl.float8e4nv
        return tl.inline_asm_elementwise(
            _PACK_E4M3 if to_e4m3 else _PACK_E5M2, "=r,f,f,f,f",
            [x0 * reciprocal, x1 * reciprocal, x2 * reciprocal, x3 * reciprocal],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    return (
        _byte_of(x0, reciprocal, DTYPE)
        | _byte_of(x1, reciprocal, DTYPE) << 8
        | _byte_of(x2, reciprocal, DTYPE) << 16
        | _byte_of(x3, reciprocal, DTYPE) << 24
    )


@triton.jit
def _byte_of(x, reciprocal, DTYPE: tl.constexpr):
    return to_fp8(x, reciprocal, DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)


def tiles(length: int) -> int:
    return -(-length // BLOCK)


def is_even(*lengths: int) -> bool:
    return all(length % BLOCK == 0 for length in lengths)


def empty_result(
    rows: int, columns: int, format: str, granularity: str | None, scale: str, device: torch.device, room: int = 0
) -> QuantizedTensor | None:
    """Return an uninitialised QuantizedTensor [rows, columns] in the layout that kernels write and GEMMs read.

    None without granularity; scales of empty results are 1. room: padding after every row, in bytes, a multiple of 128:
    with "1x128" the result is a view of a wider matrix.
    """
    if granularity is None:
        return None
    data = torch.empty(rows, columns + room, dtype=FORMATS[format].dtype, device=device)[:, :columns]
    if granularity == "1x128":
        # Group-major: scales of one group are contiguous along the rows, and a GEMM's tile reads 128 of them at once.
        factors = torch.empty(tiles(columns + room), rows, device=device).t()[:, : tiles(columns)]
    elif granularity == "128x128":
        # Rows of these scales are padded to multiples of 4: cuBLAS reads them 16 bytes at a time.
        factors = block_scales(tiles(rows), tiles(columns), device)
    else:
        factors = torch.empty((rows, 1) if granularity == "row" else (), device=device)
    if data.numel() == 0:
        factors.fill_(1.0)
    return QuantizedTensor(data, factors, granularity, scale)


def result_arguments(result: QuantizedTensor | None) -> tuple:
    """Return (data, scale, stride of the scales per group along the contraction, per row or row block) of a result."""
    if result is None:
        return None, None, 0, 0
    strides = result.scale.stride()
    across, along = strides if len(strides) == 2 else (0, 0)
    return result.data, result.scale, along, across
