"""The start report: parameters in FP8 and in BF16 with the reason, bytes, notes on speed; and its panel.

The panel has ten lines, or with "report": "full" all of the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from rich.panel import Panel
from rich.table import Table
from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS, NATIVE_FORMATS
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.log import show
from ds_fp8.config.plans import MOMENTS
from ds_fp8.engine.state import FP8State
from ds_fp8.gemm import DESCRIPTIONS
from ds_fp8.graphs.conditions import unknown_code
from ds_fp8.graphs.driver import EAGER_STEPS
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.format import AttentionFormat
from ds_fp8.layers.experts.selection import expert_weights, names_of_experts
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.published import IN_3D, published, why_not_in_fp8
from ds_fp8.layers.selection import ROUTERS, in_expert_list
from ds_fp8.optim.moments import moment_bytes
from ds_fp8.zero.deepspeed.parameters import full_shape, is_partitioned, untrained_parameters
from ds_fp8.zero.hosts import why_flat

MEASURED = "one H200, 2026-11-22"
# Hidden size -> fewest measured tokens of a micro-batch with which a fused decoder layer of infir2 was faster than
# transformers' in BF16, both eager (docs/performance.md, "Where FP8 pays"). In CUDA graphs FP8 was faster at all sizes.
BREAK_EVEN = {512: 16384, 1024: 16384, 2048: 8192, 4096: 2048}


def why_slow(linears: list[FP8Linear], tokens: int | None) -> str | None:
    """Return a note if eager FP8 layers of this size, with so many tokens (None: unknown), are slower than in BF16.

    Sizes between two measured ones count as the smaller.
    """
    features = sorted(linear.in_features for linear in linears)
    if not features:
        return None
    hidden = features[len(features) // 2]  # the median: the hidden size of most models
    needed = next((count for size, count in reversed(BREAK_EVEN.items()) if size <= hidden), None)
    if needed is None:
        return (
            f"layers with {hidden} features are too small for FP8 to be faster than BF16 ({MEASURED}) without CUDA "
            "graphs: expect less memory and fewer bytes sent, not more tokens/s"
        )
    if tokens is None:
        return f"with {hidden} features FP8 is faster than BF16 from {needed} tokens a GPU and micro-batch ({MEASURED})"
    if tokens >= needed:
        return None
    return (
        f"{tokens} tokens a GPU and micro-batch are too few for FP8 to be faster than BF16 with {hidden} features: "
        f"that begins at {needed} ({MEASURED}); larger micro-batches, longer sequences or CUDA graphs help"
    )


EXPERTS = "experts"  # prefix of the reasons of experts in BF16
NOT_GATHERED = "which ZeRO-3 alone all-gathers in FP8, and not those below its persistence threshold"
LITTLE = 1 / 3  # share of the parameters in FP8 below which the start report warns


def coverage(
    model: nn.Module, left: Mapping[str, str], gathers: Callable[[nn.Parameter], bool] = lambda parameter: False
) -> dict[str, Any]:
    """Count the parameters of a converted model, sharded or not; tied ones once.

    `left`: reasons of linears and weights of experts in BF16, by name. `gathers`: whether a weight of experts is
    all-gathered in FP8. Parameters in BF16 are grouped by reason: experts first, then by size.
    """
    kept: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    total = in_fp8 = gathered = 0
    for owner_name, owner in model.named_modules():
        for own_name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied
                continue
            seen.add(id(parameter))
            shape = full_shape(parameter)
            total += math.prod(shape)
            if isinstance(owner, FP8Linear) and own_name == "weight":
                in_fp8 += math.prod(shape)
                continue
            name = f"{owner_name}.{own_name}".lstrip(".")
            if own_name in expert_weights(owner_name, owner):
                if gathers(parameter):
                    gathered += math.prod(shape)
                    continue
                reason = f"{EXPERTS}, {left.get(name, NOT_GATHERED)}"
            else:
                reason = _reason(owner_name, owner, shape, left)
            part = kept.setdefault(reason, {"reason": reason, "parameters": 0, "names": []})
            part["parameters"] += math.prod(shape)
            part["names"].append(name)
    order = sorted(kept.values(), key=lambda part: (not part["reason"].startswith(EXPERTS), -part["parameters"]))
    return {
        "parameters": total,
        "fp8_parameters": in_fp8,
        "fp8_gathered_experts": gathered,
        "kept_in_bf16": order,
    }


def _reason(name: str, owner: nn.Module, shape: torch.Size, left: Mapping[str, str]) -> str:
    if len(shape) < 2:
        return "norms, biases and other vectors"
    if name in left:
        return left[name]
    if isinstance(owner, nn.Embedding):
        return "embeddings"
    kind = type(owner).__name__
    if "Router" in kind or ROUTERS & set(name.split(".")[-2:]):
        return "a router or gate"
    return "parameters of other layers"


def start_report(engine: deepspeed.DeepSpeedEngine, state: FP8State, tokens: int | None) -> dict[str, Any]:
    """Return facts about an initialised engine, ready for JSON. Counts are of the unsharded model; bytes as named.

    tokens: of a micro-batch on one GPU, None if unknown.
    """
    total = sum(math.prod(full_shape(p)) for p in engine.module.parameters())
    report: dict[str, Any] = {
        "enabled": state.conversion is not None,
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "sequence_parallel_size": engine.sequence_parallel_size,
        "zero_stage": engine.zero_optimization_stage(),
        "parameters": total,
    }
    if state.conversion is None:
        return report

    linears = [module for module in engine.module.modules() if isinstance(module, FP8Linear)]
    fp8, group, conversion, recipe = state.config, state.weights, state.conversion, state.conversion.recipe
    fusion, experts, precision = conversion.fusion, conversion.experts, fp8.optimizer.precision()
    left = conversion.left | experts.left
    covered = coverage(engine.module, left, group.in_fp8 if group is not None else lambda parameter: False)
    sharded = [m.weight for m in linears if is_partitioned(m.weight)]
    gathered = [weight for weight in sharded if group is not None and group.in_fp8(weight)]
    gathered_count = sum(math.prod(full_shape(weight)) for weight in gathered) + covered["fp8_gathered_experts"]
    basic = getattr(engine, "basic_optimizer", None)
    optimizer = NO_OPTIMIZER if basic is None else type(basic).__name__
    graphs = f"after {EAGER_STEPS} micro-batches of a shape, compared with Python now and then"
    report |= {
        "preset": fp8.preset_name,
        "preset_reason": state.preset_reason,
        "backend": recipe.backend,
        "backend_description": DESCRIPTIONS[recipe.backend],
        "casts": {name: str(getattr(fp8.linear, name)) for name in ("input", "weight", "grad_output")},
        "emulated": sorted({str(cast) for linear in linears for cast in linear.recipe.emulated}) + _emulated_state(fp8),
        "overrides": _overrides(state),
        "remarks": fp8.linear.remarks([linear.recipe for linear in linears]),
        "outlier_channels": fp8.linear.outlier_channels,
        "fp8_linears": len(linears),
        **covered,
        "left_in_bf16": left,
        "experts_multiplied_in_fp8": len(experts.multiplied),
        "experts_decoded": experts.dequantized,
        "experts_with_adapters": len(experts.adapted),
        "fused_layers": len(fusion.layers),
        "fused_attention_halves": len(fusion.attention_halves),
        "fused_mlps": len(fusion.mlps),
        "not_fused": fusion.left,
        **_attention(conversion.attention),
        "param_gather": fp8.param_gather.format if group else "bf16",
        "param_transport": group.transport.description if group else "by collectives",
        "fp8_gathered_parameters": gathered_count,
        "fp8_shard_bytes_per_rank": group.nbytes if group else 0,
        "frozen_weights_with_bf16": None if group is None else group.frozen_with_bf16(),
        "frozen_weights_whole": 0 if group is None else group.kept_numel,
        "gathered_bytes_per_parameter": (2 * total - gathered_count - (group.kept_numel if group else 0)) / total,
        "grad_reduce": fp8.grad_reduce.format,
        "grad_scale": fp8.grad_reduce.scale,
        "hosts": state.hosts.count,
        "ranks_of_hosts": str(state.hosts),
        "grad_hierarchy": _hierarchy(state),
        "optimizer": "ds_fp8.optim.AdamW" if state.optimizer else optimizer,
        "optimizer_step": "ds_fp8" if state.step else f"DeepSpeed's: {state.why_no_step}",
        "graphs": f"off: {state.why_no_graphs}" if state.why_no_graphs else graphs,
        "optimizer_state": fp8.optimizer.model_dump(),
        "stochastic_parts": list(precision.stochastic_parts) if precision.compressed else [],
        "moment_bytes_per_parameter": moment_bytes(precision),
        "loss": state.loss.description if state.loss else "the model's own",
        "monitor": {**fp8.monitor.model_dump(), "every": state.monitor.every},
        "moved_to_bf16": state.health.layers_in_bf16,  # the list itself: training appends to it
    }
    return report | {"notes": [*_notes(engine, state, report, linears, tokens), *state.notes]}


def _notes(
    engine: deepspeed.DeepSpeedEngine,
    state: FP8State,
    report: Mapping[str, Any],
    linears: list[FP8Linear],
    tokens: int | None,
) -> Iterator[str]:
    group, total = state.weights, report["parameters"]
    if state.plans.group.gathers:
        sharded = [linear.weight for linear in linears if is_partitioned(linear.weight)]
        if persistent := len(linears) - len(sharded):
            yield (
                f"{persistent} FP8 linears have fewer elements than stage3_param_persistence_threshold: ZeRO-3 keeps "
                "their weights unsharded in BF16, and they are quantized when used"
            )
        if in_bf16 := sum(group is None or not group.in_fp8(weight) for weight in sharded):
            yield f"the weights of {in_bf16} FP8 linears are all-gathered in BF16, because other modules read them"
    if untrained := untrained_parameters(engine):
        count = "1 parameter that requires" if len(untrained) == 1 else f"{len(untrained)} parameters that require"
        yield (
            f"the optimizer lacks {count} gradients, {untrained[0]}{' among them' * (len(untrained) > 1)}: unsharded "
            "gradients are computed and kept on every rank; to train them pass them in model_parameters, otherwise "
            "requires_grad_(False)"
        )
    if not linears and not report["fp8_gathered_experts"]:
        yield "no linear layer is in FP8: fp8.linear.overrides keeps them in BF16"
    elif (in_fp8 := report["fp8_parameters"] + report["fp8_gathered_experts"]) < LITTLE * total:
        yield f"only {in_fp8 / total:.0%} of the parameters are in FP8: expect little gain"
    if state.conversion.unmatched:
        yield f"fp8.linear.skip matches no linear: {', '.join(state.conversion.unmatched)}"
    for part in report["overrides"]:
        if not part["linears"]:
            pattern = part["pattern"]
            yield f'fp8.linear.overrides "{pattern}" has no effect: other patterns, or the reasons above, apply first'
    yield from _in_folders(engine.module)
    recipes = [state.conversion.recipe, *state.plans.layers.overrides.values()]
    listed = [name for name in state.conversion.converted if in_expert_list(name)]
    if listed and any(recipe is not None and recipe.outlier_channels for recipe in recipes):
        yield f"experts in a list, not all of which every rank calls, have no outlier channels: {listed[0]} and others"
    masters = None if group is None else group.coded
    if masters is not None and (slow := masters.stepped_in_torch):
        yield (
            f"optimizer.master: {slow} weights have rows or shards that are no multiples of 128, or share a sub-group "
            "with another quantization: their step runs in torch, slower, and with FP32 masters of a sub-group for a "
            'moment ("master": "fp32" has a kernel for all)'
        )
    if report["emulated"]:
        formats = ", ".join(report["emulated"])
        yield f"emulated, in one byte an element: {formats}; nothing here computes with them natively"
    if report["backend"] == "reference" and linears:
        yield "emulated arithmetic: the numerics of FP8, slower than BF16"
    elif state.why_no_graphs and (slow := why_slow(linears, tokens)) is not None:
        yield f'{slow} ("graph": "auto")' if state.plans.step.graph == "off" else slow
    if state.graphs is not None and (others := unknown_code(engine.module)) is not None:
        yield f"{others}: graphs keep the Python values of their capture until a check finds a change"


def _in_folders(model: nn.Module) -> list[str]:
    """Return notes on weights that exports and servers will have in BF16 alone."""
    try:
        forms, experts = published(model), set(names_of_experts(model))
    except UserError as error:
        return [f"no export: {error.problem}"]
    if (why := why_not_in_fp8(model)) is not None:
        return [f"exports and servers have this model in BF16 only: {why}"]
    stacks = [form.stored[0] for form in forms if experts & form.shapes.keys() and not form.matrices]
    return [f"exports and servers have the experts in BF16: {IN_3D} ({stacks[0]})"] if stacks else []


def _hierarchy(state: FP8State) -> str:
    if state.nodes is not None:
        return f"{state.nodes.count} nodes x {state.nodes.ranks_per_node}"
    several = state.hosts.count > 1 and state.gradient_reduce is not None
    return f"flat: {why_flat(state.hosts)}" if several else "flat"


def _attention(attention: AttentionFormat | None) -> dict[str, Any]:
    if attention is None:
        return {"attention": "bf16", "fp8_attention_layers": 0, "attention_in_bf16": {}}
    how = "emulated" if attention.emulated else "cuDNN through Transformer Engine"
    where = "in rows of one document" if attention.packed else "in rows without padding"
    if attention.packed or attention.only_long:
        both = " and documents, both" if attention.only_long else " and documents"
        where += f"{both if attention.packed else ''} from {documents.LONG} tokens on; BF16 in shorter ones"
    return {
        "attention": f"e4m3, gradients e5m2 ({how}), {where}",
        "fp8_attention_layers": len(attention.layers),
        "attention_in_bf16": attention.left,
    }


def _emulated_state(fp8: FP8Config) -> list[str]:
    formats = {"gradients on the wire": fp8.grad_reduce.format}
    formats |= {name: getattr(fp8.optimizer, name) for name in MOMENTS}
    return [
        f"{format} {what}" for what, format in formats.items() if format in FORMATS and format not in NATIVE_FORMATS
    ]


def _overrides(state: FP8State) -> list[dict[str, Any]]:
    casts, recipes = state.config.linear.overrides, state.plans.layers.overrides
    return [
        {
            "pattern": pattern,
            "casts": str(casts[pattern]),
            "backend": "bf16" if recipes[pattern] is None else recipes[pattern].backend,
            "linears": len(linears),
        }
        for pattern, linears in state.conversion.overrides.items()
    ]


# ---------------------------------------------------------------- the panel

# Keys of the report that count fused parts -> their names.
FUSED = {
    "fused_layers": "decoder layers",
    "fused_attention_halves": "attention halves of layers with experts",
    "fused_mlps": "MLPs",
}
NO_OPTIMIZER = "none"
Rows = Iterator[tuple[str, str]]


def log_report(report: Mapping[str, Any], full: bool = False) -> None:
    if not report["enabled"]:
        show("[bold]FP8 is off[/bold]: plain DeepSpeed in BF16")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, text in _rows(report, full):
        table.add_row(title, text)
    show(Panel(table, title=f"ds_fp8, preset {report['preset']}", title_align="left", expand=False))


def _rows(report: Mapping[str, Any], full: bool) -> Rows:
    total, shared_by = report["parameters"], report["sequence_parallel_size"]
    if report["preset_reason"] is not None:
        yield "preset", f"not named in the configuration; {report['preset_reason']}"
    if full or report["hosts"] > 1 or shared_by > 1:
        shared = f", {shared_by} ranks share a sequence" if shared_by > 1 else ""
        yield "hosts x ranks", f"{report['ranks_of_hosts']}{shared}"
    yield from _experts(report)
    linears = f"{report['fp8_linears']} ({report['fp8_parameters'] / total:.1%} of {total:,} parameters)"
    fused = ", ".join(f"{report[key]} {what}" for key, what in FUSED.items() if report[key]) or "nothing"
    yield "linears in FP8", f"{linears}; fused: {fused}"
    if report["fp8_attention_layers"]:
        yield "attention in FP8", f"{report['fp8_attention_layers']} layers, {report['attention']}"
    shares = [(part, f"{part['parameters'] / total:.1%}") for part in report["kept_in_bf16"]]
    if not full:
        yield "in BF16", "; ".join(f"{part['reason']} ({share})" for part, share in shares)
    for part, share in shares if full else ():
        count = f"{len(part['names'])} tensor{'s' * (len(part['names']) > 1)}, {part['parameters']:,} parameters"
        yield "in BF16", f"{part['reason']}: {count} ({share}), {_first(part['names'], 2)}"
    for reason, names in _by_reason(report["not_fused"]):
        yield "not fused", f"{names}: {reason}"
    for reason, names in _by_reason(report["attention_in_bf16"] if full else {}):
        yield "attention in BF16", f"{names}: {reason}"
    yield "products", f"{_casts(report)}; by {report['backend']} ({report['backend_description']})"
    if full:
        yield from report["remarks"].items()
    for part in report["overrides"] if full else ():
        backend = "" if part["backend"] in ("bf16", report["backend"]) else f", by {part['backend']}"
        count = f"{part['linears']} linear{'s' * (part['linears'] != 1)}"
        yield "override", f"{part['pattern']}: {count}, {part['casts']}{backend}"
    nbytes = f"{report['gathered_bytes_per_parameter']:.2f} bytes a parameter (BF16: 2)"
    weights = f"weights {report['param_gather']}, {report['param_transport']}, {nbytes}"
    scale = ", one scale a tensor" if report["grad_scale"] == "tensor" else ""
    yield "wire", f"{weights}; gradients {report['grad_reduce']}, {report['grad_hierarchy']}{scale}"
    if (frozen := report["frozen_weights_with_bf16"]) is not None:
        with_bf16, count = frozen
        copies = f"; of {with_bf16:,} BF16 shards, too" if with_bf16 else " alone"
        whole = report["frozen_weights_whole"]
        unsharded = f"; {whole:,} unsharded on every GPU" if whole else ""
        yield "frozen weights", f"{count:,} on the device in FP8, one byte each{copies}{unsharded}"
    step = "" if report["optimizer"] == NO_OPTIMIZER else f"{report['optimizer_step']}; "
    yield "optimizer step", f"{step}{_optimizer(report)}"
    yield "CUDA graphs", report["graphs"]
    yield "loss", report["loss"]
    if full:
        every, fallback = report["monitor"]["every"], report["monitor"]["fallback"]
        measured = f"measured every {every} steps; a layer that degrades {'runs in BF16' if fallback else 'is named'}"
        yield "health of casts", measured if every else "not measured"
        yield "memory of shards", f"{report['fp8_shard_bytes_per_rank']:,} bytes of FP8 data and scales a rank"
    yield from (("note", note) for note in report["notes"])


def _experts(report: Mapping[str, Any]) -> Rows:
    total, kept = report["parameters"], report["kept_in_bf16"]
    in_bf16 = sum(part["parameters"] for part in kept if part["reason"].startswith(EXPERTS))
    if in_bf16:
        yield "experts", f"[bold]{in_bf16 / total:.0%} of the parameters stay BF16: experts[/bold]"
    if report["fp8_gathered_experts"]:
        count, decoded = report["experts_multiplied_in_fp8"], report["experts_decoded"]
        products = "dequantized and multiplied in BF16"
        if count:
            products = f"multiplied in FP8{f' in {count} of {count + len(decoded)} layers' if decoded else ''}"
        yield (
            "experts",
            f"{report['fp8_gathered_experts'] / total:.1%} of the parameters: all-gathered in FP8, {products}",
        )
        for reason, names in _by_reason(decoded):
            yield "experts", f"multiplied in BF16: {names} ({reason})"
        if layers := report["experts_with_adapters"]:
            how = "added to these products" if count else "added to the dequantized weights"
            yield "experts", f"adapters on those of {layers} layers: low-rank parts in BF16, {how}"


def _casts(report: Mapping[str, Any]) -> str:
    words = ", ".join(f"{name} {cast}" for name, cast in report["casts"].items())
    if not report["outlier_channels"]:
        return words
    experts = ", experts without" if report["experts_multiplied_in_fp8"] or report["experts_decoded"] else ""
    return f"{words}; {report['outlier_channels']} outlier channels a product{experts}"


def _optimizer(report: Mapping[str, Any]) -> str:
    name = report["optimizer"]
    if name == NO_OPTIMIZER:
        return f"{name}: this engine evaluates"
    if "Adam" not in name:
        return name
    state, parts = report["optimizer_state"], report["stochastic_parts"]
    parts_of_state = ("exp_avg", "exp_avg_sq") if state["master"] == "fp32" else ("master", "exp_avg", "exp_avg_sq")
    kept = ", ".join(f"{name} {state[name]}" for name in parts_of_state)
    rounding = f", {' and '.join(parts)} rounded stochastically" if parts else ""
    return f"{name}, {kept}{rounding}, {report['moment_bytes_per_parameter']:.2f} bytes of moments a parameter"


def _by_reason(reasons: Mapping[str, str]) -> Rows:
    """Yield each reason once, with its first few names."""
    for reason in dict.fromkeys(reasons.values()):
        yield reason, _first([name for name, why in reasons.items() if why == reason], 3)


def _first(names: list[str], count: int) -> str:
    return ", ".join(names[:count]) + (" ..." if len(names) > count else "")
