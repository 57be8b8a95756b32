"""Measure how far casts move a model: its losses on rows of text, and the divergence from those without casts.

The divergence is the mean over tokens of KL(without casts || with them). Unlike a difference of losses it is never
negative and nearly free of chance, so that parts of a model can be told apart on a few rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds_fp8.data import IGNORED, PackedDataset, measured_rows

Batch = dict[str, torch.Tensor]
"""One row: `input_ids`, `labels` and `position_ids`, int64 [1, L]."""


def rows_of(
    dataset: PackedDataset, count: int, device: str | torch.device, weights: Sequence[float] = (1.0,)
) -> list[Batch]:
    """Return the first rows of a data set, at most `count`, as batches of one on a device.

    Its sources are in them by their `weights`.
    """
    chosen = measured_rows(dataset.rows_by_source, count, weights)
    return [{name: numbers[None].to(device) for name, numbers in dataset[index].items()} for index in chosen]


class Measured(NamedTuple):
    """Figures of a model on rows of text: FP64 [R] all."""

    losses: torch.Tensor
    """Mean over the tokens of each row, in nats."""
    divergences: torch.Tensor
    """Mean over the tokens of each row of KL(without casts || this model), in nats."""
    tokens: torch.Tensor

    @property
    def loss(self) -> float:
        """Return the mean loss of all tokens."""
        return ((self.losses * self.tokens).sum() / self.tokens.sum()).item()

    @property
    def divergence(self) -> float:
        """Return the mean divergence of all tokens."""
        return ((self.divergences * self.tokens).sum() / self.tokens.sum()).item()


class Judge:
    """Rows of text and what the model says of them without casts: FP32, as many numbers as tokens times words."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[Batch]):
        """Ask the model, which casts nothing now, about all rows."""
        self._rows = rows
        # On the CPU: rows times words of FP32 may take more than the GPU has beside the model.
        self._expected = [self._log_probabilities(model, row)[0].cpu() for row in rows]

    @torch.no_grad()
    def _log_probabilities(self, model: PreTrainedModel, row: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of all words, FP32 [T, V], at the places with a label, and the labels [T]."""
        output = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False)
        labels = row["labels"][0, 1:]
        kept = labels != IGNORED
        # In FP32, since divergences of 1e-5 are told apart.
        return F.log_softmax(output.logits[0, :-1][kept].float(), -1), labels[kept]

    @torch.no_grad()
    def measure(self, model: PreTrainedModel) -> Measured:
        """Return losses and divergences of the model as it computes now."""
        numbers = []
        for row, expected in zip(self._rows, self._expected, strict=True):
            found, labels = self._log_probabilities(model, row)
            expected = expected.to(found.device)
            loss = F.nll_loss(found, labels).item()
            divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
            numbers.append((loss, divergence, len(labels)))
        return Measured(*torch.tensor(numbers, dtype=torch.float64).T)


def difference(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Return the mean of first - second over rows [R], and its standard error."""
    gaps = first - second
    error = gaps.std().item() / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return gaps.mean().item(), error
