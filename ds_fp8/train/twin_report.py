"""FP8 runs beside their BF16 twins: summary.json, and report.html as one file with its pictures inside."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ds_fp8.errors import UserError
from ds_fp8.train.checkpoints import METRICS, RESULT

Runs = Mapping[str, Mapping[str, "RunRecord"]]
"""Stage name -> {"fp8", "bf16"} -> what the run left."""

KINDS = ("fp8", "bf16")
_COLOURS = {"fp8": "#d1495b", "bf16": "#30638e"}
_LABELS = {"fp8": "FP8", "bf16": "BF16"}


class RunRecord:
    """A finished run folder: its result and its metrics by line."""

    def __init__(self, folder: Path):
        try:
            self.result: dict[str, Any] = json.loads((folder / RESULT).read_text())
            self.metrics = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        except OSError as error:
            raise UserError(
                f"{folder} is not a finished run: {Path(error.filename).name} is missing",
                file=folder,
                remedy="run the stage to its end first",
            ) from None

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of every record that has `key`."""
        pairs = [(r["step"], r[key]) for r in self.metrics if r.get(key) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]


def summarise(runs: Runs) -> dict[str, Any]:
    """The figures of every stage, FP8 beside BF16, with ratios; losses in nats per token, bytes per step and rank."""
    stages = {}
    for stage, pair in runs.items():
        entry: dict[str, Any] = {}
        for kind in KINDS:
            result = pair[kind].result
            entry[kind] = {
                "steps": result["steps"],
                "first_loss": result["first_loss"],
                "last_loss": result["last_train_loss"],
                "first_validation_loss": result["first_validation_loss"],
                "final_validation_loss": result["final_loss"],
                "exact_match_before": result["exact_match"]["before"],
                "exact_match": result["exact_match"]["after"],
                "exact_match_problems": result["exact_match"]["problems"],
                "all_gather_bytes": result["bytes_per_step"]["all_gather_bytes"],
                "grad_bytes": result["bytes_per_step"]["grad_bytes"],
                "tokens_per_second": result["tokens_per_second"],
                "peak_memory_bytes": result["peak_memory_bytes"],
                "skipped_steps": result["skipped_steps"],
            }
        fp8, bf16 = entry["fp8"], entry["bf16"]
        entry["final_loss_gap"] = fp8["final_validation_loss"] / bf16["final_validation_loss"] - 1
        for key in ("all_gather_bytes", "grad_bytes", "peak_memory_bytes", "tokens_per_second"):
            entry[f"{key}_ratio"] = fp8[key] / bf16[key] if bf16[key] else None
        stages[stage] = entry
    first = next(iter(runs.values()))["fp8"].result
    return {
        "device": first["device"],
        "ranks": first["ranks"],
        "parameters": first["parameters"],
        "versions": first["versions"],
        "stages": stages,
    }


def write_report(runs: Runs, folder: Path, title: str) -> tuple[Path, Path]:
    """Write folder/summary.json and folder/report.html; returns their paths."""
    summary = summarise(runs)
    folder.mkdir(parents=True, exist_ok=True)
    summary_file, report_file = folder / "summary.json", folder / "report.html"
    summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    report_file.write_text(_page(title, summary, runs))
    return summary_file, report_file


# ---------------------------------------------------------------- pictures


def _picture(draw: Callable[[Any], None], columns: int, alternative: str) -> str:
    """An <img> with the figure that `draw(axes)` fills, `columns` panels wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(4.2 * columns, 3.2), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    draw(axes[0])
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    pyplot.close(figure)
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="{escape(alternative)}" src="data:image/png;base64,{data}">'


def _losses(runs: Runs) -> str:
    def draw(axes: Any) -> None:
        for axis, (stage, pair) in zip(axes, runs.items(), strict=True):
            for kind in KINDS:
                style = {"color": _COLOURS[kind], "label": f"{_LABELS[kind]} training"}
                axis.plot(*pair[kind].series("loss"), **style, linewidth=1.2, linestyle="-" if kind == "fp8" else "--")
                style["label"] = f"{_LABELS[kind]} validation"
                axis.plot(*pair[kind].series("validation_loss"), **style, linestyle="", marker="ox"[kind == "bf16"])
            axis.set(title=stage, xlabel="step", ylabel="loss (nats per token)", yscale="log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="y", which="both", labelsize=7)
        axes[0].legend(frameon=False, fontsize=8)

    return _picture(draw, len(runs), "loss of FP8 and BF16 by stage")


def _bars(summary: dict[str, Any], panels: Mapping[str, Callable[[dict], float]], alternative: str) -> str:
    """One panel a title; in each, a pair of bars a stage."""
    stages = summary["stages"]

    def draw(axes: Any) -> None:
        for axis, (title, value) in zip(axes, panels.items(), strict=True):
            for offset, kind in ((-0.2, "fp8"), (0.2, "bf16")):
                heights = [value(stages[stage][kind]) for stage in stages]
                places = [index + offset for index in range(len(stages))]
                bars = axis.bar(places, heights, 0.38, color=_COLOURS[kind], label=_LABELS[kind])
                axis.bar_label(bars, fmt="{:,.3g}" if max(heights) < 100 else "{:,.0f}", fontsize=7)
            axis.set_xticks(range(len(stages)), list(stages), fontsize=8)
            axis.set_title(title, fontsize=10)
            axis.margins(y=0.3)  # room for the legend above the bars
            axis.legend(frameon=False, ncols=2, loc="upper center", fontsize=8)

    return _picture(draw, len(panels), alternative)


# ---------------------------------------------------------------- page

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1c2733}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2rem}img{max-width:100%}
table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #dde3ea}
th:first-child,td:first-child{text-align:left}td.note{text-align:left}
.muted{color:#667}
"""


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _results_table(summary: dict[str, Any]) -> str:
    rows = []
    for stage, entry in summary["stages"].items():
        fp8, bf16 = entry["fp8"], entry["bf16"]
        rows.append(
            [
                stage,
                f"{fp8['first_validation_loss']:.3f} -> {fp8['final_validation_loss']:.4f}",
                f"{bf16['first_validation_loss']:.3f} -> {bf16['final_validation_loss']:.4f}",
                f"{entry['final_loss_gap']:+.2%}",
                f"{_percent(fp8['exact_match_before'])} -> {_percent(fp8['exact_match'])}",
                f"{_percent(bf16['exact_match_before'])} -> {_percent(bf16['exact_match'])}",
                f"{entry['all_gather_bytes_ratio']:.3f}",
                f"{entry['grad_bytes_ratio']:.3f}",
                f"{entry['tokens_per_second_ratio']:.2f}",
            ]
        )
    header = ["stage", "FP8 loss", "BF16 loss", "gap", "FP8 exact match", "BF16 exact match"]
    return _table([*header, "gather bytes", "gradient bytes", "tokens/s"], rows)


def _report_table(report: dict[str, Any]) -> str:
    rows = []
    for key, value in report.items():
        if isinstance(value, Mapping):
            value = "; ".join(f"{name}: {item}" for name, item in value.items())
        elif isinstance(value, list):
            value = "; ".join(map(str, value))
        rows.append([key.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value)])
    return _table(["FP8 report", "first stage"], rows)


def _page(title: str, summary: dict[str, Any], runs: Runs) -> str:
    where = "GPU memory allocated" if summary["device"] == "cuda" else "resident memory of the process"
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    notes = next(iter(runs.values()))["fp8"].result["fp8"].get("notes", [])
    traffic = {
        "parameter gather, MB a step": lambda run: run["all_gather_bytes"] / 1e6,
        "gradients, MB a step": lambda run: run["grad_bytes"] / 1e6,
    }
    outcome = {"exact match, % of held-out problems": lambda run: 100 * (run["exact_match"] or 0)}
    memory = {
        f"{where}, MiB": lambda run: run["peak_memory_bytes"] / 2**20,
        "tokens/s": lambda run: run["tokens_per_second"],
    }
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{summary["parameters"]:,} parameters, {summary["ranks"]} ranks on {summary["device"]}; '
        f"{escape(versions)}. The BF16 twin has the same seed, data and steps.</p>",
        _results_table(summary),
        '<p class="muted">Losses are validation losses before and after the stage. Bytes and tokens/s are FP8 over '
        f"BF16. {escape('. '.join(notes))}.</p>",
        "<h2>Loss</h2>",
        _losses(runs),
        "<h2>Answers</h2>",
        _bars(summary, outcome, "exact match by stage"),
        "<h2>Bytes on the wire, sent by one rank</h2>",
        _bars(summary, traffic, "bytes on the wire by stage"),
        "<h2>Memory and speed</h2>",
        _bars(summary, memory, "memory and speed by stage"),
        "<h2>What ran in FP8</h2>",
        _report_table(next(iter(runs.values()))["fp8"].result["fp8"]),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
