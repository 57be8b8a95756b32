"""The order of rows: every epoch a permutation, every step a function of its number, ranks a partition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fp8.data.order import BLOCK, budgeted_micro_batches, local_micro_batches, measured_rows, rows_of_step


@given(num_rows=st.integers(1, 40), global_batch=st.integers(1, 50), seed=st.integers(0, 2**40))
def test_every_epoch_visits_each_row_once(num_rows, global_batch, seed):
    steps = 3 * num_rows // global_batch + 1
    stream = [row for step in range(steps) for row in rows_of_step(step, num_rows, global_batch, seed)]
    assert len(stream) == steps * global_batch
    for start in range(0, len(stream) - num_rows + 1, num_rows):
        assert sorted(stream[start : start + num_rows]) == list(range(num_rows))


def test_order_changes_with_epoch_and_seed_and_not_with_what_was_asked_before():
    first, second = rows_of_step(0, 50, 50, 1), rows_of_step(1, 50, 50, 1)
    assert first != second
    assert first != rows_of_step(0, 50, 50, 2)
    assert first == rows_of_step(0, 50, 50, 1)
    assert first != sorted(first)


@pytest.mark.parametrize(("world", "micro_batch", "accumulation"), [(1, 1, 1), (2, 3, 1), (3, 2, 4), (5, 1, 2)])
def test_ranks_share_the_rows_without_overlap(world, micro_batch, accumulation):
    rows = rows_of_step(3, 1000, world * micro_batch * accumulation, seed=0)
    shares = [local_micro_batches(rows, rank, world, micro_batch, accumulation) for rank in range(world)]
    for share in shares:
        assert [len(batch) for batch in share] == [micro_batch] * accumulation
    assert sorted(row for share in shares for batch in share for row in batch) == sorted(rows)
    # One accumulation step is one contiguous part of the rows, whatever the number of ranks.
    per_step = world * micro_batch
    for index in range(accumulation):
        assert [row for share in shares for row in share[index]] == rows[index * per_step : (index + 1) * per_step]


def test_a_loss_is_measured_on_every_source_by_its_share():
    counts, weights = (500, 300, 0, 2), (3.0, 1.0, 1.0, 1.0)
    ends = np.cumsum(counts)
    rows = measured_rows(counts, 100, weights)
    found = np.bincount(np.searchsorted(ends, rows, side="right"), minlength=len(counts))
    assert found.tolist() == [74, 24, 0, 2]  # of a source with two rows both, and the others go on
    for source, number in enumerate(found):
        first = ends[source] - counts[source]
        assert sorted(row for row in rows if first <= row < ends[source]) == list(range(first, first + number))
    assert measured_rows(counts, 40, weights) == rows[:40]
    assert sorted(measured_rows(counts, 10_000, weights)) == list(range(802))
    assert measured_rows((7,), 5, (0.3,)) == list(range(5))


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="7 rows"):
        local_micro_batches(list(range(7)), 0, 2, 2, 2)
    with pytest.raises(ValueError, match="no rows"):
        rows_of_step(0, 0, 4, 0)


@pytest.mark.parametrize(
    ("num_rows", "weights"), [((50, 7, 300), (1.0, 1.0, 2.0)), ((5, 2000), (0.3, 0.7)), ((10, 10), (1.0, 1e-9))]
)
def test_a_mixture_keeps_its_shares_and_each_sources_epochs(num_rows, weights):
    batch = 64
    steps = 2 * BLOCK // batch
    stream = [row for step in range(steps) for row in rows_of_step(step, num_rows, batch, 3, weights)]
    ends = np.cumsum(num_rows)
    source_of = np.searchsorted(ends, stream, side="right")
    for source, (count, weight) in enumerate(zip(num_rows, weights, strict=True)):
        mine = [row - (ends[source] - count) for row, of in zip(stream, source_of, strict=True) if of == source]
        assert len(mine) == pytest.approx(2 * BLOCK * weight / sum(weights), abs=2 * len(num_rows))
        assert mine, "every source has its turn, however small its weight"
        for start in range(0, len(mine) - count + 1, count):
            assert sorted(mine[start : start + count]) == list(range(count))
    # The sources alternate: no half of the rows is of one source alone.
    assert len(set(source_of[:BLOCK].tolist())) == len(num_rows)


def test_a_mixture_is_a_function_of_the_step():
    asked_before = rows_of_step(70, (50, 7), 100, 3, (1.0, 2.0))
    for step in range(3):
        rows_of_step(step, (50, 7), 100, 3, (1.0, 2.0))
    assert rows_of_step(70, (50, 7), 100, 3, (1.0, 2.0)) == asked_before
    assert rows_of_step(70, (50, 7), 100, 4, (1.0, 2.0)) != asked_before


@given(
    tokens=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    world=st.integers(1, 5),
    budget=st.sampled_from((100, 128, 350)),
)
def test_micro_batches_within_a_budget(tokens, world, budget):
    rows = [1000 + index for index in range(len(tokens))]
    shares = budgeted_micro_batches(rows, tokens, world, budget)
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for micro in share for row in micro) == rows
    sums = [[sum(tokens[row - 1000] for row in micro) for micro in share] for share in shares]
    assert max(map(max, sums)) <= budget
    # No more than a greedy filling could need, and what ranks run at once is alike in size.
    assert len(sums[0]) <= max(1, -(-2 * sum(tokens) // (budget * world)) + 1)
    if len(rows) >= world:
        for at_once in zip(*sums, strict=True):
            assert max(at_once) - min(at_once) <= max(tokens)


def test_a_row_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="101 tokens"):
        budgeted_micro_batches([0, 1], [5, 101], 1, 100)
