"""The casts in Triton, bit-equal to reference.py: every byte of the input is read once, both results are written once.

One program takes a tile of 128 x 128 elements, which holds whole groups of every fine granularity:

    x = x * row_factor[m] * column_factor[k]          (optional: RMSNorm, or the folded scales of a weight)
    rowwise:     scale[m] = f(max_k |x|),  data[m, k] = cast(x / scale)        contraction k, for fprop and dgrad
    columnwise:  scale[k] = f(max_m |x|),  data[k, m] = cast(x / scale)        contraction m (tokens), for wgrad

1x128 and 128x128 find their amax inside the tile. `row` and `tensor` need all of x first: `_amax_tiles` reduces it to
the amax of every row and column, then the same tile kernel casts with the scales of those.

Layouts: data is contiguous, [M, K] row-wise and [K, M] column-wise. Scales of 1x128 are stored group-major ([K/128, M]
as memory, seen as [M, K/128]), as cuBLAS and TMA want them; 128x128 scales pad each row to a multiple of 4.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ds_fp8.formats import BLOCK, FORMATS, SMALLEST_SCALE
from ds_fp8.quantize.stochastic import MULTIPLIERS
from ds_fp8.quantize.tensor import QuantizedTensor, block_scales

NONE, GROUP, TILE, ROW, TENSOR = (tl.constexpr(i) for i in range(5))
"""How a result is scaled: not wanted, one scale per 1x128 group, per tile, per row of the result, for all of it."""
MODES = {None: 0, "1x128": 1, "128x128": 2, "row": 3, "tensor": 4}
_STEP, _FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def random_word(index, key):
    """The 32 bits whose upper half `uniform` of stochastic.py takes."""
    word = index.to(tl.uint32) * _STEP + key.to(tl.uint32)
    word = (word ^ (word >> 16)) * _FIRST
    word = (word ^ (word >> 15)) * _SECOND
    return word ^ (word >> 16)


@triton.jit
def _magnitude_bits(x):
    """Magnitudes of FP32 `x` as their bits, which order like the numbers, with NaN above Inf."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """Largest magnitude of FP32 `x` along `axis`, as its bits."""
    return tl.max(_magnitude_bits(x), axis)


@triton.jit
def scale_of(bits, largest: tl.constexpr, smallest_scale: tl.constexpr, POW2: tl.constexpr):
    """(scale, what to multiply or divide by) of scale_from_amax in reference.py, from the bits of the amax.

    The largest value of both formats is 1.75 * 2^E. With amax = m * 2^e the power of two not below amax / largest is
    2^(e - E), or twice that when m > 1.75: a carry out of the mantissa. The second result is then 1 / scale, exactly.
    """
    amax = bits.to(tl.float32, bitcast=True)
    overflow = bits >= 0x7F800000
    if POW2:
        E: tl.constexpr = 8 if largest < 500 else 15
        exponent = ((bits + 0x1FFFFF) & 0x7F800000) - (E << 23)
        exponent = tl.where(bits == 0, 127 << 23, tl.maximum(exponent, 1 << 23))
        scale = exponent.to(tl.float32, bitcast=True)
        divisor = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + largest), smallest_scale)
        scale = tl.where(bits == 0, 1.0, scale)
        divisor = scale
    return tl.where(overflow, float("nan"), scale), tl.where(overflow, float("nan"), divisor)


@triton.jit
def to_fp8(x, divisor, dtype: tl.constexpr, POW2: tl.constexpr):
    """x in units of its scale, rounded to nearest even; NaN stays NaN.

    Nothing saturates: the amax that made the scale is at least |x|. `divisor` as from scale_of, broadcasting.
    """
    if POW2:
        return (x * divisor).to(dtype)
    return tl.div_rn(x, tl.zeros_like(x) + divisor).to(dtype)


@triton.jit
def spacing_of(x, EPSILON: tl.constexpr, SUBNORMAL: tl.constexpr):
    """The distance, around x, of the numbers of a format with this machine epsilon and smallest subnormal number."""
    binade = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(binade * EPSILON, SUBNORMAL)


@triton.jit
def round_stochastically(x, draw, EPSILON: tl.constexpr, SUBNORMAL: tl.constexpr):
    """x on a format's grid, up or down with chances that keep its expectation; `draw` in [0, 1). NaN stays NaN."""
    spacing = spacing_of(x, EPSILON, SUBNORMAL)
    in_steps = tl.div_rn(tl.abs(x), spacing)
    below = tl.floor(in_steps)
    # The fraction first: added to the whole, a draw would lose the bits that FP32 has no room for.
    magnitude = tl.where(in_steps - below + draw >= 1.0, below + 1.0, below) * spacing
    return tl.where(x.to(tl.int32, bitcast=True) < 0, -magnitude, magnitude)  # zero has a sign, too


@triton.jit
def _load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS: tl.constexpr, EVEN: tl.constexpr):
    """FP32 tile [128, 128] at rows m, columns k; zero outside."""
    address = x + m[:, None].to(tl.int64) * stride_m + k[None, :]
    if EVEN:
        tile = tl.load(address).to(tl.float32)
    else:
        tile = tl.load(address, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    if FACTORS & 1:
        tile *= tl.load(row_factor + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    if FACTORS & 2:
        tile *= tl.load(column_factor + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def store_cast(
    tile, along, across, num_along, num_across, data, scale, amax, scale_along, scale_across,
    AXIS: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    POW2: tl.constexpr, EVEN: tl.constexpr,
):
    """Cast a tile and store it in a result [num_across, num_along] whose contraction lies along `AXIS` of the tile.

    along, across: indices of the tile's elements in the contraction and in the other dimension of the result.
    scale_along, scale_across: strides of the scales per group along, per row (TILE: block of rows) across.
    """
    if MODE == GROUP:
        bits = amax_bits(tile, AXIS)
    elif MODE == TILE:
        bits = tl.max(amax_bits(tile, AXIS), 0) + tl.zeros_like(across)
    elif MODE == ROW:
        bits = tl.load(amax + across, mask=across < num_across, other=0)
    else:
        bits = tl.load(amax) + tl.zeros_like(across)
    factor, divisor = scale_of(bits, LARGEST, SMALLEST, POW2)
    _store_scale(factor, along, across, num_across, scale, scale_along, scale_across, MODE)
    codes = to_fp8(tile, tl.expand_dims(divisor, AXIS), DTYPE, POW2)
    if AXIS == 1:
        address = data + across[:, None].to(tl.int64) * num_along + along[None, :]
        inside = (across < num_across)[:, None] & (along < num_along)[None, :]
    else:
        address = data + across[None, :].to(tl.int64) * num_along + along[:, None]
        inside = (across < num_across)[None, :] & (along < num_along)[:, None]
    if EVEN:
        tl.store(address, codes)
    else:
        tl.store(address, codes, mask=inside)


@triton.jit
def _store_scale(factor, along, across, num_across, scale, scale_along, scale_across, MODE: tl.constexpr):
    group = tl.min(along, 0) // 128
    if MODE == GROUP:
        tl.store(scale + group * scale_along + across * scale_across, factor, mask=across < num_across)
    elif MODE == TILE:
        first = tl.min(across, 0)
        block = scale + group * scale_along + first // 128 * scale_across
        tl.store(block + tl.zeros_like(across), factor, mask=across == first)
    elif MODE == ROW:
        tl.store(scale + across, factor, mask=(across < num_across) & (group == 0))
    else:
        tl.store(scale + tl.zeros_like(across), factor, mask=(across == 0) & (group == 0))


@triton.jit
def store_cast_rowwise(
    x0, x1, x2, x3, first_m, k, M, K, data, scale, amax, scale_along, scale_across,
    MODE: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """store_cast along axis 1 for a whole tile given as for store_cast_columnwise."""
    m = first_m + 4 * tl.arange(0, 32)
    store_cast(
        x0, k, m, K, M, data, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    store_cast(
        x1, k, m + 1, K, M, data, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    store_cast(
        x2, k, m + 2, K, M, data, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    store_cast(
        x3, k, m + 3, K, M, data, scale, amax, scale_along, scale_across, 1, MODE, DTYPE, LARGEST, SMALLEST, POW2, True
    )


@triton.jit
def store_cast_columnwise(
    x0, x1, x2, x3, first_m, k, M, K, data, scale, amax, scale_along, scale_across,
    MODE: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """store_cast along axis 0 for a whole tile given as its rows 4i, 4i + 1, 4i + 2 and 4i + 3, each [32, 128].

    Four codes that will lie side by side are packed into one word before they change places: transposing words costs a
    quarter of transposing bytes. M is a multiple of 4.
    """
    if MODE == GROUP or MODE == TILE:
        bits01 = tl.maximum(_magnitude_bits(x0), _magnitude_bits(x1))
        bits23 = tl.maximum(_magnitude_bits(x2), _magnitude_bits(x3))
        bits = tl.max(tl.maximum(bits01, bits23), 0)
        if MODE == TILE:
            bits = tl.max(bits, 0) + tl.zeros_like(k)
    elif MODE == ROW:
        bits = tl.load(amax + k)
    else:
        bits = tl.load(amax) + tl.zeros_like(k)
    factor, divisor = scale_of(bits, LARGEST, SMALLEST, POW2)
    _store_scale(factor, first_m + tl.zeros_like(k), k, K, scale, scale_along, scale_across, MODE)
    divisor = divisor[None, :]
    word = (
        _code(x0, divisor, DTYPE, POW2)
        | _code(x1, divisor, DTYPE, POW2) << 8
        | _code(x2, divisor, DTYPE, POW2) << 16
        | _code(x3, divisor, DTYPE, POW2) << 24
    )
    address = (
        data.to(tl.pointer_type(tl.int32))
        + k[None, :].to(tl.int64) * (M // 4)
        + (first_m // 4 + tl.arange(0, 32))[:, None]
    )
    tl.store(address, word)


@triton.jit
def _code(x, divisor, DTYPE: tl.constexpr, POW2: tl.constexpr):
    """The code of each element as an int32."""
    return to_fp8(x, divisor, DTYPE, POW2).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _cast_tiles(
    x, row_factor, column_factor, M, K, stride_m,
    row_data, row_scale, row_amax, row_scale_along, row_scale_across,
    column_data, column_scale, column_amax, column_scale_along, column_scale_across,
    FACTORS: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr, EVEN: tl.constexpr,
):
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    first_m = tl.program_id(1) * 128
    if EVEN and COLUMNWISE != NONE and ROWWISE != TILE:
        m = first_m + 4 * tl.arange(0, 32)
        x0 = _load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
        x1 = _load_tile(x, row_factor, column_factor, m + 1, k, M, K, stride_m, FACTORS, EVEN)
        x2 = _load_tile(x, row_factor, column_factor, m + 2, k, M, K, stride_m, FACTORS, EVEN)
        x3 = _load_tile(x, row_factor, column_factor, m + 3, k, M, K, stride_m, FACTORS, EVEN)
        if ROWWISE != NONE:
            store_cast_rowwise(
                x0, x1, x2, x3, first_m, k, M, K, row_data, row_scale, row_amax, row_scale_along, row_scale_across,
                ROWWISE, DTYPE, LARGEST, SMALLEST, POW2,
            )
        store_cast_columnwise(
            x0, x1, x2, x3, first_m, k, M, K,
            column_data, column_scale, column_amax, column_scale_along, column_scale_across,
            COLUMNWISE, DTYPE, LARGEST, SMALLEST, POW2,
        )
    else:
        m = first_m + tl.arange(0, 128)
        tile = _load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
        if ROWWISE != NONE:
            store_cast(
                tile, k, m, K, M, row_data, row_scale, row_amax, row_scale_along, row_scale_across,
                1, ROWWISE, DTYPE, LARGEST, SMALLEST, POW2, EVEN,
            )
        if COLUMNWISE != NONE:
            store_cast(
                tile, m, k, M, K, column_data, column_scale, column_amax, column_scale_along, column_scale_across,
                0, COLUMNWISE, DTYPE, LARGEST, SMALLEST, POW2, EVEN,
            )


@triton.jit
def _amax_tiles(
    x, row_factor, column_factor, M, K, stride_m, row_amax, column_amax,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):
    """Bits of the amax of every row and column of x, into zeroed int32 [M] and [K] (TENSOR: into element 0)."""
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    m = tl.program_id(1) * 128 + tl.arange(0, 128)
    tile = _load_tile(x, row_factor, column_factor, m, k, M, K, stride_m, FACTORS, EVEN)
    rows = amax_bits(tile, 1)
    if ROWS == ROW:
        tl.atomic_max(row_amax + m, rows, mask=m < M, sem="relaxed")
    elif ROWS == TENSOR:
        tl.atomic_max(row_amax, tl.max(rows, 0), sem="relaxed")
    if COLUMNS == ROW:
        tl.atomic_max(column_amax + k, amax_bits(tile, 0), mask=k < K, sem="relaxed")
    elif COLUMNS == TENSOR:
        tl.atomic_max(column_amax, tl.max(rows, 0), sem="relaxed")


@triton.jit
def _transpose_tiles(x, result, M, K, SIZE: tl.constexpr):
    """Bytes [M, K] -> [K, M]."""
    k = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (m < M)[:, None] & (k < K)[None, :]
    tile = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=inside)
    tl.store(result + k[None, :].to(tl.int64) * M + m[:, None], tile, mask=inside)


TRITON_DTYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


def format_arguments(format: str, scale: str) -> dict[str, object]:
    """The compile-time arguments of every casting kernel."""
    return {
        "DTYPE": TRITON_DTYPES[format],
        "LARGEST": FORMATS[format].max,
        "SMALLEST": SMALLEST_SCALE,
        "POW2": scale == "pow2",
    }


def tiles(length: int) -> int:
    return -(-length // BLOCK)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once; a few in Triton's interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def is_even(*lengths: int) -> bool:
    return all(length % BLOCK == 0 for length in lengths)


def empty_result(
    rows: int, columns: int, format: str, granularity: str, scale: str, device: torch.device
) -> QuantizedTensor:
    """An uninitialised QuantizedTensor [rows, columns] in the layout that kernels write and GEMMs read."""
    data = torch.empty(rows, columns, dtype=FORMATS[format].dtype, device=device)
    if granularity == "1x128":
        factors = torch.empty(tiles(columns), rows, device=device).t()
    elif granularity == "128x128":
        factors = block_scales(tiles(rows), tiles(columns), device)
    else:
        factors = torch.empty((rows, 1) if granularity == "row" else (), device=device)
    return QuantizedTensor(data, factors, granularity, scale)


def result_arguments(result: QuantizedTensor | None) -> tuple:
    """(data, scale, stride of the scales per group along the contraction, per row or row block) of a result."""
    if result is None:
        return None, None, 0, 0
    strides = result.scale.stride()
    across, along = strides if len(strides) == 2 else (0, 0)
    return result.data, result.scale, along, across


def quantize_tiles(
    x: torch.Tensor,
    format: str,
    scale: str,
    rowwise: str | None,
    columnwise: str | None,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Cast a matrix x [M, K] on the GPU: row-wise as [M, K], column-wise as [K, M]; None where its granularity is."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    row = None if rowwise is None else empty_result(M, K, format, rowwise, scale, x.device)
    column = None if columnwise is None else empty_result(K, M, format, columnwise, scale, x.device)
    if x.numel() == 0:
        for result in (row, column):
            if result is not None:
                result.scale.fill_(1.0)
        return row, column
    grid = (tiles(K), tiles(M))
    common = {"FACTORS": (row_factor is not None) + 2 * (column_factor is not None), "EVEN": is_even(M, K)}
    source = (x, row_factor, column_factor, M, K, x.stride(0))
    row_amax = column_amax = None
    if {rowwise, columnwise} & {"row", "tensor"}:
        row_amax, column_amax = torch.zeros(M + K, dtype=torch.int32, device=x.device).split([M, K])
        _amax_tiles[grid](
            *source, row_amax, column_amax, ROWS=MODES[rowwise], COLUMNS=MODES[columnwise], num_warps=8, **common
        )
    row_data, row_scale, *row_strides = result_arguments(row)
    column_data, column_scale, *column_strides = result_arguments(column)
    _cast_tiles[grid](
        *source, row_data, row_scale, row_amax, *row_strides, column_data, column_scale, column_amax, *column_strides,
        ROWWISE=MODES[rowwise], COLUMNWISE=MODES[columnwise], num_warps=8 if column is None else 4,
        **format_arguments(format, scale), **common,
    )
    return row, column


def transpose_bytes(data: torch.Tensor) -> torch.Tensor:
    """A contiguous FP8 matrix [M, K] as a contiguous [K, M]."""
    M, K = data.shape
    result = torch.empty(K, M, dtype=data.dtype, device=data.device)
    if data.numel():
        size = 128
        _transpose_tiles[(triton.cdiv(K, size), triton.cdiv(M, size))](
            data.view(torch.uint8), result.view(torch.uint8), M, K, SIZE=size, num_warps=8
        )
    return result
