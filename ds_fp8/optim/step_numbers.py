"""The numbers that one AdamW step multiplies with, from its hyperparameters."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step; `number` counts from 1."""

    number: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """Return the factor of weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """Return the learning rate with exp_avg's bias corrected."""
        return self.lr / (1 - self.beta1**self.number)

    @property
    def root_factor(self) -> float:
        """Return the factor that corrects the bias of the root of exp_avg_sq."""
        return 1 / math.sqrt(1 - self.beta2**self.number)
