"""Tokenised examples packed into rows of one length, with no attention from one example to another.

Position ids restart at every example: transformers derives the block-diagonal mask from that when it is given no
attention mask.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from ds_fp8.data.chat import IGNORED
from ds_fp8.errors import UserError

Example = tuple[Sequence[int], Sequence[int]]
"""Token ids and labels of one example, of the same length; labels are not shifted, -100 carries no loss."""


@dataclass(frozen=True)
class PackedDataset(Dataset):
    """Rows of `sequence_length` tokens. Item i: `input_ids`, `labels`, `position_ids`, int64 [sequence_length]."""

    input_ids: np.ndarray
    """int32 [rows, sequence_length]"""
    labels: np.ndarray
    """int32 [rows, sequence_length]: the token itself, not shifted, or -100 where there is no loss."""
    position_ids: np.ndarray
    """int32 [rows, sequence_length], from 0 in every example and in the padding behind the last one."""
    tokens: int
    """Tokens in all rows, padding left out."""
    dropped: int
    """Examples left out: longer than a row (overlong "drop"), or without any token that carries loss."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        names = ("input_ids", "labels", "position_ids")
        return {name: torch.from_numpy(getattr(self, name)[index].astype(np.int64)) for name in names}


def pack(
    examples: Iterable[Example], sequence_length: int, pad_id: int, overlong: Literal["split", "drop"] = "split"
) -> PackedDataset:
    """Pack each example into the fullest row that still has room for it, in the order given.

    An example longer than a row is split into consecutive pieces, each an example of its own, or dropped. Every row
    has at least one label that carries loss. Raises UserError when no example is left.
    """
    rows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    tokens = dropped = 0
    for ids, labels in examples:
        pieces = _pieces(ids, labels, sequence_length, overlong)
        dropped += not pieces
        for piece in pieces:
            length = len(piece[0])
            place = bisect_left(room, (length, 0))
            free, row = room.pop(place) if place < len(room) else (sequence_length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(piece)
            if free > length:
                insort(room, (free - length, row))
            tokens += length
    if not rows:
        raise UserError(
            f"none of the {dropped} examples fits into a row of {sequence_length} tokens and carries loss",
            key="data.sequence_length",
            remedy="raise data.sequence_length, or give data with shorter conversations that have assistant turns",
        )
    return _fill(rows, sequence_length, pad_id, tokens, dropped)


def _pieces(ids: Sequence[int], labels: Sequence[int], sequence_length: int, overlong: str) -> list[Example]:
    """The example cut to rows, without the pieces that carry no loss."""
    if len(ids) > sequence_length and overlong == "drop":
        return []
    starts = range(0, len(ids), sequence_length)
    pieces = [(ids[start : start + sequence_length], labels[start : start + sequence_length]) for start in starts]
    # The label of a first token does not count: it would be predicted from the example before.
    return [piece for piece in pieces if any(label != IGNORED for label in piece[1][1:])]


def _fill(rows: list[list[Example]], sequence_length: int, pad_id: int, tokens: int, dropped: int) -> PackedDataset:
    shape = (len(rows), sequence_length)
    input_ids = np.full(shape, pad_id, dtype=np.int32)
    all_labels = np.full(shape, IGNORED, dtype=np.int32)
    position_ids = np.zeros(shape, dtype=np.int32)
    for index, row in enumerate(rows):
        start = 0
        for ids, labels in row:
            stop = start + len(ids)
            input_ids[index, start:stop] = ids
            all_labels[index, start:stop] = labels
            all_labels[index, start] = IGNORED
            position_ids[index, start:stop] = np.arange(len(ids))
            start = stop
        position_ids[index, start:] = np.arange(sequence_length - start)
    return PackedDataset(input_ids, all_labels, position_ids, tokens, dropped)
