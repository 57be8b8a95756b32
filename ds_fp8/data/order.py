"""Order of the rows: those of each step, and each rank's share of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

BLOCK = 4096
"""Places in the order of a mixture over which the shares of its sources are kept; each source has at least one."""


def rows_of_step(
    step: int, num_rows: int | Sequence[int], global_batch: int, seed: int, weights: Sequence[float] = (1.0,)
) -> list[int]:
    """Return the row indices of an optimizer step, a function of the arguments alone.

    Every epoch of a source visits each of its rows once in a new order; a step may end one and begin the next.

    Args:
        step: Number of the step, from 0.
        num_rows: Rows of each source, or of the only one.
        global_batch: Rows of a step.
        seed: Seed of the orders in which rows are visited.
        weights: Shares of the sources in the rows of training.

    Returns:
        `global_batch` indices, which count through the rows of all sources.

    Raises:
        ValueError: The step is negative, the batch empty, or a source without rows or weight.
    """
    counts = (num_rows,) if isinstance(num_rows, int) else tuple(num_rows)
    if min(counts, default=0) < 1 or global_batch < 1 or step < 0 or len(counts) != len(weights):
        raise ValueError(f"no rows for step {step}, num_rows {num_rows}, global_batch {global_batch}")
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

    Args:
        num_rows: Rows of each source; a source may have none.
        most: Most rows to return.
        weights: Shares of the sources in the rows of training.

    Returns:
        Indices, which count through the rows of all sources.
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
    """Return the micro-batches that a rank takes of a step's rows.

    Args:
        rows: Rows of the step.
        rank: This rank.
        world: Number of ranks.
        micro_batch: Rows of a micro-batch.
        accumulation: Micro-batches of a step.

    Returns:
        `accumulation` lists of `micro_batch` rows.

    Raises:
        ValueError: len(rows) is not world * micro_batch * accumulation.
    """
    if len(rows) != world * micro_batch * accumulation:
        raise ValueError(f"{len(rows)} rows do not make {world} x {micro_batch} x {accumulation}")
    # Micro-batch by micro-batch over all ranks: on another number of ranks a step has the same rows.
    starts = [(index * world + rank) * micro_batch for index in range(accumulation)]
    return [list(rows[start : start + micro_batch]) for start in starts]


def budgeted_micro_batches(
    rows: Sequence[int], tokens: Sequence[int], world: int, budget: int
) -> list[list[list[int]]]:
    """Return for each rank the micro-batches that it takes of some rows, each of at most `budget` tokens.

    All ranks get equally many micro-batches, those they run at the same time alike in tokens; one may be empty when
    there are fewer rows than ranks.

    Args:
        rows: Indices of the rows.
        tokens: Tokens of each row.
        world: Number of ranks.
        budget: Most tokens of a micro-batch.

    Returns:
        Rows by rank and micro-batch.

    Raises:
        ValueError: A row has more tokens than `budget`.
    """
    if max(tokens, default=0) > budget:
        raise ValueError(f"a row of {max(tokens)} tokens does not fit into {budget}")
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


def _spread(places: Sequence[int], tokens: Sequence[int], number: int) -> list[tuple[int, list[int]]]:
    """Return `number` bins of (tokens, places), filled evenly: each place goes to the emptiest."""
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


@lru_cache(maxsize=64)
def _epoch_order(source: int, epoch: int, num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, source][: 3 if source else 2]).permutation(num_rows)
