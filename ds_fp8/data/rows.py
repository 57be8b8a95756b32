"""Rows: which piece of which example lies in which row, the rows of each step, and each rank's share of them.

Packing is planned once, from lengths; tokens are read when a row is asked for. Position ids restart at every example:
the model's block-diagonal mask follows from that. A model that makes no such mask, or mixes tokens by a convolution or
a state, gets rows of one example (`PackedDataset.alone`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from ds_fp8.data.chat import IGNORED
from ds_fp8.data.token_store import NO_LOSS, TokenStore

# Places in the order of a mixture over which the shares of its sources are kept; each source has at least one
BLOCK = 4096
WINDOW = 1 << 16  # Examples that are packed together before the next ones are looked at, which bounds time and memory


@dataclass
class PackingStats:
    """Counts of the examples that packing kept, cut and dropped."""

    tokens: int = 0  # Tokens in all rows, padding left out
    examples: int = 0  # Examples that were given
    overlong: int = 0  # Examples longer than a row
    longest: int = 0  # Tokens of the longest example
    dropped: int = 0  # Examples left out: longer than a row ("drop"), or without any token that carries loss
    tokens_left_out: int = 0  # Tokens of dropped examples, of cut ends and of pieces without loss


@dataclass(frozen=True)
class Plan:
    """Rows as pieces of examples."""

    # int64 [pieces, 4]: example, its first token, number of tokens, and of those with loss; row by row
    pieces: np.ndarray
    row_ends: np.ndarray  # int64 [rows]: where each row ends in `pieces`
    stats: PackingStats = field(default_factory=PackingStats)

    def __len__(self) -> int:
        return len(self.row_ends)

    def row(self, index: int) -> np.ndarray:
        return self.pieces[self.row_ends[index - 1] if index else 0 : self.row_ends[index]]

    def row_tokens(self) -> np.ndarray:
        # Tokens before each piece, so that a row's are a difference: no loop over millions of rows.
        before = np.concatenate([[0], np.cumsum(self.pieces[:, 2])])
        return np.diff(before[self.row_ends], prepend=0)


def plan_rows(
    store: TokenStore,
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
        overlong: For an example longer than a row: "split" into pieces, "cut" to a row, or "drop".
        together: An example goes into the fullest row that still has room for it; else into a new row.
        all_carry_loss: Every token of the store carries loss.
    """
    lengths = store.lengths()
    pieces: list[tuple[int, int, int, int]] = []
    row_ends: list[int] = []
    stats = PackingStats(examples=len(chosen))
    for first in range(0, len(chosen), WINDOW):
        # New rows for each window: rows of the last one are closed, however much room they have.
        rows: list[list[tuple[int, int, int, int]]] = []
        room: list[tuple[int, int]] = []  # (free tokens, row), sorted
        for example in chosen[first : first + WINDOW].tolist():
            length = int(lengths[example])
            stats.longest = max(stats.longest, length)
            stats.overlong += length > sequence_length
            kept = 0
            for piece in _pieces(example, length, sequence_length, overlong):
                # The first token of an example is never predicted: what stands before it belongs to another.
                labels = piece[2] - 1 if all_carry_loss else int((store.read(*piece)[1:] < NO_LOSS).sum())
                if not labels:
                    continue
                size = piece[2]
                kept += size
                # Best fit: the row with the least free tokens that are enough. Sorted, so each example takes log(rows).
                place = bisect_left(room, (size, 0)) if together else len(room)
                free, row = room.pop(place) if place < len(room) else (sequence_length, len(rows))
                if row == len(rows):
                    rows.append([])
                rows[row].append((*piece, labels))
                # A full row leaves the list, which stays short.
                if free > size and together:
                    insort(room, (free - size, row))
            stats.tokens += kept
            stats.tokens_left_out += length - kept
            stats.dropped += not kept
        for row in rows:
            pieces.extend(row)
            row_ends.append(len(pieces))
    return Plan(np.array(pieces, dtype=np.int64).reshape(-1, 4), np.array(row_ends, dtype=np.int64), stats)


def _pieces(example: int, length: int, sequence_length: int, overlong: str) -> Iterator[tuple[int, int, int]]:
    if length <= sequence_length:
        yield example, 0, length
    elif overlong == "cut":
        yield example, 0, sequence_length
    elif overlong == "split":
        for start in range(0, length, sequence_length):
            yield example, start, min(sequence_length, length - start)


class PackedDataset(Dataset):
    """Planned rows of one or several sources, one source after the other.

    Item i is row i padded to `sequence_length`: `input_ids`, `labels` (the token itself, not shifted, or -100 where
    there is no loss) and `position_ids` (from 0 in every example, and in the padding), int64 [sequence_length].
    """

    def __init__(
        self, parts: Sequence[tuple[TokenStore, Plan]], sequence_length: int, pad_id: int, alone: bool = False
    ):
        """`alone`: every row is one example, and positions count on in its padding, so that no mask is needed."""
        self._parts, self.sequence_length, self._pad_id, self.alone = list(parts), sequence_length, pad_id, alone
        self.rows_by_source = tuple(len(plan) for _, plan in parts)  # Number of rows of each source
        self._first = np.cumsum([0, *self.rows_by_source])
        self._row_tokens = [plan.row_tokens() for _, plan in parts]

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.joined([index], self.sequence_length)

    @property
    def tokens(self) -> int:
        return sum(plan.stats.tokens for _, plan in self._parts)

    def row_tokens(self, index: int) -> int:
        source, local = self._place(index)
        return int(self._row_tokens[source][local])

    def label_tokens(self, index: int) -> int:
        source, local = self._place(index)
        return int(self._parts[source][1].row(local)[:, 3].sum())

    def joined(self, rows: Sequence[int], length: int) -> dict[str, torch.Tensor]:
        """Return the examples of several rows in one row, padded to `length` tokens. No rows: padding without loss."""
        input_ids = np.full(length, self._pad_id, dtype=np.int64)
        labels = np.full(length, IGNORED, dtype=np.int64)
        position_ids = np.empty(length, dtype=np.int64)
        stop = 0
        for row in rows:
            source, local = self._place(row)
            store, plan = self._parts[source]
            for example, first, size, _ in plan.row(local).tolist():
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
        # Padding is a document of its own: attention within it meets no token of an example. Behind an example alone
        # it is part of it: without several documents in a row a CUDA graph can be captured with any attention.
        position_ids[stop:] = np.arange(stop, length) if self.alone else np.arange(length - stop)
        arrays = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def report(self) -> dict[str, int | float]:
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


def rows_of_step(
    step: int, num_rows: int | Sequence[int], global_batch: int, seed: int, weights: Sequence[float] = (1.0,)
) -> list[int]:
    """Return the row indices of an optimizer step, a function of the arguments alone.

    Every epoch of a source visits each of its rows once in a new order; a step may end one and begin the next.
    Indices count through the rows of all sources.
    """
    counts = (num_rows,) if isinstance(num_rows, int) else tuple(num_rows)
    places = np.arange(step * global_batch, (step + 1) * global_batch)
    rows = np.empty(global_batch, dtype=np.int64)
    first = 0
    for source, (count, (mine, visits)) in enumerate(zip(counts, _visits(places, tuple(weights), seed), strict=True)):
        for epoch in np.unique(visits // count).tolist():
            now = visits // count == epoch
            # From seed, epoch and source alone: a resumed run needs the number of the step and nothing else.
            rows[np.flatnonzero(mine)[now]] = first + _epoch_order(source, epoch, count, seed)[visits[now] % count]
        first += count
    return rows.tolist()


def measured_rows(num_rows: Sequence[int], most: int, weights: Sequence[float]) -> list[int]:
    """Return the rows that a loss is measured on, the same ones every time.

    They are the first rows of each source, in turns, so that any number of them has the sources by their shares. Once a
    source has no more the others go on.
    """
    wanted = min(most, sum(num_rows))
    if len(num_rows) == 1:
        return list(range(wanted))
    firsts = np.cumsum([0, *num_rows]).tolist()
    # By the place in a mixture at which a source's next row is due.
    due = [(1 / weight, source, 0) for source, weight in enumerate(weights) if num_rows[source]]
    heapq.heapify(due)
    rows = []
    while len(rows) < wanted:
        _, source, row = due[0]
        rows.append(firsts[source] + row)
        if row + 1 < num_rows[source]:
            heapq.heapreplace(due, ((row + 2) / weights[source], source, row + 1))
        else:
            heapq.heappop(due)
    return rows


def local_micro_batches(
    rows: Sequence[int], rank: int, world: int, micro_batch: int, accumulation: int
) -> list[list[int]]:
    """Return the `accumulation` micro-batches that a rank takes of a step's rows."""
    # Micro-batch by micro-batch over all ranks: on another number of ranks a step has the same rows.
    starts = [(index * world + rank) * micro_batch for index in range(accumulation)]
    return [list(rows[start : start + micro_batch]) for start in starts]


def budgeted_micro_batches(
    rows: Sequence[int], tokens: Sequence[int], world: int, budget: int
) -> list[list[list[int]]]:
    """Return for each rank the micro-batches that it takes of some rows, each of at most `budget` tokens.

    All ranks get equally many micro-batches, those they run at the same time alike in tokens; one may be empty when
    there are fewer rows than ranks.
    """
    longest_first = sorted(range(len(rows)), key=lambda place: (-tokens[place], place))
    fewest = max(1, -(-sum(tokens) // (budget * world)))
    # From the fewest that the sum of tokens allows; rarely more than one or two more are needed.
    for rounds in range(fewest, len(rows) + 1):
        bins = _spread(longest_first, tokens, rounds * world)
        if max(filled for filled, _ in bins) <= budget:
            break
    # Neighbours after sorting run at the same time on different ranks: they differ least in tokens.
    bins.sort(key=lambda entry: (-entry[0], entry[1]))
    batches = [[rows[place] for place in places] for _, places in bins]
    return [batches[rank::world] for rank in range(world)]


def padded_micro_batches(rows: Sequence[int], tokens: Sequence[int], world: int, budget: int) -> list[list[list[int]]]:
    """Return for each rank its micro-batches, as `budgeted_micro_batches` does, of rows that stay rows of their own.

    Rows of a micro-batch are padded to its longest, and have at most `budget` tokens with their padding.
    """
    bins: list[list[int]] = []
    # Neighbours after sorting differ least in tokens: those of a micro-batch, and those that run at the same time.
    for place in sorted(range(len(rows)), key=lambda place: (-tokens[place], place)):
        if bins and (len(bins[-1]) + 1) * tokens[bins[-1][0]] <= budget:
            bins[-1].append(place)
        else:
            bins.append([place])
    while len(bins) % world:
        # The largest of several rows is halved; where every row is alone one is empty.
        at = max(range(len(bins)), key=lambda n: len(bins[n]) > 1 and len(bins[n]) * tokens[bins[n][0]])
        half = -(-len(bins[at]) // 2)
        bins[at : at + 1] = [bins[at][:half], bins[at][half:]]
    return [[[rows[place] for place in places] for places in bins[rank::world]] for rank in range(world)]


def _spread(places: Sequence[int], tokens: Sequence[int], number: int) -> list[tuple[int, list[int]]]:
    filled, members = [0] * number, [[] for _ in range(number)]
    for place in places:
        # The longest rows are placed first, the short ones even out the bins at the end.
        emptiest = min(range(number), key=filled.__getitem__)
        filled[emptiest] += tokens[place]
        members[emptiest].append(place)
    return list(zip(filled, members, strict=True))


def _visits(places: np.ndarray, weights: tuple[float, ...], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each source which of `places` are its own (bool), and each place's ordinal within its source."""
    if len(weights) == 1:
        return [(np.ones(len(places), dtype=bool), places)]
    share = _shares(weights)
    source_of = np.empty(len(places), dtype=np.int64)
    visit = np.empty(len(places), dtype=np.int64)
    blocks = places // BLOCK
    for block in np.unique(blocks).tolist():
        sources, ordinals = _block(block, share, seed)
        now = blocks == block
        inside = places[now] % BLOCK
        source_of[now] = sources[inside]
        visit[now] = block * np.array(share)[sources[inside]] + ordinals[inside]
    return [(source_of == source, visit[source_of == source]) for source in range(len(weights))]


def _shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return each source's rows in a block: proportional, at least one, the largest remainders rounded up."""
    exact = np.array(weights) / sum(weights) * BLOCK
    share = np.maximum(np.floor(exact).astype(int), 1)
    while share.sum() < BLOCK:
        share[np.argmax(exact - share)] += 1
    # At least one row each may have used up more than the remainders leave; the largest share then gives it back.
    while share.sum() > BLOCK:
        share[np.argmax(share)] -= 1
    return tuple(share.tolist())


@lru_cache(maxsize=4)
def _block(block: int, share: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each place of a block, and each place's ordinal within its source."""
    # A permutation of exact shares, not draws: every block has each source as often as it should.
    sources = np.random.default_rng([seed, block, BLOCK]).permutation(np.repeat(np.arange(len(share)), share))
    ordinals = np.empty(BLOCK, dtype=np.int64)
    for source, count in enumerate(share):
        ordinals[sources == source] = np.arange(count)
    return sources, ordinals


# Of each source the order that was asked for last, 8 bytes a row, and what it is of
_orders: dict[int, tuple[tuple[int, int, int], np.ndarray]] = {}


def _epoch_order(source: int, epoch: int, num_rows: int, seed: int) -> np.ndarray:
    known = _orders.get(source)
    if known is None or known[0] != (epoch, num_rows, seed):
        generator = np.random.default_rng([seed, epoch, source][: 3 if source else 2])
        known = _orders[source] = (epoch, num_rows, seed), generator.permutation(num_rows)
    return known[1]
