"""Loss spikes: found among the losses, reported, and undone by a rollback to the last checkpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from deepspeed import comm as dist

from ds_fp8.config.log import logger
from ds_fp8.train import resume
from ds_fp8.train.checkpoints import move_in_data
from ds_fp8.train.loop import Callback, Run
from ds_fp8.train.run_folder import warn_unwritten
from ds_fp8.train.saving import Checkpoint
from ds_fp8.train.steps import Reading

LEAST_HISTORY = 20  # Losses to have seen before one can stand out
NORMAL_MAD = 1.4826  # Standard deviation over median absolute deviation, for normally distributed values
LEAST_SPREAD = 1e-3  # Part of the median below which the spread of losses is not believed
MOST_ROLLBACKS = 3  # Rollbacks to one checkpoint, after which a run goes on in spite of a spike


class SpikeDetector:
    """Compares each loss with the `window` before it."""

    def __init__(self, window: int, threshold: float, losses: Iterable[float] = ()):
        self._threshold = threshold
        self.losses: deque[float] = deque(losses, maxlen=window)

    def observe(self, loss: float) -> float | None:
        """Return the standard deviations by which `loss` exceeds the losses before, if above the threshold."""
        if not math.isfinite(loss):  # its step is skipped anyway
            return None
        score = 0.0
        # Of a few losses the median deviation may be almost zero, and anything would stand out.
        if len(self.losses) >= min(LEAST_HISTORY, self.losses.maxlen):
            # Median and its deviation, not mean and standard deviation: one spike among the losses hardly moves them.
            centre = median(self.losses)
            spread = NORMAL_MAD * median(abs(other - centre) for other in self.losses)
            score = (loss - centre) / max(spread, LEAST_SPREAD * abs(centre))
        self.losses.append(loss)
        return score if score > self._threshold else None


class Spike(NamedTuple):
    """A loss that stands out."""

    step: int
    score: float  # Standard deviations above the losses before it


class Spikes(Callback):
    """Reports loss spikes, or goes back to the last checkpoint and leaves the data since then out."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._found: list[Spike] = []
        self._rollbacks, self._back_at = 0, -1  # How many to the checkpoint of which step

    def on_start(self, run: Run) -> None:
        config = run.stage.train
        # With the losses from before the stop: a resumed run judges the next loss as an uninterrupted one would.
        self._detector = SpikeDetector(config.spike_window, config.spike_threshold, run.saved.losses)

    on_rollback = on_start

    def state(self, run: Run) -> dict[str, Any]:
        return {"losses": tuple(self._detector.losses)}

    def on_read(self, run: Run, reading: Reading) -> None:
        first = run.step - len(reading.losses) + 1
        scores = [(step, self._detector.observe(loss)) for step, loss in enumerate(reading.losses, start=first)]
        if run.stage.train.spike != "off":
            self._found = [Spike(step, score) for step, score in scores if score is not None]

    def on_step(self, run: Run) -> None:
        found, self._found = self._found, []
        # `any` stops at the first that goes back: later spikes belong to steps that are undone.
        any(self._roll_back(run, spike) for spike in found)

    def _roll_back(self, run: Run, spike: Spike) -> bool:
        """Go back to the last checkpoint where the stage wants it; return whether it does. Collective."""
        self._checkpoint.finish(run)
        saved = run.saved
        if saved.step != self._back_at:
            self._rollbacks, self._back_at = 0, saved.step
        line = f"step {spike.step}: the loss is {spike.score:.1f} standard deviations above the last ones"
        wanted = run.stage.train.spike == "rollback"
        # At step 0 the checkpoint, if any, is another run's.
        if not wanted or not saved.step or self._rollbacks == MOST_ROLLBACKS:
            why = f"as after {self._rollbacks} rollbacks" if saved.step else "no checkpoint to go back to yet"
            logger.info(f"{line}; {why}, continuing" if wanted else line)
            run.log.append({"step": spike.step, "event": "spike", "score": spike.score})
            return False
        # The weights go back, the position in the data does not: the batch of the spike is not seen again.
        state, undone = replace(saved, data_step=run.data_step), run.step
        resume.load(run.engine, run.stage, state)
        if dist.get_rank() == 0:
            with warn_unwritten("the checkpoint's place in the data"):
                move_in_data(state)  # resumed from here, the run leaves out the same data
        logger.info(f"{line}; back to step {state.step}, its data of {undone - state.step} steps left out")
        run.log.go_back(state.step)
        run.log.append({"step": state.step, "event": "rollback", "score": spike.score, "from_step": undone})
        self._rollbacks += 1
        run.go_to(state)
        for callback in run.callbacks:
            callback.on_rollback(run)
        return True
