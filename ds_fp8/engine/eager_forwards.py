"""Forwards that Python launched and whose backward may still come: no graph runs meanwhile.

A graph's backward adds to the gradients of no other forward that is under way, or writes over them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class _Forward:
    """Lives as long as a loss of its own, or until that has its backward."""

    done = False

    def backward_begins(self, gradient: torch.Tensor) -> None:
        self.done = True


class EagerForwards:
    """Those of one engine, in training."""

    def __init__(self):
        """Begin with none."""
        self._forwards: list[weakref.ref[_Forward]] = []

    def add(self, output: Any) -> None:
        """Remember a forward by what it returned, until that is gone or gets a gradient."""
        forward = _Forward()
        for leaf in tree_leaves(output):
            if torch.is_tensor(leaf) and leaf.requires_grad:
                leaf.register_hook(forward.backward_begins)
        self._forwards = [*self._pending(), weakref.ref(forward)]

    @property
    def pending(self) -> bool:
        """Return whether a backward may still come."""
        return bool(self._pending())

    def _pending(self) -> list[weakref.ref[_Forward]]:
        return [one for one in self._forwards if (forward := one()) is not None and not forward.done]
