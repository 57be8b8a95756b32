"""Stacks of ranks as faulthandler writes them: cut to the main thread, grouped, and told apart."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from itertools import islice

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n", re.MULTILINE)
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+)')
_COLLECTIVE_FILES = ("/torch/distributed/", "/deepspeed/comm/")


def main_thread(dump: str, ident: int) -> str:
    """Return the frames of the thread `ident`, innermost first, or "" where the dump has none."""
    parts = _THREAD.split(dump)
    for thread, frames in zip(parts[1::2], parts[2::2], strict=True):
        if int(thread, 16) == ident:
            return frames.strip("\n")
    return ""


def waits_for_others(stack: str) -> bool:
    """Return whether one of the two innermost frames is a collective, or waits for one."""
    for frame in islice(_FRAME.finditer(stack), 2):
        source = linecache.getline(frame["file"], int(frame["line"]))
        if any(part in frame["file"] for part in _COLLECTIVE_FILES) or ".wait(" in source:
            return True
    return False


def grouped(stacks: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return (ranks, stack) for every different stack, the ranks in order."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank], []).append(rank)
    return [(ranks, stack) for stack, ranks in groups.items()]


def spans(ranks: Iterable[int]) -> str:
    """Return ranks as a reader wants them: "rank 3", "ranks 0-7, 9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"ranks {text}" if len(runs) > 1 or (runs and runs[0][0] != runs[0][1]) else f"rank {text}"
