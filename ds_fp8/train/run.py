"""Run a stage: prepare data, model and engine, train from the last saved step, and write model/ and result.json."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
from deepspeed import comm as dist
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import ds_fp8
from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.config.log import logger
from ds_fp8.data import StageData, build_data, build_tokenizer, save_tokenizer, stop_tokens
from ds_fp8.data.stage import describe
from ds_fp8.data.token_store import tokenizer_identity
from ds_fp8.export.folder import make_readable
from ds_fp8.monitor.records import layers_in_bf16
from ds_fp8.train import processes, resume
from ds_fp8.train.adapters import ends_ties, with_adapters_merged
from ds_fp8.train.checkpoints import RunState
from ds_fp8.train.loop import TrainingLoop
from ds_fp8.train.metrics import MetricsLog, TokeniserProgress, read_metrics, summarise
from ds_fp8.train.model import build_sharded_model, files_of_base, load_model_config, parameters_to_train
from ds_fp8.train.processes import Interrupt, Interrupted
from ds_fp8.train.run_folder import (
    ADAPTER,
    CONFIG,
    METRICS,
    MODEL,
    RESULT,
    flush,
    flush_tree,
    only_run_in,
    remove,
    write_atomically,
)
from ds_fp8.train.saving import versions
from ds_fp8.train.stage import Stage, learning_rate_factor
from ds_fp8.zero.deepspeed.checkpoints import consolidated_state_dict
from ds_fp8.zero.deepspeed.parameters import full_shape


def train(stage: Stage) -> dict[str, Any]:
    """Run the stage on this rank, from where its run folder left off, and return what result.json holds. Collective.

    Nothing is written before every check has passed.

    Raises:
        UserError: On all ranks alike, for a mistake in the stage.
        Interrupted: After a signal, once the checkpoint is saved.
    """
    processes.set_single_process_env()
    watchdog.beat("preparing data and model", slow=True)
    try:
        # First, before minutes of preparation: a run that is finished or belongs to another stage ends here.
        state = resume.inspect_run(stage)
        if state.result is not None:
            logger.info("%s has finished its %s steps: nothing to do", stage.run_dir, state.step)
            return state.result
        tokenizer = build_tokenizer(stage.data)
        data = build_data(stage.data, tokenizer, TokeniserProgress())
        stage = stage.with_length(len(data.train))
        resume.check_length(stage, state)
        resume.check_data(stage, state, data.identity)
        config = load_model_config(stage, tokenizer)
        processes.init_distributed()
        processes.check_same_everywhere(
            "the data it prepared",
            {"tokenizer": tokenizer_identity(tokenizer), "sources": data.identity, **data.report},
            key="data.path",
            remedy="give every host the same files; what was prepared earlier from others lies in DS_FP8_CACHE",
        )
        stage = replace(stage, base=processes.on_first_rank(lambda: files_of_base(stage)))
        model = build_sharded_model(stage, config)
        # Taken last, and held to the end: what comes before writes nothing into the run folder.
        with only_run_in(stage.run_dir, logger.info):
            state = resume.settle(stage, logger.info)
            if state.checkpoint is not None:  # frozen weights that it holds may be others than the files': keep them
                stage = replace(stage, base=state.base)
                resume.check_model(state, model)
            return _train(stage, data, tokenizer, model, state)
    except UserError as error:
        raise error.located(stage.file) from None


def _train(
    stage: Stage,
    data: StageData,
    tokenizer: PreTrainedTokenizerBase,
    model: torch.nn.Module,
    state: RunState,
) -> dict[str, Any]:
    rank = dist.get_rank()
    records = read_metrics(stage.run_dir / METRICS, state.step if state.step else -1)
    if rank == 0:
        _prepare_wandb(stage)
    engine, _, _, _ = ds_fp8.initialize(
        model=model,
        model_parameters=parameters_to_train(stage, model),
        lr_scheduler=lambda optimizer: LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, stage.train.steps, stage.train.schedule)
        ),
        # Bytes on the wire are measured where there is a section, FP8 or not.
        config={"fp8": {"enabled": False}, **stage.raw},
    )
    if engine.fp8.optimizer is not None:
        engine.fp8.optimizer.compact = stage.train.compact_checkpoints
    if rank == 0:
        stage.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(stage.run_dir / CONFIG, json.dumps(stage.raw, indent=2) + "\n")
    if engine.fp8.health is not None:
        known = dict(engine.module.named_modules())
        # Before the checkpoint is loaded: it restores the state of a model in which these layers are BF16 already.
        engine.fp8.health.move_to_bf16(layer for layer in layers_in_bf16(records) if layer in known)
    if state.checkpoint is not None:
        resume.load(engine, stage, state)
        if not state.step:
            engine.skipped_steps = 0  # those before were the other run's
    log = MetricsLog(stage.run_dir / METRICS, records, writes=rank == 0)
    del records
    if rank == 0:
        log.check(state)
    describe(data.report, logger.info)
    interrupt = Interrupt(engine.device)
    run = TrainingLoop(stage, data, tokenizer, engine, log, interrupt, state)
    try:
        run.all_steps()
        run.evaluate_bf16_weights()
    except Interrupted:
        run.save()
        run.finish_save()
        done = "saved" if run.saved.step == run.step else "not saved"
        logger.info(f"interrupted: {run.step} steps are done and {done}; the same command resumes")
        raise
    finally:
        run.progress.stop()
    watchdog.beat("writing the result", slow=True)
    result = write_result(stage, engine, tokenizer, log, data.report, state.step)
    # Other ranks may not end the job while rank 0 still writes.
    dist.barrier()
    interrupt.end()  # not at an error or a signal: this process ends, and another signal must not change how
    return result


def _prepare_wandb(stage: Stage) -> None:
    section = stage.raw.get("wandb", {})
    if not section.get("enabled"):
        return
    stage.run_dir.mkdir(parents=True, exist_ok=True)  # wandb writes elsewhere when its folder does not exist
    os.environ.setdefault("WANDB_DIR", str(stage.run_dir))
    if "WANDB_API_KEY" not in os.environ and "WANDB_MODE" not in os.environ:
        os.environ["WANDB_MODE"] = "offline"
        logger.info(
            "wandb: no WANDB_API_KEY, so the run is logged offline in %s; WANDB_MODE=online overrides", stage.run_dir
        )


# ---------------------------------------------------------------- results


def write_result(
    stage: Stage,
    engine: deepspeed.DeepSpeedEngine,
    tokenizer: PreTrainedTokenizerBase,
    log: MetricsLog,
    data: dict[str, Any],
    first_step: int,
) -> dict[str, Any]:
    """Write run_dir/model (BF16 safetensors, configuration, tokenizer), then run_dir/result.json. Collective.

    Returns the result, the same on every rank but for the FP8 report, which is the rank's own.
    """
    state, final = consolidated_state_dict(engine), stage.run_dir / MODEL

    def write() -> None:
        part = final.with_name(f"{MODEL}.part")
        try:
            remove(part)
            # Otherwise a model of chats goes on behind its answer.
            engine.module.generation_config.eos_token_id = stop_tokens(tokenizer, stage.data.format == "chat")
            if stage.train.lora is None:
                engine.module.save_pretrained(part, state_dict=state)
            else:
                _save_adapters(engine.module, state, part)
            misread = save_tokenizer(tokenizer, part)
            make_readable(part)
            # Flushed before the rename: a model folder under its final name is on the disk as a whole.
            flush_tree(part)
            if stage.train.lora is not None:
                remove(final.with_name(ADAPTER))
                (part / ADAPTER).rename(final.with_name(ADAPTER))
            remove(final)
            part.rename(final)
            flush(final.parent)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise UserError(
                f"the model cannot be written to {final}: {error}",
                key="train.run_dir",
                remedy="make room or repair the file system; the same command then writes it",
            ) from None
        if misread:
            logger.info(f"note: to transformers' AutoTokenizer the tokenizer in {final} {misread}")

    processes.on_first_rank(write)
    result = {
        **processes.on_first_rank(lambda: summarise(log, stage.train.steps)),
        "epochs": stage.train.epochs,
        "ranks": stage.world,
        "device": str(engine.device.type),
        "parameters": sum(math.prod(full_shape(p)) for p in engine.module.parameters()),
        "data": data,
        "fp8": engine.fp8.report,
        "versions": versions(),
    }
    if dist.get_rank() == 0:
        content = {**result, "made": _made(stage, engine.device, first_step)}
        write_atomically(stage.run_dir / RESULT, json.dumps(content, indent=2) + "\n")
    return result


def _save_adapters(model: PreTrainedModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the model with its adapters merged into `folder`, and into folder/adapter what PEFT loads."""
    model.save_pretrained(folder / ADAPTER, state_dict=state)
    merged, tied = with_adapters_merged(model, state), model.config.tie_word_embeddings
    model._hf_peft_config_loaded = False  # by which save_pretrained knows adapters, and writes nothing else
    model.config.tie_word_embeddings = tied and not ends_ties(model, merged)
    try:
        model.save_pretrained(folder, state_dict=merged)
    finally:
        model._hf_peft_config_loaded, model.config.tie_word_embeddings = True, tied


def _made(stage: Stage, device: torch.device, first_step: int) -> dict[str, Any]:
    started = psutil.Process().create_time()
    launched = Path(sys.argv[0]).parts[-3:] == ("ds_fp8", "commands", "train.py")
    program = "ds-fp8 train" if launched or sys.argv[0].startswith("ds-fp8 ") else shlex.quote(sys.argv[0])
    arguments = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started)),
        "seconds": round(time.time() - started),
        "first_step": first_step,
        "host": platform.node(),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "commit": _commit(),
        "command": f"{program} {shlex.join(arguments)}".strip(),
        "seed": stage.train.seed,
    }


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", information.read_text(), re.MULTILINE) if information.exists() else None
    return f"{found.group(1) if found else platform.machine()}, {psutil.cpu_count()} cores"


def _commit() -> str | None:
    clone = Path(ds_fp8.__file__).parents[1]
    if not (clone / ".git").exists():
        return None
    command = ["git", "-C", str(clone), "describe", "--always", "--exclude=*", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
