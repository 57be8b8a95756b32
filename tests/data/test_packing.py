"""Packing: nothing lost, nothing seen across examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from ds_fp8.data import IGNORED, PackedDataset
from ds_fp8.data.packing import plan_rows
from ds_fp8.data.token_store import pack_batch
from ds_fp8.train import packed_attention

PAD = 0
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
"""FP32 logits of a small model, summed in another order."""


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


def test_overlong_examples_are_dropped_and_counted():
    dataset = pack(_examples([4, 20, 6]), 10, PAD, overlong="drop")
    assert dataset.report()["dropped"] == 1
    assert dataset.tokens == 10
    assert len(dataset) == 1


def test_examples_without_loss_are_dropped_so_that_every_row_has_some():
    silent = ([50, 51, 52], [IGNORED] * 3)
    first_only = ([60, 61], [60, IGNORED])
    dataset = pack([silent, first_only, *_examples([4])], 4, PAD)
    assert dataset.report()["dropped"] == 2
    assert len(dataset) == 1


@pytest.mark.parametrize("examples", [[], _examples([20, 30])])
def test_nothing_may_be_left(examples):
    assert len(pack(examples, 10, PAD, overlong="drop")) == 0


def test_overlong_examples_are_cut_and_counted():
    dataset = pack(_examples([4, 25, 6]), 10, PAD, overlong="cut")
    assert sorted(len(ids) for ids, _ in _unpack(dataset) if ids[0] != PAD) == [4, 6, 10]
    report = dataset.report()
    assert (report["overlong"], report["longest"], report["dropped"], report["tokens_left_out"]) == (1, 25, 0, 15)


def test_rows_joined_into_one_are_their_examples_one_after_the_other():
    dataset = pack(_examples([5, 3, 6]), 8, PAD, together=False)
    assert [dataset.row_tokens(row) for row in range(3)] == [5, 3, 6]
    joined = dataset.joined([2, 0], 16)
    assert joined["input_ids"].tolist() == [*range(9, 15), *range(1, 6), *[PAD] * 5]
    assert joined["position_ids"].tolist() == [*range(6), *range(5), *range(5)]
    assert joined["labels"].tolist() == [IGNORED, *range(10, 15), IGNORED, *range(2, 6), *[IGNORED] * 5]
    blank = dataset.joined([], 4)
    assert set(blank["labels"].tolist()) == {IGNORED}


def test_many_examples_are_packed_window_by_window(monkeypatch):
    monkeypatch.setattr("ds_fp8.data.packing.WINDOW", 3)
    dataset = pack(_examples([5, 2, 4, 4, 3, 1, 8]), 8, PAD)
    # The 3 would have fitted beside the 5, which is in the window before.
    assert [dataset.row_tokens(row) for row in range(len(dataset))] == [7, 4, 7, 8]


@pytest.mark.parametrize("implementation", ["packed", "sdpa"])
@pytest.mark.parametrize("lengths", [(7, 5, 9), (2, 2, 2, 17), (24,), (11, 12)])
def test_packed_logits_equal_those_of_the_example_alone(lengths, implementation):
    packed_attention.register()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=40,
        num_hidden_layers=2,
        intermediate_size=72,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    model = Qwen2ForCausalLM(config).eval()
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
