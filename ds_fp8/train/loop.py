"""The loop of a stage: steps, evaluation, saves, and rollback on a loss spike.

A step enqueues work and reads nothing back. Its loss stays on the device until `Steps.read`, which costs a few small
reductions over all ranks and one wait for the device, however many steps were done since the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp
from typing import Any, Literal, NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from transformers import PreTrainedTokenizerBase

from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.config.log import logger
from ds_fp8.data import StageData
from ds_fp8.train import resume
from ds_fp8.train.batches import BatchesAhead
from ds_fp8.train.checkpoints import RunState, move_in_data
from ds_fp8.train.evaluation import Alone, exact_match, validation_loss
from ds_fp8.train.metrics import (
    ANSWERS,
    BF16_LOSS,
    MetricsLog,
    Record,
    RunHealth,
    RunProgress,
    SpikeDetector,
    begin_peak_memory,
    peak_memory_bytes,
    reserved_memory_bytes,
)
from ds_fp8.train.model import without_casts
from ds_fp8.train.processes import Interrupt
from ds_fp8.train.saving import CheckpointWriter
from ds_fp8.train.stage import Stage

# After about so long losses are read, and signals looked for, even where nothing is logged: from a signal on, a
# launcher gives ranks 30 s, checkpoint included
SECONDS_UNREAD = 2.0
MOST_ROLLBACKS = 3  # Rollbacks to one checkpoint, after which a run goes on in spite of a spike


@dataclass(frozen=True)
class Reading:
    """Figures of the steps since the last reading."""

    losses: list[float]  # Mean loss per label token of every step, in nats, oldest first
    record: Record  # Figures of the last of them; seconds and bytes on the wire are means over all of them


class Steps:
    """Does optimizer steps, and reads their figures when asked to."""

    def __init__(self, stage: Stage, data: StageData, engine: deepspeed.DeepSpeedEngine):
        self._stage, self._engine = stage, engine
        self._batches = BatchesAhead(stage, data, engine.device)
        self._process_bytes = begin_peak_memory()
        self._losses: list[torch.Tensor] = []
        self._tokens, self._learning_rate, self._started = 0, 0.0, 0.0
        self._longest_unread = 1

    @property
    def unread(self) -> int:
        return len(self._losses)

    @property
    def overdue(self) -> bool:
        """Return whether steps have gone unread for about SECONDS_UNREAD, by the last reading: as on all ranks."""
        return self.unread >= self._longest_unread

    def do(self, data_step: int) -> None:
        """Do the optimizer step over the batch of a step of the data. Collective; nothing of it is read."""
        engine = self._engine
        if not self._losses:
            self._tokens, self._started = 0, time.perf_counter()
            if engine.fp8.wire is not None:
                engine.fp8.wire.take()  # bytes sent by evaluation do not belong to a step
        step = self._batches.take(data_step)
        # A seed per step, so that a resumed run draws what an uninterrupted one does.
        torch.manual_seed((self._stage.train.seed * 1_000_003 + data_step) * dist.get_world_size() + dist.get_rank())
        self._learning_rate = engine.get_lr()[0]
        # FP64: the sum over micro-batches rounds nothing that shows.
        loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        # Steps made by tokens have as many micro-batches as they need, and DeepSpeed divides by the configured number.
        # What a model adds to the loss of the labels (mixtures) is averaged over micro-batches, too.
        count = len(step.batches)
        share = engine.gradient_accumulation_steps() / count
        for index, batch in enumerate(step.batches, start=1):
            engine.set_gradient_accumulation_boundary(index == count)
            micro_loss = engine(**batch, use_cache=False, num_items_in_batch=step.items).loss
            engine.backward(micro_loss if share == 1 else micro_loss * share)
            engine.step()
            loss += micro_loss.detach().double()
        # Kept on the device: `.item()` here would make the host wait for the step before it enqueues the next.
        self._losses.append(loss / (count * dist.get_world_size()))
        self._tokens += step.tokens

    def read(self) -> Reading:
        """Return the figures of the steps since the last reading; there must be one. Collective."""
        engine, count = self._engine, self.unread
        losses = torch.stack(self._losses)
        # One collective for the losses of all steps since the last reading.
        dist.all_reduce(losses)
        # The losses are read first: the clock stops when all of the steps is done.
        means = losses.tolist()
        seconds = (time.perf_counter() - self._started) / count
        most = torch.tensor(
            [peak_memory_bytes(engine.device), reserved_memory_bytes(engine.device), seconds],
            dtype=torch.float64,
            device=engine.device,
        )
        # In FP64, for bytes of memory exceed the integers that FP32 holds exactly.
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        memory, reserved, slowest = most.tolist()
        # By the slowest rank, agreed above: all ranks read after the same number of steps.
        self._longest_unread = max(1, int(SECONDS_UNREAD / slowest))
        # Reading the meter empties it: what is taken here belongs to the steps since the last reading.
        sent = {} if engine.fp8.wire is None else engine.fp8.wire.take()
        record = {
            "loss": means[-1],
            "learning_rate": self._learning_rate,
            "gradient_norm": float(engine.get_global_grad_norm()),
            "memory_bytes": int(memory),
            "reserved_bytes": int(reserved),
            "process_bytes": self._process_bytes,
            "skipped_steps": engine.skipped_steps,
            "tokens": self._tokens // count,
            "step_seconds": seconds,
            "tokens_per_second": self._tokens / count / seconds,
            **(engine.fp8.saturation() or {}),
            **{key: value // count for key, value in sent.items()},
        }
        self._losses.clear()
        return Reading(means, record)


class Spike(NamedTuple):
    """A loss that stands out."""

    step: int
    score: float  # Standard deviations above the losses before it


class TrainingLoop:
    """The state of a run in progress."""

    def __init__(
        self,
        stage: Stage,
        data: StageData,
        tokenizer: PreTrainedTokenizerBase,
        engine: deepspeed.DeepSpeedEngine,
        log: MetricsLog,
        interrupt: Interrupt,
        state: RunState,
    ):
        self.stage, self.data, self.tokenizer, self.engine = stage, data, tokenizer, engine
        self.log, self.interrupt = log, interrupt
        self.progress = RunProgress(stage.train.steps, state.step)
        # A forward may have kernels to compile, or hundreds of tokens to generate, before the next check.
        self._check_slow = partial(interrupt.check, slow=True)
        self.steps = Steps(stage, data, engine)
        self.saved = state  # State in the last checkpoint of this run; its `checkpoint` is None before the first
        if not state.step:
            self.saved = RunState(0, state.data_step)
        self.rollbacks = 0  # Rollbacks to the last checkpoint
        self.writer = CheckpointWriter(engine, stage, logger.info)
        self.health = RunHealth(engine.fp8.health, log, self._send)
        self._go_to(state)
        # A stop between checkpoint and the files that name it leaves those behind: they are written again.
        if state.step and dist.get_rank() == 0:
            with self._written("which checkpoint is the latest"):
                self.writer.complete(state.step, log.by_step("validation_loss"))

    def _go_to(self, state: RunState) -> None:
        config = self.stage.train
        self.step, self.data_step = state.step, state.data_step
        self.engine.fp8.monitor.steps = state.step  # the same steps are measured as without a stop
        self.health.go_to(state.step)
        # With the losses from before the stop: a resumed run judges the next loss as an uninterrupted one would.
        self.spikes = SpikeDetector(config.spike_window, config.spike_threshold, state.losses)

    def all_steps(self) -> None:
        """Evaluate, train and save until all steps are done and measured. Raises Interrupted."""
        config = self.stage.train
        while True:
            self.evaluate()
            if self.step == config.steps:
                self.finish_save()
                if self.writer.failure is not None:
                    raise UserError(
                        f"step {self.step}, the last, was not saved: {self.writer.failure}",
                        key="train.run_dir",
                        remedy="make room or repair the file system; the same command goes on from "
                        + (f"step {self.saved.step}" if self.saved.checkpoint else "the beginning"),
                    )
                return
            # `any` stops at the first that goes back: later spikes belong to steps that are undone.
            if any(self.roll_back(spike) for spike in self.train_step()):
                continue
            if self.step == config.steps or (config.save_every and self.step % config.save_every == 0):
                self.save()
            # Only where losses were just read: reading is the one point where all ranks have waited for the device
            # anyway, and a checkpoint of the interrupt includes all steps.
            if not self.steps.unread:
                self.interrupt.check()

    def save(self) -> None:
        self.finish_save()
        if self.step > self.saved.step:
            losses, records = tuple(self.spikes.losses()), self.log.before(self.step)
            state = RunState(self.step, self.data_step, losses, data=self.data.identity, records=records)
            self.writer.save(state, self.log.by_step("validation_loss"))
            if not self.stage.train.async_save:
                self.finish_save()

    def finish_save(self) -> None:
        watchdog.beat("saving a checkpoint", slow=True)
        saved = self.writer.finish()
        if saved is not None:
            self.saved, self.rollbacks = saved, 0
            self.log.append({"step": saved.step, "saved": True})

    def roll_back(self, spike: Spike) -> bool:
        """Go back to the last checkpoint where the stage wants it, and leave the data since then out. Collective.

        Returns whether it went back.
        """
        self.finish_save()
        line = f"step {spike.step}: the loss is {spike.score:.1f} standard deviations above the last ones"
        wanted = self.stage.train.spike == "rollback"
        if not wanted or self.saved.checkpoint is None or self.rollbacks == MOST_ROLLBACKS:
            none = self.saved.checkpoint is None
            why = "no checkpoint to go back to yet" if none else f"as after {self.rollbacks} rollbacks"
            logger.info(f"{line}; {why}, continuing" if wanted else line)
            self.log.append({"step": spike.step, "event": "spike", "score": spike.score})
            return False
        # The weights go back, the position in the data does not: the batch of the spike is not seen again.
        state = replace(self.saved, data_step=self.data_step)
        resume.load(self.engine, self.stage, state)
        if dist.get_rank() == 0:
            with self._written("the checkpoint's place in the data"):
                move_in_data(state)  # resumed from here, the run leaves out the same data
        logger.info(f"{line}; back to step {state.step}, its data of {self.step - state.step} steps left out")
        self.log.go_back(state.step)
        self.log.append({"step": state.step, "event": "rollback", "score": spike.score, "from_step": self.step})
        self.saved, self.rollbacks = state, self.rollbacks + 1
        self._go_to(state)
        return True

    def evaluate(self) -> None:
        """Measure what is due after this many steps and has not been measured before."""
        config, step = self.stage.train, self.step
        at_an_end = step in (0, config.steps)
        if at_an_end or (config.eval_every and step % config.eval_every == 0):
            self._measure_loss("validation")
            if config.eval_bf16 and step:
                self._measure_in_bf16(lambda: without_casts(self.stage, self.engine))
        if step == config.steps and len(self.data.test):
            self._measure_loss("test")
        if at_an_end:
            self._measure_answers()

    def evaluate_bf16_weights(self) -> None:
        """Measure, after the last step, the validation loss of the BF16 weights without casts; casting ends with it."""

        def stopped() -> deepspeed.DeepSpeedEngine:
            self.engine.fp8.stop_casting()
            return self.engine

        self._measure_in_bf16(stopped)

    def _measure_in_bf16(self, model: Callable[[], deepspeed.DeepSpeedEngine | Alone]) -> None:
        # Asked of the log: a run that was stopped after this measurement and resumed does not repeat it.
        if not self.engine.fp8.casts or self.log.has(self.step, BF16_LOSS):
            return
        rows, batches = self.data.validation, self.stage.train.eval_batches
        loss = validation_loss(model(), self.stage, rows, batches, self._check_slow)
        self._report(self.step, BF16_LOSS, loss, f"validation loss of the weights in BF16, without casts, {loss:.4f}")

    def _measure_loss(self, split: Literal["validation", "test"]) -> None:
        key, rows, batches = f"{split}_loss", getattr(self.data, split), self.stage.train.eval_batches
        if self.log.value(self.step, key) is None:
            loss = validation_loss(self.engine, self.stage, rows, batches, self._check_slow)
            # exp overflows FP64 just above 709.
            perplexity = exp(min(loss, 700.0))
            line = f"{split} loss {loss:.4f}, perplexity {perplexity:.4g}"
            self._report(self.step, key, loss, line, **{f"{split}_perplexity": perplexity})

    def _measure_answers(self) -> None:
        wanted = self.stage.train.exact_match_problems
        if not wanted or self.log.value(self.step, "exact_match") is not None:
            return
        questions = self.data.questions(wanted)
        if not questions:
            if self.step == 0:
                logger.info('no exact match: the data has no known answers ("data.answer_pattern" finds them in chats)')
            return
        pattern = self.data.answer_pattern
        answers = exact_match(self.engine, self.stage, self.tokenizer, questions, pattern, self._check_slow)
        share, samples = answers.exact_match, [asdict(sample) for sample in answers.samples]
        self.log.append({"step": self.step, "event": ANSWERS, "answers": samples})
        line = f"exact match {share:.1%} of {len(questions)} problems"
        # Last: this record marks the answers as measured, so a run stopped in between answers the questions again.
        self._report(self.step, "exact_match", share, line, problems=len(questions))

    def train_step(self) -> list[Spike]:
        """Do one optimizer step. Returns which of the losses that were read stand out."""
        # The first step after a start or a save compiles kernels, captures graphs or waits for the disk.
        watchdog.beat(f"step {self.step + 1}", slow=self.step == self.saved.step)
        self.steps.do(self.data_step)
        self.step += 1
        self.data_step += 1
        spikes = self._read() if self._reads() else []
        self.health.log_step(self.step)
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
            self._send({f"Train/{key}": value for key, value in record.items() if key != "step" and value is not None})
        first = self.step - len(reading.losses) + 1
        scores = [(step, self.spikes.observe(loss)) for step, loss in enumerate(reading.losses, start=first)]
        return [Spike(step, score) for step, score in scores if score is not None]

    def _report(self, step: int, key: str, value: float, line: str, **more: Any) -> None:
        self.log.append({"step": step, key: value, **more})
        logger.info(f"step {step}: {line}")
        self._send({f"Train/{key}": value})

    def _send(self, values: Record) -> None:
        if self.engine.monitor.enabled:
            samples = self.engine.global_samples
            with self._written("the monitors' figures"):
                self.engine.monitor.write_events([(key, value, samples) for key, value in values.items()])

    @contextmanager
    def _written(self, what: str) -> Iterator[None]:
        """Go on, with a warning, where the disk has no room for what training does not need."""
        try:
            yield
        except OSError as error:
            logger.warning(f"WARNING: {what} could not be written: {error.strerror or error}")
