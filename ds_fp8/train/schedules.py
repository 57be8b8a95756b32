"""Learning-rate schedules: the share of the peak learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ds_fp8.config.schema import Section

SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Shapes of a decay from 1 at progress 0 to 0 at progress 1."""


class Schedule(Section):
    """The learning-rate schedule of a run. Lengths are steps, or below 1 a fraction of all steps."""

    type: Literal["wsd", "cosine", "constant"] = "cosine"
    """wsd: warmup, stable, decay at the end; cosine: decay right after warmup; constant: warmup only."""
    warmup: float = Field(0.05, ge=0)
    """Linear warmup: steps, or below 1 a fraction of all steps."""
    decay: float = Field(0.2, ge=0)
    """The last part of a wsd run, counted like `warmup`; ignored by the other types."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Shape of the decay of a wsd run: half a cosine wave, a straight line, or one minus the square root of the
    progress."""
    min_ratio: float = Field(0.1, ge=0, le=1)
    """The last step's share of the peak learning rate."""

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts of the schedule that have a length."""
        return {"warmup": self.warmup} | ({"decay": self.decay} if self.type == "wsd" else {})

    @property
    def shortest(self) -> int:
        """Return a number of steps into which the parts fit, if any do: at least 1."""
        long = sum(length for length in self.parts.values() if length >= 1)
        share = sum(length for length in self.parts.values() if length < 1)
        # One step more for each part, whose length is rounded.
        return math.ceil(long / (1 - share)) + len(self.parts) if long else 1

    def check_lengths(self, total: int) -> None:
        """Raise ValueError when the parts do not fit into `total` steps."""
        lengths = {name: _length(value, total) for name, value in self.parts.items()}
        if sum(lengths.values()) > total:
            shown = " + ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"the schedule is longer than the run: {shown} steps > steps {total}")


def _length(steps_or_fraction: float, total: int) -> int:
    return round(steps_or_fraction * total if steps_or_fraction < 1 else steps_or_fraction)


def learning_rate_factor(step: int, total: int, schedule: Schedule) -> float:
    """Return the factor in [0, 1] on the peak learning rate of 0-based `step` in a run of `total` steps.

    The last warmup step has factor 1, the last step of a decaying run has `min_ratio`; steps after the end keep it. A
    wsd run without warmup whose decay is all of it goes on as if the step before it had been at the peak: it is the end
    of a longer wsd run.
    """
    warmup = min(_length(schedule.warmup, total), total)
    # From 1 / warmup, not from 0: the first step would change nothing.
    if step < warmup:
        return (step + 1) / warmup
    if schedule.type == "constant":
        return 1.0
    # The step that still has factor 1, after which the decay goes down to the last step.
    if schedule.type == "wsd":
        # From the end of the run: a longer run has a longer stable part and the same decay.
        peak, shape = max(warmup - 1, total - 1 - _length(schedule.decay, total)), SHAPES[schedule.decay_shape]
    else:
        peak, shape = max(warmup - 1, 0), SHAPES["cosine"]
    # Clamped at both ends: the stable part of wsd lies before 0, steps after the planned end beyond 1.
    progress = min(max((step - peak) / max(total - 1 - peak, 1), 0.0), 1.0)
    return schedule.min_ratio + (1 - schedule.min_ratio) * shape(progress)


def learning_rate_scheduler(total: int, schedule: Schedule) -> Callable[[Optimizer], LambdaLR]:
    """Return a function that makes the LambdaLR of `schedule` for an optimizer, for `initialize(lr_scheduler=...)`."""

    def make(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: learning_rate_factor(step, total, schedule))

    return make
