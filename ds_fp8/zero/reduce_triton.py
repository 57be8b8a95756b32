"""Triton kernels of gradient reduction: pack, sum_rows and add_rows of reduce.py; one pass each.

A program of `_pack` and `_sum_rows` takes 32 groups of 128 elements: of the slice of one rank, or those places of all
rows, which it adds in FP32 in the order of the ranks.

A program of `_add_rows`, of which one launch adds all gradients of a message, takes one span of one gradient. It finds
the gradient through `owner`, and that gradient's numbers in a row of `table`; both are kept on the device, for a bucket
has the same gradients in every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from ds_fp8.casts.primitives_triton import TRITON_DTYPES, amax_bits, scale_of, to_fp8
from ds_fp8.config.formats import BLOCK, FORMATS, SMALLEST_SCALE
from ds_fp8.zero.reduce import LIMIT, SPAN, Message, Slices, Target, span_count

GROUPS = 32  # groups of 128 that one program of _pack and _sum_rows takes
WARPS = 8  # warps of a program: 16 elements a thread, whose data of one row are one access
UNROLL = 8  # rows whose loads are in flight at a time
ALIGNMENT = 16  # elements that all places must be a multiple of for accesses of 16 bytes


@triton.jit(do_not_specialize=["rows"])
def _pack(
    gradient, tensor_scale, clipped, message, numel, length, padded, column, width, row_numel, row_bytes, rows,
    TENSOR: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):
    #     x     = gradient[rank's slice]
    #     scale = 2^ceil(log2(amax / largest)) a group        or one a tensor, found from earlier steps
    #     data  = round(x / scale)
    #     message[row of rank] = data | scales               one row a rank: what an all-to-all sends
    rank = tl.program_id(1)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    within = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    # Slices of ceil(numel / ranks): the last ones may be short or empty, and are padded to whole groups with zeros, so
    # that every row of the message has one length.
    index = rank.to(tl.int64) * length + within
    inside = (within < length) & (index < numel)
    x = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32)
    if TENSOR:
        scale = tl.load(tensor_scale) + tl.zeros([GROUPS], tl.float32)
        in_units = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
        outside = tl.abs(in_units) > LARGEST
        count = tl.sum(tl.sum(outside.to(tl.int32), 1), 0)
        # Few programs have anything to report, and an atomic of each would queue at one address.
        if count > 0:
            tl.atomic_add(clipped, count, sem="relaxed")
        in_units = tl.where(outside, tl.where(x < 0, -LARGEST, LARGEST), in_units)
    else:
        scale, reciprocal = scale_of(amax_bits(x, 1), LARGEST, SMALLEST, True)
        in_units = x * reciprocal[:, None]
    data = to_fp8(in_units, 1.0, DTYPE)

    first = (rank // rows).to(tl.int64) * width + column
    row = message + (rank % rows).to(tl.int64) * row_bytes
    tl.store(row + first + within, data.to(tl.uint8, bitcast=True), mask=within < padded)
    # Scales behind all data of the row: both are read in runs as long as the row is.
    scales = (row + row_numel).to(tl.pointer_type(tl.float32))
    tl.store(scales + first // 128 + group, scale, mask=group * 128 < padded)


@triton.jit(do_not_specialize=["rows", "divisor"])
def _sum_rows(message, total, row_numel, row_bytes, rows, divisor, GROUPS: tl.constexpr, DTYPE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    #     sums = 0;  for each rank, in order:  sums += data * scale        FP32
    #     total = sums / divisor
    # In the order of the ranks on every rank, so that the sum has the same bits whoever computes it.
    sums = tl.zeros([GROUPS, 128], tl.float32)
    done = 0
    while done < rows:
        row = message + done * row_bytes.to(tl.int64)
        data = tl.load(row + place, mask=place < row_numel, other=0).to(DTYPE, bitcast=True)
        scales = (row + row_numel).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + group, mask=group * 128 < row_numel, other=0.0)
        sums += data.to(tl.float32) * scale[:, None]
        done += 1
    sums = tl.div_rn(sums, tl.zeros_like(sums) + divisor.to(tl.float32))
    tl.store(total + place, sums, mask=place < row_numel)


@triton.jit
def _row(row, column, within, inside, group, needed, row_numel, DTYPE: tl.constexpr):
    """Return the numbers of one row of a message."""
    data = tl.load(row + column + within, mask=inside, other=0).to(DTYPE, bitcast=True)
    scales = (row + row_numel).to(tl.pointer_type(tl.float32)) + column // 128
    scale = tl.load(scales + group, mask=needed, other=0.0)
    return data.to(tl.float32) * scale[:, None]


@triton.jit(do_not_specialize=["divisor"])
def _add_rows(
    message, owner, table, gradient, squares, row_numel, row_bytes, divisor,
    ROWS: tl.constexpr, LOOPED: tl.constexpr, UNROLL: tl.constexpr, EXACT: tl.constexpr, ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    #     sums      = sum over rows of data * scale            in the order of the ranks, FP32
    #     gradient  = gradient + sums / divisor                (or = , for the first micro-batch)
    #     squares[span] = sum of gradient^2 in FP64            of what is stored: the norm needs no other read
    program = tl.program_id(0)
    # Numbers in memory and not arguments: the kernel is compiled once for all buckets and launched once for a message.
    fields = table + tl.load(owner + program) * 5
    first_program, column, start = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    numel, span = tl.load(fields + 3), tl.load(fields + 4)
    column = tl.multiple_of(column, 128)
    if ALIGNED:
        start, numel = tl.multiple_of(start, 16), tl.multiple_of(numel, 16)
    group = (program - first_program) * GROUPS + tl.arange(0, GROUPS)
    within = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = within < numel
    needed = group * 128 < numel
    sums = tl.zeros([GROUPS, 128], tl.float32)
    # All in the order of the ranks: a loop over UNROLL rows at a time, then those that are left.
    for done in range(0, LOOPED, UNROLL):
        for step in tl.static_range(UNROLL):
            row = message + row_bytes.to(tl.int64) * (done + step)
            sums += _row(row, column, within, inside, group, needed, row_numel, DTYPE)
    for done in tl.static_range(LOOPED, ROWS):
        row = message + row_bytes.to(tl.int64) * done
        sums += _row(row, column, within, inside, group, needed, row_numel, DTYPE)
    if EXACT:  # a power of two divides as its reciprocal multiplies
        sums *= 1.0 / divisor.to(tl.float32)
    else:
        sums = tl.div_rn(sums, tl.zeros_like(sums) + divisor.to(tl.float32))
    place = gradient + start + within
    # Added to what is stored, in FP32 before it is rounded.
    if ACCUMULATE:
        sums += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    # The square of the rounded number: the norm must be that of what the optimizer reads.
    stored = sums.to(gradient.dtype.element_ty)
    tl.store(place, stored, mask=inside)
    square = stored.to(tl.float64)
    square = tl.where(inside, square * square, 0.0)
    # A place for each span, and no atomics: added up in a fixed order later, the norm has the same bits in every run.
    tl.store(squares + span + program - first_program, tl.sum(square))


def pack(gradient: torch.Tensor, message: torch.Tensor, shape: Message, slices: Slices, format: str, scale: torch.Tensor | None = None, clipped: torch.Tensor | None = None) -> None:
    """Do pack_reference of reduce.py."""
    target = FORMATS[format]
    world = shape.rows * shape.places
    # The second axis is the rank: at most 65535 programs there, and the first axis takes a large gradient's groups.
    _pack[(triton.cdiv(slices.padded, GROUPS * BLOCK), world)](
        gradient.contiguous(), scale, clipped, message,
        gradient.numel(), slices.length, slices.padded, slices.column, shape.width, shape.row_numel, shape.row_bytes,
        shape.rows, TENSOR=scale is not None, GROUPS=GROUPS, DTYPE=TRITON_DTYPES[format],
        LARGEST=target.max, SMALLEST=SMALLEST_SCALE, num_warps=4,
    )


def sum_rows(message: torch.Tensor, shape: Message, format: str, divisor: int) -> torch.Tensor:
    """Do sum_rows_reference of reduce.py."""
    total = torch.empty(shape.row_numel, device=message.device)
    _sum_rows[(triton.cdiv(shape.row_numel, GROUPS * BLOCK),)](
        message, total, shape.row_numel, shape.row_bytes, shape.rows, divisor, GROUPS=GROUPS, DTYPE=TRITON_DTYPES[format], num_warps=4
    )
    return total


def looped_rows(rows: int) -> int:
    """Return how many of a message's rows are added in a loop: the kernel does not grow with the ranks then."""
    return 0 if rows <= UNROLL else rows - rows % UNROLL


class _Tables(NamedTuple):
    """Offsets of the gradients of a message, on the device."""

    owner: torch.Tensor
    table: torch.Tensor
    programs: int
    aligned: bool
    # Host tensors that a graph copies again at every replay, if they were made while it was captured.
    on_host: tuple[torch.Tensor, ...]


class _Cache:
    """Tables of the messages that are added to one engine's gradients."""

    def __init__(self):
        self._recent: dict[tuple[Target, ...], _Tables] = {}  # those that were used last, at most LIMIT
        self._captured: list[_Tables] = []  # those whose addresses kernels of CUDA graphs have as arguments

    def tables(self, targets: tuple[Target, ...], device: torch.device) -> _Tables:
        """Return (owner, table, programs, aligned) of a message's gradients."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        tables = self._recent.pop(targets, None)
        if capturing:
            self._captured.append(tables or _tables(targets, device))
            if tables is None:
                # Nothing runs in a capture: these are on the device once this graph is replayed. A dry run never is,
                # and the next capture must not find its tables.
                return self._captured[-1]
        self._recent[targets] = tables = tables or _tables(targets, device)
        if len(self._recent) > LIMIT:
            del self._recent[next(iter(self._recent))]
        return tables


_caches = WeakTensorKeyDictionary()  # by the sums of squares, which an engine has one tensor of: its tables end with it


def _tables(targets: tuple[Target, ...], device: torch.device) -> _Tables:
    # A program for each span, numbered through all gradients of the message.
    counts = [span_count(target.numel) for target in targets]
    first = list(itertools.accumulate(counts, initial=0))
    rows = [(begin, *target) for begin, target in zip(first[:-1], targets, strict=True)]
    owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
    table = torch.tensor(rows, dtype=torch.int64)
    # Also the lengths: the last access of a slice must not reach into the next.
    aligned = all(number % ALIGNMENT == 0 for target in targets for number in (target.start, target.numel))
    on_host: tuple[torch.Tensor, ...] = ()
    if device.type == "cuda":  # copied without making the host wait
        # A graph copies from these addresses again at every replay, so they live as long as the tables.
        on_host = owner.pin_memory(), table.pin_memory()
        owner, table = (x.to(device, non_blocking=True) for x in on_host)
        on_host = on_host if torch.cuda.is_current_stream_capturing() else ()
    return _Tables(owner, table, first[-1], aligned, on_host)


def add_rows(
    message: torch.Tensor,
    shape: Message,
    format: str,
    divisor: int,
    targets: Sequence[Target],
    gradient: torch.Tensor,
    squares: torch.Tensor,
    accumulate: bool,
) -> None:
    """Do add_rows_reference of reduce.py."""
    if not targets:  # a rank may have no part of any gradient
        return
    cache = _caches.get(squares)
    if cache is None:
        cache = _caches[squares] = _Cache()
    tables = cache.tables(tuple(targets), message.device)
    _add_rows[(tables.programs,)](
        message, tables.owner, tables.table, gradient, squares, shape.row_numel, shape.row_bytes, divisor,
        ROWS=shape.rows, LOOPED=looped_rows(shape.rows), UNROLL=UNROLL, EXACT=divisor & (divisor - 1) == 0, ACCUMULATE=accumulate, ALIGNED=tables.aligned and gradient.data_ptr() % ALIGNMENT == 0, GROUPS=SPAN // BLOCK,
        DTYPE=TRITON_DTYPES[format], num_warps=WARPS,
    )
