"""Tokenised examples packed into rows, with no attention from one example to another.

Which piece of which example lies in which row is planned once, from lengths; tokens are read when a row is asked for.
Position ids restart at every example: the model's block-diagonal mask follows from that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from ds_fp8.data.chat import IGNORED
from ds_fp8.data.token_store import NO_LOSS

WINDOW = 1 << 16
"""Examples that are packed together before the next ones are looked at, which bounds time and memory."""


class Store(Protocol):
    """The interface that packing reads examples through; `TokenStore` has it."""

    def lengths(self) -> np.ndarray:
        """Return int64 [examples]: how many tokens each example has."""

    def read(self, example: int, start: int, length: int) -> np.ndarray:
        """Return `length` tokens of an example from its token `start` on."""


@dataclass
class PackingStats:
    """Counts of the examples that packing kept, cut and dropped."""

    tokens: int = 0
    """Tokens in all rows, padding left out."""
    examples: int = 0
    """Examples that were given."""
    overlong: int = 0
    """Examples longer than a row."""
    longest: int = 0
    """Tokens of the longest example."""
    dropped: int = 0
    """Examples left out: longer than a row ("drop"), or without any token that carries loss."""
    tokens_left_out: int = 0
    """Tokens of dropped examples, of cut ends and of pieces without loss."""


@dataclass(frozen=True)
class Plan:
    """Rows as pieces of examples."""

    pieces: np.ndarray
    """int64 [pieces, 3]: example, its first token, number of tokens; row by row."""
    row_ends: np.ndarray
    """int64 [rows]: where each row ends in `pieces`."""
    stats: PackingStats = field(default_factory=PackingStats)

    def __len__(self) -> int:
        return len(self.row_ends)

    def row(self, index: int) -> np.ndarray:
        """Return the pieces of a row, int64 [pieces of it, 3]."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.pieces[self.row_ends[index - 1] if index else 0 : self.row_ends[index]]

    def row_tokens(self) -> np.ndarray:
        """Return int64 [rows]: how many tokens each row has, padding left out."""
        # Tokens before each piece, so that a row's are a difference: no loop over millions of rows.
        before = np.concatenate([[0], np.cumsum(self.pieces[:, 2])])
        return np.diff(before[self.row_ends], prepend=0)


def plan_rows(
    store: Store,
    chosen: np.ndarray,
    sequence_length: int,
    overlong: Literal["split", "cut", "drop"] = "split",
    *,
    together: bool = True,
    all_carry_loss: bool = True,
) -> Plan:
    """Return the plan of rows of at most `sequence_length` tokens. Every row has a token that carries loss.

    Args:
        store: Tokens of the examples.
        chosen: int64 indices of the examples to pack, in this order.
        sequence_length: Most tokens of a row.
        overlong: What happens to an example longer than a row: "split" into pieces, "cut" to a row, or "drop".
        together: Whether an example goes into the fullest row that still has room for it; else into a new row.
        all_carry_loss: Whether every token of the store carries loss.
    """
    lengths = store.lengths()
    pieces: list[tuple[int, int, int]] = []
    row_ends: list[int] = []
    stats = PackingStats(examples=len(chosen))
    for first in range(0, len(chosen), WINDOW):
        # New rows for each window: rows of the last one are closed, however much room they have.
        rows: list[list[tuple[int, int, int]]] = []
        room: list[tuple[int, int]] = []  # (free tokens, row), sorted
        for example in chosen[first : first + WINDOW].tolist():
            length = int(lengths[example])
            stats.longest = max(stats.longest, length)
            stats.overlong += length > sequence_length
            kept = 0
            for piece in _pieces(example, length, sequence_length, overlong):
                if not _carries_loss(store, piece, all_carry_loss):
                    continue
                size = piece[2]
                kept += size
                # Best fit: the row with the least free tokens that are enough. Sorted, so each example takes log(rows).
                place = bisect_left(room, (size, 0)) if together else len(room)
                free, row = room.pop(place) if place < len(room) else (sequence_length, len(rows))
                if row == len(rows):
                    rows.append([])
                rows[row].append(piece)
                # A full row leaves the list, which stays short.
                if free > size and together:
                    insort(room, (free - size, row))
            stats.tokens += kept
            stats.tokens_left_out += length - kept
            stats.dropped += not kept
        for row in rows:
            pieces.extend(row)
            row_ends.append(len(pieces))
    return Plan(np.array(pieces, dtype=np.int64).reshape(-1, 3), np.array(row_ends, dtype=np.int64), stats)


def _pieces(example: int, length: int, sequence_length: int, overlong: str) -> Iterator[tuple[int, int, int]]:
    if length <= sequence_length:
        yield example, 0, length
    elif overlong == "cut":
        yield example, 0, sequence_length
    elif overlong == "split":
        for start in range(0, length, sequence_length):
            yield example, start, min(sequence_length, length - start)


def _carries_loss(store: Store, piece: tuple[int, int, int], all_carry_loss: bool) -> bool:
    # The first token of an example is never predicted: what stands before it belongs to another.
    if all_carry_loss or piece[2] < 2:
        return piece[2] >= 2
    return bool((store.read(*piece)[1:] < NO_LOSS).any())


class PackedDataset(Dataset):
    """Planned rows of one or several sources, one source after the other.

    Item i is row i padded to `sequence_length`: `input_ids`, `labels` (the token itself, not shifted, or -100 where
    there is no loss) and `position_ids` (from 0 in every example, and in the padding), int64 [sequence_length].
    """

    def __init__(self, parts: Sequence[tuple[Store, Plan]], sequence_length: int, pad_id: int):
        self._parts, self.sequence_length, self._pad_id = list(parts), sequence_length, pad_id
        self.rows_by_source = tuple(len(plan) for _, plan in parts)
        """Number of rows of each source."""
        self._first = np.cumsum([0, *self.rows_by_source])
        self._row_tokens = [plan.row_tokens() for _, plan in parts]

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.joined([index], self.sequence_length)

    @property
    def tokens(self) -> int:
        """Return the tokens in all rows, padding left out."""
        return sum(plan.stats.tokens for _, plan in self._parts)

    def row_tokens(self, index: int) -> int:
        """Return the tokens of a row, padding left out."""
        source, local = self._place(index)
        return int(self._row_tokens[source][local])

    def label_tokens(self, index: int) -> int:
        """Return how many tokens of a row carry loss."""
        source, local = self._place(index)
        store, plan = self._parts[source]
        # The first token of a piece is never predicted.
        return sum(int((store.read(*piece)[1:] < NO_LOSS).sum()) for piece in plan.row(local).tolist())

    def joined(self, rows: Sequence[int], length: int) -> dict[str, torch.Tensor]:
        """Return the examples of several rows in one row, padded to `length` tokens. No rows: padding without loss."""
        input_ids = np.full(length, self._pad_id, dtype=np.int64)
        labels = np.full(length, IGNORED, dtype=np.int64)
        position_ids = np.empty(length, dtype=np.int64)
        stop = 0
        for row in rows:
            source, local = self._place(row)
            store, plan = self._parts[source]
            for example, first, size in plan.row(local).tolist():
                tokens = store.read(example, first, size)
                start, stop = stop, stop + size
                silent = tokens >= NO_LOSS
                # The mark lies in the token's highest bit: one uint32 a token holds both, and the embedding must not
                # see it.
                input_ids[start:stop] = tokens & ~NO_LOSS
                labels[start:stop] = np.where(silent, IGNORED, input_ids[start:stop])
                # What precedes it belongs to another example, or to nothing.
                labels[start] = IGNORED
                position_ids[start:stop] = np.arange(size)
        # Padding is a document of its own: attention within it meets no token of an example.
        position_ids[stop:] = np.arange(length - stop)
        arrays = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def report(self) -> dict[str, int | float]:
        """Return the number of rows, and the sums of `PackingStats` over the sources."""
        total = PackingStats()
        for _, plan in self._parts:
            for name, value in asdict(plan.stats).items():
                setattr(total, name, max(total.longest, value) if name == "longest" else getattr(total, name) + value)
        return {"rows": len(self), **asdict(total)}

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        # side="right": a source without rows begins where the next one does, and is skipped.
        source = int(np.searchsorted(self._first, index, side="right")) - 1
        return source, int(index - self._first[source])
