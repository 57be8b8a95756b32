"""Triton kernels that quantize shards (param.py, quantizer.py): amax, data, residuals of all shards, a launch each.

Weights are cut into tiles of 128 x 128 elements, a program for each tile with elements of the shard. A program finds
its weight through `owner`, the weight's geometry in a row of `table`, and its masters by an address in `sources`, since
they are in several buffers, one per sub-group of DeepSpeed:

    programs int32 [launched]        the tiles of a launch
    alone    uint8 [tiles]           whether a tile is a block of this rank alone
    owner    int32 [tiles]           the weight that a tile belongs to
    table    int64 [weights, 9]      FIELDS, fixed for the life of the engine
    sources  int64 [weights, 2]      address of the shard's first element; 1 where it is BF16, 0 for FP32

An amax is the bits of its FP32 number, which order like the numbers: groups wider than a tile take an atomic maximum.

Data have row stride `pitch`; `origin` is the place of the weight's first element, which may be on another rank.

Blocks of this rank alone are quantized in the first launch, which reads their masters once; the second launch quantizes
blocks shared with other ranks.

Residuals have separate tables (RESIDUAL_FIELDS): a program takes 128 rows and 64 outlier channels of a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_fp8.casts.outliers import HALF
from ds_fp8.casts.outliers_triton import ROUND_EVERY_PRODUCT
from ds_fp8.casts.primitives_triton import (
    MODES,
    ROW,
    TENSOR,
    TRITON_DTYPES,
    amax_bits,
    format_arguments,
    reciprocal_of,
    scale_of,
    to_fp8,
)
from ds_fp8.config.formats import BLOCK, CastSpec
from ds_fp8.optim.masters_triton import dequantize_master
from ds_fp8.zero.param import FP8Param, Numbers, on_device

FIELDS = ("first_program", "columns", "start", "stop", "first_tile_row", "origin", "scale_start", "scales_per_row", "pitch")
ALIGNMENT = 16  # in elements, and of addresses in bytes, for accesses of 16 bytes

# Addresses, in bytes, of data and residuals those of the weight's first row; the shard's part of the weight; lengths;
# places in the buffer of scales; whether residuals are outlier blocks; the first 128 rows, and their program.
RESIDUAL_FIELDS = (
    "source", "kind", "data", "channels", "residual", "start", "stop", "columns", "count", "scale_start",
    "scales_per_row", "pitch", "residual_pitch", "has_room", "first_block", "first_program",
)  # fmt: skip
# Dtypes of masters; int16: corrections of the data.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int16: 2}


@triton.jit
def _geometry(owner, table, programs, ALIGNED: tl.constexpr):
    """Return (weight, columns, start, stop, rows [128], columns [128], origin, pitch, where its scales begin, scales a row)."""
    program = tl.load(programs + tl.program_id(0))
    # 64 bits from here on: offsets into large weights pass 2^31.
    weight = tl.load(owner + program).to(tl.int64)
    fields = table + weight * 9
    columns, start, stop = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    origin, pitch = tl.load(fields + 5), tl.load(fields + 8)
    # Promised to the compiler, which then loads 16 bytes a thread; the sizes are numbers in memory to it otherwise.
    if ALIGNED:
        columns, start, stop = tl.multiple_of(columns, 16), tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
        origin, pitch = tl.multiple_of(origin, 16), tl.multiple_of(pitch, 16)
    tile, tiles_across = program - tl.load(fields), (columns + 127) // 128
    row = (tl.load(fields + 4) + tile // tiles_across) * 128 + tl.arange(0, 128)
    column = tile % tiles_across * 128 + tl.arange(0, 128)
    return weight, columns, start, stop, row, column, origin, pitch, tl.load(fields + 6), tl.load(fields + 7)


@triton.jit
def _load(source, place, inside, ALIGNED: tl.constexpr):
    """Return FP32 numbers at `place` in a shard, whose row of `sources` is given; zero where not `inside`."""
    address = tl.load(source)
    if tl.load(source + 1) == 1:
        bf16 = address.to(tl.pointer_type(tl.bfloat16))
        if ALIGNED:
            bf16 = tl.multiple_of(bf16, 16)
        x = tl.load(bf16 + place, mask=inside, other=0.0).to(tl.float32)
    else:
        fp32 = address.to(tl.pointer_type(tl.float32))
        if ALIGNED:
            fp32 = tl.multiple_of(fp32, 16)
        x = tl.load(fp32 + place, mask=inside, other=0.0)
    return x


@triton.jit
def _quantized(x, scale, DTYPE: tl.constexpr, LARGEST: tl.constexpr, POW2: tl.constexpr):
    """Quantize x with a scale per row [128], as bytes."""
    if POW2 == 1:  # exact reciprocal by mirroring the exponent
        reciprocal = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        # A NaN scale, whose exponent would mirror to a finite number, stays NaN.
        reciprocal = tl.where(scale == scale, reciprocal, float("nan"))
    else:
        reciprocal = reciprocal_of(scale)
    return to_fp8(x, reciprocal[:, None], DTYPE).to(tl.uint8, bitcast=True)


@triton.jit(do_not_specialize=["first_weight"], do_not_specialize_on_alignment=["programs"])
def _amax(
    owner, table, sources, programs, first_weight, amax, alone, data, MODE: tl.constexpr, ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    #     index[r, c] = r * columns + c                     flat index in the weight
    #     inside      = start <= index < stop               elements of this rank
    #     amax[block] = max |x[index - start]| of those     0 for elements of other ranks, until the all-reduce MAX
    #     data[place] = round(x / scale(amax))              blocks of this rank alone
    weight, columns, start, stop, row, column, origin, pitch, scale_start, scales_per_row = _geometry(
        owner, table, programs, ALIGNED
    )
    index = row[:, None] * columns + column[None, :]
    inside = (column < columns)[None, :] & (index >= start) & (index < stop)
    place = origin + row[:, None] * pitch + column[None, :]
    x = _load(sources + 2 * (weight - first_weight), index - start, inside, ALIGNED)
    bits = tl.minimum(amax_bits(x, 1), 0x7F800000)  # Inf for NaN: an all-reduce MAX must carry it
    if MODE == ROW:
        # A row spans several tiles, and maybe several shards.
        tl.atomic_max(amax + scale_start + row, bits, mask=(row * columns < stop) & ((row + 1) * columns > start), sem="relaxed")
    elif MODE == TENSOR:
        tl.atomic_max(amax + scale_start, tl.max(bits, 0), sem="relaxed")
    else:
        block = tl.min(row, 0) // 128 * scales_per_row + tl.min(column, 0) // 128
        # No other program of this rank has the block: a plain store.
        bits = tl.max(bits, 0)
        tl.store(amax + scale_start + block, bits)
        if tl.load(alone + tl.load(programs + tl.program_id(0))) != 0:
            scale, _ = scale_of(bits + tl.zeros([128], tl.int32), LARGEST, SMALLEST, POW2)
            found = _quantized(x, scale, DTYPE, LARGEST, POW2)
            tl.store(data + place, found, mask=inside)


@triton.jit(do_not_specialize=["first_weight"], do_not_specialize_on_alignment=["programs"])
def _cast(
    owner, table, sources, programs, first_weight, scales, data, MODE: tl.constexpr, ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    #     scale = scales[block]                             from the all-reduced amax
    #     data[place] = round(x / scale)
    # Bitwise equal to quantizing the unsharded weight on one rank.
    weight, columns, start, stop, row, column, origin, pitch, scale_start, scales_per_row = _geometry(
        owner, table, programs, ALIGNED
    )
    index = row[:, None] * columns + column[None, :]
    inside = (column < columns)[None, :] & (index >= start) & (index < stop)
    place = origin + row[:, None] * pitch + column[None, :]
    x = _load(sources + 2 * (weight - first_weight), index - start, inside, ALIGNED)
    if MODE == ROW:
        scale = tl.load(scales + scale_start + row, mask=(row * columns < stop) & ((row + 1) * columns > start), other=1.0)
    elif MODE == TENSOR:
        scale = tl.load(scales + scale_start) + tl.zeros([128], tl.float32)
    else:
        block = tl.min(row, 0) // 128 * scales_per_row + tl.min(column, 0) // 128
        scale = tl.load(scales + scale_start + block) + tl.zeros([128], tl.float32)
    found = _quantized(x, scale, DTYPE, LARGEST, POW2)
    tl.store(data + place, found, mask=inside)


class TritonShardCast:
    """ReferenceShardCast (param.py), a launch each for amax and data; offloaded shards are copied one by one."""

    def __init__(self, weights: Sequence[FP8Param], shards: torch.Tensor, spec: CastSpec):
        # A rank may hold nothing but padding of a small weight.
        self._weights = [weight for weight in weights if weight.shard.valid]
        self._shards, self._spec = shards, spec
        tiles = [tiles_of(weight) for weight in self._weights]
        counts = [down * across for _, down, across in tiles]
        first = list(itertools.accumulate(counts, initial=0))
        rows = [
            (begin, weight.shard.shape[1], weight.shard.start, weight.shard.start + weight.shard.valid, tile_row,
             weight.start + weight.origin, weight.scale_start, weight.scale_strides[0] if weight.scale_strides else 0,
             weight.pitch)
            for weight, begin, (tile_row, _, _) in zip(self._weights, first[:-1], tiles, strict=True)
        ]
        self._table = torch.tensor(rows, dtype=torch.int64, device=shards.device)
        owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(first).diff())
        self._owner = owner.to(shards.device)
        alone = torch.zeros(len(owner), dtype=torch.bool)
        # Other scales depend on more than the block's own amax.
        if spec.granularity == "128x128" and spec.scale in ("pow2", "fp32") and rows:
            alone = torch.cat([alone_in(weight, *size) for weight, size in zip(self._weights, tiles, strict=True)])
        self._alone = alone.to(shards.device, torch.uint8)
        # Tiles of a launch and how many are of each weight: all, and those without data after the launch for the amax.
        self._all, self._left = (
            (chosen.nonzero()[:, 0].int().to(shards.device), [int(own.sum()) for own in chosen.split(counts)])
            for chosen in (torch.ones_like(alone), ~alone)
        )
        # Of all weights: the kernel is launched once and compiled for one answer. row[1:4]: columns, start and stop of
        # a shard; row[5] and row[8]: the places of its data.
        self._aligned = all(number % ALIGNMENT == 0 for row in rows for number in (*row[1:4], row[5], row[8]))
        self._listed: list[tuple[int, int]] = []
        self._sources = torch.empty(0, dtype=torch.int64)

    def write_amax(self, amax: torch.Tensor, source: Numbers) -> None:
        """Write the amax of every group, and the data of blocks that this rank has to itself."""
        self._launch(_amax, self._all, (amax.view(torch.int32), self._alone, self._shards), source)

    def cast(self, scales: torch.Tensor, source: Numbers) -> None:
        self._launch(_cast, self._left, (scales, self._shards), source)

    def _launch(
        self, kernel: triton.JITFunction, tiles: tuple[torch.Tensor, list[int]], buffers: tuple[torch.Tensor, ...], source: Numbers
    ) -> None:
        launched, counts = tiles
        if not len(launched):  # a rank may have no part of any weight
            return
        numbers = [source(weight) for weight in self._weights]
        device = self._shards.device
        if all(_is_readable(one, device) for one in numbers):
            self._run(kernel, launched, 0, numbers, buffers)
            return
        for position, (one, own) in enumerate(zip(numbers, launched.split(counts), strict=True)):
            if len(own):
                # An offloaded shard is on the device only while it is quantized.
                here = one if _is_readable(one, device) else on_device(one, device)
                self._run(kernel, own, position, [here], buffers)

    def _run(
        self, kernel: triton.JITFunction, launched: torch.Tensor, first_weight: int, numbers: list[torch.Tensor], buffers: tuple
    ) -> None:
        sources = [(one.data_ptr(), int(one.dtype is torch.bfloat16)) for one in numbers]
        aligned = self._aligned and all(address % ALIGNMENT == 0 for address, _ in sources)
        kernel[(len(launched),)](
            self._owner, self._table, self._sent(sources), launched, first_weight, *buffers,
            MODE=MODES[self._spec.granularity], ALIGNED=aligned,
            **format_arguments(self._spec.format, self._spec.scale), num_warps=8,
        )

    def _sent(self, sources: list[tuple[int, int]]) -> torch.Tensor:
        """Return `sources` on the device, without making the host wait; kept there for as long as they stay the same."""
        if sources != self._listed:
            table = torch.tensor(sources, dtype=torch.int64)
            if self._shards.device.type == "cuda":
                # Pinned memory goes back to its pool only behind this copy: the pool knows the stream that used it.
                table = table.pin_memory().to(self._shards.device, non_blocking=True)
            self._listed, self._sources = sources, table
        return self._sources


def alone_in(weight: FP8Param, first: int, down: int, across: int) -> torch.Tensor:
    """Return whether each tile of a shard, as tiles_of counts them, is a block without elements of other ranks."""
    rows, columns = weight.shard.shape
    starts = torch.arange(first, first + down) * BLOCK
    stops = (starts + BLOCK).clamp(max=rows)
    inside = (starts * columns >= weight.shard.start) & (stops * columns <= weight.shard.start + weight.shard.valid)
    return inside.repeat_interleave(across)


def tiles_of(weight: FP8Param) -> tuple[int, int, int]:
    """Return (first row of tiles, rows of tiles, tiles across) that the shard has a part of."""
    columns = weight.shard.shape[1]
    first = weight.shard.start // columns // BLOCK
    last = (weight.shard.start + weight.shard.valid - 1) // columns // BLOCK
    return first, last - first + 1, -(-columns // BLOCK)


def _is_readable(numbers: torch.Tensor, device: torch.device) -> bool:
    return numbers.device == device and numbers.dtype in (torch.float32, torch.bfloat16) and numbers.is_contiguous()


@triton.jit
def _write_residuals(owner, table, scales, GROUPS: tl.constexpr, DTYPE: tl.constexpr):
    program = tl.program_id(0)
    fields = table + tl.load(owner + program).to(tl.int64) * 16
    data = tl.load(fields + 2).to(tl.pointer_type(tl.uint8))
    channels = tl.load(fields + 3).to(tl.pointer_type(tl.int32))
    residual = tl.load(fields + 4).to(tl.pointer_type(tl.uint8))
    start, stop, columns, count = tl.load(fields + 5), tl.load(fields + 6), tl.load(fields + 7), tl.load(fields + 8)
    has_room, block = tl.load(fields + 13), tl.load(fields + 14) + program - tl.load(fields + 15)
    scale = scales + tl.load(fields + 9) + block * tl.load(fields + 10)

    #     x    = master[n, channel];  q = FP8 shard[n, channel]          of outlier channels only
    #     lost = x - q * scale[block of n, channel / 128]
    #     residual[n, place] = round(lost / largest scale of the row of blocks)
    # and in outlier blocks also the dequantized weight in the same units, and the scale of the block.
    n = block * 128 + tl.arange(0, 128)
    place = tl.program_id(1) * 64 + tl.arange(0, 64)
    channel = tl.load(channels + place, mask=place < count, other=0).to(tl.int64)
    index = n[:, None] * columns + channel[None, :]
    inside = (index >= start) & (index < stop) & (place < count)[None, :]
    quantized = tl.load(data + n[:, None] * tl.load(fields + 11) + channel[None, :], mask=inside, other=0)
    index -= start
    of_channel = tl.load(scale + channel // 128)
    kind = tl.load(fields + 1)
    if kind == 1:
        x = tl.load(tl.load(fields).to(tl.pointer_type(tl.bfloat16)) + index, mask=inside, other=0.0).to(tl.float32)
    elif kind == 2:
        correction = tl.load(tl.load(fields).to(tl.pointer_type(tl.int16)) + index, mask=inside, other=0)
        x = dequantize_master(quantized, correction, of_channel[None, :])
    else:
        x = tl.load(tl.load(fields).to(tl.pointer_type(tl.float32)) + index, mask=inside, other=0.0)
    group = tl.arange(0, GROUPS)
    # One scale for a row of blocks, known everywhere: the largest of that row's bounds all of its rounding errors.
    of_row = tl.max(tl.load(scale + group, mask=group < (columns + 127) // 128, other=0.0), 0)
    number, reciprocal = quantized.to(DTYPE, bitcast=True).to(tl.float32) * of_channel[None, :], reciprocal_of(of_row)
    lost = to_fp8(x - number, reciprocal, DTYPE).to(tl.uint8, bitcast=True)
    to = residual + n[:, None] * tl.load(fields + 12) + (place + has_room * tl.program_id(1) * 64)[None, :]
    tl.store(to, lost, mask=inside)
    if has_room != 0:
        tl.store(to + 64, to_fp8(number, reciprocal, DTYPE).to(tl.uint8, bitcast=True), mask=inside)
        # Of all rows of the weight, on every rank: blocks are gathered, and scales are not.
        tl.store(scale + (columns + 127) // 128 + tl.program_id(1), of_row, mask=tl.program_id(1) * 64 < count)


class TritonResidualCast:
    """ReferenceResidualCast (quantizer.py) in one launch; offloaded masters are copied to the device for it."""

    def __init__(self) -> None:
        self._listed: list[tuple[int, ...]] = []
        self._table = self._owner = torch.empty(0)

    def write(
        self,
        weights: Sequence[tuple[FP8Param, torch.Tensor]],
        scales: torch.Tensor,
        source: Numbers,
    ) -> None:
        rows, programs, held = [], 0, []
        for weight, residual in weights:
            shard = weight.shard
            if not shard.valid:
                continue
            coded = weight.correction is not None and weight.master_override is None
            numbers = weight.correction if coded else source(weight)
            if not coded and (numbers.device != scales.device or numbers.dtype not in (torch.float32, torch.bfloat16)):
                numbers = on_device(numbers, scales.device)
            held.append(numbers)  # a copy must outlive the launch below
            columns, stop, count = shard.shape[1], shard.start + shard.valid, len(weight.outliers.channels)
            first, programs_of = tiles_of(weight)[:2]
            residual_start, residual_pitch = residual.data_ptr(), count
            if weight.has_room:
                first, programs_of = 0, -(-shard.shape[0] // BLOCK)
                residual_start, residual_pitch = residual_start + weight.origin, weight.pitch
            rows.append((
                numbers.data_ptr(), _KINDS[numbers.dtype], weight.data.data_ptr() + weight.origin,
                weight.outliers.channels.data_ptr(), residual_start, shard.start, stop, columns, count,
                weight.scale_start, weight.scale_strides[0], weight.pitch, residual_pitch, int(weight.has_room),
                first, programs,
            ))  # fmt: skip
            programs += programs_of
        if not rows:
            return
        if rows != self._listed:
            self._send(rows, programs, scales.device)
        groups = triton.next_power_of_2(max(-(-row[7] // BLOCK) for row in rows))
        format = weights[0][0].spec.format
        blocks = max(-(-row[8] // HALF) for row in rows)
        _write_residuals[programs, blocks](
            self._owner, self._table, scales, GROUPS=groups, DTYPE=TRITON_DTYPES[format], num_warps=8, **ROUND_EVERY_PRODUCT
        )

    def _send(self, rows: list[tuple[int, ...]], programs: int, device: torch.device) -> None:
        """Put the tables on the device, without making the host wait."""
        table = torch.tensor(rows, dtype=torch.int64)
        firsts = torch.tensor([row[-1] for row in rows] + [programs])
        owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), firsts.diff())
        if device.type == "cuda":
            table, owner = (t.pin_memory().to(device, non_blocking=True) for t in (table, owner))
        self._listed, self._table, self._owner = rows, table, owner
