"""Documents in packed rows: how many there are and where they end, and causal attention within them.

Positions count from 0 in every document, so that a token at 0 begins one. Padding is a document like others.

    position_ids    0 1 2 0 1 0 | 0 1 2 3 0 1    two rows of 6 tokens
    ends            0 3 5 6 10 12                through all rows, with the 0 before the first

The shape of `ends` depends on the values of the positions, which a CUDA graph cannot do. Where one is captured, `ends`
has a fixed length, and repeats the last value: documents of no tokens, which kernels for variable lengths skip. What
was found is noted on the tensor, until it is written to: a batch built on the host is counted there, without waiting
for the device. Where ranks share rows, a rank has a slice of their positions: `first_of_run` tells whether it is one of
a row that is one document.

Attention within documents takes the format that the length of each pays for:

    row    | long document | short | short | long document | short |
    calls  | FP8           | BF16, one call | FP8           | BF16  |

cuDNN's FP8 kernels take sequences of one length, so that a long document is a call of its own, with scales of its own:
the numbers it would have in a row by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

# Tokens from which on a document of a packed row is in FP8, and with "auto" a row. On an H200 attention in FP8 takes
# 0.87 of BF16's time at 16384 tokens, with 28 heads and with 12, and 1.1 and 2.5 at 8192 (docs/log/attention.md).
LONG = 16384

_NOTE = "ds_fp8_documents"
_RUN = "ds_fp8_first_of_run"
_WHOLE = "ds_fp8_whole"
_ENDS = "ds_fp8_document_ends"
_fixed: int | None = None


class QKV(NamedTuple):
    """Operands of attention, whose output is [B, S, heads, D]."""

    q: torch.Tensor  # [B, heads, S, D]
    k: torch.Tensor  # [B, kv_heads, S, D], as v
    v: torch.Tensor


def _noted(tensor: torch.Tensor | None, key: str) -> tuple[Any] | None:
    known = getattr(tensor, key, None)
    return known[:1] if known is not None and known[1] == tensor._version else None


def _note(tensor: torch.Tensor | None, key: str, found: Any) -> None:
    # Inference tensors have no version, so that a later write could not be noticed.
    if tensor is not None and not tensor.is_inference():
        setattr(tensor, key, (found, tensor._version))


def count(positions: torch.Tensor) -> int:
    """Return how many documents rows hold; the host waits where int [rows, tokens] are on a device and not noted.

    At least one a row; 0 where the positions of some row do not count from 0 in every document.
    """
    if (known := _noted(positions, _NOTE)) is not None:
        return known[0]
    begins = positions == 0
    counts_on = positions[..., 1:] == positions[..., :-1] + 1
    # On the device up to here: one number is copied to the host, not two.
    told = begins[..., 0].all() & (begins[..., 1:] | counts_on).all()
    return int(torch.where(told, begins.sum(), 0))


def note(positions: torch.Tensor, documents: int) -> None:
    _note(positions, _NOTE, documents)


def first_of_run(positions: torch.Tensor) -> int | None:
    """Return the position from which all rows count on without a break, or None; the host waits as in `count`."""
    if (known := _noted(positions, _RUN)) is not None:
        return known[0]
    first = positions.flatten()[0]
    numbers = torch.arange(positions.shape[-1], device=positions.device)
    found = int(torch.where((positions == first + numbers).all(), first, -1))
    return None if found < 0 else found


def note_as(here: torch.Tensor, there: torch.Tensor) -> None:
    """Remember for positions on a device what `count` and `first_of_run` return for their copy on the host."""
    note(there, count(here))
    _note(there, _RUN, first_of_run(here))


def whole(mask: torch.Tensor) -> bool:
    """Return whether a padding mask [rows, tokens] has ones only; the host waits as in `count`, once a tensor."""
    if (known := _noted(mask, _WHOLE)) is not None:
        return known[0]
    ones = bool(mask.all())
    note_whole(mask, ones)
    return ones


def note_whole(mask: torch.Tensor, ones: bool) -> None:
    _note(mask, _WHOLE, ones)


def ends(begins: torch.Tensor, most: int) -> torch.Tensor:
    """Return where documents end, int32 [most + 1] whose last value is repeated, without waiting for the device.

    begins: bool [rows, tokens], the first token of each document, that of every row among them. most: a bound of their
    number, which nothing checks: of more, the last ones are lost.
    """
    document = begins.reshape(-1).cumsum(0, dtype=torch.int32)  # of every token, from 1
    numbers = torch.arange(1, most + 2, dtype=torch.int32, device=begins.device)
    # `document` ascends by one at each first token: the insertion point of n is where document n begins, and that of
    # numbers beyond the last is the end of all tokens.
    return torch.searchsorted(document, numbers, out_int32=True)


def ends_of(positions: torch.Tensor) -> torch.Tensor | None:
    """Return where documents of positions int [rows, tokens] end, int32 [documents + 1]; None if every row is one.

    A document begins where positions do not count on. The host waits for the device.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    # The first token of a row stays True: no document continues in the next row.
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    starts = torch.nonzero(begins.reshape(-1)).flatten()
    if len(starts) == len(positions):
        return None
    return torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)


def note_ends(tensor: torch.Tensor | None, found: object) -> None:
    _note(tensor, _ENDS, found)


def noted_ends(tensor: torch.Tensor | None) -> object | None:
    known = _noted(tensor, _ENDS)
    return None if known is None else known[0]


def places_of(ends: torch.Tensor) -> list[int]:
    """Return `ends` as numbers; the host waits for the device once for each tensor."""
    known = noted_ends(ends)
    if known is None:
        known = ends.tolist()
        note_ends(ends, known)
    return known


@contextlib.contextmanager
def fixed(most: int) -> Iterator[None]:
    """Let attention masks built inside be `ends` of [most + 1], without a host sync; 0: every row is one document."""
    global _fixed
    before, _fixed = _fixed, most
    try:
        yield
    finally:
        _fixed = before


def fixed_at() -> int | None:
    return _fixed


def longest(places: list[int]) -> int:
    return max((stop - start for start, stop in pairwise(places)), default=0)


class Call(NamedTuple):
    start: int  # First token, counted through all rows
    stop: int
    in_fp8: bool
    # int32: where its documents end, counted from its first token; None of one in FP8, which is one document
    ends: torch.Tensor | None


def calls(ends: torch.Tensor, length: int) -> list[Call]:
    """Return the calls of attention in the order of their tokens; the host waits as in `places_of`."""
    places, found = places_of(ends), []
    for first, last in _runs(places, length):
        of_call, own = places[first : last + 1], None
        in_fp8 = longest(of_call) >= LONG
        if not in_fp8:
            own = ends[first : last + 1] - of_call[0]  # on the device
            note_ends(own, [place - of_call[0] for place in of_call])  # which nobody needs to wait for
        found.append(Call(of_call[0], of_call[-1], in_fp8, own))
    return found


def by_length(
    in_fp8: Callable[..., torch.Tensor], in_bf16: Callable[..., torch.Tensor], qkv: QKV, ends: torch.Tensor | None
) -> torch.Tensor:
    """Return attention [B, S, heads, D] with long documents in FP8; rows of one document are in FP8 at any length.

    in_fp8 takes q, k and v, in_bf16 QKV and where documents end. ends: int32 [documents + 1] through all rows, or None.
    """
    rows, length = len(qkv.q), qkv.q.shape[2]
    if ends is None or len(ends) == rows + 1:
        return in_fp8(*qkv)
    of_rows = calls(ends, length)
    parts = _pieces([(call.start, call.stop) for call in of_rows], qkv)
    outputs = [
        in_fp8(*part)[0] if call.in_fp8 else in_bf16(part, call.ends)[0]
        for call, part in zip(of_rows, parts, strict=True)
    ]
    return torch.cat(outputs).unflatten(0, (rows, length))


def attention(
    before: Callable[..., tuple[torch.Tensor, Any]],
    takes_ends: bool,
    module: nn.Module,
    options: Mapping[str, Any],
    qkv: QKV,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return an attention function's output [B, S, heads, D] within documents.

    `takes_ends`: whether the function `before` takes `ends` as its mask; otherwise it is called for each document.
    """
    if takes_ends:
        return before(module, *qkv, ends, **options)[0]
    of_documents = [(start, stop) for start, stop in pairwise(places_of(ends)) if start < stop]
    outputs = [before(module, *part, None, **options)[0][0] for part in _pieces(of_documents, qkv)]
    return torch.cat(outputs).unflatten(0, (len(qkv.q), qkv.q.shape[2]))


def _pieces(places: Sequence[tuple[int, int]], qkv: QKV) -> Iterator[QKV]:
    """Return pieces, with S = n and one row, of q, k and v; they are all tokens, in their order."""
    rows, length = len(qkv.q), qkv.q.shape[2]
    # The gradient of a split is one concatenation; that of a slice is a tensor as large as x, for each piece.
    sizes = [[stop - start for start, stop in places if start // length == row] for row in range(rows)]
    parts = [[part for row, own in zip(x.split(1), sizes, strict=True) for part in row.split(own, 2)] for x in qkv]
    return (QKV(*each) for each in zip(*parts, strict=True))


def _runs(places: list[int], length: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last index in `places` of each call's documents: no call crosses the end of a row."""
    first = 0
    for index, (start, stop) in enumerate(pairwise(places)):
        alone = stop - start >= LONG
        # A run of short documents ends before a long one, and with its row: q, k and v of a call are slices of one row.
        if index > first and (alone or start % length == 0):
            yield first, index
            first = index
        if alone:
            yield index, index + 1
            first = index + 1
    if first < len(places) - 1:
        yield first, len(places) - 1
