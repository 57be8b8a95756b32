"""Measure what each part's casts cost the loss of a model on rows of text, and propose layers to keep in BF16.

A part of the model is cast and nothing else: all linear layers of one kind (q_proj, ... down_proj), those of one
decoder layer, or all of them. One forward each over the rows gives the loss and the divergence from the model without
casts: the mean over tokens of KL(without casts || with them), which unlike a difference of losses is never negative and
nearly free of chance, so that parts are told apart on a few rows.

The model is one in FP32 with weights of BF16: in BF16 whatever changes a little changes the roundings after it, and the
divergence of a single layer's casts drowns in that.

Only forward is measured: what casts of gradients cost is seen in training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ds_fp8.config.fp8 import AttentionConfig, FP8Config
from ds_fp8.data import PackedDataset
from ds_fp8.data.rows import measured_rows
from ds_fp8.layers.convert import convert, stop_casting
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import GATHERED
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.train.batches import Batch
from ds_fp8.train.evaluation import label_logits

_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks)\.\d+)\.")
"""Beginning of the name of a linear in a decoder layer."""


def rows_of(
    dataset: PackedDataset, count: int, device: str | torch.device, weights: Sequence[float] = (1.0,)
) -> list[Batch]:
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
        return ((self.losses * self.tokens).sum() / self.tokens.sum()).item()

    @property
    def divergence(self) -> float:
        return ((self.divergences * self.tokens).sum() / self.tokens.sum()).item()


class Judge:
    """Rows of text [1, L] and what the model, which casts nothing now, says of them: FP32, tokens times words."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[Batch]):
        self._rows = rows
        # On the CPU: rows times words of FP32 may take more than the GPU has beside the model.
        self._expected = [self._log_probabilities(model, row)[0].cpu() for row in rows]

    @torch.no_grad()
    def _log_probabilities(self, model: PreTrainedModel, row: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = label_logits(model, row)
        # In FP32, since divergences of 1e-5 are told apart.
        return F.log_softmax(logits.float(), -1), labels

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
    gaps = first - second
    error = gaps.std().item() / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return gaps.mean().item(), error


class Part(NamedTuple):
    """Linear layers that are cast together."""

    pattern: str
    """Pattern for them in fp8.linear.overrides."""
    linears: tuple[str, ...]
    share: float
    """Their share of the FLOPs of all products of a step."""


class Cost(NamedTuple):
    """Cost of the casts of a part, while nothing else is cast."""

    part: Part
    loss: float
    """Loss with these casts over that without, less 1."""
    loss_error: float
    """Its standard error over rows."""
    divergence: float
    """Divergence (Kullback-Leibler) of the predictions from those without casts, in nats per token."""

    @property
    def per_share(self) -> float:
        return self.divergence / (100 * self.part.share)

    def as_json(self) -> dict[str, Any]:
        return {
            "pattern": self.part.pattern,
            "linears": len(self.part.linears),
            "flops_share": self.part.share,
            "loss_increase": self.loss,
            "loss_standard_error": self.loss_error,
            "divergence": self.divergence,
            "divergence_per_percent_of_flops": self.per_share,
        }


class CastSwitch:
    """A converted model of which chosen linears are cast and nothing else; `close` gives the model back as it was."""

    def __init__(self, model: PreTrainedModel, config: FP8Config):
        """Convert a model in FP32, and cast nothing yet. Nothing is fused, and attention is not cast."""
        self._model = model
        # The model is in FP32 here, which the reference alone multiplies without rounding to BF16.
        linear = config.linear.model_copy(update={"backend": "reference"})
        config = config.model_copy(update={"fuse": "off", "attention": AttentionConfig(), "linear": linear})
        convert(model, config, CastMonitor(0))
        self.linears = {name: m for name, m in model.named_modules() if isinstance(m, FP8Linear)}
        for linear in self.linears.values():
            # Once, and not in every forward.
            setattr(linear.weight, GATHERED, linear.recipe.cast_weight(linear.weight.detach()))
        self._switch(())

    def _switch(self, cast: Collection[str]) -> None:
        for name, linear in self.linears.items():
            # Switched by class, so that a part that is not cast runs the very forward of the model.
            linear.__class__ = FP8Linear if name in cast else linear.own_class

    @contextmanager
    def only(self, linears: Collection[str]) -> Iterator[None]:
        self._switch(linears)
        try:
            yield
        finally:
            self._switch(())

    def close(self) -> None:
        self._switch(self.linears)
        for linear in self.linears.values():
            delattr(linear.weight, GATHERED)  # the cached operand must not reach what converts or saves the model next
        stop_casting(self._model)


class Parts(NamedTuple):
    """The parts of a model that are measured."""

    all: Part
    kinds: list[Part]
    layers: list[Part]
    shares: dict[str, float]
    """Share of the FLOPs by the name of each linear that can be cast."""


def parts_of(model: PreTrainedModel, linears: Sequence[str], length: int) -> Parts:
    """Return the parts that `linears` form; attention's FLOPs follow the tokens of a row, `length`."""
    # A token is multiplied once by each weight in forward: numbers of weights are in proportion to FLOPs, and
    # attention's products are added in the same unit.
    total = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)) + _attention(model, length)
    shares = {name: model.get_submodule(name).weight.numel() / total for name in linears}

    def parts(pattern_of: Callable[[str], str | None]) -> list[Part]:
        groups: dict[str, list[str]] = {}
        for name in linears:
            if (pattern := pattern_of(name)) is not None:
                groups.setdefault(pattern, []).append(name)
        return [Part(p, tuple(names), sum(shares[name] for name in names)) for p, names in groups.items()]

    return Parts(
        Part("*", tuple(linears), sum(shares.values())),
        parts(lambda name: f"*.{name.rpartition('.')[2]}"),
        parts(lambda name: found.group(1) if (found := _LAYER.match(name)) else None),
        shares,
    )


def _attention(model: PreTrainedModel, length: int) -> float:
    config = model.config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return 2 * config.num_hidden_layers * heads * head_dim * (length + 1) / 2


def measure(
    model: PreTrainedModel, switch: CastSwitch, judge: Judge, parts: Parts, left: Callable[[int], None] = lambda n: None
) -> list[Cost]:
    """Return the cost of every part; `left` is called with the number of measurements that are left."""
    plain = judge.measure(model)
    asked, costs = (parts.all, *parts.kinds, *parts.layers), []
    for part in asked:
        left(len(asked) - len(costs))
        with switch.only(part.linears):
            found = judge.measure(model)
        _, error = difference(found.losses, plain.losses)
        # The error is that of the difference by rows, in which what a row's text costs in itself cancels.
        costs.append(Cost(part, found.loss / plain.loss - 1, error / plain.loss, found.divergence))
    return costs


class Proposal(NamedTuple):
    """Parts to keep in BF16."""

    overrides: dict[str, str]
    """fp8.linear.overrides, by falling divergence for their FLOPs."""
    linears: tuple[str, ...]
    share: float
    """Share of the FLOPs of all of them."""


def propose(costs: Sequence[Cost], shares: Mapping[str, float], budget: float) -> Proposal:
    """Return the kinds and decoder layers that cost the most for their FLOPs and together have at most a share of them.

    One after the other the part with the highest divergence for its FLOPs is taken that still fits into the budget, a
    share of the FLOPs of all products. Of a linear in two parts only the first pays.
    """
    candidates = [c for c in costs if c.part.pattern != "*" and c.divergence > 0]
    taken: dict[str, None] = {}
    overrides, spent = {}, 0.0
    for cost in sorted(candidates, key=lambda cost: -cost.per_share):
        new = [name for name in cost.part.linears if name not in taken]
        share = sum(shares[name] for name in new)
        # The slack is for sums of shares that add up to the budget exactly.
        if new and spent + share <= budget * (1 + 1e-9):
            overrides[cost.part.pattern] = "bf16"
            taken |= dict.fromkeys(new)
            spent += share
    return Proposal(overrides, tuple(taken), spent)


def sensitivity(
    model: PreTrainedModel,
    rows: Sequence[Batch],
    config: FP8Config,
    length: int,
    budget: float,
    left: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Return what the casts of `config` cost a model in FP32, and the loss with all of them but the proposed ones."""
    judge, switch = Judge(model, rows), CastSwitch(model, config)
    parts = parts_of(model, list(switch.linears), length)
    costs = measure(model, switch, judge, parts, left)
    proposal = propose(costs, parts.shares, budget)
    plain = judge.measure(model)
    with switch.only([name for name in parts.all.linears if name not in proposal.linears]):
        rest = judge.measure(model)
    switch.close()
    return {
        "tokens": int(plain.tokens.sum().item()),
        "loss": plain.loss,
        "costs": [cost.as_json() for cost in costs],
        "proposal": {
            "overrides": proposal.overrides,
            "flops_share": proposal.share,
            "loss_increase": rest.loss / plain.loss - 1,
            "divergence": rest.divergence,
        },
    }
