"""Rows: nothing lost, nothing seen across examples; every epoch a permutation, ranks a partition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.data import IGNORED, PackedDataset
from ds_fp8.data import rows as module
from ds_fp8.data.rows import (
    BLOCK,
    budgeted_micro_batches,
    local_micro_batches,
    measured_rows,
    padded_micro_batches,
    plan_rows,
    rows_of_step,
)
from ds_fp8.data.token_store import pack_batch
from ds_fp8.train import packed_attention
from tests.layers.hugging_face import causal_lm

PAD = 0
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}  # FP32 logits of a small model, summed in another order


class Examples:
    """A token store in memory."""

    def __init__(self, examples):
        pairs = [(ids, [label != IGNORED for label in labels]) for ids, labels in examples]
        self._tokens = [pack_batch([pair])[0] for pair in pairs]

    def lengths(self):
        return np.array(list(map(len, self._tokens)), dtype=np.int64)

    def read(self, example, start, length):
        return self._tokens[example][start : start + length]


def pack(examples, sequence_length, pad_id, overlong="split", **more):
    store = Examples(examples)
    plan = plan_rows(store, np.arange(len(examples)), sequence_length, overlong, all_carry_loss=False, **more)
    return PackedDataset([(store, plan)], sequence_length, pad_id)


def _examples(lengths, first=1):
    """Examples of distinct tokens, so that a packed row tells where each token comes from."""
    examples = []
    for length in lengths:
        ids = list(range(first, first + length))
        examples.append((ids, ids))
        first += length
    return examples


def _unpack(dataset):
    """The pieces in a packed dataset, padding included, as (ids, labels)."""
    pieces = []
    for row in dataset:
        ids, labels, positions = (row[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        starts = [index for index, position in enumerate(positions) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:stop] == list(range(stop - start))
            pieces.append((ids[start:stop], labels[start:stop]))
    return pieces


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=30), sequence_length=st.sampled_from((8, 13, 64)))
def test_every_token_is_packed_once(lengths, sequence_length):
    examples = _examples(lengths)
    dataset = pack(examples, sequence_length, PAD)
    expected = []
    for ids, _ in examples:
        pieces = [ids[start : start + sequence_length] for start in range(0, len(ids), sequence_length)]
        expected += [(piece, [IGNORED, *piece[1:]]) for piece in pieces if len(piece) > 1]
    found = [piece for piece in _unpack(dataset) if piece[0][0] != PAD]
    assert sorted(found) == sorted(expected)
    assert dataset.tokens == sum(len(ids) for ids, _ in expected)
    assert dataset.report()["dropped"] == sum(len(ids) < 2 for ids, _ in examples)
    for ids, labels in _unpack(dataset):
        assert ids[0] != PAD or (set(ids) == {PAD} and set(labels) == {IGNORED})


def test_items_are_int64_rows():
    dataset = pack(_examples([5, 3, 9]), 8, PAD)
    item = dataset[len(dataset) - 1]
    assert set(item) == {"input_ids", "labels", "position_ids"}
    assert all(tensor.dtype == torch.int64 and tensor.shape == (8,) for tensor in item.values())
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_rows_are_filled_well():
    # 3 + 5 and 6 + 2 fill two rows of 8 exactly, although they come in another order.
    assert len(pack(_examples([3, 6, 5, 2]), 8, PAD)) == 2


def test_examples_without_loss_are_dropped_so_that_every_row_has_some():
    silent = ([50, 51, 52], [IGNORED] * 3)
    first_only = ([60, 61], [60, IGNORED])
    dataset = pack([silent, first_only, *_examples([4])], 4, PAD)
    assert dataset.report()["dropped"] == 2
    assert len(dataset) == 1


@pytest.mark.parametrize("examples", [[], _examples([20, 30])])
def test_nothing_may_be_left(examples):
    assert len(pack(examples, 10, PAD, overlong="drop")) == 0


@pytest.mark.parametrize(
    ("overlong", "pieces", "dropped", "left_out"),
    [("cut", [4, 6, 10], 0, 15), ("drop", [4, 6], 1, 25), ("split", [4, 5, 6, 10, 10], 0, 0)],
)
def test_overlong_examples_are_counted(overlong, pieces, dropped, left_out):
    dataset = pack(_examples([4, 25, 6]), 10, PAD, overlong=overlong)
    assert sorted(len(ids) for ids, _ in _unpack(dataset) if ids[0] != PAD) == pieces
    report = dataset.report()
    assert (report["overlong"], report["longest"], report["dropped"]) == (1, 25, dropped)
    assert (report["tokens_left_out"], report["tokens"]) == (left_out, dataset.tokens) == (left_out, sum(pieces))


def test_rows_joined_into_one_are_their_examples_one_after_the_other():
    dataset = pack(_examples([5, 3, 6]), 8, PAD, together=False)
    assert [dataset.row_tokens(row) for row in range(3)] == [5, 3, 6]
    joined = dataset.joined([2, 0], 16)
    assert joined["input_ids"].tolist() == [*range(9, 15), *range(1, 6), *[PAD] * 5]
    assert joined["position_ids"].tolist() == [*range(6), *range(5), *range(5)]
    assert joined["labels"].tolist() == [IGNORED, *range(10, 15), IGNORED, *range(2, 6), *[IGNORED] * 5]
    blank = dataset.joined([], 4)
    assert set(blank["labels"].tolist()) == {IGNORED}


def test_positions_count_on_behind_an_example_alone():
    dataset = pack(_examples([5, 3]), 8, PAD, together=False)
    dataset.alone = True
    assert dataset[1]["position_ids"].tolist() == list(range(8))
    assert dataset.joined([], 4)["position_ids"].tolist() == list(range(4))


def test_many_examples_are_packed_window_by_window(monkeypatch):
    monkeypatch.setattr("ds_fp8.data.rows.WINDOW", 3)
    dataset = pack(_examples([5, 2, 4, 4, 3, 1, 8]), 8, PAD)
    # The 3 would have fitted beside the 5, which is in the window before.
    assert [dataset.row_tokens(row) for row in range(len(dataset))] == [7, 4, 7, 8]


@pytest.mark.parametrize("implementation", ["packed", "sdpa"])
@pytest.mark.parametrize("lengths", [(7, 5, 9), (2, 2, 2, 17), (24,), (11, 12)])
def test_packed_logits_equal_those_of_the_example_alone(lengths, implementation):
    packed_attention.register()
    sizes = {"vocab_size": 64, "hidden_size": 40, "intermediate_size": 72, "head_dim": 10}
    model = causal_lm("qwen2", torch.float32, **sizes, attn_implementation=implementation).eval()
    examples = _examples(lengths)
    (row,) = pack(examples, 24, PAD)
    with torch.no_grad():
        packed = model(
            input_ids=row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False
        ).logits[0]
        for ids, _ in examples:
            start = row["input_ids"].tolist().index(ids[0])
            alone = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            torch.testing.assert_close(packed[start : start + len(ids)], alone, **TOLERANCE)
        if len(lengths) > 1:
            # The test would mean nothing if the mask made no difference.
            mixed = model(input_ids=row["input_ids"][None], use_cache=False).logits[0]
            assert not torch.allclose(mixed, packed, atol=1e-3)


@given(num_rows=st.integers(1, 40), global_batch=st.integers(1, 50), seed=st.integers(0, 2**40))
def test_every_epoch_visits_each_row_once(num_rows, global_batch, seed):
    steps = 3 * num_rows // global_batch + 1
    stream = [row for step in range(steps) for row in rows_of_step(step, num_rows, global_batch, seed)]
    assert len(stream) == steps * global_batch
    for start in range(0, len(stream) - num_rows + 1, num_rows):
        assert sorted(stream[start : start + num_rows]) == list(range(num_rows))


@pytest.mark.parametrize(("rows", "weights"), [((50,), (1.0,)), ((50, 7), (1.0, 2.0))])
def test_order_changes_with_epoch_and_seed_and_not_with_what_was_asked_before(rows, weights):
    def asked(step, seed):
        return rows_of_step(step, rows, 100, seed, weights)

    last = asked(70, 3)
    assert [asked(step, 3) for step in range(3)].count(asked(0, 3)) == 1
    assert asked(70, 3) == last != sorted(last)
    assert asked(70, 4) != last


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


of_a_step = given(
    tokens=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    world=st.integers(1, 5),
    budget=st.sampled_from((100, 128, 350)),
)


@of_a_step
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


@of_a_step
def test_micro_batches_of_padded_rows_within_a_budget(tokens, world, budget):
    rows = [1000 + index for index in range(len(tokens))]
    shares = padded_micro_batches(rows, tokens, world, budget)
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for micro in share for row in micro) == rows
    lengths = [[tokens[row - 1000] for row in micro] for share in shares for micro in share if micro]
    assert all(len(each) * max(each) <= budget for each in lengths)
    # Filled, but for the last one and halves of those that every rank must have as many of.
    assert sum(len(each) * max(each) + max(each) <= budget for each in lengths) <= 2 * world


def test_labels_are_counted_without_reading_tokens(monkeypatch):
    examples = _examples([5, 9, 3, 1])
    examples[1] = (examples[1][0], [IGNORED] * 4 + examples[1][1][4:])
    dataset = pack(examples, 8, PAD)
    counted = [int((row["labels"] != IGNORED).sum()) for row in dataset]
    monkeypatch.setattr(Examples, "read", None)
    assert [dataset.label_tokens(row) for row in range(len(dataset))] == counted


def test_one_order_of_each_source_is_kept(monkeypatch):
    monkeypatch.setattr(module, "_orders", {})
    rows = [rows_of_step(step, [40, 60], 50, 7, (1.0, 3.0)) for step in range(64)]
    assert {len(order) for _, order in module._orders.values()} == {40, 60}
    assert rows == [rows_of_step(step, [40, 60], 50, 7, (1.0, 3.0)) for step in range(64)]
