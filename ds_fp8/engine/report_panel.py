"""Show the start report as one panel of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.panel import Panel
from rich.table import Table

from ds_fp8.config.log import show
from ds_fp8.engine.coverage import EXPERTS

FUSED = {
    "fused_layers": "decoder layers",
    "fused_attention_halves": "attention halves of layers with experts",
    "fused_mlps": "MLPs",
}
"""Keys of the report that count fused parts -> what these are."""


def log_report(report: dict[str, Any]) -> None:
    """Log the report as one panel."""
    if not report["enabled"]:
        show("[bold]FP8 is off[/bold]: plain DeepSpeed in BF16")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    total, kept = report["parameters"], report["kept_in_bf16"]
    experts = [part for part in kept if part["reason"].startswith(EXPERTS)]
    if experts:
        share = sum(part["parameters"] for part in experts) / total
        table.add_row("experts", f"[bold]{share:.0%} of the parameters stay BF16: experts[/bold]")
    if report["fp8_gathered_experts"]:
        share = report["fp8_gathered_experts"] / total
        table.add_row("experts", f"{share:.1%} of the parameters: gathered in FP8, {_products_of_experts(report)}")
        decoded = report["experts_decoded"]
        for reason in dict.fromkeys(decoded.values()):
            table.add_row("experts", f"multiplied in BF16: {_some(decoded, reason)}")
    if (tokens := report["expert_parallelism_below_tokens"]) is not None:
        table.add_row(
            "experts",
            f"below about {tokens:,} tokens a GPU and micro-batch (computed, for NVLink) their gathers take longer "
            "than their products: expert parallelism would be faster",
        )
    shared_by = report["sequence_parallel_size"]
    shared = f", {shared_by} ranks share a sequence" if shared_by > 1 else ""
    table.add_row("hosts x ranks", f"{report['ranks_of_hosts']}{shared}")
    share = report["fp8_parameters"] / total
    table.add_row("linears in FP8", f"{report['fp8_linears']} ({share:.1%} of {total:,} parameters)")
    for part in kept:
        names = ", ".join(part["names"][:2]) + (" ..." if len(part["names"]) > 2 else "")
        count = len(part["names"])
        tensors = (
            f"{count} tensor{'s' * (count > 1)}, {part['parameters']:,} parameters ({part['parameters'] / total:.1%})"
        )
        table.add_row("in BF16", f"{part['reason']}: {tensors}, {names}")
    fused = [f"{report[key]} {what}" for key, what in FUSED.items()]
    table.add_row("fused", ", ".join(text for text in fused if not text.startswith("0 ")) or "nothing")
    # Once a reason, with a few names: large models have many layers with the same one.
    for reason in dict.fromkeys(report["not_fused"].values()):
        table.add_row("not fused", f"{_some(report['not_fused'], reason)}: {reason}")
    if report["fp8_attention_layers"]:
        table.add_row("attention", f"{report['fp8_attention_layers']} layers {report['attention']}")
    if report["attention_exchange"] is not None:
        table.add_row("attention's exchange", report["attention_exchange"])
    for reason in dict.fromkeys(report["attention_in_bf16"].values()):
        table.add_row("attention in BF16", f"{_some(report['attention_in_bf16'], reason)}: {reason}")
    table.add_row("casts", ", ".join(f"{name} {cast}" for name, cast in report["casts"].items()))
    for title, text in report["remarks"].items():
        table.add_row(title, text)
    for part in report["overrides"]:
        count = part["linears"]
        backend = "" if part["backend"] in ("bf16", report["backend"]) else f", by {part['backend']}"
        table.add_row("override", f"{part['pattern']}: {count} linear{'s' * (count != 1)}, {part['casts']}{backend}")
    if report["outlier_channels"]:
        words = "the input channels with the largest energy, multiplied with their cast errors too"
        experts = "; experts have none" if report["experts_multiplied_in_fp8"] or report["experts_decoded"] else ""
        table.add_row("outlier channels", f"{report['outlier_channels']} a product: {words}{experts}")
    table.add_row("GEMM backend", f"{report['backend']} ({report['backend_description']})")
    table.add_row(
        "parameter all-gather",
        f"{report['param_gather']}, {report['param_transport']}, "
        f"{report['gathered_bytes_per_parameter']:.2f} bytes a parameter (BF16: 2), "
        f"{report['fp8_shard_bytes_per_rank']:,} bytes of FP8 shards and scales a rank",
    )
    table.add_row("gradient reduction", ", ".join([report["grad_reduce"], report["grad_hierarchy"], *_unusual(report)]))
    state = report["optimizer_state"]
    kept = ", ".join(f"{name} {state[name]}" for name in ("exp_avg", "exp_avg_sq"))
    rounding = _rounding(report["stochastic_parts"])
    moments = f"{report['moment_bytes_per_parameter']:.2f} bytes of moments a parameter"
    table.add_row("optimizer", f"{report['optimizer']}: {kept}{rounding}, {moments}")
    table.add_row("optimizer step", report["optimizer_step"])
    table.add_row("CUDA graphs", report["graphs"])
    table.add_row("loss", report["loss"])
    table.add_row("health of casts", _monitoring(report["monitor"]))
    for note in report["notes"]:
        table.add_row("note", note)
    show(Panel(table, title=f"ds_fp8, preset {report['preset']}", title_align="left", expand=False))


def _products_of_experts(report: dict[str, Any]) -> str:
    count, decoded = report["experts_multiplied_in_fp8"], len(report["experts_decoded"])
    if not count:
        return "decoded and multiplied in BF16"
    return "multiplied in FP8" if not decoded else f"multiplied in FP8 in {count} of {count + decoded} layers"


def _rounding(parts: Sequence[str]) -> str:
    return f", {' and '.join(parts)} rounded stochastically" if parts else ""


def _unusual(report: dict[str, Any]) -> list[str]:
    """Return the options of the gradients' cast that are not the defaults."""
    cast = report["grad_cast"]
    words = ["one scale a tensor"] * (cast["scale"] == "tensor") + ["stochastic rounding"] * (
        cast["rounding"] == "stochastic"
    )
    if cast["error_feedback"] != "off":
        kept = report["grad_residual_bytes_per_rank"]
        words.append(f"error feedback in {cast['error_feedback']}, {kept:,} bytes a rank")
    return words


def _monitoring(monitor: dict[str, Any]) -> str:
    if not monitor["every"]:
        return "not measured"
    result = "now runs in BF16" if monitor["fallback"] else "is named"
    return f"measured every {monitor['every']} steps; a layer that degrades {result}"


def _some(reasons: dict[str, str], reason: str) -> str:
    """Return the first few names that have this reason."""
    names = [name for name, why in reasons.items() if why == reason]
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
