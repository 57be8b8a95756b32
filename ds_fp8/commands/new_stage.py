"""A stage made of a model and data alone: what `ds-fp8 train MODEL DATA` decides and says."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fp8.commands.arguments import amount, count, say
from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.files import apply_override, model_of_run

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from ds_fp8.data import StageData
    from ds_fp8.memory import Estimate
    from ds_fp8.train import Stage

GIB = 2**30
# Tokens of a row where no chat is longer, and where there are few; 128 is the edge of a block of scales
LONGEST, SHORTEST = 4096, 128
# Most tokens of a micro-batch on a GPU and of a step, which is smaller where an epoch would have fewer steps
MICRO_TOKENS, STEP_TOKENS, STEPS = 8192, 65536, 20
HELD_OUT, MOST_HELD_OUT = 0.05, 500  # Share of the examples for validation, and most examples
# Peak learning rates, and parameters of a large model
RATES, LARGE = {"adapters": 2e-4, "small": 2e-5, "large": 1e-5}, 4e9
MICRO_BATCH, TRAIN_BATCH = "train_micro_batch_size_per_gpu", "train_batch_size"  # config.deepspeed_json imports torch
# Options of MODEL DATA, and the keys of a stage that they stand for
KEYS = {"lora": "train.lora.r", "seq": "data.sequence_length", "epochs": "train.epochs", "lr": "optimizer.params.lr"}
KEYS |= {"out": "train.run_dir", "write": None}
SECONDS = 5  # In which the hub must answer
CLIPPED = 800


def add_new_stage(parser: argparse.ArgumentParser) -> None:
    words = "data of a model, given in the place of FILE: JSONL, folder, data set"
    parser.add_argument("data", nargs="?", metavar="DATA", help=words)
    add = parser.add_argument_group("with MODEL DATA").add_argument
    add("--lora", type=count, metavar="R", help="train adapters of this rank instead of all weights")
    add("--seq", type=count, metavar="TOKENS", help="tokens of a row (default: by the data, at most the model's)")
    add("--epochs", type=amount, metavar="N", help="passes through the data (default: 3 of chats, 1 of text)")
    add("--lr", type=amount, help="peak learning rate (default: 2e-4 of adapters; 2e-5; 1e-5 from 4B parameters on)")
    add("--out", metavar="FOLDER", help="run folder (default: runs/MODEL-DATA)")


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options of MODEL DATA with a stage, a stage in the place of MODEL, and a model in the place of a stage."""
    name, data = arguments.stage or "", arguments.data
    if data is not None and (Path(name).suffix == ".json" or arguments.deepspeed_config):
        raise UserError("a stage names its model and its data itself", key="DATA", remedy=f"--set data.path={data}")
    if data is None and (Path(name) / "config.json").is_file() and model_of_run(Path(name)) is None:
        raise UserError(f"{name} is a model, and no data is given", key="DATA", remedy=f"ds-fp8 train {name} DATA")
    for option, key in {} if data else KEYS.items():
        if (value := getattr(arguments, option, None)) is not None:
            problem = f"--{option} goes with MODEL DATA, and what is given is a stage"
            raise UserError(problem, key=f"--{option}", remedy=f"--set {key}={value}" if key else "leave it out")


def look_for_network(*names: str) -> None:
    """Take what the hub has from this machine alone where the hub does not answer: its clients try for minutes."""
    remote = [name for name in names if not os.path.exists(os.path.expanduser(name))]
    endpoint, answers = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), []

    def ask() -> None:
        with suppress(OSError):
            with suppress(urllib.error.HTTPError):  # an answer, too
                urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=SECONDS)
            answers.append(endpoint)

    if remote and os.environ.get("HF_HUB_OFFLINE") != "1":
        asking = threading.Thread(target=ask, daemon=True)  # to look up a host's name has no timeout
        asking.start()
        asking.join(SECONDS)
        if not answers:
            say(f"{endpoint} does not answer: {' and '.join(remote)} must be on this machine")
            os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read at the first import


def new_stage(arguments: argparse.Namespace, ranks: int, console: Console) -> tuple[Stage, Estimate | None]:
    """Return the stage that trains a model on data, and its estimate, after saying what it does; writes nothing.

    Raises:
        UserError: for a model, data or options with which it cannot be trained here.
    """
    from ds_fp8.data import build_tokenizer
    from ds_fp8.data.sources import recognise
    from ds_fp8.train.stage import checked_stage
    from ds_fp8.train.stored_model import check_trainable, stored_config, stored_model
    from ds_fp8.train.trial import attention_for

    raw = defaults(arguments.stage, arguments.data, ranks, arguments.lora, arguments.epochs, arguments.out)
    if any(change.startswith("train.steps=") for change in arguments.set):
        del raw["train"]["epochs"]

    def checked() -> Stage:
        changed = copy.deepcopy(raw)
        for change in arguments.set:
            apply_override(changed, change)
        return checked_stage(changed, Path(getattr(arguments, "write", None) or "stage.json"), ranks)

    stage = checked()
    source = stored_model(stage.model.path, None, stage.model.revision)
    check_trainable(source, config := stored_config(source))
    if "attn_implementation" not in stage.model.model_fields_set and (attention := attention_for(config)) != "packed":
        console.print(f'attention "{attention}": a {config.model_type} cannot compute "packed"', markup=False)
        raw["model"]["attn_implementation"] = attention
    if not {"format", "text_key"} & stage.data.model_fields_set:
        keys, words = recognise(stage.data.path, stage.data.messages_key)
        console.print(f"{stage.data.path}: {words}", markup=False)
        raw["data"] |= keys
        stage = checked()
    if arguments.epochs is None and stage.data.format == "chat" and "epochs" in raw["train"]:
        raw["train"]["epochs"] = 3
    _check_template(stage)
    tokenizer = build_tokenizer(stage.data)
    raw["data"] |= _split_and_length(stage, tokenizer, ranks, arguments.seq)
    stage = checked()
    data = read_data(stage, tokenizer, console)

    length, rows = stage.data.sequence_length, len(data.train)
    of_row = -(-data.train.tokens // rows) if data.train.alone else length
    of_step = max(ranks, min(rows // STEPS, STEP_TOKENS // of_row))
    micro, recompute, needs = _fit(stage.raw, ranks, max(1, min(MICRO_TOKENS // length, of_step // ranks)), console)
    raw["model"]["activation_checkpointing"] = recompute
    raw |= {MICRO_BATCH: micro, TRAIN_BATCH: max(1, of_step // (micro * ranks)) * micro * ranks}
    large = "large" if needs and needs.workload.model.numel >= LARGE else "small"
    raw["optimizer"]["params"]["lr"] = arguments.lr or RATES["adapters" if arguments.lora else large]
    an_epoch = -(-rows // raw[TRAIN_BATCH])
    batches = min(20, -(-len(data.validation) // raw[TRAIN_BATCH]))
    raw["train"] |= {"eval_every": -(-an_epoch // 2), "save_every": an_epoch, "eval_batches": batches}
    stage = checked()
    _describe(stage.with_length(rows), console)
    return stage, needs


def defaults(
    model: str, data: str, ranks: int, lora: int | None = None, epochs: float | None = None, out: str | None = None
) -> dict[str, Any]:
    """Return the stage of a model and data before either is read; lora is the rank of adapters."""
    path = str(model_of_run(Path(model)) or model)
    adapters = {"lora": {"r": lora, "alpha": 2 * lora}} if lora else {}
    name = f"{Path(os.path.abspath(model)).name}-{Path(data).name.partition('.')[0]}"
    adamw = {"lr": RATES["large"], "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True}
    return {
        TRAIN_BATCH: ranks,
        MICRO_BATCH: 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "fp8": {"preset": "precise"},
        "model": {"path": path, "activation_checkpointing": False},
        "data": {"path": data, "tokenizer": path, "sequence_length": SHORTEST},  # until both are read
        "train": {
            "run_dir": out or f"runs/{name}{'-lora' if adapters else ''}",
            **adapters,
            "epochs": epochs or 1,
            "schedule": {"type": "cosine", "warmup": 0.03, "min_ratio": 0.1},
            "keep_last": 1,
        },
    }


def _check_template(stage: Stage) -> None:
    from ds_fp8.data import load_tokenizer

    data = stage.data
    if data.format != "chat" or data.chat_template is not None:
        return
    if load_tokenizer(data.tokenizer, data.tokenizer_revision).chat_template is None:
        raise UserError(
            f"the data are chats, and the tokenizer of {data.tokenizer} has no chat template",
            key="data.chat_template",
            remedy="the chat model of this family; --set data.chat_template=chatml; or a file with a template",
        )


def _power_of_two(tokens: int) -> int:
    """Return the least power of two of at least so many tokens."""
    return 1 << (tokens - 1).bit_length()


def _positions(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> tuple[int, PretrainedConfig]:
    from ds_fp8.train.model import load_model_config

    config = load_model_config(stage, tokenizer)  # refuses rows that are longer
    return getattr(config, "max_position_embeddings", None) or 1 << 17, config


def _split_and_length(stage: Stage, tokenizer: PreTrainedTokenizerBase, ranks: int, seq: int | None) -> dict[str, Any]:
    """Return the share of held-out examples, and tokens of a row: no chat is longer, and steps are not too few."""
    from ds_fp8.data import build_data
    from ds_fp8.train.metrics import TokeniserProgress

    most, _ = _positions(stage, tokenizer)
    everything = stage.data.model_copy(update={"sequence_length": most, "overlong": "cut"})
    parts = build_data(everything, tokenizer, TokeniserProgress()).report.values()
    examples, tokens = (sum(part[name] for part in parts) for name in ("examples", "tokens"))
    longest = max(part["longest"] for part in parts) if stage.data.format == "chat" else 1
    of_steps = _power_of_two(int(tokens / STEPS / ranks) // 2 + 1)  # the power of two below
    length = min(most, max(SHORTEST, min(LONGEST, of_steps), _power_of_two(longest)))
    return {"validation_fraction": min(HELD_OUT, MOST_HELD_OUT / examples), "sequence_length": seq or length}


def read_data(stage: Stage, tokenizer: PreTrainedTokenizerBase, console: Console) -> StageData:
    """Return the data of a stage after saying what it is, with one example as it is trained on.

    Raises UserError where chats are left out that no key of the stage leaves out.
    """
    from ds_fp8.data import IGNORED, build_data
    from ds_fp8.data.stage import describe
    from ds_fp8.train.trial import check_rows

    positions, config = _positions(stage, tokenizer)
    why = check_rows(config, stage.model.attn_implementation)
    data = build_data(stage.data, tokenizer, alone=why is not None)
    if why:
        console.print(f"one example a row: {why}", markup=False)
    describe(data.report, lambda line: console.print(line, markup=False))
    parts = data.report.values()
    longest, over = max(part["longest"] for part in parts), sum(part["overlong"] for part in parts)
    if over and stage.data.overlong is None and stage.data.format == "chat":
        enough = _power_of_two(longest)
        longer = f"--seq {enough}; " if enough <= positions else ""
        raise UserError(
            f"{over:,} of {sum(part['examples'] for part in parts):,} chats are longer than a row of "
            f"{stage.data.sequence_length:,} tokens (the longest {longest:,})",
            key="data.sequence_length",
            remedy=f"{longer}without them: --set data.overlong=drop; without their ends: --set data.overlong=cut",
        )
    row = data.train[0]
    ends = (row["position_ids"] == 0).nonzero().flatten().tolist()[1:]  # of the row's first example
    stop = ends[0] if ends else data.train.row_tokens(0)
    ids, labels = (row[name][:stop].tolist() for name in ("input_ids", "labels"))
    coloured = console.is_terminal and not console.no_color
    marked = "in green" if coloured else "between « and »"
    console.print(f"an example, {len(ids):,} tokens, loss on {sum(n != IGNORED for n in labels):,} of them, {marked}:")
    for learnt, run in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED):
        text = clipped(tokenizer.decode([token for token, _ in run]), CLIPPED)
        text = text if coloured or not learnt else f"«{text}»"
        console.print(text, style="green" if learnt else "dim", markup=False, end="")
    console.print()
    return data


def _fit(raw: dict[str, Any], ranks: int, wanted: int, console: Console) -> tuple[int, bool | str, Estimate | None]:
    """Return the rows of a micro-batch, whether layers are recomputed, and the estimate, None where there is none."""
    import psutil
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_fp8.memory.estimate import estimate_workload, largest_that_fits
    from ds_fp8.memory.report import verdict_of
    from ds_fp8.memory.shapes import read_workload

    device, name, memory = "cpu", "CPU", psutil.virtual_memory().total // ranks
    if get_accelerator().device_name() == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        device, name, memory = "cuda", gpu.name, gpu.total_memory
    recompute = raw["model"]["activation_checkpointing"]
    try:
        w = read_workload(raw, gpus=ranks, device=device)
        estimate_workload(w)  # refused where a layer cannot be measured
    except UserError as error:
        console.print(f"{error.problem}: micro-batches of one row", markup=False)
        return 1, recompute, None
    for each in (w, replace(w, activation_checkpointing=recompute or True)):
        rows = min(wanted, largest_that_fits(each, "micro_batch", memory))
        found = estimate_workload(each.resized("micro_batch", rows or 1))
        if rows:
            console.print(verdict_of(raw, found, memory, name), markup=False)
            return rows, each.activation_checkpointing, found
    # Without the batch of all ranks: it would not divide by more of them.
    raw = {key: value for key, value in raw.items() if key != TRAIN_BATCH}
    raw["model"] = {**raw["model"], "activation_checkpointing": recompute or True}
    problem, _, remedy = verdict_of(raw, found, memory, name).partition("; ")
    remedy += "" if "lora" in raw["train"] else "; adapters need less: --lora 16"
    raise UserError(f"{raw['model']['path']} {problem}, layers recomputed", key="MODEL", remedy=remedy)


def check_run(stage: Stage, needs: Estimate | None) -> None:
    """Refuse a run folder of another run, and a disk without room for the checkpoints and the model of the run."""
    from ds_fp8.train.resume import inspect_run

    try:
        inspect_run(stage)
    except UserError as error:
        error.remedy = f"{error.remedy.partition(', or choose')[0]}, or train elsewhere: --out FOLDER"
        raise
    weights = needs.workload.model.parameters if needs else ()
    # FP32 masters and moments of two checkpoints, one of them being written, and all weights in BF16.
    needed = sum(2 * weight.numel + (24 * weight.numel if weight.trainable else 0) for weight in weights)
    there = sum(file.stat().st_size for file in stage.run_dir.rglob("*") if file.is_file())
    disk = next(folder for folder in (stage.run_dir, *stage.run_dir.absolute().parents) if folder.is_dir())
    if needed - there > (free := shutil.disk_usage(disk).free):
        raise UserError(
            f"the run writes {needed / GIB:.2f} GiB into {stage.run_dir}, and its disk has {free / GIB:.2f} free",
            key="--out",
            remedy="make room, or --out FOLDER on another disk; adapters (--lora 16) write less",
        )


def _describe(stage: Stage, console: Console) -> None:
    train, fp8 = stage.train, f"FP8, preset {stage.fp8.preset_name}" if stage.fp8.enabled else "BF16"
    what = f"adapters of rank {train.lora.r} on" if train.lora else "all weights of"
    recomputed = ", layers recomputed" if stage.model.activation_checkpointing else ""
    epochs = f" ({train.epochs:g} epochs)" if train.epochs else ""
    rate = stage.configuration.optimizer_params["lr"]
    for line in (
        f"trains {what} {stage.model.path}: {fp8}, learning rate {rate:g}{recomputed}",
        f"{train.steps:,} steps{epochs} of {stage.global_batch:,} rows x {stage.data.sequence_length:,} tokens: ranks "
        f"{stage.world}, micro-batches a rank {stage.accumulation}, rows a micro-batch {stage.micro_batch}",
        f"run folder: {stage.run_dir}",
    ):
        console.print(line, markup=False)
