"""Eager forwards of an engine in training, watched until their backward: what a capture must know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_fp8.graphs.capture import random_numbers_drawn
from ds_fp8.graphs.conditions import PythonState


class _Forward:
    """Lives as long as its output, or until the output's backward."""

    def __init__(self, used: set[int]):
        self.used = used
        self.done = False


class _Output(torch.autograd.Function):
    """An output at a place, whose gradient is noted: hooks would be lost where it is a view, and changed in place.

    Its node holds the forward, which lives as long as a backward through this output is possible.
    """

    @staticmethod
    def forward(ctx, output: torch.Tensor, forward: _Forward, place: int) -> torch.Tensor:
        ctx.of, ctx.place = forward, place
        return output.detach()  # and not the output itself, of which autograd makes a view

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.of.used.add(ctx.place)
        ctx.of.done = True
        return gradient, None, None


class EagerForwards:
    """Eager forwards of one engine in training, and what they show: which outputs get a gradient, what they change."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], device: torch.device, stream: torch.cuda.Stream):
        self._module, self._call, self._device, self._stream = module, call, device, stream
        # Weak references: a forward is over when its outputs are dropped, as after an evaluation with gradients
        # enabled.
        self._forwards: list[weakref.ref[_Forward]] = []
        self._used: dict[object, set[int]] = {}
        self.draws = False
        """True once a forward has drawn random numbers."""
        self.changes: str | None = None
        """Attribute of a module of others that a forward has changed."""

    def launch(
        self, args: tuple, kwargs: Mapping[str, Any], signature: object, where_called: bool, watches: bool
    ) -> Any:
        """Call the module, and remember until its backward that it has run."""
        # Only for code that is not known: comparing all attributes takes time at every step.
        state = PythonState(self._module) if watches else None
        # The generator's offset is on the host, so asking for it waits for nothing.
        drawn = random_numbers_drawn(self._device)
        output = self._call(*args, **kwargs) if where_called else self._aside(args, kwargs)
        self.draws = self.draws or random_numbers_drawn(self._device) != drawn
        if state is not None:
            self.changes = self.changes or state.changed()
        return self.add(output, signature)

    def _aside(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call the module on the stream that graphs are captured on.

        Autograd adds a gradient up on the stream that its parameter was first used on, and remembers that for as long
        as the user holds the loss of an earlier step. A capture must not come upon another stream there.
        """
        outside = torch.cuda.current_stream(self._device)
        # Both waits: arguments were made outside, and outputs are read there. Memory needs no marks: both streams wait
        # for each other at every micro-step before either reuses what the other has read.
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            output = self._call(*args, **kwargs)
        outside.wait_stream(self._stream)
        return output

    def add(self, output: Any, signature: object = None) -> Any:
        """Remember a forward by what it returned, until that is gone or gets a gradient.

        Returns:
            The same outputs. Those with gradients are aliases: an output may be what another one is computed from, and
            gets a gradient from that as well, or a view.
        """
        forward = _Forward(self._used.setdefault(signature, set()))
        leaves, structure = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if torch.is_tensor(leaf) and leaf.requires_grad:
                leaves[place] = _Output.apply(leaf, forward, place)
        self._forwards = [*self._pending(), weakref.ref(forward)]
        return tree_unflatten(leaves, structure)

    def used(self, signature: object) -> frozenset[int]:
        """Return the places of the outputs that have got a gradient from the caller, in forwards of a signature."""
        return frozenset(self._used.get(signature, ()))

    @property
    def pending(self) -> bool:
        """Return whether a backward may still come."""
        return bool(self._pending())

    def _pending(self) -> list[weakref.ref[_Forward]]:
        return [one for one in self._forwards if (forward := one()) is not None and not forward.done]
