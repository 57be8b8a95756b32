"""The order of rows: every epoch a permutation, every step a function of its number, ranks a partition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fp8.data import local_micro_batches, rows_of_step


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


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="7 rows"):
        local_micro_batches(list(range(7)), 0, 2, 2, 2)
    with pytest.raises(ValueError, match="no rows"):
        rows_of_step(0, 0, 4, 0)
