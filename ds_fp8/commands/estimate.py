"""Estimate the memory of a stage, or of a model, on each GPU, FP8 and BF16: no weights are loaded, no GPU is needed.

ds-fp8 estimate infir2_1.5b/cpt.json --gpus 8 --gpu h100
ds-fp8 estimate MODEL --gpus 8 --gpu h100 --lora 16     as `ds-fp8 train MODEL DATA`, with micro-batches of 8,192 tokens
ds-fp8 estimate --fits [--gpu h200]     which models fit 1 to 8 GPUs, as tables

MODEL is a folder with config.json, or a name on the hub. BF16 has the stage's recomputation, and once the loss that the
stage has with FP8, without logits as Liger's, once its own. With --gpu or --memory it says whether the stage fits, and
if not, what would; the exit code is 0 where it fits, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ds_fp8.commands.arguments import (
    add_stage,
    amount,
    config_file,
    count,
    fp8_in_words,
    load_deepspeed,
    parser_of,
    read_stage,
    say,
    stage_file,
)
from ds_fp8.commands.fits import print_fits
from ds_fp8.commands.new_stage import LONGEST, MICRO_BATCH, MICRO_TOKENS, TRAIN_BATCH, defaults, look_for_network
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override, model_of_run

GIB = 2**30
STAGE = "as configured"


def main() -> int:
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--gpus", type=count, help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--gpu", metavar="NAME", help="the kind of GPU: h100, h200, b200, l40s, ... (an unknown name lists all)"
    )
    parser.add_argument("--memory", type=amount, metavar="GIB", help="memory of a GPU, instead of --gpu")
    parser.add_argument("--lora", type=count, metavar="R", help="of a MODEL: adapters of this rank are trained")
    parser.add_argument("--seq", type=count, metavar="TOKENS", help="of a MODEL: tokens of a row (default 4096)")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.add_argument("--fits", action="store_true", help="alone or with --gpu: print what fits, as Markdown")
    arguments = parser.parse_args()
    if arguments.fits:
        return print_fits(arguments)
    arguments.gpus = arguments.gpus or 1
    if arguments.gpu is not None and arguments.memory is not None:
        raise UserError("--gpu and --memory exclude each other", key="--memory", remedy="give one")
    model = _model_of(arguments)
    file = None if model else stage_file(arguments)
    for option, key in {} if model else {"lora": "train.lora.r", "seq": "data.sequence_length"}.items():
        if (value := getattr(arguments, option)) is not None:
            problem = f"--{option} goes with a MODEL, and what is given is a stage"
            raise UserError(problem, key=f"--{option}", remedy=f"--set {key}={value}")
    if model:
        look_for_network(model)
    load_deepspeed()

    from deepspeed.utils.logging import set_log_level_from_string
    from rich.console import Console

    from ds_fp8.memory.estimate import bf16_stages, estimate, gpu_of, largest_that_fits, longest_contexts
    from ds_fp8.memory.report import print_estimates, verdict_of
    from ds_fp8.memory.shapes import with_known_model

    gpu = None if arguments.gpu is None else gpu_of(arguments.gpu)
    memory = round(arguments.memory * GIB) if arguments.memory else gpu and gpu.bytes
    set_log_level_from_string("warning")
    # A model named on the hub gets its shape from a list: an estimate needs no network.
    given = _stage_of(model, arguments) if model else read_stage(arguments)
    raw = with_known_model(given, file)
    say("estimating ...")
    try:
        stage = estimate(raw, gpus=arguments.gpus)
        fp8 = stage.workload.fp8
        in_bf16 = bf16_stages(raw, fp8) if fp8.enabled else {}
        estimates = {STAGE: stage} | {name: estimate(other, gpus=arguments.gpus) for name, other in in_bf16.items()}
    except UserError as error:
        raise (error.located(file) if file else error) from None
    verdict = None if memory is None else verdict_of(raw, stage, memory, arguments.gpu and arguments.gpu.lower())
    fits = memory is None or stage.required_bytes <= memory
    if arguments.json:
        result: dict[str, Any] = {name: value.as_json() for name, value in estimates.items()}
        for name, value in estimates.items() if memory is not None else ():
            sizes = ("micro_batch", "sequence_length")
            result[name]["largest"] = {what: largest_that_fits(value.workload, what, memory) for what in sizes}
            result[name]["longest_by_sequence_parallel_size"] = longest_contexts(value.workload, memory)
            result[name]["fits"] = value.required_bytes <= memory
        if verdict is not None:
            result[STAGE]["verdict"] = verdict
        print(json.dumps(result, indent=2))
        return int(not fits)
    print_estimates(estimates, memory, Console(highlight=False))
    print(fp8_in_words(given, fp8))
    if verdict is not None:
        print(verdict)
    if gpu is not None and gpu.limits and fp8.enabled:
        print(f"note: {arguments.gpu.lower()} has {gpu.limits}")
    return int(not fits)


def _model_of(arguments: argparse.Namespace) -> str | None:
    """Return the model that is given in the place of a stage: a folder, or a name that is no configuration's."""
    name = arguments.stage
    if not name or arguments.deepspeed_config or Path(name).suffix == ".json":
        return None
    if os.path.isdir(name):
        return str(model_of_run(Path(name)) or name)
    try:
        config_file(name)
    except UserError as error:
        if "did you mean" in error.remedy:
            raise
        return name
    return None


def _stage_of(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the stage that `ds-fp8 train MODEL DATA` begins with, with rows of --seq tokens."""
    from ds_fp8.memory.shapes import known_shape
    from ds_fp8.train.stored_model import check_trainable, stored_config, stored_model

    if known := known_shape(model):
        longest = known["max_position_embeddings"]
    else:
        try:
            source = stored_model(model, None)
            check_trainable(source, config := stored_config(source))
        except UserError as error:
            error.key = "MODEL"
            raise
        longest = getattr(config, "max_position_embeddings", None)
    length = arguments.seq or min(LONGEST, longest or LONGEST)
    if longest is not None and length > longest:
        problem = f"rows of {length:,} tokens are longer than the {longest:,} positions of {model}"
        raise UserError(problem, key="--seq", remedy=f"--seq {longest}, or a model with more positions")
    raw = defaults(model, "DATA", arguments.gpus, arguments.lora)
    raw["data"]["sequence_length"] = length
    raw[MICRO_BATCH] = max(1, MICRO_TOKENS // length)
    raw[TRAIN_BATCH] = raw[MICRO_BATCH] * arguments.gpus
    for change in arguments.set:
        apply_override(raw, change)
    return raw
