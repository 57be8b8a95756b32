"""Estimate a stage's memory on each GPU, FP8 beside BF16: no weights are loaded, no GPU is needed.

ds-fp8 estimate infir2_1.5b/cpt.json --gpus 8 --gpu h100

With --gpu or --memory it says whether the stage fits, and if not, what would; the exit code is 0 where it fits, else 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_fp8.commands.arguments import add_stage, amount, count, parser_of, stage_file
from ds_fp8.config.errors import UserError

if TYPE_CHECKING:
    from ds_fp8.memory import Estimate

GIB = 2**30


def main() -> int:
    """Print the estimates and, where the GPU's memory is given, whether the stage fits."""
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--gpus", type=count, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--gpu", metavar="NAME", help="the kind of GPU: h100, h200, b200, l40s, ... (an unknown name lists all)"
    )
    parser.add_argument("--memory", type=amount, metavar="GIB", help="memory of a GPU, instead of --gpu")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    arguments = parser.parse_args()

    from deepspeed.utils.logging import set_log_level_from_string
    from rich.console import Console

    from ds_fp8.config.files import apply_override, read_json
    from ds_fp8.memory import estimate_workload, largest_that_fits, read_workload
    from ds_fp8.memory.comparison import print_estimates
    from ds_fp8.memory.fit import longest_contexts
    from ds_fp8.memory.gpus import gpu_of
    from ds_fp8.memory.known_models import with_known_model
    from ds_fp8.memory.workload import bf16_twin

    if arguments.gpu is not None and arguments.memory is not None:
        raise UserError("--gpu and --memory exclude each other", key="--memory", remedy="give one")
    gpu = None if arguments.gpu is None else gpu_of(arguments.gpu)
    memory = round(arguments.memory * GIB) if arguments.memory else gpu and gpu.bytes
    set_log_level_from_string("warning")
    file = stage_file(arguments)
    raw = read_json(file)
    for override in arguments.set:
        apply_override(raw, override)
    # A model named on the hub gets its shape from a list: an estimate needs no network.
    raw = with_known_model(raw, file)

    def estimated(stage: dict) -> Estimate:
        try:
            return estimate_workload(read_workload(stage, gpus=arguments.gpus))
        except UserError as error:
            raise error.located(file) from None

    estimates = {"as configured": estimated(raw)}
    if estimates["as configured"].workload.fp8.enabled:
        estimates["BF16, its own loss"] = estimated(bf16_twin(raw))
    verdict = None if memory is None else _verdict(raw, estimates["as configured"], memory, arguments.gpu)
    if arguments.json:
        result: dict[str, Any] = {name: value.as_json() for name, value in estimates.items()}
        if verdict is not None:
            for name, value in estimates.items():
                sizes = ("micro_batch", "sequence_length")
                result[name]["largest"] = {what: largest_that_fits(value.workload, what, memory) for what in sizes}
                result[name]["longest_by_sequence_parallel_size"] = longest_contexts(value.workload, memory)
                result[name]["fits"] = value.device_bytes <= memory
            result["as configured"]["verdict"] = verdict
        print(json.dumps(result, indent=2))
    else:
        print_estimates(estimates, memory, Console(highlight=False))
        if verdict is not None:
            print(verdict)
            if gpu is not None and gpu.limits and estimates["as configured"].workload.fp8.enabled:
                print(f"note: {arguments.gpu.lower()} has {gpu.limits}")
    return 0 if verdict is None or estimates["as configured"].device_bytes <= memory else 1


def _verdict(raw: Mapping[str, Any], estimate: Estimate, memory: int, gpu: str | None) -> str:
    """Return one line: whether the stage fits and, where it does not, what would."""
    from ds_fp8.memory.remedies import gpus_that_fit, settings_that_fit

    needed, gpus = estimate.device_bytes, estimate.workload.gpus
    where = f"{gpus} x {gpu.lower()}" if gpu else f"{gpus} GPU{'s' if gpus > 1 else ''}"
    figures = f"{needed / GIB:.1f} of {memory / GIB:.1f} GiB on {where}"
    if needed <= memory:
        return f"fits: {figures}"
    found = [remedy(raw, gpus, memory) for remedy in (settings_that_fit, gpus_that_fit)]
    ways = [f"{remedy.change} ({remedy.device_bytes / GIB:.1f} GiB)" for remedy in found if remedy is not None]
    would = f"fits with {' or with '.join(ways)}" if ways else "no tried setting or number of GPUs fits"
    return f"does not fit: {figures}; {would}"
