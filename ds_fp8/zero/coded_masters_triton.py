"""AdamW's step of masters of data and corrections (coded_masters.py) in one pass over blocks of 128 x 128.

A program updates PART rows at a time, stores their moments and stages their new masters; then the amax of the block
gives scale, data and corrections. Masters are staged in a few MB that fit the L2 cache: a block in registers would
allow one program per SM.

    UPDATE     blocks of this rank alone: everything
    MEASURE    shared blocks: the amax only
    FINISH     shared blocks again, with the scale from the all-reduced amax

Moments have groups of 128 elements of the flat sub-group, or no scales. A row of a block is a group: rows and shards
are multiples of 128 (`takes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import amax_bits, format_arguments, multiprocessors, random_word, reciprocal_of
from ds_fp8.config.formats import BLOCK
from ds_fp8.optim.adamw import AdamStep
from ds_fp8.optim.adamw_step_triton import (
    BEYOND,
    common_arguments,
    load,
    new_master,
    new_moments,
    state_arguments,
    store,
)
from ds_fp8.optim.masters_triton import dequantize_master, quantize_master, stored_scale
from ds_fp8.optim.moments import Moment
from ds_fp8.optim.moments_triton import dequantize_tile, quantize_store
from ds_fp8.zero.cast_triton import alone_in, tiles_of
from ds_fp8.zero.param import FP8Param

UPDATE, MEASURE, FINISH = (tl.constexpr(i) for i in range(3))
# For data that are used once, so that staged masters stay in the cache
ONCE = tl.constexpr("evict_first")
# Rows that a program updates at a time, its warps, programs per SM: 8 elements and 80 registers per thread
PART, WARPS, PROGRAMS = 16, 8, 3


@triton.jit
def _put_masters(data, corrections, w, scale, reciprocal, valid, POW2: tl.constexpr, EVEN: tl.constexpr):
    quantized, correction = quantize_master(w, scale, reciprocal, POW2)
    store(data, quantized, valid, EVEN, ONCE)
    store(corrections, correction, valid, EVEN, ONCE)


@triton.jit
def _put_staged(
    staged, data, corrections, start, stop, columns, scale, reciprocal, POW2: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr
):
    """Quantize the staged masters of a block, by the scale that their amax gives."""
    across_block, many = tl.arange(0, 128), tl.arange(0, 2 * PART)
    tl.debug_barrier()  # until all masters are staged
    for part in range(0, 128, 2 * PART):
        of_row = tl.multiple_of((part + many) * columns, [128])
        valid = ((of_row >= start) & (of_row < stop))[:, None] & (across_block >= 0)[None, :]
        place = of_row[:, None] + across_block[None, :]
        w = tl.load(staged + (part + many)[:, None] * 128 + across_block[None, :], eviction_policy="evict_last")
        _put_masters(data + place, corrections + place, w, scale, reciprocal, valid, POW2, EVEN)
    tl.debug_barrier()  # before the next block's are staged


@triton.jit
def _noise(at, across_block, seed):
    """Return random numbers in [0, 1) for both moments of rows that begin at `at`."""
    # Rows of 128 elements of which no two are on two sides of a multiple of 2^32.
    key = seed.to(tl.uint32) + (at >> 32).to(tl.uint32) * BEYOND
    word = random_word(at.to(tl.uint32)[:, None] + across_block.to(tl.uint32)[None, :], key[:, None])
    return (word & 0xFFFF).to(tl.float32) * (1.0 / 65536.0), (word >> 16).to(tl.float32) * (1.0 / 65536.0)


@triton.jit(do_not_specialize=["seed", "count"], do_not_specialize_on_alignment=["programs"])
def _step(
    owner, table, overrides, programs, count, staged, data, corrections, old_scales, new_scales, amax,
    grad, skip, factor, exp_avg, exp_avg_scale, exp_avg_exponent, exp_avg_sq, exp_avg_sq_scale, exp_avg_sq_exponent,
    beta1, beta2, eps, decay, step_size, root_factor, seed,
    KIND1: tl.constexpr, DTYPE1: tl.constexpr, MAX1: tl.constexpr, LOG2_MAX1: tl.constexpr, SMALLEST1: tl.constexpr, MANTISSA1: tl.constexpr,
    MIN_EXPONENT1: tl.constexpr,
    KIND2: tl.constexpr, DTYPE2: tl.constexpr, MAX2: tl.constexpr, LOG2_MAX2: tl.constexpr, SMALLEST2: tl.constexpr, MANTISSA2: tl.constexpr,
    MIN_EXPONENT2: tl.constexpr,
    MASK: tl.constexpr, LOG2_RANGE: tl.constexpr, STEPS: tl.constexpr, LARGEST_STEPS: tl.constexpr,
    NOISE1: tl.constexpr, NOISE2: tl.constexpr, SKIP: tl.constexpr, FAST: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr, PART: tl.constexpr, WHAT: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):
    if SKIP:
        if tl.load(skip) != 0:
            return
    across_block, parts = tl.arange(0, 128), tl.arange(0, PART)
    staged += tl.program_id(0) * 128 * 128
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        program = tl.load(programs + index)
        weight = tl.load(owner + program).to(tl.int64)
        fields = table + weight * 10
        columns = tl.load(fields + 1).to(tl.int32)
        tile, across = program - tl.load(fields).to(tl.int32), columns // 128
        tile_row = tl.load(fields + 4) + tile // across
        block = tl.load(fields + 5) + tile_row * tl.load(fields + 6) + tile % across
        # Where the block begins in the weight; places in flat tensors pass 2^31, those in a block do not. Shards begin
        # and end at multiples of 128, and rows have so many elements.
        begin = tl.multiple_of(tile_row * 128 * columns + tile % across * 128, 128)
        start, stop = tl.load(fields + 2) - begin, tl.load(fields + 3) - begin
        flat = tl.multiple_of(tl.load(fields + 7) - start, 128)
        its_data = data + tl.multiple_of(tl.load(fields + 8) - start, 16)
        its_corrections = corrections + tl.multiple_of(tl.load(fields + 9) - start, 16)
        old_scale = tl.load(old_scales + block)
        scale = old_scale
        reciprocal = old_scale
        if WHAT == FINISH:
            scale = tl.load(new_scales + block)
            reciprocal = reciprocal_of(scale)
        bits = tl.zeros([PART], tl.int32)
        for part in range(0, 128, PART):
            of_row = tl.multiple_of((part + parts) * columns, [128])
            inside = (of_row >= start) & (of_row < stop)
            valid = inside[:, None] & (across_block >= 0)[None, :]
            place = of_row[:, None] + across_block[None, :]
            groups = flat // 128 + of_row // 128
            g = load(grad + flat + place, valid, EVEN, ONCE).to(tl.float32)
            if factor is not None:
                g = g * tl.load(factor)
            m = dequantize_tile(load(exp_avg + flat + place, valid, EVEN, ONCE), exp_avg_scale, exp_avg_exponent, groups, inside, KIND1, DTYPE1, MAX1, LOG2_MAX1, STEPS, True, False, FAST)
            v = dequantize_tile(load(exp_avg_sq + flat + place, valid, EVEN, ONCE), exp_avg_sq_scale, exp_avg_sq_exponent, groups, inside, KIND2, DTYPE2, MAX2, LOG2_MAX2, STEPS, False, False, FAST)
            m, v = new_moments(g, m, v, beta1, beta2)
            w = dequantize_master(load(its_data + place, valid, EVEN, ONCE), load(its_corrections + place, valid, EVEN, ONCE), old_scale)
            if overrides is not None:
                address = tl.load(overrides + weight)
                of_user = tl.load(address.to(tl.pointer_type(tl.float32)) + (place - start), mask=valid & (address != 0), other=0.0)
                w = tl.where(address != 0, of_user, w)
            w = new_master(w, m, v, decay, step_size, root_factor, eps, FAST)
            if not EVEN:
                w = tl.where(valid, w, 0.0)
            if WHAT != FINISH:
                bits = tl.maximum(bits, amax_bits(w, 1))
            if WHAT == UPDATE:
                tl.store(staged + (part + parts)[:, None] * 128 + across_block[None, :], w, eviction_policy="evict_last")
            if WHAT == FINISH:
                _put_masters(its_data + place, its_corrections + place, w, scale, reciprocal, valid, POW2, EVEN)
            if WHAT != MEASURE:
                noise1 = w
                noise2 = w
                if NOISE1 or NOISE2:
                    noise1, noise2 = _noise(flat + of_row, across_block, seed)
                quantize_store(
                    m, exp_avg + flat, exp_avg_scale, exp_avg_exponent, place, groups, inside, valid, noise1, amax,
                    KIND1, DTYPE1, MAX1, LOG2_MAX1, MASK, SMALLEST, SMALLEST1, MANTISSA1, MIN_EXPONENT1, LOG2_RANGE, STEPS, LARGEST_STEPS,
                    True, NOISE1, False, EVEN, FAST,
                )
                quantize_store(
                    v, exp_avg_sq + flat, exp_avg_sq_scale, exp_avg_sq_exponent, place, groups, inside, valid, noise2, amax,
                    KIND2, DTYPE2, MAX2, LOG2_MAX2, MASK, SMALLEST, SMALLEST2, MANTISSA2, MIN_EXPONENT2, LOG2_RANGE, STEPS, LARGEST_STEPS,
                    False, NOISE2, False, EVEN, FAST,
                )
        if WHAT != FINISH:
            # A block is one program's: a plain store into zeros. Other ranks find its scale in the all-reduce.
            largest = tl.minimum(tl.max(bits, 0), 0x7F800000)
            tl.store(amax + block, largest)
        if WHAT == UPDATE:
            scale, reciprocal = stored_scale(largest, LARGEST, SMALLEST, POW2)
            _put_staged(staged, its_data, its_corrections, start, stop, columns, scale, reciprocal, POW2, PART, EVEN)


class TileStep:
    """The step of one sub-group: one launch, and two more for blocks on several ranks."""

    def __init__(self, members: Sequence[tuple[FP8Param, int]]):
        # Whether all rows and shards are multiples of 128, and all weights have one cast
        self.in_tiles = len({str(weight.spec) for weight, _ in members}) == 1 and all(
            number % BLOCK == 0 for w, start in members for number in (w.shard.shape[1], w.shard.numel, start)
        )
        # Whether all blocks of this rank alone are full
        self._even = all(weight.shard.shape[0] % BLOCK == 0 for weight, _ in members)
        self._members = members = [(weight, start) for weight, start in members if weight.shard.valid]
        tiles = [tiles_of(weight) for weight, _ in members]
        first = list(itertools.accumulate((down * across for _, down, across in tiles), initial=0))
        rows = [
            (begin, weight.shard.shape[1], weight.shard.start, weight.shard.start + weight.shard.valid, tile_row,
             weight.scale_start, weight.scale_strides[0], flat, weight.start, weight.correction.storage_offset())
            for (weight, flat), begin, (tile_row, _, _) in zip(members, first[:-1], tiles, strict=True)
        ]  # fmt: skip
        owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(first).diff())
        alone = [alone_in(weight, *size) for (weight, _), size in zip(members, tiles, strict=True)]
        alone = torch.cat(alone) if alone else torch.zeros(0, dtype=torch.bool)
        self._tables = owner, torch.tensor(rows, dtype=torch.int64)
        self._programs = {what: which.nonzero()[:, 0].int() for what, which in ((UPDATE, alone), (FINISH, ~alone))}

    def takes(self, exp_avg: torch.Tensor | Moment, exp_avg_sq: torch.Tensor | Moment) -> bool:
        """Return whether the kernel can step these weights and moments; the same on all ranks."""
        moments = [moment for moment in (exp_avg, exp_avg_sq) if isinstance(moment, Moment)]
        return self.in_tiles and all(m.layout.granularity == "1x128" and m.codec.emulated is None for m in moments)

    def __call__(
        self,
        scales: torch.Tensor,
        amax: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor | Moment,
        exp_avg_sq: torch.Tensor | Moment,
        step: AdamStep,
    ) -> Callable[[torch.Tensor], None]:
        """Take the step of blocks that no other rank has a part of, and raise `amax`, FP32 zeros, of all.

        Of a sub-group's flat gradient and moments, as adamw_step_reference; `scales` and `amax` are all weights'.
        Returns what takes the step of the other blocks, by the new scales.
        """
        device, members = gradient.device, self._members
        if not members:
            return lambda scales: None
        if self._tables[0].device != device:
            self._tables = tuple(table.to(device) for table in self._tables)
            self._programs = {what: programs.to(device) for what, programs in self._programs.items()}
        overrides = [
            None if w.master_override is None else w.master_override.to(device, torch.float32) for w, _ in members
        ]
        addresses = None
        if any(one is not None for one in overrides):  # seldom: users have written to masters or weights
            addresses = torch.tensor([0 if one is None else one.data_ptr() for one in overrides], device=device)
        weight, everything = members[0][0], (slice(0, gradient.numel()), slice(None))
        # The buffers of all weights, from their beginnings: places in them are in the table.
        data, corrections = (one.as_strided((1,), (1,), 0) for one in (weight.data, weight.correction))
        arguments = (
            amax.view(torch.int32), gradient, step.skip, step.factor, *state_arguments(exp_avg, *everything),
            *state_arguments(exp_avg_sq, *everything), *step.numbers, step.seed or 0,
        )  # fmt: skip
        options = common_arguments(exp_avg, exp_avg_sq, gradient, step)
        options |= format_arguments(weight.spec.format, weight.spec.scale)

        def launch(what: tl.constexpr, programs: torch.Tensor, new_scales: torch.Tensor) -> None:
            if len(programs):
                at_once = min(len(programs), PROGRAMS * multiprocessors(device))
                staged = torch.empty(at_once if what is UPDATE else 0, BLOCK, BLOCK, device=device)
                _step[(at_once,)](
                    *self._tables, addresses, programs, len(programs), staged, data, corrections, scales, new_scales, *arguments, WHAT=what,
                    EVEN=self._even and what is UPDATE, PART=PART, num_warps=WARPS, maxnreg=80, **options
                )

        launch(UPDATE, self._programs[UPDATE], scales)
        launch(MEASURE, self._programs[FINISH], scales)

        def finish(agreed: torch.Tensor, held: list[torch.Tensor | None] = overrides) -> None:
            """Launch FINISH; `held` keeps masters alive that kernels read by address."""
            launch(FINISH, self._programs[FINISH], agreed)

        return finish
