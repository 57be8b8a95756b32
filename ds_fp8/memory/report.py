"""Tables of estimates and of sweeps on the terminal, and the best point as a stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_fp8.config.errors import UserError
from ds_fp8.engine.preflight import OWN_SECTIONS
from ds_fp8.memory.estimate import (
    KINDS,
    Estimate,
    gpus_that_fit,
    largest_that_fits,
    longest_contexts,
    settings_that_fit,
)
from ds_fp8.memory.sweep import OK, Record, estimate_of
from ds_fp8.report.compare import Point
from ds_fp8.train.run_folder import write_atomically

BEST = "best.json"
GIB = 2**30
NONE = "–"  # In a table, where there is no estimate
WIDE = 200  # Columns of a table in a file, or for another program


def gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:,.2f}"


def print_estimates(estimates: Mapping[str, Estimate], memory_bytes: int | None, console: Console) -> None:
    """Print one column for each estimate: bytes by kind at its peak, the total, and the largest sizes that fit."""
    table = _table("per GPU, GiB", *estimates)
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
    if any(column.graph_bytes for column in columns):
        table.add_row("CUDA graphs want besides", *(gib(column.graph_bytes or None) for column in columns))
    if any(column.host_bytes for column in columns):
        table.add_row("pinned host memory, activations", *(gib(column.host_bytes) for column in columns))
    if memory_bytes is None:
        print_table(table, console)
        return
    table.add_section()
    for what, label in (("micro_batch", "largest micro-batch, rows"), ("sequence_length", "longest row, tokens")):
        largest = [largest_that_fits(column.workload, what, memory_bytes) for column in columns]
        table.add_row(label, *map(_size, largest))
    longest = [longest_contexts(column.workload, memory_bytes) for column in columns]
    shared = [size for size in longest[0] if size > 1]
    for size in [1, *shared] if shared else []:
        label = f"  {size} GPUs share a row" if size > 1 else "  a row on one GPU"
        table.add_row(label, *(_size(found[size]) for found in longest))
    print_table(table, console)
    if shared:
        console.print(
            "The last rows: the longest rows by memory alone, beyond the model's positions too; GPUs share a row by "
            '"sequence_parallel_size".'
        )


def verdict_of(raw: Mapping[str, Any], estimate: Estimate, memory: int, gpu: str | None) -> str:
    """Return one line: whether the stage fits, with CUDA graphs or without, and where it does not, what would."""
    needed, graphs, gpus = estimate.required_bytes, estimate.graph_bytes, estimate.workload.gpus
    where = f"{gpus} x {gpu}" if gpu else f"{gpus} GPU{'s' if gpus > 1 else ''}"
    figures = f"{needed / GIB:.1f} of {memory / GIB:.1f} GiB on {where}"
    if needed <= memory:
        whole = estimate.device_bytes + graphs
        if not graphs:
            return f"fits: {figures}"
        if whole <= memory:
            return f"fits: {figures}, {whole / GIB:.1f} with CUDA graphs"
        return (
            f"fits only without CUDA graphs: {figures}, {whole / GIB:.1f} with them; steps launched by Python take "
            "longer where micro-batches are small"
        )
    tried = (settings_that_fit, gpus_that_fit) if estimate.workload.device == "cuda" else ()
    found = [remedy(raw, gpus, memory) for remedy in tried]
    ways = [f"{remedy.change} ({remedy.device_bytes / GIB:.1f} GiB)" for remedy in found if remedy is not None]
    would = f"fits with {' or with '.join(ways)}" if ways else "no tried setting or number of GPUs fits"
    return f"does not fit: {figures}; {would}"


def _size(size: int) -> str:
    return f"{size:,}" if size else "none"


def _table(*heads: str) -> Table:
    table = Table(*heads)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table; in the whole width that it needs where no terminal limits it."""
    if not console.is_terminal:
        console.width = WIDE  # 80 without a terminal, and print(width=...) makes that only smaller
    console.print(table, crop=False)


def print_plan(points: Sequence[Point], raw: Mapping[str, Any], memory_bytes: int | None) -> None:
    """Print the points of a sweep and what they are expected to take on GPUs, wherever this runs."""
    table = _table("point", "GPUs", "micro-batch", "length", "needs GiB", "peak at")
    reasons: dict[str, None] = {}
    for point in points:
        try:
            expected = estimate_of(point, raw, "cuda")
        except UserError as error:
            reasons[error.problem] = None
            table.add_row(point.name, str(point.gpus), *[NONE] * 4)
            continue
        w, needs = expected.workload, expected.device_bytes
        over = memory_bytes is not None and needs > memory_bytes
        shown = f"{gib(needs)}{' (does not fit)' if over else ''}"
        table.add_row(point.name, str(w.gpus), str(w.rows), f"{w.sequence_length:,}", shown, expected.peak.name)
    console = Console(highlight=False, soft_wrap=True)
    print_table(table, console)
    for reason in reasons:
        console.print(f"no estimate: {reason}", markup=False)


def expected_bytes(record: Record) -> int | None:
    """Return the measurement that the estimate predicts: tensors, and on a CPU also what the process held before.

    None where there is no estimate.
    """
    if record["estimate"] is None:
        return None
    return record["estimate"]["peak_bytes"] + record.get("process_bytes", 0)


def _speed(record: Record) -> float | None:
    return record["tokens_per_second"] / record["gpus"] if record.get("tokens_per_second") else None


def print_records(records: Sequence[Record], console: Console) -> None:
    """Print estimate against measured peak, point by point."""
    table = _table("point", "status", "peak GiB", "estimate GiB", "deviation", "of the first", "tokens/s/GPU", "loss")
    first = next((record["peak_bytes"] for record in records if record.get("peak_bytes")), None)
    for record in records:
        peak, tokens, expected = record.get("peak_bytes"), _speed(record), expected_bytes(record)
        estimated = NONE if expected is None else gib(expected)
        measured = ["", estimated, "", "", "", ""]
        if peak:
            shares = (NONE if expected is None else f"{expected / peak - 1:+.1%}", f"{peak / first:.2f}")
            measured = [gib(peak), estimated, *shares, f"{tokens:,.0f}", f"{record['loss']:.4f}"]
        table.add_row(record["name"], record["status"], *measured)
    print_table(table, console)


def best_of(records: Sequence[Record]) -> Record | None:
    """Return the fastest point that ran, per GPU; of equally fast ones that with the least memory."""
    ran = [record for record in records if record["status"] == OK]
    return max(ran, key=lambda record: (_speed(record), -record["peak_bytes"]), default=None)


def write_best(folder: Path, records: Sequence[Record], raw: Mapping[str, Any]) -> Path | None:
    """Write best.json, the stage `raw` with the best point's settings; return it, or None if no point ran."""
    best = best_of(records)
    if best is None:
        return None
    stage = Point(best["name"], best["settings"], best["gpus"]).applied(raw)
    # In sections of this package null is a value, which may stand for another than the preset's.
    stage = {key: part if key in OWN_SECTIONS else _without_null(part) for key, part in stage.items()}
    stage = {key: part for key, part in stage.items() if part is not None}
    write_atomically(folder / BEST, json.dumps(stage, indent=2) + "\n")
    return folder / BEST


def _without_null(values: Any) -> Any:
    """Return values without null: a sweep takes a key away by setting it to null."""
    if isinstance(values, dict):
        return {key: _without_null(value) for key, value in values.items() if value is not None}
    return values
