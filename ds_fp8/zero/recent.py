"""Cache of the most recently used items."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

LIMIT = 1024
"""Buckets of gradients are far fewer where all steps have the same; where they vary there are new ones for ever."""


class Recent(Generic[K, V]):
    """The values of the keys that were used last, at most `limit`."""

    def __init__(self, limit: int = LIMIT):
        self._limit = limit
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`: the one that is kept, or what `make` returns."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value  # the last one now
        if len(self._values) > self._limit:
            del self._values[next(iter(self._values))]
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
