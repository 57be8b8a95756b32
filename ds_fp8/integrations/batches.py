"""Notes on a batch, taken on the host before Accelerate moves it, so that the device need not be asked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_fp8.layers.attention import documents


def noting(send_to_device: Callable) -> Callable:
    """Return Accelerate's move of batches to a device, with notes on the masks and positions that arrive.

    Args:
        send_to_device: accelerate.utils.send_to_device.
    """

    @functools.wraps(send_to_device)
    def send_and_note(batch: Any, *args: Any, **keywords: Any) -> Any:
        moved = send_to_device(batch, *args, **keywords)
        if isinstance(batch, Mapping) and isinstance(moved, Mapping):
            for name, learn in (("attention_mask", _note_mask), ("position_ids", documents.note_as)):
                here, there = batch.get(name), moved.get(name)
                both = torch.is_tensor(here) and torch.is_tensor(there) and here.dim() == there.dim() == 2
                # Read on the host, where it costs microseconds; asking the device later would make the host wait in
                # every step.
                if both and here.device.type == "cpu" and not there.is_inference():
                    learn(here, there)
        return moved

    return send_and_note


def _note_mask(here: torch.Tensor, there: torch.Tensor) -> None:
    documents.note_whole(there, bool(here.all()))
