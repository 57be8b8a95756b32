"""What Accelerate's loader moves to a device is known on the host: nothing is read back."""

import pytest
import torch
from accelerate import data_loader
from torch import nn

import ds_fp8
from ds_fp8.graphs.conditions import rows_in_a_graph
from ds_fp8.integrations.install import uninstall
from ds_fp8.layers.attention import documents

# A tensor on it has no values: whoever reads one raises, as whoever waits for a GPU does not.
ELSEWHERE = torch.device("meta")


@pytest.fixture
def loader():
    """Accelerate's loader of these batches, on a device."""
    ds_fp8.install()

    def load(*batches):
        loader = torch.utils.data.DataLoader(list(batches), batch_size=None)
        return list(data_loader.prepare_data_loader(loader, device=ELSEWHERE, put_on_device=True, even_batches=False))

    yield load
    uninstall()


def batch(mask, positions=None):
    found = {"input_ids": torch.ones(2, 4, dtype=torch.int64)}
    if mask is not None:
        found["attention_mask"] = torch.tensor(mask)
    if positions is not None:
        found["position_ids"] = torch.tensor(positions)
    return found


ONES, PADDED = [[1, 1, 1, 1]] * 2, [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_masks_are_known_without_a_wait(loader):
    whole, padded = loader(batch(ONES), batch(PADDED))
    assert whole["attention_mask"].device == ELSEWHERE
    for _ in range(2):
        assert rows_in_a_graph(nn.Identity(), whole) == (0, None)
        assert "padded" in rows_in_a_graph(nn.Identity(), padded)[1]


def test_positions_are_known_without_a_wait(loader):
    (one,) = loader(batch(None, [[0, 1, 2, 3]] * 2))
    assert rows_in_a_graph(nn.Identity(), one) == (0, None)
    (several,) = loader(batch(None, [[0, 1, 0, 1], [0, 1, 2, 3]]))
    assert documents.count(several["position_ids"]) == 3


def test_a_mask_that_is_written_to_is_read_again(loader):
    (moved,) = loader(batch(ONES))
    moved["attention_mask"].zero_()
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows_in_a_graph(nn.Identity(), moved)


def test_without_it_somebody_waits(loader):
    uninstall()
    (moved,) = loader(batch(ONES))
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows_in_a_graph(nn.Identity(), moved)


def test_a_mask_is_read_once():
    mask = torch.tensor(PADDED)
    assert not documents.is_full(mask)
    mask.data = torch.ones(2, 4, dtype=torch.int64)  # which no version tells of: only a note does not see it
    assert not documents.is_full(mask)
    mask.fill_(1)
    assert documents.is_full(mask)
    mask[0, 0] = 0
    assert not documents.is_full(mask)
    with torch.inference_mode():
        assert documents.is_full(torch.ones(2, 3))
