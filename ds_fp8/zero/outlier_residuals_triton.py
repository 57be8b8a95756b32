"""Triton kernel of outlier_residuals.py: the residuals of all weights in one launch.

A program takes 128 rows, and 64 outlier channels, of a weight that this rank has a part of. It finds its weight through `owner`, and what it
needs of it in a row of `table`:

    owner    int32 [programs]       the weight a program works for
    table    int64 [weights, 12]    FIELDS
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_fp8.casts.outliers import HALF
from ds_fp8.casts.outliers_triton import ROUND_EVERY_PRODUCT
from ds_fp8.casts.primitives_triton import TRITON_DTYPES, to_fp8
from ds_fp8.config.formats import BLOCK
from ds_fp8.zero.shards import ShardedWeight, Source, on_device

FIELDS = (
    "source", "is_bf16", "codes", "channels", "residual", "start", "stop", "columns", "count", "scale_start",
    "scales_per_row", "first_program",
)  # fmt: skip
"""Addresses, in bytes; the shard's part of the weight; lengths; places in the buffer of scales and among programs."""


@triton.jit
def _write_residuals(owner, table, scales, GROUPS: tl.constexpr, DTYPE: tl.constexpr):
    program = tl.program_id(0)
    fields = table + tl.load(owner + program).to(tl.int64) * 12
    codes = tl.load(fields + 2).to(tl.pointer_type(tl.uint8))
    channels = tl.load(fields + 3).to(tl.pointer_type(tl.int32))
    residual = tl.load(fields + 4).to(tl.pointer_type(tl.uint8))
    start, stop, columns, count = tl.load(fields + 5), tl.load(fields + 6), tl.load(fields + 7), tl.load(fields + 8)
    block = start // columns // 128 + program - tl.load(fields + 11)
    scale = scales + tl.load(fields + 9) + block * tl.load(fields + 10)

    #     x    = master[n, channel];  code = FP8 shard[n, channel]       of outlier channels only
    #     lost = x - code * scale[block of n, channel / 128]
    #     residual[n, place] = cast(lost / largest scale of the row of blocks)
    n = block * 128 + tl.arange(0, 128)
    place = tl.program_id(1) * 64 + tl.arange(0, 64)
    channel = tl.load(channels + place, mask=place < count, other=0).to(tl.int64)
    index = n[:, None] * columns + channel[None, :]
    inside = (index >= start) & (index < stop) & (place < count)[None, :]
    index -= start
    if tl.load(fields + 1) == 1:
        x = tl.load(tl.load(fields).to(tl.pointer_type(tl.bfloat16)) + index, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(tl.load(fields).to(tl.pointer_type(tl.float32)) + index, mask=inside, other=0.0)
    code = tl.load(codes + index, mask=inside, other=0).to(DTYPE, bitcast=True).to(tl.float32)
    of_channel = tl.load(scale + channel // 128)
    group = tl.arange(0, GROUPS)
    # One scale for a row of blocks, known everywhere: the largest of that row's bounds all of its rounding errors.
    of_row = tl.max(tl.load(scale + group, mask=group < (columns + 127) // 128, other=0.0), 0)
    lost = to_fp8(x - code * of_channel[None, :], tl.div_rn(1.0, of_row), DTYPE).to(tl.uint8, bitcast=True)
    tl.store(residual + n[:, None] * count + place[None, :], lost, mask=inside)


class TritonResidualCast:
    """ResidualCast of outlier_residuals.py in one launch; masters that are offloaded are copied to the device for it."""

    def __init__(self) -> None:
        self._listed: list[tuple[int, ...]] = []
        self._table = self._owner = torch.empty(0)

    def write(
        self,
        weights: Sequence[tuple[ShardedWeight, torch.Tensor]],
        scales: torch.Tensor,
        source: Source,
    ) -> None:
        """Write residuals of the shards' elements, as ResidualCast says."""
        rows, programs, kept = [], 0, []
        for weight, residual in weights:
            shard = weight.shard
            if not shard.valid:
                continue
            numbers = source(weight)
            if numbers.device != scales.device or numbers.dtype not in (torch.float32, torch.bfloat16):
                numbers = on_device(numbers, scales.device)
            kept.append(numbers)  # a copy must outlive the launch below
            columns = shard.shape[1]
            stop = shard.start + shard.valid
            addresses = (t.data_ptr() for t in (weight.data, weight.outliers.channels, residual))
            rows.append((
                numbers.data_ptr(), int(numbers.dtype is torch.bfloat16), *addresses, shard.start, stop, columns,
                len(weight.outliers.channels), weight.scale_start, weight.scale_strides[0], programs,
            ))  # fmt: skip
            programs += (stop - 1) // columns // BLOCK - shard.start // columns // BLOCK + 1
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
