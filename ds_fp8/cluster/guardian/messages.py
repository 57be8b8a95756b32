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


async def received(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield messages until the other side closes; a line that is no message (of a port scan, say) ends it as well."""
    while True:
        try:
            line = await reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return
        if not isinstance(message, dict):
            return
        yield message
