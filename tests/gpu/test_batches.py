"""Accelerate's batches on a GPU tell a graph what it must know, and the host waits for nothing."""

import pytest
import torch
from torch import nn

import ds_fp8
from ds_fp8.graphs.conditions import rows_in_a_graph
from ds_fp8.integrations.install import uninstall

pytestmark = pytest.mark.gpu


def test_no_wait_for_a_mask():
    from accelerate import data_loader

    ds_fp8.install()
    try:
        batch = {
            "input_ids": torch.ones(2, 8, dtype=torch.int64).pin_memory(),
            "attention_mask": torch.ones(2, 8, dtype=torch.int64).pin_memory(),
        }
        (moved,) = data_loader.prepare_data_loader(
            torch.utils.data.DataLoader([batch], batch_size=None), device=torch.device("cuda"), put_on_device=True,
            non_blocking=True, even_batches=False,
        )  # fmt: skip
        assert moved["attention_mask"].is_cuda
        torch.cuda.set_sync_debug_mode("error")
        assert rows_in_a_graph(nn.Identity(), moved) == (0, None)
        with pytest.raises(RuntimeError, match="synchronizing"):
            rows_in_a_graph(nn.Identity(), {**moved, "attention_mask": moved["attention_mask"].clone()})
    finally:
        torch.cuda.set_sync_debug_mode("default")
        uninstall()
