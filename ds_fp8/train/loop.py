"""Training a stage from its first or last saved step to its result."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, Literal, NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from transformers import PreTrainedTokenizerBase

import ds_fp8
from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.data import StageData, build_data, build_tokenizer, describe
from ds_fp8.data.tokenise import tokenizer_identity
from ds_fp8.monitor.records import layers_in_bf16
from ds_fp8.train import checkpoints, processes, resume
from ds_fp8.train.checkpoints import RunState
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.evaluation import exact_match, validation_loss
from ds_fp8.train.health import RunHealth
from ds_fp8.train.interrupt import Interrupt, Interrupted
from ds_fp8.train.metrics import ANSWERS, MetricsLog, Record, read_metrics
from ds_fp8.train.model import build_sharded_model, load_model_config, parameters_to_train
from ds_fp8.train.progress import RunProgress, TokeniserProgress
from ds_fp8.train.result import write_result
from ds_fp8.train.run_lock import only_run_in
from ds_fp8.train.saving import CheckpointWriter
from ds_fp8.train.schedules import learning_rate_scheduler
from ds_fp8.train.spikes import SpikeDetector
from ds_fp8.train.stage import Stage
from ds_fp8.train.step import Steps

MOST_ROLLBACKS = 3
"""Rollbacks to one checkpoint, after which a run goes on in spite of a spike."""


def train(stage: Stage) -> dict[str, Any]:
    """Run the stage on this rank, from where its run folder left off, and return its result. Collective.

    Nothing is written before every check has passed. Raises UserError, on all ranks alike, for a mistake in the stage,
    and Interrupted after a signal, once the checkpoint is saved.
    """
    processes.set_single_process_env()
    watchdog.beat("preparing data and model", slow=True)
    rank = int(os.environ["RANK"])
    try:
        state = resume.inspect_run(stage)
        if state.result is not None:
            if rank == 0:
                print(f"{stage.run_dir} has finished its {state.step} steps: nothing to do", flush=True)
            return state.result
        tokenizer = build_tokenizer(stage.data, cache_dir())
        with TokeniserProgress() as report:
            data = build_data(stage.data, tokenizer, cache_dir(), report)
        stage = stage.with_length(len(data.train))
        resume.check_length(stage, state)
        _check_problems(stage, data)
        config = load_model_config(stage, tokenizer)
        processes.init_distributed()
        processes.check_same_everywhere(
            "the data it prepared",
            {"tokenizer": tokenizer_identity(tokenizer), **data.report},
            key="data.path",
            remedy="give every host the same files; what was prepared earlier from others lies in DS_FP8_CACHE",
        )
        model = build_sharded_model(stage, config)
        say = RunProgress.say_on(rank == 0)
        with only_run_in(stage.run_dir, say):
            return _train(stage, data, tokenizer, model, resume.settle(stage, say))
    except UserError as error:
        raise error.located(stage.file) from None


def _train(
    stage: Stage,
    data: StageData,
    tokenizer: PreTrainedTokenizerBase,
    model: torch.nn.Module,
    state: RunState,
) -> dict[str, Any]:
    """Train from `state`, whose run folder is this run's alone, and return the result. Collective."""
    rank = dist.get_rank()
    records = read_metrics(stage.run_dir / checkpoints.METRICS, state.step if state.step else -1)
    if rank == 0:
        _prepare_wandb(stage)
    engine, _, _, _ = ds_fp8.initialize(
        model=model,
        model_parameters=parameters_to_train(stage, model),
        lr_scheduler=learning_rate_scheduler(stage.train.steps, stage.train.schedule),
        # Bytes on the wire are measured where there is a section, FP8 or not.
        config={"fp8": {"enabled": False}, **stage.raw},
    )
    if engine.fp8.optimizer is not None:
        engine.fp8.optimizer.compact = stage.train.compact_checkpoints
    if rank == 0:
        stage.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(stage.run_dir / checkpoints.CONFIG, json.dumps(stage.raw, indent=2) + "\n")
    if engine.fp8.health is not None:
        engine.fp8.health.move_to_bf16(layers_in_bf16(records))
    if state.checkpoint is not None:
        checkpoints.load(engine, stage, state)
        if not state.step:
            engine.skipped_steps = 0  # those before were the other run's
    log = MetricsLog(stage.run_dir / checkpoints.METRICS, records, writes=rank == 0)
    with RunProgress(stage.run_dir.name, stage.train.steps, state.step, shown=rank == 0) as progress:
        describe(data.report, progress.say)
        run = _Run(stage, data, tokenizer, engine, log, progress, Interrupt(engine.device), state)
        try:
            run.all_steps()
        except Interrupted:
            run.save()
            run.finish_save()
            run.draw()
            progress.say(
                f"interrupted: {run.step} steps are done and {'saved' if run.saved.step == run.step else 'not saved'}; "
                "the same command resumes"
            )
            raise
    watchdog.beat("writing the result", slow=True)
    result = write_result(stage, engine, tokenizer, log, data.report, progress.say)
    dist.barrier()
    return result


def cache_dir() -> Path:
    """Return the folder that keeps the tokenizer and prepared data between runs: DS_FP8_CACHE, or ~/.cache/ds_fp8."""
    return Path(os.environ.get("DS_FP8_CACHE", "~/.cache/ds_fp8")).expanduser()


class Spike(NamedTuple):
    """A loss that stands out."""

    step: int
    score: float
    """Standard deviations above the losses before it."""


class _Run:
    """The state of a run in progress."""

    def __init__(
        self,
        stage: Stage,
        data: StageData,
        tokenizer: PreTrainedTokenizerBase,
        engine: deepspeed.DeepSpeedEngine,
        log: MetricsLog,
        progress: RunProgress,
        interrupt: Interrupt,
        state: RunState,
    ):
        self.stage, self.data, self.tokenizer, self.engine = stage, data, tokenizer, engine
        self.log, self.progress, self.interrupt = log, progress, interrupt
        # A forward may have kernels to compile, or hundreds of tokens to generate, before the next check.
        self._check_slow = partial(interrupt.check, slow=True)
        self.steps = Steps(stage, data, engine)
        self.saved = state
        """What the last checkpoint of this run holds; its `checkpoint` is None before the first."""
        if not state.step:
            self.saved = RunState(0, state.data_step)
        self.rollbacks = 0
        """Rollbacks to the last checkpoint."""
        self.writer = CheckpointWriter(engine, stage, progress.say)
        self.health = RunHealth(engine.fp8.health, stage.run_dir, log, progress.say, self._send)
        self._go_to(state)
        if state.step and dist.get_rank() == 0:
            with self._written("which checkpoint is the latest"):
                self.writer.complete(state.step, log.by_step("validation_loss"))

    def _go_to(self, state: RunState) -> None:
        config = self.stage.train
        self.step, self.data_step = state.step, state.data_step
        self.engine.fp8.monitor.steps = state.step  # the same steps are measured as without a stop
        self.spikes = SpikeDetector(config.spike_window, config.spike_threshold, state.losses)

    def all_steps(self) -> None:
        """Evaluate, train and save until all steps are done and measured. Raises Interrupted."""
        config = self.stage.train
        while True:
            self.evaluate()
            if self.step == config.steps:
                self.finish_save()
                self.draw()
                return
            if any(self.roll_back(spike) for spike in self.train_step()):
                continue
            if self.step == config.steps or (config.save_every and self.step % config.save_every == 0):
                self.save()
            if not self.steps.unread:
                self.interrupt.check()

    def save(self) -> None:
        """Save a checkpoint unless this step has one; an asynchronous one is begun."""
        self.finish_save()
        if self.step > self.saved.step:
            state = RunState(self.step, self.data_step, tuple(self.spikes.losses()))
            self.writer.save(state, self.log.by_step("validation_loss"))
            if not self.stage.train.async_save:
                self.finish_save()

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        watchdog.beat("saving a checkpoint", slow=True)
        saved = self.writer.finish()
        if saved is not None:
            self.saved, self.rollbacks = saved, 0

    def roll_back(self, spike: Spike) -> bool:
        """Say that the last loss stands out; where the stage wants it, go back to the last checkpoint. Collective.

        The data of the steps since then is left out. Returns whether it went back.
        """
        self.finish_save()
        line = f"step {spike.step}: the loss is {spike.score:.1f} standard deviations above the last ones"
        wanted = self.stage.train.spike == "rollback"
        if not wanted or self.saved.checkpoint is None or self.rollbacks == MOST_ROLLBACKS:
            why = (
                "no checkpoint to go back to yet"
                if self.saved.checkpoint is None
                else f"as after {self.rollbacks} rollbacks"
            )
            self.progress.say(f"{line}; {why}, going on" if wanted else line)
            self.log.append({"step": spike.step, "event": "spike", "score": spike.score})
            return False
        state = replace(self.saved, data_step=self.data_step)
        checkpoints.load(self.engine, self.stage, state)
        if dist.get_rank() == 0:
            with self._written("the checkpoint's place in the data"):
                checkpoints.move_in_data(state)  # resumed from here, the run leaves out the same data
        self.progress.say(f"{line}; back to step {state.step}, its data of {self.step - state.step} steps left out")
        self.log.go_back(state.step)
        self.log.append({"step": state.step, "event": "rollback", "score": spike.score, "from_step": self.step})
        self.health.rolled_back(state.step)
        self.saved, self.rollbacks = state, self.rollbacks + 1
        self._go_to(state)
        return True

    def evaluate(self) -> None:
        """Measure what is due after this many steps and has not been measured before."""
        config, step = self.stage.train, self.step
        at_an_end = step in (0, config.steps)
        if at_an_end or (config.eval_every and step % config.eval_every == 0):
            self._measure_loss("validation")
        if step == config.steps and len(self.data.test):
            self._measure_loss("test")
        if at_an_end:
            self._measure_answers()

    def _measure_loss(self, split: Literal["validation", "test"]) -> None:
        key, rows, batches = f"{split}_loss", getattr(self.data, split), self.stage.train.eval_batches
        if self.log.value(self.step, key) is None:
            loss = validation_loss(self.engine, self.stage, rows, batches, self._check_slow)
            perplexity = exp(min(loss, 700.0))
            line = f"{split} loss {loss:.4f}, perplexity {perplexity:.4g}"
            self._report(self.step, key, loss, line, **{f"{split}_perplexity": perplexity})

    def _measure_answers(self) -> None:
        wanted = self.stage.train.exact_match_problems
        if not wanted or self.log.value(self.step, "exact_match") is not None:
            return
        questions = self.data.questions[:wanted]
        if not questions:
            if self.step == 0:
                self.progress.say(
                    'no exact match: the data has no known answers ("data.answer_pattern" finds them in chats)'
                )
            return
        answers = exact_match(
            self.engine, self.stage, self.tokenizer, questions, self.data.answer_pattern, self._check_slow
        )
        share, samples = answers.exact_match, [asdict(sample) for sample in answers.samples]
        self.log.append({"step": self.step, "event": ANSWERS, "answers": samples})
        line = f"exact match {share:.1%} of {len(questions)} problems"
        self._report(self.step, "exact_match", share, line, problems=len(questions))

    def train_step(self) -> list[Spike]:
        """Do one optimizer step. Returns which of the losses that were read stand out."""
        watchdog.beat(f"step {self.step + 1}", slow=self.step == self.saved.step)
        self.steps.do(self.data_step)
        self.step += 1
        self.data_step += 1
        spikes = self._read() if self._reads() else []
        self.health.log_step(self.step)
        self.draw(now=False)
        return [] if self.stage.train.spike == "off" else spikes

    def _reads(self) -> bool:
        """Return whether to read the figures of the steps so far now; reading makes the host wait for the device."""
        config = self.stage.train
        every = [config.log_every, config.save_every, config.eval_every]
        due = self.step in (1, config.steps) or any(number and self.step % number == 0 for number in every)
        # A run that goes back leaves out as little data as it can.
        return due or config.spike == "rollback" or self.steps.overdue

    def _read(self) -> list[Spike]:
        """Read the steps since the last reading, log what is due and look for spikes. Collective."""
        reading = self.steps.read()
        record = {"step": self.step, **reading.record}
        self.progress.step(record)
        if self.step % self.stage.train.log_every == 0 or self.step in (1, self.stage.train.steps):
            self.log.append(record)
            self._monitor({key: value for key, value in record.items() if key != "step" and value is not None})
        first = self.step - len(reading.losses) + 1
        scores = [(step, self.spikes.observe(loss)) for step, loss in enumerate(reading.losses, start=first)]
        return [Spike(step, score) for step, score in scores if score is not None]

    def _report(self, step: int, key: str, value: float, line: str, **more: Any) -> None:
        self.log.append({"step": step, key: value, **more})
        self.progress.say(f"step {step}: {line}")
        self._monitor({key: value})

    def _monitor(self, values: Record) -> None:
        self._send({f"Train/{key}": value for key, value in values.items()})

    def _send(self, values: Record) -> None:
        """Send figures to DeepSpeed's monitors (wandb, TensorBoard, CSV), which count in samples."""
        if self.engine.monitor.enabled:
            samples = self.engine.global_samples
            with self._written("the monitors' figures"):
                self.engine.monitor.write_events([(key, value, samples) for key, value in values.items()])

    def draw(self, now: bool = True) -> None:
        """Draw all measurements so far; unless `now`, not more often than every few minutes."""
        with self._written("the picture of all measurements"):
            self.health.draw(now)

    @contextmanager
    def _written(self, what: str) -> Iterator[None]:
        """Go on, with a warning, where the disk has no room for what training does not need."""
        try:
            yield
        except OSError as error:
            self.progress.say(f"WARNING: {what} could not be written: {error.strerror or error}")


def _check_problems(stage: Stage, data: StageData) -> None:
    wanted, there = stage.train.exact_match_problems, len(data.questions)
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
