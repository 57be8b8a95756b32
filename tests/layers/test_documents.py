"""Documents of packed rows: counted, and their ends with a fixed length, against an enumeration in Python."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_fp8.layers.attention import documents

ROWS = [
    [[1]],
    [[7]],
    [[3, 1, 2]],
    [[1, 1, 1, 1]],
    [[5, 8], [13], [1, 12]],
    [[64] * 3 + [65], [257]],
    [[1] * 130, [129, 1]],
]


def positions_of(rows):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@pytest.mark.parametrize("more", [0, 17])
@pytest.mark.parametrize("rows", ROWS)
def test_ends_repeat_the_last_one(rows, more):
    positions = positions_of(rows)
    held = sum(map(len, rows))
    expected = [0]
    for length in (length for row in rows for length in row):
        expected.append(expected[-1] + length)
    found = documents.ends(positions == 0, held + more)
    assert found.dtype == torch.int32
    assert found.tolist() == expected + [positions.numel()] * more
    assert documents.count(positions) == held


def test_ends_are_found_without_a_read():
    with FakeTensorMode():
        assert documents.ends(torch.ones(2, 8, dtype=torch.bool), 5).shape == (6,)


@pytest.mark.parametrize(
    "positions",
    [[[1, 2, 3]], [[0, 1, 3]], [[0, 1, 1]], [[0, 1, 2], [0, 2, 0]], [[0, 1, 2], [1, 2, 3]], [[0, -1, 0]], [[2, 1, 0]]],
)
def test_positions_that_tell_no_documents(positions):
    assert documents.count(torch.tensor(positions)) == 0


def test_a_noted_number_is_not_read_again_until_somebody_writes():
    positions = torch.zeros(2, 6, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError):
        documents.count(positions)
    documents.cache(positions, documents._COUNT, 3)
    assert documents.count(positions) == 3
    positions.add_(1)
    with pytest.raises(RuntimeError):
        documents.count(positions)


def test_what_is_fixed_ends_with_the_block():
    with documents.fixed(4), documents.fixed(8):
        assert documents.fixed_at() == 8
    assert documents.fixed_at() is None
    with pytest.raises(KeyError), documents.fixed(4):
        raise KeyError
    assert documents.fixed_at() is None
