"""Run a stage: prepare data, model and engine, then train from the last saved step."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

import ds_fp8
from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import write_atomically
from ds_fp8.config.log import logger
from ds_fp8.data import StageData, build_data, build_tokenizer
from ds_fp8.data.stage import ALONE, describe
from ds_fp8.data.token_store import tokenizer_identity
from ds_fp8.train import processes, resume, trial
from ds_fp8.train.batches import padding
from ds_fp8.train.checkpoints import RunState
from ds_fp8.train.evaluation import Evaluation
from ds_fp8.train.loop import Run, train_loop
from ds_fp8.train.metrics import Health, Metrics, MetricsLog, TokeniserProgress, read_metrics
from ds_fp8.train.model import build_sharded_model, files_of_base, load_model_config, parameters_to_train
from ds_fp8.train.processes import Interrupt
from ds_fp8.train.result import Result
from ds_fp8.train.run_folder import CONFIG, METRICS, only_run_in
from ds_fp8.train.saving import Checkpoint
from ds_fp8.train.spikes import Spikes
from ds_fp8.train.stage import Stage, learning_rate_factor


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
        # A run keeps the rows that it began with, also where another version or other packages find otherwise.
        begun = any(ALONE in source for source in state.data or ()) if state.step else None
        data = build_data(stage.data, tokenizer, TokeniserProgress(), bool(begun))
        config = load_model_config(stage, tokenizer)
        processes.init_distributed()
        # Now, and not at the first step: else micro-batches would be averaged with the wrong weights, silently.
        why = processes.on_first_rank(lambda: trial.check_rows(config, stage.model.attn_implementation))
        if why and begun is None:
            data = build_data(stage.data, tokenizer, alone=True)
        elif why and not begun:
            logger.warning("note: documents of a row see those before them, as since this run began: %s", why)
        processes.check_same_everywhere(
            "the data it prepared",
            {"tokenizer": tokenizer_identity(tokenizer), "sources": data.identity, **data.report},
            key="data.path",
            remedy="give every host the same files; what was prepared earlier from others lies in DS_FP8_CACHE",
        )
        stage = stage.with_length(len(data.train))
        resume.check_length(stage, state)
        resume.check_data(stage, state, data.identity)
        if data.train.alone:
            share, tokens = padding(stage, data)
            logger.warning("note: one example a row, %.0f%% padding, %s tokens a step without it: %s",
                           100 * share, f"{tokens:,}", why or "as since this run began")  # fmt: skip
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
    stage: Stage, data: StageData, tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module, state: RunState
) -> dict[str, Any]:
    is_first = dist.get_rank() == 0
    log = MetricsLog(
        stage.run_dir / METRICS, read_metrics(stage.run_dir / METRICS, state.step if state.step else -1), is_first
    )
    if is_first:
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
    if is_first:
        stage.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(stage.run_dir / CONFIG, json.dumps(stage.raw, indent=2) + "\n")
    describe(data.report, logger.info)
    run = Run(stage, data, tokenizer, engine, log, Interrupt(engine.device), state)
    checkpoint, result = Checkpoint(engine, stage), Result()
    # Events of a step are logged in this order, and a rollback comes before the save of what it undoes.
    run.callbacks = [
        resume.Resume(), Metrics(), Health(), Spikes(checkpoint), checkpoint, Evaluation(), result,
    ]  # fmt: skip
    train_loop(run)
    run.interrupt.end()  # not at an error or a signal: this process ends, and another signal must not change how
    return result.content


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
