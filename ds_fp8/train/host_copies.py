"""Copies of a training state in host memory, so that it can be written while training goes on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class HostCopies:
    """Host memory for the copies, kept from one save to the next: pinned for tensors of an accelerator."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, bool], list[torch.Tensor]] = {}
        """By bytes and whether they are pinned, which takes seconds."""

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return nested dicts, lists and tuples with their tensors in this memory, valid until the next call."""
        free, self._buffers = self._buffers, {}
        copied = self._copy(state, free)
        if get_accelerator().device_name() != "cpu":
            # One wait for all copies: behind it the next step may overwrite what was copied, and the thread may read
            # the copies.
            get_accelerator().current_stream().synchronize()
        return copied

    def _copy(self, value: Any, free: dict[tuple[int, bool], list[torch.Tensor]]) -> Any:
        if isinstance(value, torch.Tensor):
            size = value.nbytes, value.device.type != "cpu"
            # Buffers of the last save are used again by size; those that fit nothing now are dropped with `free`.
            buffer = free[size].pop() if free.get(size) else torch.empty(size[0], dtype=torch.uint8, pin_memory=size[1])
            self._buffers.setdefault(size, []).append(buffer)
            return buffer.view(value.dtype).view(value.shape).copy_(value, non_blocking=True)
        if isinstance(value, dict):
            return type(value)((key, self._copy(inner, free)) for key, inner in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copy(inner, free) for inner in value)
        return copy.copy(value)
