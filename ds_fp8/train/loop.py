"""Training a stage from its first or last saved step to its result."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from transformers import PreTrainedTokenizerBase

import ds_fp8
from ds_fp8.data import StageData, build_data, build_tokenizer, local_micro_batches, rows_of_step
from ds_fp8.errors import UserError
from ds_fp8.train import checkpoints, processes
from ds_fp8.train.batches import load_micro_batches, tokens_per_micro_batch
from ds_fp8.train.evaluation import exact_match, validation_loss
from ds_fp8.train.interrupt import Interrupt, Interrupted
from ds_fp8.train.metrics import BYTES, MetricsLog, Record, peak_memory_bytes, read_metrics, write_atomically
from ds_fp8.train.model import build_model, load_model_config
from ds_fp8.train.progress import RunProgress
from ds_fp8.train.result import write_result
from ds_fp8.train.schedules import learning_rate_scheduler
from ds_fp8.train.stage import Stage


def train(stage: Stage) -> dict[str, Any]:
    """Run the stage on this rank, from where its run folder left off, and return its result. Collective.

    Nothing is written before every check has passed. Raises UserError, on all ranks alike, for a mistake in the stage,
    and Interrupted after a signal, once the checkpoint is saved.
    """
    processes.stand_alone()
    rank = int(os.environ["RANK"])
    try:
        state = checkpoints.inspect_run(stage)
        if state.result is not None:
            if rank == 0:
                print(f"{stage.run_dir} has finished its {state.step} steps: nothing to do", flush=True)
            return state.result
        tokenizer = build_tokenizer(stage.data, cache_dir())
        data = build_data(stage.data, tokenizer, cache_dir())
        _check_problems(stage, data)
        model = build_model(stage, load_model_config(stage, tokenizer))
    except UserError as error:
        raise error.located(stage.file) from None
    records = read_metrics(stage.run_dir / checkpoints.METRICS, state.step if state.step else -1)

    processes.join()
    if rank == 0:
        _prepare_wandb(stage)
    try:
        engine, _, _, _ = ds_fp8.initialize(
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            lr_scheduler=learning_rate_scheduler(stage.train.steps, stage.train.schedule),
            config=stage.raw,
        )
    except UserError as error:
        raise error.located(stage.file) from None
    if rank == 0:
        stage.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(stage.run_dir / checkpoints.CONFIG, json.dumps(stage.raw, indent=2) + "\n")
    if state.step:
        checkpoints.load(engine, stage.run_dir, state.step)
    log = MetricsLog(stage.run_dir / checkpoints.METRICS, records, writes=rank == 0)
    with RunProgress(stage.run_dir.name, stage.train.steps, state.step, shown=rank == 0) as progress:
        run = _Run(stage, data, tokenizer, engine, log, progress, Interrupt(engine.device), state.step, state.step)
        try:
            run.all_steps()
        except Interrupted:
            run.save()
            progress.say(f"interrupted: {run.step} steps are done and saved; the same command resumes")
            raise
    result = write_result(stage, engine, tokenizer, log, data.report)
    dist.barrier()
    return result


def cache_dir() -> Path:
    """Where the tokenizer and prepared data sets are kept between runs: DS_FP8_CACHE, or ~/.cache/ds_fp8."""
    return Path(os.environ.get("DS_FP8_CACHE", "~/.cache/ds_fp8")).expanduser()


@dataclass
class _Run:
    """The state of a run in progress."""

    stage: Stage
    data: StageData
    tokenizer: PreTrainedTokenizerBase
    engine: deepspeed.DeepSpeedEngine
    log: MetricsLog
    progress: RunProgress
    interrupt: Interrupt
    step: int
    """Optimizer steps done."""
    saved: int
    """Steps done at the last checkpoint."""

    def all_steps(self) -> None:
        """Evaluate, train and save until all steps are done and measured. Raises Interrupted."""
        config = self.stage.train
        while True:
            self.evaluate()
            if self.step == config.steps:
                return
            self.train_step()
            if self.step == config.steps or (config.save_every and self.step % config.save_every == 0):
                self.save()
            self.interrupt.check()

    def save(self) -> None:
        """Save a checkpoint unless this step has one."""
        if self.step > self.saved:
            checkpoints.save(self.engine, self.stage.run_dir, self.step, self.stage.train.keep_last)
            self.saved = self.step

    def evaluate(self) -> None:
        """Measure what is due after this many steps and has not been measured before."""
        config, step = self.stage.train, self.step
        at_an_end = step in (0, config.steps)
        check = self.interrupt.check
        due = at_an_end or (config.eval_every and step % config.eval_every == 0)
        if due and self.log.value(step, "validation_loss") is None:
            loss = validation_loss(
                self.engine, self.data.validation, self.stage.micro_batch, config.eval_batches, check
            )
            self._report(step, "validation_loss", loss, f"validation loss {loss:.4f}")
        if step == 0 and config.exact_match_problems and not self.data.problems:
            self.progress.say('no exact match: only the data "synthetic" has held-out problems with known answers')
        wanted = self.data.problems and config.exact_match_problems
        if at_an_end and wanted and self.log.value(step, "exact_match") is None:
            problems = self.data.problems[:wanted]
            chat = self.stage.data.format == "chat"
            share = exact_match(self.engine, self.tokenizer, problems, chat, config.max_new_tokens, check)
            line = f"exact match {share:.1%} of {len(problems)} problems"
            self._report(step, "exact_match", share, line, problems=len(problems))

    def train_step(self) -> None:
        """One optimizer step over the global batch."""
        stage, engine = self.stage, self.engine
        rank, world = dist.get_rank(), dist.get_world_size()
        engine.fp8.wire.take()  # what evaluation sent is not the step's
        started = time.perf_counter()
        rows = rows_of_step(self.step, len(self.data.train), stage.global_batch, stage.train.seed)
        indices = local_micro_batches(rows, rank, world, stage.micro_batch, stage.accumulation)
        batches = load_micro_batches(self.data.train, indices, engine.device)
        items = tokens_per_micro_batch(batches)
        # A seed per step, so that a resumed run draws what an uninterrupted one does.
        torch.manual_seed((stage.train.seed * 1_000_003 + self.step) * world + rank)
        learning_rate = engine.get_lr()[0]
        loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        for batch in batches:
            micro_loss = engine(**batch, use_cache=False, num_items_in_batch=items).loss
            engine.backward(micro_loss)
            engine.step()
            loss += micro_loss.detach().double()
        dist.all_reduce(loss)
        memory = torch.tensor([peak_memory_bytes(engine.device)], dtype=torch.int64, device=engine.device)
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        record = {
            "step": self.step + 1,
            "loss": loss.item() / (world * len(batches)),
            "learning_rate": learning_rate,
            "gradient_norm": float(engine.get_global_grad_norm()),
            "memory_bytes": memory.item(),
            "skipped_steps": engine.skipped_steps,
        }
        seconds = time.perf_counter() - started
        record |= {
            "step_seconds": seconds,
            "tokens_per_second": stage.global_batch * stage.data.sequence_length / seconds,
            **(engine.fp8.saturation() or {}),
            **{key: count for key, count in engine.fp8.wire.take().items() if key in BYTES},
        }
        self.step += 1
        self.progress.step(record)
        if self.step % stage.train.log_every == 0 or self.step in (1, stage.train.steps):
            self.log.append(record)
            self._monitor({key: value for key, value in record.items() if key != "step" and value is not None})

    def _report(self, step: int, key: str, value: float, line: str, **more: Any) -> None:
        self.log.append({"step": step, key: value, **more})
        self.progress.say(f"step {step}: {line}")
        self._monitor({key: value})

    def _monitor(self, values: Record) -> None:
        """Send figures to DeepSpeed's monitors (wandb, TensorBoard, CSV), which count in samples."""
        if self.engine.monitor.enabled:
            events = [(f"Train/{key}", value, self.engine.global_samples) for key, value in values.items()]
            self.engine.monitor.write_events(events)


def _check_problems(stage: Stage, data: StageData) -> None:
    wanted, there = stage.train.exact_match_problems, len(data.problems)
    if not there:
        return  # data without known answers: the run says so and measures the loss alone
    if wanted > there:
        raise UserError(
            f"{wanted} problems are to be answered, and the data has {there} held-out ones",
            key="train.exact_match_problems",
            remedy=f"at most {there}",
        )


def _prepare_wandb(stage: Stage) -> None:
    section = stage.raw.get("wandb", {})
    if not section.get("enabled"):
        return
    stage.run_dir.mkdir(parents=True, exist_ok=True)  # wandb writes elsewhere when its folder does not exist
    os.environ.setdefault("WANDB_DIR", str(stage.run_dir))
    if "WANDB_API_KEY" not in os.environ and "WANDB_MODE" not in os.environ:
        os.environ["WANDB_MODE"] = "offline"
        print(
            f"wandb: no WANDB_API_KEY, so the run is logged offline in {stage.run_dir}; WANDB_MODE=online overrides",
            flush=True,
        )
