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
from ds_fp8.engine.plans import convert
from ds_fp8.layers.convert import stop_casting
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import UNSHARDED
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.train.batches import Batch
from ds_fp8.train.evaluation import label_logits

_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks)\.\d+)\.")  # Beginning of the name of a linear in a decoder layer

Figures = dict[str, Any]  # Cost of the casts of a part, while nothing else is cast: as sensitivity.json has it


def rows_of(
    dataset: PackedDataset, count: int, device: str | torch.device, weights: Sequence[float] = (1.0,)
) -> list[Batch]:
    chosen = measured_rows(dataset.rows_by_source, count, weights)
    return [{name: numbers[None].to(device) for name, numbers in dataset[index].items()} for index in chosen]


class Measured(NamedTuple):
    """Figures of a model on rows of text: FP64 [R] all."""

    losses: torch.Tensor  # Mean over the tokens of each row, in nats
    divergences: torch.Tensor  # Mean over the tokens of each row of KL(without casts || this model), in nats
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
            setattr(linear.weight, UNSHARDED, linear.recipe.quantize_weight(linear.weight.detach()))
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
            delattr(linear.weight, UNSHARDED)  # the cached operand must not reach what converts or saves the model next
        stop_casting(self._model)


def parts_of(linears: Sequence[str]) -> dict[str, list[str]]:
    """Return the parts that linears form, by pattern: all of them, those of one kind, those of one decoder layer."""
    parts = {"*": list(linears)}
    for name in linears:
        parts.setdefault(f"*.{name.rpartition('.')[2]}", []).append(name)
    for name in linears:
        if layer := _LAYER.match(name):
            parts.setdefault(layer[1], []).append(name)
    return parts


def shares_of(model: PreTrainedModel, linears: Sequence[str], length: int) -> dict[str, float]:
    """Return the share of each linear in the FLOPs of all products of a step over rows of `length` tokens."""
    # A token is multiplied once by each weight in forward: numbers of weights are in proportion to FLOPs, and
    # attention's products are added in the same unit.
    total = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)) + _attention(model, length)
    return {name: model.get_submodule(name).weight.numel() / total for name in linears}


def _attention(model: PreTrainedModel, length: int) -> float:
    config = model.config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return 2 * config.num_hidden_layers * heads * head_dim * (length + 1) / 2


def measure(
    model: PreTrainedModel,
    switch: CastSwitch,
    judge: Judge,
    parts: Mapping[str, Sequence[str]],
    shares: Mapping[str, float],
    left: Callable[[int], None] = lambda n: None,
) -> list[Figures]:
    """Return the cost of every part; `left` is called with the number of measurements that are left."""
    plain, costs = judge.measure(model), []
    for pattern, linears in parts.items():
        left(len(parts) - len(costs))
        with switch.only(linears):
            found = judge.measure(model)
        # By rows, in whose differences what a row's text costs in itself cancels.
        gaps, share = found.losses - plain.losses, sum(shares[name] for name in linears)
        error = gaps.std().item() / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        costs.append(
            {
                "pattern": pattern,
                "linears": len(linears),
                "flops_share": share,
                "loss_increase": found.loss / plain.loss - 1,
                "loss_standard_error": error / plain.loss,
                "divergence": found.divergence,
                "divergence_per_percent_of_flops": found.divergence / (100 * share),
            }
        )
    return costs


def propose(
    costs: Sequence[Figures], parts: Mapping[str, Sequence[str]], shares: Mapping[str, float], budget: float
) -> dict[str, list[str]]:
    """Return, by pattern, linears to keep in BF16 that cost the most for their FLOPs and have a share of them at most.

    One after the other the part with the highest divergence for its FLOPs is taken that still fits into the budget, a
    share of the FLOPs of all products. Of a linear in two parts only the first pays.
    """
    candidates = [cost for cost in costs if cost["pattern"] != "*" and cost["divergence"] > 0]
    taken: dict[str, list[str]] = {}
    spent = 0.0
    for cost in sorted(candidates, key=lambda cost: -cost["divergence_per_percent_of_flops"]):
        new = [name for name in parts[cost["pattern"]] if not any(name in names for names in taken.values())]
        share = sum(shares[name] for name in new)
        # The slack is for sums of shares that add up to the budget exactly.
        if new and spent + share <= budget * (1 + 1e-9):
            taken[cost["pattern"]] = new
            spent += share
    return taken


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
    parts, shares = parts_of(list(switch.linears)), shares_of(model, list(switch.linears), length)
    costs = measure(model, switch, judge, parts, shares, left)
    proposed = propose(costs, parts, shares, budget)
    kept = [name for names in proposed.values() for name in names]
    plain = judge.measure(model)
    with switch.only([name for name in switch.linears if name not in kept]):
        rest = judge.measure(model)
    switch.close()
    return {
        "tokens": int(plain.tokens.sum().item()),
        "loss": plain.loss,
        "costs": costs,
        "proposal": {
            "overrides": dict.fromkeys(proposed, "bf16"),
            "flops_share": sum(shares[name] for name in kept),
            "loss_increase": rest.loss / plain.loss - 1,
            "divergence": rest.divergence,
        },
    }
