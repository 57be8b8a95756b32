"""AdamW's step of FP32 masters and moments fused with quantization: 29 bytes per element, not 33 (FP32 gradients).

A program takes a block of 128 x 128 of a weight. It updates PART rows at a time with their new masters in registers;
then the amax of the block gives scale and data. For blocks shared with another rank it writes the amax, and requantize
the data (quantizer.py). Other parameters of a sub-group (vectors, embeddings) are updated in the same launch, as rows of
128 elements without data.

Bitwise equal to adamw_step (optim/adamw_step_triton.py) followed by cast_triton.py. Not for compressed moments:
quantizing them takes the registers that hold the masters, and two passes are faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import amax_bits, format_arguments, scale_of, to_fp8
from ds_fp8.config.formats import BLOCK
from ds_fp8.optim.adamw import AdamStep
from ds_fp8.optim.adamw_step_triton import load, new_master, new_moments, store
from ds_fp8.zero.cast_triton import alone_in, tiles_of
from ds_fp8.zero.param import FP8Param

ONCE = tl.constexpr("evict_first")
# Rows that a program updates at a time, its warps: 118 registers per thread, one program per SM
PART, WARPS = 32, 16


@triton.jit
def _step_and_cast(
    owner, table, programs, masters, data, amax, grad, exp_avg, exp_avg_sq, skip, factor,
    beta1, beta2, eps, decay, step_size, root_factor,
    SKIP: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr, PART: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    if SKIP:
        if tl.load(skip) != 0:
            return
    program = tl.load(programs + tl.program_id(0))
    casts, program = program % 2, program // 2
    fields = table + tl.load(owner + program).to(tl.int64) * 10
    columns = tl.load(fields + 1).to(tl.int32)
    tile, across = program - tl.load(fields).to(tl.int32), columns // 128
    tile_row, column = tl.load(fields + 4) + tile // across, tile % across * 128
    # Places in flat tensors pass 2^31, those in a block do not. Rows have multiples of 128 elements; all else is a
    # multiple of 4, or of 16 where data lie.
    begin = tile_row * 128 * columns + column
    start, stop = tl.multiple_of(tl.load(fields + 2) - begin, 4), tl.multiple_of(tl.load(fields + 3) - begin, 4)
    flat = tl.multiple_of(tl.load(fields + 7) - start, 4)
    rows, across_block = tl.arange(0, PART), tl.arange(0, 128)
    bits = tl.zeros([PART], tl.int32)
    updated = ()
    for part in tl.static_range(128 // PART):
        of_block = tl.multiple_of((part * PART + rows) * columns, [128])[:, None] + across_block[None, :]
        valid = (of_block >= start) & (of_block < stop)
        place = flat + of_block
        w = load(masters + place, valid, EVEN, ONCE)
        g = load(grad + place, valid, EVEN, ONCE).to(tl.float32)
        m = load(exp_avg + place, valid, EVEN, ONCE)
        v = load(exp_avg_sq + place, valid, EVEN, ONCE)
        if factor is not None:
            g = g * tl.load(factor)
        m, v = new_moments(g, m, v, beta1, beta2)
        w = new_master(w, m, v, decay, step_size, root_factor, eps, FAST)
        if not EVEN:
            w = tl.where(valid, w, 0.0)
        store(masters + place, w, valid, EVEN, ONCE)
        store(exp_avg + place, m, valid, EVEN, ONCE)
        store(exp_avg_sq + place, v, valid, EVEN, ONCE)
        bits = tl.maximum(bits, amax_bits(w, 1))
        updated += (w,)
    scales_per_row = tl.load(fields + 6)
    if scales_per_row > 0:
        largest = tl.minimum(tl.max(bits, 0), 0x7F800000)  # Inf for NaN: an all-reduce MAX must carry it
        tl.store(amax + tl.load(fields + 5) + tile_row * scales_per_row + column // 128, largest)
        if casts != 0:
            _, reciprocal = scale_of(largest, LARGEST, SMALLEST, POW2)
            pitch = tl.load(fields + 9)
            to = data + tl.multiple_of(tl.load(fields + 8) + tile_row * 128 * pitch + column, 16)
            for part in tl.static_range(128 // PART):
                of_block = ((part * PART + rows) * columns)[:, None] + across_block[None, :]
                valid = (of_block >= start) & (of_block < stop)
                place = tl.multiple_of((part * PART + rows) * pitch, [16])[:, None] + across_block[None, :]
                quantized = to_fp8(updated[part], reciprocal, DTYPE).to(tl.uint8, bitcast=True)
                store(to + place, quantized, valid, EVEN, ONCE)


class StepAndCast:
    """Fused step and quantization of one sub-group: one launch, and another for ragged blocks."""

    def __init__(self, members: Sequence[tuple[FP8Param, int]], numel: int, data: torch.Tensor):
        """Prepare the step of a sub-group of `numel` elements; `can_take` must have returned True for it.

        `members` are its weights, each with its first element in the sub-group; `data` the buffer of all, or a view.
        """
        data, spec = data.as_strided((1,), (1,), 0), members[0][0].spec  # from its beginning, for places in the table
        members = sorted(((w, start) for w, start in members if w.shard.valid), key=lambda member: member[1])
        first, end, rows, casts, even_tiles = 0, 0, [], [], []
        for weight, start in (*members, (None, numel)):
            if start > end:  # elements of no weight
                tiles = -(-(start - end) // BLOCK**2)
                rows.append((first, BLOCK, 0, start - end, 0, 0, 0, end, 0, 0))
                casts.append(torch.zeros(tiles, dtype=torch.bool))
                even_tiles.append((torch.arange(tiles) + 1) * BLOCK**2 <= start - end)
                first += tiles
            if weight is None:
                break
            shard, (tile_row, down, across) = weight.shard, tiles_of(weight)
            rows.append((
                first, shard.shape[1], shard.start, shard.start + shard.valid, tile_row, weight.scale_start,
                weight.scale_strides[0], start, weight.start + weight.origin, weight.pitch,
            ))  # fmt: skip
            alone = alone_in(weight, tile_row, down, across)
            casts.append(alone)
            last_rows = torch.arange(tile_row + 1, tile_row + down + 1) * BLOCK
            even_tiles.append(alone & (last_rows <= shard.shape[0]).repeat_interleave(across))
            first += down * across
            end = start + shard.numel
        firsts = torch.tensor([row[0] for row in rows] + [first])
        owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), firsts.diff())
        programs, evenly = 2 * torch.arange(first, dtype=torch.int32) + torch.cat(casts).int(), torch.cat(even_tiles)
        self._tables = owner.to(data.device), torch.tensor(rows, dtype=torch.int64, device=data.device)
        self._programs = [(even, programs[evenly == even].to(data.device)) for even in (True, False)]
        self._data, self._options = data, format_arguments(spec.format, spec.scale)

    def __call__(
        self,
        masters: torch.Tensor,
        amax: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        step: AdamStep,
    ) -> None:
        """Take the step, as adamw_step_reference, of a sub-group's flat tensors; write amax and data.

        `amax`, FP32 zeros of all weights, gets that of every block; the data of blocks that other ranks have a part of
        are left to the cast.
        """
        for even, programs in self._programs:
            if len(programs):
                _step_and_cast[(len(programs),)](
                    *self._tables, programs, masters, self._data, amax.view(torch.int32), gradient, exp_avg, exp_avg_sq,
                    step.skip, step.factor, *step.numbers, SKIP=step.skip is not None, FAST=gradient.is_cuda, EVEN=even, PART=PART,
                    num_warps=WARPS, **self._options,
                )  # fmt: skip


def can_take(members: Sequence[tuple[FP8Param, int]], numel: int) -> bool:
    """Return whether StepAndCast can step a sub-group: one cast of blocks, and aligned weights."""
    specs = {str(weight.spec): weight.spec for weight, _ in members}
    blocks = all(spec.granularity == "128x128" and not spec.by_torch for spec in specs.values())
    rows = all(weight.shard.shape[1] % BLOCK == 0 for weight, _ in members)
    data = (n for w, _ in members for n in (w.shard.start, w.shard.numel, w.start, w.pitch))
    places = (numel, *(start for _, start in members))
    evenly = all(n % 16 == 0 for n in data) and all(n % 4 == 0 for n in places)
    return len(specs) == 1 and blocks and rows and evenly
