"""Causal attention within the documents of packed rows, each document in the format that its length pays for.

    row    | long document | short | short | long document | short |
    calls  | FP8           | BF16, one call | FP8           | BF16  |

cuDNN's FP8 kernels take sequences of one length, so that a long document is a call of its own, with scales of its own:
the numbers it would have in a row by itself. Documents below `LONG` tokens stay in BF16, those that lie side by side in
one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_fp8.layers.attention import documents

LONG = 16384
"""Tokens from which on a document of a packed row is in FP8. On an H200 cuDNN's FP8 attention takes 0.81 of the time of
BF16 at 32768 tokens, and gains nothing at 8192 (docs/performance.md); between them nothing was measured."""

Heads = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""[B, heads, S, D], twice [B, kv_heads, S, D] -> [B, S, heads, D]"""


def longest(places: list[int]) -> int:
    """Return the tokens of the longest document, of where documents end."""
    return max((stop - start for start, stop in pairwise(places)), default=0)


def by_length(
    in_fp8: Heads,
    in_bf16: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention [B, S, heads, D] with long documents in FP8; rows of one document are in FP8 at any length.

    Args:
        in_fp8: Causal attention over whole rows.
        in_bf16: Takes besides q, k and v where documents end.
        query: [B, heads, S, D].
        key: [B, kv_heads, S, D].
        value: [B, kv_heads, S, D].
        ends: int32 [documents + 1] through all rows, or None.
    """
    rows, length = len(query), query.shape[2]
    if ends is None or len(ends) == rows + 1:
        return in_fp8(query, key, value)
    outputs, of_rows = [], calls(ends, length)
    heads = (_pieces([(call.start, call.stop) for call in of_rows], x) for x in (query, key, value))
    for call, *of_call in zip(of_rows, *heads, strict=True):
        outputs.append(in_fp8(*of_call)[0] if call.in_fp8 else in_bf16(*of_call, call.ends)[0])
    return torch.cat(outputs).unflatten(0, (rows, length))


class Call(NamedTuple):
    """Documents that one call of attention computes."""

    start: int
    """First token, counted through all rows."""
    stop: int
    in_fp8: bool
    ends: torch.Tensor | None
    """int32: where its documents end, counted from its first token; None of one in FP8, which is one document."""


def calls(ends: torch.Tensor, length: int) -> list[Call]:
    """Return the calls of attention in the order of their tokens; the host waits once for each tensor.

    Args:
        ends: int32 [documents + 1] through all rows.
        length: Tokens of a row.
    """
    places, found = documents.places(ends), []
    for first, last in _runs(places, length):
        of_call, own = places[first : last + 1], None
        in_fp8 = longest(of_call) >= LONG
        if not in_fp8:
            own = ends[first : last + 1] - of_call[0]  # on the device
            documents.note_ends(own, [place - of_call[0] for place in of_call])  # which nobody needs to wait for
        found.append(Call(of_call[0], of_call[-1], in_fp8, own))
    return found


def attention(
    before: Callable[..., tuple[torch.Tensor, Any]],
    takes_ends: bool,
    module: nn.Module,
    options: Mapping[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return an attention function's output [B, S, heads, D] within documents.

    Args:
        before: The function.
        takes_ends: Whether it takes `ends` as its mask; otherwise it is called for each document.
        module: The attention module.
        options: Of the function.
        query: [B, heads, S, D].
        key: [B, kv_heads, S, D].
        value: [B, kv_heads, S, D].
        ends: int32 [documents + 1] through all rows.
    """
    if takes_ends:
        return before(module, query, key, value, ends, **options)[0]
    of_documents = [(start, stop) for start, stop in pairwise(documents.places(ends)) if start < stop]
    heads = (_pieces(of_documents, x) for x in (query, key, value))
    outputs = [before(module, *own, None, **options)[0][0] for own in zip(*heads, strict=True)]
    return torch.cat(outputs).unflatten(0, (len(query), query.shape[2]))


def _pieces(places: Sequence[tuple[int, int]], x: torch.Tensor) -> list[torch.Tensor]:
    """Return [1, heads, n, D] of each piece of x [B, heads, S, D].

    Args:
        places: First token and end of each piece, counted through all rows; together all tokens, in their order.
        x: Queries, keys or values.
    """
    # The gradient of a split is one concatenation; that of a slice is a tensor as large as x, for each piece.
    lengths = [[stop - start for start, stop in places if start // x.shape[2] == row] for row in range(len(x))]
    of_rows = zip(x.split(1), lengths, strict=True)
    return [piece for row, own in of_rows for piece in row.split(own, 2)]


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
