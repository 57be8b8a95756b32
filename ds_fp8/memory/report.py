"""Write a sweep's results: sweep.csv, report.html as one file that needs no network, and the best point as a stage."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ds_fp8.memory import charts
from ds_fp8.memory.grid import Point
from ds_fp8.memory.results import OK, Record
from ds_fp8.memory.sweep import expected_bytes
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.stage import OWN_SECTIONS

CSV, HTML, BEST = "sweep.csv", "report.html", "best.json"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right }}
th {{ cursor: pointer; vertical-align: bottom }}
th:first-child, td:first-child {{ text-align: left }}
figure {{ margin: 2rem 0 }}
figcaption {{ color: #555 }}
svg {{ max-width: 100%; height: auto }}
tr.bad td {{ color: #a33 }}
code {{ background: #f3f3f3; padding: 0 .2rem }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{about}</p>
{table}
{figures}
<script>
document.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {{
  const body = head.closest("table").tBodies[0];
  const value = row => row.cells[column].dataset.value;
  const down = head.dataset.down = head.dataset.down === "1" ? "" : "1";
  const rows = [...body.rows].sort((a, b) => isNaN(value(a)) || isNaN(value(b))
    ? value(a).localeCompare(value(b)) : value(a) - value(b));
  (down ? rows.reverse() : rows).forEach(row => body.append(row));
}}));
</script>
</body>
</html>
"""


def deviation(record: Record) -> float | None:
    """Return how far the estimate is from the measurement: (estimate / measured) - 1."""
    return expected_bytes(record) / record["peak_bytes"] - 1 if record.get("peak_bytes") else None


def speed(record: Record) -> float | None:
    """Return the tokens per second per GPU."""
    return record["tokens_per_second"] / record["gpus"] if record.get("tokens_per_second") else None


def best_of(records: Sequence[Record]) -> Record | None:
    """Return the fastest point that ran, per GPU; of equally fast ones that with the least memory."""
    ran = [record for record in records if record["status"] == OK]
    return max(ran, key=lambda record: (speed(record), -record["peak_bytes"]), default=None)


def write_report(
    folder: Path, records: Sequence[Record], raw: Mapping[str, Any], title: str, description: str = ""
) -> list[Path]:
    """Write sweep.csv, report.html and, when a point ran, best.json; return the files that were written.

    Args:
        folder: Where to write them.
        records: The points and what they took.
        raw: The stage's JSON that the points change.
        title: Title of the page.
        description: Text below the title.
    """
    files = {CSV: table_csv(records), HTML: page(records, title, description)}
    best = best_of(records)
    if best is not None:
        stage = Point(best["name"], best["settings"], best["gpus"]).applied(raw)
        # In sections of this package null is a value, which may stand for another than the preset's.
        stage = {key: part if key in OWN_SECTIONS else _without_null(part) for key, part in stage.items()}
        files[BEST] = json.dumps({key: part for key, part in stage.items() if part is not None}, indent=2) + "\n"
    for name, text in files.items():
        write_atomically(folder / name, text)
    return [folder / name for name in files]


def table_csv(records: Sequence[Record]) -> str:
    """Return one row a point: figures in bytes, seconds and tokens per second, then the estimate by kind."""
    kinds = list(dict.fromkeys(kind for record in records for kind in record["estimate"]["parts"]))
    stream = io.StringIO()
    figures = ("peak_bytes", "reserved_bytes", "tokens_per_second", "step_seconds", "loss", "steps", "seconds")
    writer = csv.writer(stream)
    writer.writerow(["name", "status", "reason", "gpus", "device", *figures, "estimated_bytes", *kinds, "settings"])
    for record in records:
        parts = record["estimate"]["parts"]
        writer.writerow(
            [record[key] for key in ("name", "status", "reason", "gpus", "device")]
            + [record.get(key, "") for key in figures]
            + [expected_bytes(record), *(parts.get(kind, 0) for kind in kinds), json.dumps(record["settings"])]
        )
    return stream.getvalue()


def page(records: Sequence[Record], title: str, description: str = "") -> str:
    """Return the report as HTML, its pictures inside."""
    devices = ", ".join(dict.fromkeys(f"{r['gpus']} x {r['device']}" for r in records)) or "nothing measured"
    what = "the process's memory, as there is no GPU" if _on_cpu(records) else "torch's allocator"
    about = f"{description} Measured on {devices}; peaks are of {what}, per GPU.".strip()
    figures = [
        f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, picture in charts.all_charts(records)
    ]
    return _PAGE.format(title=escape(title), about=escape(about), table=_table(records), figures="\n".join(figures))


def _table(records: Sequence[Record]) -> str:
    head = ("point", "status", "peak GiB", "estimate GiB", "deviation", "of the first", "tokens/s/GPU", "loss")
    first = next((record["peak_bytes"] for record in records if record.get("peak_bytes")), None)
    rows = []
    for record in records:
        peak = record.get("peak_bytes")
        cells = [
            (record["name"], record["name"]),
            (record["status"], record["status"]),
            _number(peak and peak / 2**30, "{:.2f}"),
            _number(expected_bytes(record) / 2**30, "{:.2f}"),
            _number(deviation(record), "{:+.1%}"),
            _number(peak and first and peak / first, "{:.2f}"),
            _number(speed(record), "{:,.0f}"),
            _number(record.get("loss"), "{:.4f}"),
        ]
        kind = "" if record["status"] == OK else f' class="bad" title="{escape(record["reason"], quote=True)}"'
        cells_html = "".join(f'<td data-value="{escape(str(v), quote=True)}">{escape(t)}</td>' for v, t in cells)
        rows.append(f"<tr{kind}>{cells_html}</tr>")
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _number(value: float | None, shape: str) -> tuple[Any, str]:
    return ("", "") if value is None else (value, shape.format(value))


def _on_cpu(records: Sequence[Record]) -> bool:
    return any(record["device"] == "cpu" for record in records)


def _without_null(values: Any) -> Any:
    """Accept null: a sweep takes a key away by setting it to null."""
    if isinstance(values, dict):
        return {key: _without_null(value) for key, value in values.items() if value is not None}
    return values
