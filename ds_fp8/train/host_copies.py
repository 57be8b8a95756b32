"""Copies of a training state in host memory, so that it can be written while training goes on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class HostCopies:
    """Host memory for the copies, kept from one save to the next: pinned for tensors of an accelerator."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._used = 0

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return nested dicts, lists and tuples with their tensors in this memory, valid until the next call."""
        self._used = 0
        copied = self._copy(state)
        if get_accelerator().device_name() != "cpu":
            get_accelerator().current_stream().synchronize()
        return copied

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._buffer(value).view(value.dtype).view(value.shape).copy_(value, non_blocking=True)
        if isinstance(value, dict):
            return type(value)((key, self._copy(inner)) for key, inner in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copy(inner) for inner in value)
        return copy.copy(value)

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return as many bytes as `tensor` has: those of the same place in the last state, where they fit."""
        place, self._used = self._used, self._used + 1
        if place == len(self._buffers) or self._buffers[place].numel() != tensor.nbytes:
            pinned = tensor.device.type != "cpu"
            self._buffers[place:] = [torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=pinned)]
        return self._buffers[place]
