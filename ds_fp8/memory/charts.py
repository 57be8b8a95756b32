"""The pictures of a sweep, each an <svg> element."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ds_fp8.memory.estimate import KINDS
from ds_fp8.memory.results import OK, Record

GIB = 2**30
PROCESS = "process"
_COLOURS = dict(zip(KINDS, matplotlib.colormaps["tab20"].colors[: len(KINDS)], strict=False)) | {PROCESS: "#e4e4e4"}
_MEASURED = "#111111"


def all_charts(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Return (caption, <svg>) of every picture that the records have the figures for."""
    points = [record for record in records if "search" not in record]
    charts: list[tuple[str, Callable[[Sequence[Record]], Figure | None], Sequence[Record]]] = [
        ("Peak memory per GPU: the estimate by kind, and what was measured (black line).", _memory, points or records),
        ("Speed.", _speed, points or records),
        ("Memory against speed: points on the line are beaten by none in both.", _frontier, records),
        ("The largest micro-batch that fits, by the estimate.", _fitting, points or records),
        ("The largest that ran in a search, and the smallest that did not (x).", _largest, records),
    ]
    for caption, draw, chosen in charts:
        figure = draw(chosen)
        if figure is not None:
            yield caption, _svg(figure)


def _bars(records: Sequence[Any]) -> tuple[Figure, Any]:
    figure = Figure(figsize=(9.5, 1.6 + 0.42 * len(records)), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    return figure, axes


def _memory(records: Sequence[Record]) -> Figure | None:
    if not records:
        return None
    figure, axes = _bars(records)
    names = [record["name"] for record in records]
    left = [0.0] * len(records)
    amounts = {
        PROCESS: [record.get("process_bytes", 0) / GIB for record in records],
        **{kind: [record["estimate"]["parts"].get(kind, 0) / GIB for record in records] for kind in KINDS},
    }
    for kind, sizes in amounts.items():
        if any(sizes):
            axes.barh(names, sizes, left=left, color=_COLOURS[kind], label=kind, height=0.7)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, record in enumerate(records):
        if record.get("peak_bytes"):
            x = record["peak_bytes"] / GIB
            axes.plot([x, x], [row - 0.45, row + 0.45], color=_MEASURED, linewidth=2)
        else:
            axes.text(left[row], row, f" {record['status']}", va="center", color="#a33333")
    axes.set_xlabel("GiB")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.set_figheight(figure.get_figheight() + 1.2)
    return figure


def _speed(records: Sequence[Record]) -> Figure | None:
    ran = [record for record in records if record["status"] == OK]
    if not ran:
        return None
    figure, axes = _bars(ran)
    bars = axes.barh([record["name"] for record in ran], [_speed_of(record) for record in ran], color="#30638e")
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_xlabel("tokens per second per GPU")
    return figure


def _frontier(records: Sequence[Record]) -> Figure | None:
    ran = [record for record in records if record["status"] == OK]
    if len(ran) < 2:
        return None
    figure = Figure(figsize=(9.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.scatter([r["peak_bytes"] / GIB for r in ran], [_speed_of(r) for r in ran], color="#30638e", zorder=3)
    for record in ran:
        place = (record["peak_bytes"] / GIB, _speed_of(record))
        axes.annotate(record["name"], place, xytext=(5, 4), textcoords="offset points", fontsize="small")
    front = frontier(ran)
    axes.plot([r["peak_bytes"] / GIB for r in front], [_speed_of(r) for r in front], color="#d1495b")
    axes.set_xlabel("peak memory, GiB")
    axes.set_ylabel("tokens per second per GPU")
    axes.margins(x=0.2, y=0.15)
    return figure


def frontier(records: Sequence[Record]) -> list[Record]:
    """Return the records than which none is both smaller and faster, from the smallest on."""
    front: list[Record] = []
    for record in sorted(records, key=lambda record: (record["peak_bytes"], -_speed_of(record))):
        if not front or _speed_of(record) > _speed_of(front[-1]):
            front.append(record)
    return front


def _fitting(records: Sequence[Record]) -> Figure | None:
    known = [record for record in records if "fits" in record]
    if not known:
        return None
    figure, axes = _bars(known)
    bars = axes.barh([r["name"] for r in known], [r["fits"]["micro_batch"] for r in known], color="#2e8b57")
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_xlabel(f"rows of a micro-batch on a GPU of {known[0]['fits']['memory_bytes'] / GIB:,.0f} GiB")
    return figure


def _largest(records: Sequence[Record]) -> Figure | None:
    tried: dict[tuple[str, str], dict[bool, list[int]]] = {}
    for record in records:
        if "search" in record:
            sizes = tried.setdefault((record["of"], record["search"]), {True: [], False: []})
            sizes[record["status"] == OK].append(record["tried"])
    if not tried:
        return None
    figure, axes = _bars(list(tried))
    names = [of for of, _ in tried]
    largest = [max(sizes[True], default=0) for sizes in tried.values()]
    bars = axes.barh(names, largest, color="#2e8b57")
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    for row, sizes in enumerate(tried.values()):
        if sizes[False]:
            axes.plot(min(sizes[False]), row, "x", color="#a33333")
    axes.set_xlabel(" / ".join(dict.fromkeys(search.replace("_", " ") for _, search in tried)))
    return figure


def _speed_of(record: Record) -> float:
    return record["tokens_per_second"] / record["gpus"]


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    # Text as text, so that it can be searched and read aloud; nothing in the file but the picture.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_fp8"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
