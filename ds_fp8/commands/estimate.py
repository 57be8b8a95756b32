"""Estimate a stage's memory on each GPU, FP8 beside BF16: no weights are loaded, no GPU is needed.

ds-fp8 estimate infir2_1.5b/cpt.json --gpus 8 --gpu h100

BF16 has the stage's recomputation, and once the loss that the stage has with FP8, without logits as Liger's, once its
own. With --gpu or --memory it says whether the stage fits, and if not, what would; the exit code is 0 where it fits,
else 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_fp8.commands.arguments import (
    add_stage,
    amount,
    count,
    fp8_in_words,
    load_deepspeed,
    parser_of,
    read_stage,
    say,
    stage_file,
)
from ds_fp8.config.errors import UserError

if TYPE_CHECKING:
    from ds_fp8.memory import Estimate

GIB = 2**30
STAGE = "as configured"


def main() -> int:
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--gpus", type=count, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--gpu", metavar="NAME", help="the kind of GPU: h100, h200, b200, l40s, ... (an unknown name lists all)"
    )
    parser.add_argument("--memory", type=amount, metavar="GIB", help="memory of a GPU, instead of --gpu")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    arguments = parser.parse_args()
    if arguments.gpu is not None and arguments.memory is not None:
        raise UserError("--gpu and --memory exclude each other", key="--memory", remedy="give one")
    file = stage_file(arguments)
    load_deepspeed()

    from deepspeed.utils.logging import set_log_level_from_string
    from rich.console import Console

    from ds_fp8.memory.estimate import bf16_twins, estimate, gpu_of, largest_that_fits, longest_contexts
    from ds_fp8.memory.report import print_estimates
    from ds_fp8.memory.shapes import with_known_model

    gpu = None if arguments.gpu is None else gpu_of(arguments.gpu)
    memory = round(arguments.memory * GIB) if arguments.memory else gpu and gpu.bytes
    set_log_level_from_string("warning")
    # A model named on the hub gets its shape from a list: an estimate needs no network.
    given = read_stage(arguments)
    raw = with_known_model(given, file)
    say("estimating ...")
    try:
        stage = estimate(raw, gpus=arguments.gpus)
        fp8 = stage.workload.fp8
        twins = bf16_twins(raw, fp8) if fp8.enabled else {}
    except UserError as error:
        raise error.located(file) from None
    estimates, without = {STAGE: stage}, {}
    for name, twin in twins.items():
        try:
            estimates[name] = estimate(twin, gpus=arguments.gpus)
        except UserError as error:
            without[name] = error.problem
    verdict = None if memory is None else verdict_of(raw, stage, memory, arguments.gpu and arguments.gpu.lower())
    fits = memory is None or _needed(stage) <= memory
    if arguments.json:
        result: dict[str, Any] = {name: value.as_json() for name, value in estimates.items()} | dict.fromkeys(without)
        for name, value in estimates.items() if memory is not None else ():
            sizes = ("micro_batch", "sequence_length")
            result[name]["largest"] = {what: largest_that_fits(value.workload, what, memory) for what in sizes}
            result[name]["longest_by_sequence_parallel_size"] = longest_contexts(value.workload, memory)
            result[name]["fits"] = _needed(value) <= memory
        if verdict is not None:
            result[STAGE]["verdict"] = verdict
        print(json.dumps(result, indent=2))
        return int(not fits)
    print_estimates(estimates, memory, Console(highlight=False))
    for name, problem in without.items():
        print(f"{name}: none ({problem})")
    print(fp8_in_words(given, fp8))
    if verdict is not None:
        print(verdict)
    if gpu is not None and gpu.limits and fp8.enabled:
        print(f"note: {arguments.gpu.lower()} has {gpu.limits}")
    return int(not fits)


def _needed(estimate: Estimate) -> int:
    """Return the memory without which the stage does not run: that of graphs too where they are asked for."""
    required = estimate.workload.fp8.graph == "on"
    return estimate.device_bytes + (estimate.graph_bytes if required else 0)


def verdict_of(raw: Mapping[str, Any], estimate: Estimate, memory: int, gpu: str | None) -> str:
    """Return one line: whether the stage fits, with CUDA graphs or without, and where it does not, what would."""
    from ds_fp8.memory.estimate import gpus_that_fit, settings_that_fit

    needed, graphs, gpus = _needed(estimate), estimate.graph_bytes, estimate.workload.gpus
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
