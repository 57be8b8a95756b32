"""Bytes that attention sends to the ranks that share its sequences: of this process, forward and backward."""

from __future__ import annotations

_sent = 0


def count_all_to_all(nbytes: int, ranks: int) -> None:
    """Count the exchange of a tensor of so many bytes, of which this rank keeps a part."""
    count(nbytes * (ranks - 1) // ranks)


def count(nbytes: int) -> None:
    """Count bytes that go to other ranks."""
    global _sent
    _sent += nbytes


def sent() -> int:
    """Return all bytes since the start of the process."""
    return _sent
