"""Tables on the terminal: a plan before a sweep, estimate against measurement after it, FP8 beside BF16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_fp8.memory.estimate import KINDS, Estimate
from ds_fp8.memory.fit import largest_that_fits, longest_contexts
from ds_fp8.memory.grid import Point
from ds_fp8.memory.report import deviation, speed
from ds_fp8.memory.results import Record
from ds_fp8.memory.sweep import estimate_of, expected_bytes

GIB = 2**30


def gib(size: float | None) -> str:
    """Return a size in GiB as text, "" for None."""
    return "" if size is None else f"{size / GIB:,.2f}"


def print_estimates(estimates: Mapping[str, Estimate], memory_bytes: int | None, console: Console) -> None:
    """Return one column for each estimate: bytes by kind at its peak, the total, and the largest sizes that fit."""
    table = Table("per GPU, GiB", *estimates, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    columns = list(estimates.values())
    for kind in KINDS:
        sizes = [column.peak.parts.get(kind, 0) for column in columns]
        if any(sizes):
            table.add_row(kind, *map(gib, sizes))
    table.add_section()
    table.add_row("peak of tensors", *(gib(column.peak_bytes) for column in columns), style="bold")
    table.add_row("at", *(column.peak.name for column in columns))
    table.add_row("allocator slack", *(gib(column.slack_bytes) for column in columns))
    table.add_row("the GPU needs", *(gib(column.device_bytes) for column in columns), style="bold")
    if any(column.host_bytes for column in columns):
        table.add_row("pinned host memory, activations", *(gib(column.host_bytes) for column in columns))
    if memory_bytes is not None:
        table.add_section()
        for what, label in (("micro_batch", "largest micro-batch, rows"), ("sequence_length", "longest row, tokens")):
            largest = [largest_that_fits(column.workload, what, memory_bytes) for column in columns]
            table.add_row(label, *map(_size, largest))
        longest = [longest_contexts(column.workload, memory_bytes) for column in columns]
        for size in longest[0]:
            if longest[0].keys() != {1}:
                shared = "one GPU" if size == 1 else f"{size} GPUs"
                table.add_row(f"longest in memory, {shared}", *(_size(found[size]) for found in longest))
    console.print(table)


def _size(size: int) -> str:
    return f"{size:,}" if size else "none"


def print_plan(points: Sequence[Point], raw: Mapping[str, Any], memory_bytes: int | None) -> None:
    """Print the points of a sweep and what they are expected to take on GPUs, wherever this runs."""
    table = Table("point", "GPUs", "micro-batch", "length", "estimate GiB", "peak at")
    for point in points:
        expected = estimate_of(point, raw, "cuda")
        w, needs = expected.workload, expected.device_bytes
        over = memory_bytes is not None and needs > memory_bytes
        shown = f"{gib(expected.peak_bytes)}{' (does not fit)' if over else ''}"
        table.add_row(point.name, str(w.gpus), str(w.rows), f"{w.sequence_length:,}", shown, expected.peak.name)
    Console(highlight=False).print(table)


def print_comparison(records: Sequence[Record], console: Console) -> None:
    """Print estimate against measured peak, point by point."""
    table = Table("point", "status", "peak GiB", "estimate GiB", "deviation", "of the first", "tokens/s/GPU")
    first = next((record["peak_bytes"] for record in records if record.get("peak_bytes")), None)
    for record in records:
        peak, off, tokens = record.get("peak_bytes"), deviation(record), speed(record)
        table.add_row(
            record["name"],
            record["status"],
            gib(peak),
            gib(expected_bytes(record)),
            "" if off is None else f"{off:+.1%}",
            "" if not peak or not first else f"{peak / first:.2f}",
            "" if tokens is None else f"{tokens:,.0f}",
        )
    console.print(table)
