"""Show the start report as one panel of the log: ten lines, or with "report": "full" all that is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.panel import Panel
from rich.table import Table

from ds_fp8.config.log import show
from ds_fp8.engine.report import EXPERTS

FUSED = {
    "fused_layers": "decoder layers",
    "fused_attention_halves": "attention halves of layers with experts",
    "fused_mlps": "MLPs",
}
"""Keys of the report that count fused parts -> what these are."""
OTHERS_FORWARD = "replaced on the instance"
"""Words of the description of a loss whose forward another package, such as TRL, has put on the model."""
NO_OPTIMIZER = "none"
Rows = Iterator[tuple[str, str]]


def log_report(report: Mapping[str, Any], full: bool = False) -> None:
    """Log the report as one panel."""
    if not report["enabled"]:
        show("[bold]FP8 is off[/bold]: plain DeepSpeed in BF16")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, text in _full(report) if full else _short(report):
        table.add_row(title, text)
    show(Panel(table, title=f"ds_fp8, preset {report['preset']}", title_align="left", expand=False))


def _short(report: Mapping[str, Any]) -> Rows:
    total = report["parameters"]
    if report["preset_reason"] is not None:
        yield "preset", f"not named in the configuration; {report['preset_reason']}"
    if report["hosts"] > 1 or report["sequence_parallel_size"] > 1:
        yield _hosts(report)
    fused = ", ".join(f"{report[key]} {what}" for key, what in FUSED.items() if report[key]) or "nothing"
    yield "linears in FP8", f"{_linears(report)}; fused: {fused}"
    yield from _experts(report)
    if report["fp8_attention_layers"]:
        yield "attention in FP8", f"{report['fp8_attention_layers']} layers, {report['attention']}"
    yield (
        "in BF16",
        "; ".join(f"{part['reason']} ({part['parameters'] / total:.1%})" for part in report["kept_in_bf16"]),
    )
    for reason, names in _by_reason(report["not_fused"]):
        yield "not fused", f"{names}: {reason}"
    yield "products", f"{_casts(report)}; by {report['backend']} ({report['backend_description']})"
    yield "wire", f"weights {_gather(report)}; gradients {_reduction(report)}"
    step = "" if report["optimizer"] == NO_OPTIMIZER else f"{report['optimizer_step']}; "
    yield "optimizer step", f"{step}{_optimizer(report)}"
    yield "CUDA graphs", report["graphs"]
    yield "loss", _loss(report)
    yield from (("note", note) for note in report["notes"])


def _full(report: Mapping[str, Any]) -> Rows:
    total = report["parameters"]
    if report["preset_reason"] is not None:
        yield "preset", f"not named in the configuration; {report['preset_reason']}"
    yield from _experts(report)
    yield _hosts(report)
    yield "linears in FP8", _linears(report)
    for part in report["kept_in_bf16"]:
        count = f"{len(part['names'])} tensor{'s' * (len(part['names']) > 1)}"
        share = f"{part['parameters']:,} parameters ({part['parameters'] / total:.1%})"
        yield "in BF16", f"{part['reason']}: {count}, {share}, {_first(part['names'], 2)}"
    yield "fused", ", ".join(f"{report[key]} {what}" for key, what in FUSED.items() if report[key]) or "nothing"
    # Once a reason, with a few names: large models have many layers with the same one.
    for reason, names in _by_reason(report["not_fused"]):
        yield "not fused", f"{names}: {reason}"
    if report["fp8_attention_layers"]:
        yield "attention", f"{report['fp8_attention_layers']} layers {report['attention']}"
    if report["attention_exchange"] is not None:
        yield "attention's exchange", report["attention_exchange"]
    for reason, names in _by_reason(report["attention_in_bf16"]):
        yield "attention in BF16", f"{names}: {reason}"
    yield "casts", _casts(report)
    yield from report["remarks"].items()
    for part in report["overrides"]:
        backend = "" if part["backend"] in ("bf16", report["backend"]) else f", by {part['backend']}"
        count = f"{part['linears']} linear{'s' * (part['linears'] != 1)}"
        yield "override", f"{part['pattern']}: {count}, {part['casts']}{backend}"
    yield "GEMM backend", f"{report['backend']} ({report['backend_description']})"
    held = f"{report['fp8_shard_bytes_per_rank']:,} bytes of FP8 shards and scales a rank"
    yield "parameter all-gather", f"{_gather(report)}, {held}"
    yield "gradient reduction", _reduction(report)
    yield "optimizer", _optimizer(report)
    yield "optimizer step", report["optimizer_step"]
    yield "CUDA graphs", report["graphs"]
    yield "loss", _loss(report)
    monitor = report["monitor"]
    result = "now runs in BF16" if monitor["fallback"] else "is named"
    measured = f"measured every {monitor['every']} steps; a layer that degrades {result}"
    yield "health of casts", measured if monitor["every"] else "not measured"
    yield from (("note", note) for note in report["notes"])


def _experts(report: Mapping[str, Any]) -> Rows:
    total, kept = report["parameters"], report["kept_in_bf16"]
    in_bf16 = sum(part["parameters"] for part in kept if part["reason"].startswith(EXPERTS))
    if in_bf16:
        yield "experts", f"[bold]{in_bf16 / total:.0%} of the parameters stay BF16: experts[/bold]"
    if report["fp8_gathered_experts"]:
        count, decoded = report["experts_multiplied_in_fp8"], report["experts_decoded"]
        products = "decoded and multiplied in BF16"
        if count:
            products = f"multiplied in FP8{f' in {count} of {count + len(decoded)} layers' if decoded else ''}"
        yield "experts", f"{report['fp8_gathered_experts'] / total:.1%} of the parameters: gathered in FP8, {products}"
        for reason, names in _by_reason(decoded):
            yield "experts", f"multiplied in BF16: {names} ({reason})"


def _hosts(report: Mapping[str, Any]) -> tuple[str, str]:
    shared_by = report["sequence_parallel_size"]
    shared = f", {shared_by} ranks share a sequence" if shared_by > 1 else ""
    return "hosts x ranks", f"{report['ranks_of_hosts']}{shared}"


def _linears(report: Mapping[str, Any]) -> str:
    total = report["parameters"]
    return f"{report['fp8_linears']} ({report['fp8_parameters'] / total:.1%} of {total:,} parameters)"


def _casts(report: Mapping[str, Any]) -> str:
    words = ", ".join(f"{name} {cast}" for name, cast in report["casts"].items())
    if not report["outlier_channels"]:
        return words
    experts = ", experts without" if report["experts_multiplied_in_fp8"] or report["experts_decoded"] else ""
    return f"{words}; {report['outlier_channels']} outlier channels a product{experts}"


def _gather(report: Mapping[str, Any]) -> str:
    share = f"{report['gathered_bytes_per_parameter']:.2f} bytes a parameter (BF16: 2)"
    return f"{report['param_gather']}, {report['param_transport']}, {share}"


def _reduction(report: Mapping[str, Any]) -> str:
    scale = ["one scale a tensor"] * (report["grad_scale"] == "tensor")
    return ", ".join([report["grad_reduce"], report["grad_hierarchy"], *scale])


def _optimizer(report: Mapping[str, Any]) -> str:
    name = report["optimizer"]
    if name == NO_OPTIMIZER:
        return f"{name}: this engine evaluates"
    return f"{name}, {_moments(report)}" if "Adam" in name else name


def _moments(report: Mapping[str, Any]) -> str:
    state, parts = report["optimizer_state"], report["stochastic_parts"]
    kept = ", ".join(f"{name} {state[name]}" for name in ("exp_avg", "exp_avg_sq"))
    rounding = f", {' and '.join(parts)} rounded stochastically" if parts else ""
    return f"{kept}{rounding}, {report['moment_bytes_per_parameter']:.2f} bytes of moments a parameter"


def _loss(report: Mapping[str, Any]) -> str:
    if OTHERS_FORWARD not in report["loss"]:
        return report["loss"]
    return (
        f"{report['loss']} (by TRL, say): whether logits are in memory is up to it (TRL's chunked loss has none), and "
        "fp8.loss has no effect"
    )


def _by_reason(reasons: Mapping[str, str]) -> Rows:
    """Yield each reason once, with the first few names that have it."""
    for reason in dict.fromkeys(reasons.values()):
        yield reason, _first([name for name, why in reasons.items() if why == reason], 3)


def _first(names: list[str], count: int) -> str:
    return ", ".join(names[:count]) + (" ..." if len(names) > count else "")
