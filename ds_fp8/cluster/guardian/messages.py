"""Lines of JSON between a rank and its guardian, and between guardians."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

LIMIT = 1 << 20
"""Bytes of the longest line: a stack of many threads."""

# Findings: what may end a job.
DIED, SILENT, ABSENT, HUNG, LOST, USER, ERROR = "died", "silent", "absent", "hung", "lost", "user", "error"


def encode(message: dict[str, Any]) -> bytes:
    """Return the message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None where the other side closed, or sent a line that is none (as a port scan does)."""
    try:
        line = await reader.readline()
        message = json.loads(line) if line.endswith(b"\n") else None
    except (OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


async def received(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield messages until there is none."""
    while (message := await receive(reader)) is not None:
        yield message


def escaped(text: str) -> str:
    """Return `text` as a terminal may show it: line breaks stay, what would steer the terminal is spelt out."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
