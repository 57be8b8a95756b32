"""The layout of expert_layout.py in Triton: a stable counting sort of the pairs by expert.

    counts  [E, chunks]  the pairs of each expert in each chunk of pairs         _count_pairs
    through [E, chunks]  the same up to and with the chunk                       torch.cumsum
    row of a pair = first row of its expert                                      _plan_rows
                  + pairs of its expert in earlier chunks + in its chunk before it   _place_pairs

Every pair has a row of its own: no atomic operation decides about an order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.config.formats import BLOCK

CELLS = 16384
"""Pairs of a chunk times experts: the comparisons that a program holds."""
TILES = 64
"""Tiles of rows whose experts one program finds."""


@triton.jit
def _is_of_expert(index, pairs, E, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """Return (the pairs of this program's chunk, which of them chose which expert as int32 [CHUNK, EXPERTS])."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, EXPERTS)
    chosen = tl.load(index + pair, mask=pair < pairs, other=-1)
    return pair, ((chosen[:, None] == expert[None, :]) & (expert < E)[None, :]).to(tl.int32)


@triton.jit
def _count_pairs(index, pairs, E, counts, chunks, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    _, ours = _is_of_expert(index, pairs, E, CHUNK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + expert * chunks + tl.program_id(0), tl.sum(ours, 0), mask=expert < E)


@triton.jit
def _plan_rows(through, chunks, E, tiles, counts, starts, of_tile, TILES: tl.constexpr, EXPERTS: tl.constexpr):
    """Store counts and starts of the experts, and the experts of TILES tiles."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(through + expert * chunks + chunks - 1, mask=expert < E, other=0)
    padded = (count + 127) // 128
    end = tl.cumsum(padded, 0)
    if tl.program_id(0) == 0:
        tl.store(counts + expert, count, mask=expert < E)
        tl.store(starts + expert, (end - padded) * 128, mask=expert < E)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = tl.sum(((end[None, :] <= tile[:, None]) & (expert < E)[None, :]).to(tl.int32), 1)
    tl.store(of_tile + tile, tl.where(before < E, before, -1), mask=tile < tiles)


@triton.jit
def _place_pairs(
    index, pairs, E, counts, through, starts, chunks, place, source, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    pair, ours = _is_of_expert(index, pairs, E, CHUNK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    at = expert * chunks + tl.program_id(0)
    # Up to and with this chunk, less this chunk's own.
    earlier = tl.load(through + at, mask=expert < E, other=0) - tl.load(counts + at, mask=expert < E, other=0)
    first = tl.load(starts + expert, mask=expert < E, other=0) + earlier
    # One expert of a pair at most is 1 in `ours`: the sum picks that expert's row.
    row = tl.sum(ours * (first[None, :] + tl.cumsum(ours, 0) - 1), 1)
    row = tl.where(tl.sum(ours, 1) > 0, row, -1)
    tl.store(place + pair, row, mask=pair < pairs)
    tl.store(source + row, pair, mask=(pair < pairs) & (row >= 0))


def lay_out(index: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the fields of ExpertLayout for at least one pair.

    Args:
        index: Integer [T, k], the experts of each token.
        experts: E, the number of experts.
        rows: R, the rows that there are.
    """
    pairs, device, index = index.numel(), index.device, index.contiguous()
    # Triton's ranges are powers of two; what lies beyond E is masked.
    width = triton.next_power_of_2(experts)
    chunk = min(max(CELLS // width, 16), 1024)
    chunks, tiles = triton.cdiv(pairs, chunk), rows // BLOCK
    integers = {"dtype": torch.int32, "device": device}
    in_chunks, place = torch.empty(experts, chunks, **integers), torch.empty(index.shape, **integers)
    counts, starts, of_tile = (torch.empty(length, **integers) for length in (experts, experts, tiles))
    source = torch.full((rows,), -1, **integers)
    sizes = {"CHUNK": chunk, "EXPERTS": width, "num_warps": 8}
    _count_pairs[(chunks,)](index, pairs, experts, in_chunks, chunks, **sizes)
    through = in_chunks.cumsum(1, dtype=torch.int32)
    _plan_rows[(triton.cdiv(tiles, TILES),)](
        through, chunks, experts, tiles, counts, starts, of_tile, TILES=TILES, EXPERTS=width, num_warps=8
    )
    _place_pairs[(chunks,)](index, pairs, experts, in_chunks, through, starts, chunks, place, source, **sizes)
    return source, place, counts, starts, of_tile
