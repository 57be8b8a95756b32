"""Documents in packed rows: their number, their ends (cu_seqlens), and causal attention within them.

Positions count from 0 in every document: a position 0 begins one. Padding is a document, too.

    position_ids    0 1 2 0 1 0 | 0 1 2 3 0 1    two rows of 6 tokens
    ends            0 3 5 6 10 12                through all rows, from 0

The shape of `ends` depends on the values of the positions. For a CUDA graph `ends` has a fixed length and repeats its
last value: empty documents, which varlen kernels skip. Results are cached on the tensor until its next write: a batch
built on the host is counted there, without a host sync. Under sequence parallelism a rank has a slice of the positions:
`first_of_run` finds whether it is a slice of a row of one document.

The format of attention follows the length of a document:

    row    | long document | short | short | long document | short |
    calls  | FP8           | BF16, one call | FP8           | BF16  |

cuDNN's FP8 kernels take sequences of one length: each long document is a call with its own scales, and has the bits of
a row by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

# Tokens from which a document of a packed row is in FP8, and with "auto" a row. Time relative to BF16 on an H200: 0.87
# at 16384 tokens, with 28 heads and with 12; 1.1 and 2.5 at 8192 (docs/log/attention.md).
LONG = 16384

ENDS = "ds_fp8_document_ends"  # keys of `cache`: attributes of a tensor
_COUNT = "ds_fp8_documents"
_RUN = "ds_fp8_first_of_run"
_FULL = "ds_fp8_full"
_fixed: int | None = None


class QKV(NamedTuple):
    """Inputs of attention, whose output is [B, S, heads, D]."""

    q: torch.Tensor  # [B, heads, S, D]
    k: torch.Tensor  # [B, kv_heads, S, D], as v
    v: torch.Tensor


def cached(tensor: torch.Tensor | None, key: str) -> Any:
    value, version = getattr(tensor, key, (None, None))
    return value if value is not None and version == tensor._version else None


def cache(tensor: torch.Tensor | None, key: str, value: Any) -> None:
    # Inference tensors have no version: a later write would go unnoticed.
    if tensor is not None and not tensor.is_inference():
        setattr(tensor, key, (value, tensor._version))


def count(positions: torch.Tensor) -> int:
    """Return the number of documents in rows, positions int [rows, tokens]; a host sync on a device, unless cached.

    0 if the positions of a row do not count from 0 in every document.
    """
    if (known := cached(positions, _COUNT)) is not None:
        return known
    begins = positions == 0
    counts_on = positions[..., 1:] == positions[..., :-1] + 1
    valid = begins[..., 0].all() & (begins[..., 1:] | counts_on).all()
    return int(torch.where(valid, begins.sum(), 0))  # one copy to the host


def first_of_run(positions: torch.Tensor) -> int | None:
    """Return the position from which all rows count on without a break, or None; a host sync as in `count`."""
    result = cached(positions, _RUN)
    if result is None:
        first = positions.flatten()[0]
        numbers = torch.arange(positions.shape[-1], device=positions.device)
        result = int(torch.where((positions == first + numbers).all(), first, -1))
    return None if result < 0 else result


def note_as(here: torch.Tensor, there: torch.Tensor) -> None:
    """Cache on positions on a device the results of `count` and `first_of_run` for their copy on the host."""
    cache(there, _COUNT, count(here))
    first = first_of_run(here)
    cache(there, _RUN, -1 if first is None else first)


def is_full(mask: torch.Tensor) -> bool:
    """Return whether a padding mask [rows, tokens] is all ones; one host sync a tensor."""
    ones = cached(mask, _FULL)
    if ones is None:
        ones = bool(mask.all())
        mark_full(mask, ones)
    return ones


def mark_full(mask: torch.Tensor, ones: bool) -> None:
    cache(mask, _FULL, ones)


def ends(begins: torch.Tensor, most: int) -> torch.Tensor:
    """Return the ends of documents, int32 [most + 1] with the last value repeated, without a host sync.

    begins: bool [rows, tokens], True at the first token of each document and row. most: an upper bound of their number,
    not checked: further documents are lost.
    """
    document = begins.reshape(-1).cumsum(0, dtype=torch.int32)  # the number of each token's document, from 1
    numbers = torch.arange(1, most + 2, dtype=torch.int32, device=begins.device)
    # The insertion point of n is the first token of document n; beyond the last document, the end of all tokens.
    return torch.searchsorted(document, numbers, out_int32=True)


def ends_of(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the ends of documents, int32 [documents + 1], from positions int [rows, tokens]; None if one a row.

    A document begins where positions do not count on. A host sync.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    # The first token of a row stays True: no document continues in the next row.
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    starts = torch.nonzero(begins.reshape(-1)).flatten()
    if len(starts) == len(positions):
        return None
    return torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)


def ends_on_host(ends: torch.Tensor) -> list[int]:
    """Return `ends` as numbers; one host sync a tensor."""
    known = cached(ends, ENDS)
    if known is None:
        known = ends.tolist()
        cache(ends, ENDS, known)
    return known


@contextlib.contextmanager
def fixed(most: int) -> Iterator[None]:
    """Build attention masks inside as `ends` of [most + 1], without a host sync; 0: every row is one document."""
    global _fixed
    before, _fixed = _fixed, most
    try:
        yield
    finally:
        _fixed = before


def fixed_at() -> int | None:
    return _fixed


def longest(ends: list[int]) -> int:
    return max((stop - start for start, stop in pairwise(ends)), default=0)


def by_length(
    in_fp8: Callable[..., torch.Tensor], in_bf16: Callable[..., torch.Tensor], qkv: QKV, ends: torch.Tensor | None
) -> torch.Tensor:
    """Return attention [B, S, heads, D], in FP8 for long documents and for rows of one document.

    in_fp8 takes q, k and v; in_bf16 QKV and the ends of documents, and returns (output, weights). ends: int32
    [documents + 1] through all rows, or None.
    """
    rows, length = len(qkv.q), qkv.q.shape[2]
    if ends is None or len(ends) == rows + 1:
        return in_fp8(*qkv)
    places, outputs = ends_on_host(ends), []
    runs = list(_runs(places, length))
    parts = _pieces([(places[first], places[last]) for first, last in runs], qkv)
    for (first, last), part in zip(runs, parts, strict=True):
        of_call = places[first : last + 1]
        if longest(of_call) >= LONG:
            outputs.append(in_fp8(*part)[0])
        else:
            own = ends[first : last + 1] - of_call[0]
            cache(own, ENDS, [place - of_call[0] for place in of_call])  # known on the host: no sync later
            outputs.append(in_bf16(part, own)[0][0])
    return torch.cat(outputs).unflatten(0, (rows, length))


def attention(
    takes_ends: bool,
    before: Callable[..., tuple[torch.Tensor, Any]],
    module: nn.Module,
    qkv: QKV,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return (output, weights) of the attention function `before`, within documents where `mask` is their ends.

    takes_ends: `before` takes the ends as its mask; otherwise it is called once a document.
    """
    if takes_ends or mask is None or mask.ndim != 1:
        return before(module, *qkv, mask, **options)
    of_documents = [(start, stop) for start, stop in pairwise(ends_on_host(mask)) if start < stop]
    outputs = [before(module, *part, None, **options)[0][0] for part in _pieces(of_documents, qkv)]
    return torch.cat(outputs).unflatten(0, (len(qkv.q), qkv.q.shape[2])), None


def _pieces(places: Sequence[tuple[int, int]], qkv: QKV) -> Iterator[QKV]:
    """Return q, k and v of each (start, stop), with one row; they cover all tokens, in order."""
    rows, length = len(qkv.q), qkv.q.shape[2]
    # split, not slices: its gradient is one concatenation, that of a slice is as large as x.
    sizes = [[stop - start for start, stop in places if start // length == row] for row in range(rows)]
    parts = [[part for row, own in zip(x.split(1), sizes, strict=True) for part in row.split(own, 2)] for x in qkv]
    return (QKV(*each) for each in zip(*parts, strict=True))


def _runs(places: list[int], length: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last index in `places` of each call's documents; no call crosses the end of a row."""
    first = 0
    for index, (start, stop) in enumerate(pairwise(places)):
        is_long = stop - start >= LONG
        if index > first and (is_long or start % length == 0):
            yield first, index
            first = index
        if is_long:
            yield index, index + 1
            first = index + 1
    if first < len(places) - 1:
        yield first, len(places) - 1
