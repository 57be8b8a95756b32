"""Packing: nothing lost, nothing seen across examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from ds_fp8.data import IGNORED, pack
from ds_fp8.errors import UserError

PAD = 0


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
    assert dataset.dropped == 0
    for ids, labels in _unpack(dataset):
        assert ids[0] != PAD or (set(ids) == {PAD} and set(labels) == {IGNORED})


def test_items_are_int64_rows():
    dataset = pack(_examples([5, 3, 9]), 8, PAD)
    assert dataset.input_ids.dtype == dataset.labels.dtype == dataset.position_ids.dtype == np.int32
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
    assert dataset.dropped == 1
    assert dataset.tokens == 10
    assert len(dataset) == 1


def test_examples_without_loss_are_dropped_so_that_every_row_has_some():
    silent = ([50, 51, 52], [IGNORED] * 3)
    first_only = ([60, 61], [60, IGNORED])
    dataset = pack([silent, first_only, *_examples([4])], 4, PAD)
    assert dataset.dropped == 2
    assert len(dataset) == 1


@pytest.mark.parametrize("examples", [[], _examples([20, 30])])
def test_nothing_left_is_an_error(examples):
    with pytest.raises(UserError) as error:
        pack(examples, 10, PAD, overlong="drop")
    assert error.value.key == "data.sequence_length"
    assert error.value.remedy


@pytest.mark.parametrize("lengths", [(7, 5, 9), (2, 2, 2, 17), (24,), (11, 12)])
def test_packed_logits_equal_those_of_the_example_alone(lengths):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=40,
        num_hidden_layers=2,
        intermediate_size=72,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
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
            torch.testing.assert_close(packed[start : start + len(ids)], alone, atol=1e-5, rtol=1e-5)
        if len(lengths) > 1:
            # The test would mean nothing if the mask made no difference.
            mixed = model(input_ids=row["input_ids"][None], use_cache=False).logits[0]
            assert not torch.allclose(mixed, packed, atol=1e-3)
