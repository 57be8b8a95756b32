"""The loop of a run, and the protocol of its features: a callback each, in a file each.

resume.py       Resume      load the checkpoint, weights and optimizer, that the run begins from
metrics.py      Metrics     metrics.jsonl, the progress that is shown, monitors
Health      what measured steps showed of FP8, and layers that moved to BF16
spikes.py       Spikes      find loss spikes; go back to the last checkpoint
saving.py       Checkpoint  save and prune checkpoints
evaluation.py   Evaluation  validation and test loss, exact match
result.py       Result      model/, adapter/, result.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import deepspeed
from transformers import PreTrainedTokenizerBase

from ds_fp8.cluster import watchdog
from ds_fp8.data import StageData
from ds_fp8.train.checkpoints import RunState
from ds_fp8.train.processes import Interrupt, Interrupted
from ds_fp8.train.stage import Stage
from ds_fp8.train.steps import Reading, Steps

if TYPE_CHECKING:
    from ds_fp8.train.metrics import MetricsLog


class Callback:
    """A feature of a run. Every rank calls every method, in the order of `Run.callbacks`: all may be collective."""

    def on_start(self, run: Run) -> None:
        """Begin: `run.saved` is what the run goes on from."""

    def on_read(self, run: Run, reading: Reading) -> None:
        """Take the figures of the steps since the last reading, of which `run.step` is the last."""

    def on_step(self, run: Run) -> None:
        """Act after a step, which may be unread; `run.step` counts it."""

    def state(self, run: Run) -> dict[str, Any]:
        """Return what a checkpoint of now has to hold for this feature: fields of RunState."""
        return {}

    def on_rollback(self, run: Run) -> None:
        """Go back to `run.saved`, whose weights are loaded again."""

    def on_interrupt(self, run: Run) -> None:
        """Act before the run ends because it was asked to."""

    def on_end(self, run: Run) -> None:
        """Act after the last step."""

    def close(self) -> None:
        """Give back what is held, however the run ends."""


@dataclass
class Run:
    """A run in progress."""

    stage: Stage
    data: StageData
    tokenizer: PreTrainedTokenizerBase
    engine: deepspeed.DeepSpeedEngine
    log: MetricsLog
    interrupt: Interrupt
    saved: RunState  # In the last checkpoint, or what the run begins from
    callbacks: Sequence[Callback] = ()
    step: int = field(init=False)  # Steps that are done
    data_step: int = field(init=False)  # Batches that are used up or left out

    def __post_init__(self) -> None:
        self.steps = Steps(self.stage, self.data, self.engine)
        self.go_to(self.saved)

    def go_to(self, state: RunState) -> None:
        self.saved, self.step, self.data_step = state, state.step, state.data_step
        self.engine.fp8.monitor.steps = state.step  # the same steps are measured as without a stop

    def is_due(self, every: int | None) -> bool:
        """Return whether the last step done is the last of all, or one of every so many."""
        return self.step == self.stage.train.steps or bool(every and self.step % every == 0)

    def reads(self) -> bool:
        """Return whether to read the figures of the steps so far now; reading makes the host wait for the device."""
        config = self.stage.train
        due = self.step == 1 or any(map(self.is_due, (config.log_every, config.save_every, config.eval_every)))
        # A run that goes back leaves out as little data as it can.
        return due or config.spike == "rollback" or self.steps.overdue


def train_loop(run: Run) -> None:
    """Do the steps of a run that are left. Collective. Raises Interrupted where a rank was asked to stop."""
    try:
        for callback in run.callbacks:
            callback.on_start(run)
        while run.step < run.stage.train.steps:
            # The first step after a start or a save compiles kernels, captures graphs or waits for the disk.
            watchdog.beat(f"step {run.step + 1}", slow=run.step == run.saved.step)
            run.steps.do(run.data_step)
            run.step, run.data_step = run.step + 1, run.data_step + 1
            if run.reads():
                reading = run.steps.read()
                for callback in run.callbacks:
                    callback.on_read(run, reading)
            # A rollback makes `run.step` an earlier one: callbacks after it find nothing due that is not done.
            for callback in run.callbacks:
                callback.on_step(run)
            # Only where losses were just read: reading is the one point where all ranks have waited for the device
            # anyway, and a checkpoint of the interrupt includes all steps.
            if not run.steps.unread:
                run.interrupt.check()
        for callback in run.callbacks:
            callback.on_end(run)
    except Interrupted:
        for callback in run.callbacks:
            callback.on_interrupt(run)
        raise
    finally:
        for callback in run.callbacks:
            callback.close()
