"""Inputs of recomputed layers, kept in host memory from forward until backward.

Activation checkpointing keeps the input of every layer: 2 bytes x tokens x hidden size x layers on the GPU. Here they
go to pinned host memory on a stream of their own, each while its layer computes. In backward the input of the layer
before comes back while a layer is recomputed. At most two of them are on the GPU at a time.

transformers' `gradient_checkpointing_enable(offload=True)` copies on the stream that computes, which waits. DeepSpeed's
`CheckpointHiddenStatesOffload` keeps what it has brought back until forward and backward are over, which is the memory
of all layers again, and its `cpu_checkpointing` empties the tensors that layers were called with, whoever holds them.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ds_fp8.layers.attention.selective_checkpointing import FUNCTION
from ds_fp8.zero.streams import current_stream, new_stream, on_stream, record_event, wait_event, wait_stream


class _Input:
    """A layer's input: on the host, and for a while on the device."""

    def __init__(self, x: torch.Tensor, before: weakref.ref[_Input] | None):
        self.device = x.device
        self.on_device: torch.Tensor | None = x
        self.copied: object | None = None  # Event of the last copy, in either direction
        self.before = before
        self.host = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")

    def take(self) -> torch.Tensor | None:
        """Return what is on the device, and forget it; the current stream waits for the copy.

        The memory belongs to the current stream, which may write it as soon as nobody holds it.
        """
        x, self.on_device = self.on_device, None
        if x is not None:
            wait_event(self.copied)
        return x

    def __del__(self) -> None:
        """Let a copy end before the memory is used again, where backward never asked for this input."""
        self.take()


class HostCheckpoints:
    """torch's activation checkpointing, with the inputs on the host."""

    def __init__(self) -> None:
        self._stream: object | None = None
        self._newest: weakref.ref[_Input] | None = None

    def __call__(self, function: Any, *args: Any, **options: Any) -> Any:
        """Call `function`, and recompute it in backward from `args`; `options` are torch's `checkpoint`'s."""
        # Inside, checkpoint has hooks of its own: these see what it is called with alone.
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(function, *args, **options)

    def _pack(self, x: torch.Tensor) -> torch.Tensor | _Input:
        # Masks and rotary tables have no gradient: all layers share them, and a copy for each would free nothing.
        if not x.requires_grad or isinstance(x, nn.Parameter):
            return x
        before = None if self._newest is None else self._newest()
        if before is not None:
            before.take()  # a layer has been computed since its copy began
        kept = _Input(x.detach(), self._newest)
        self._newest = weakref.ref(kept)
        self._copy(kept.host, kept.on_device, kept)
        return kept

    def _unpack(self, kept: torch.Tensor | _Input) -> torch.Tensor:
        if not isinstance(kept, _Input):
            return kept
        self._fetch(kept)
        x = kept.take()
        if kept.before is not None and (before := kept.before()) is not None:
            self._fetch(before)
        return x

    def _fetch(self, kept: _Input) -> None:
        if kept.on_device is None:
            kept.on_device = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
            self._copy(kept.on_device, kept.host, kept)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, kept: _Input) -> None:
        self._stream = self._stream or new_stream()
        computing = current_stream()
        with on_stream(self._stream):
            # For the layer that makes the input, and for kernels that may still read the memory that it comes back to.
            wait_stream(computing)
            to.copy_(source, non_blocking=True)
            kept.copied = record_event()


def recomputed_by(part: nn.Module) -> Any:
    """Return the function that recomputes a module in backward, without its options; None if it is not recomputed.

    It is the module's own forward, where that recomputes without a function of transformers'.
    """
    # Looked up where transformers sets it: asking a module for what it lacks is slow.
    if not vars(part).get("gradient_checkpointing"):
        return None
    function = getattr(part, FUNCTION, type(part).forward)
    return getattr(function, "func", function)


def keep_on_host(model: nn.Module) -> bool:
    """Let the inputs of all layers that torch's checkpointing recomputes wait on the host, and return whether any are.

    Called after `model.gradient_checkpointing_enable()`, which takes it back when it is called again.
    """
    on_host = HostCheckpoints()
    parts = [part for part in model.modules() if recomputed_by(part) is checkpoint]
    for part in parts:
        options = getattr(vars(part)[FUNCTION], "keywords", {})
        setattr(part, FUNCTION, functools.partial(on_host, **options))
    return bool(parts)
