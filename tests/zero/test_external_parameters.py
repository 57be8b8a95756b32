"""Weights that a module reads which does not own them: they arrive in BF16, as in plain ZeRO-3."""

import deepspeed
import pytest
import torch
from torch import nn

from tests.zero import models
from tests.zero.test_training import QUIET


class ReadsAnothers(nn.Module):
    """A residual linear layer that adds a product with the weight of its neighbour, which it does not call."""

    def __init__(self, hidden: int):
        super().__init__()
        self.own = nn.Linear(hidden, hidden)
        self.neighbour = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + nn.functional.linear(x, self.neighbour.weight))


class ReadsAndCalls(ReadsAnothers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.neighbour(x)


class CallsOnly(ReadsAnothers):
    """Has a method that reads a weight, which its forward does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + self.neighbour(x))

    def largest(self) -> torch.Tensor:
        return self.neighbour.weight.abs().max()


class ReadsByAMethod(ReadsAnothers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + self.product(x))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.neighbour.weight)


def register(model):
    for layer in model.layers:
        deepspeed.zero.register_external_parameter(layer, layer.neighbour.weight)


def make_leaves(model):
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.layers[0])])


def losses(section, layer, when):
    prepare = {"before": register, "inside leaf modules": make_leaves}.get(when)
    engine = models.build(models.config(section), layers=[layer] * 3, prepare=prepare)
    if when == "after":
        register(engine.module)
    return models.train(engine, 4), engine.skipped_steps, models.bf16_weights(engine)


@pytest.mark.parametrize(
    ("layer", "when"),
    [
        *((layer, when) for layer in (ReadsAnothers, ReadsAndCalls) for when in ("before", "after", "found")),
        (ReadsAndCalls, "inside leaf modules"),
        (ReadsByAMethod, "inside leaf modules"),
    ],
)
def test_training_follows_bf16(ranks, baseline, layer, when):
    fp8, bf16 = ranks(2, losses, QUIET, layer, when), baseline(2, losses, {"enabled": False}, layer, "before")
    for (found, skipped, weights), (twin, _, twin_weights) in zip(fp8, bf16, strict=True):
        assert skipped == 0
        assert found == pytest.approx(twin, rel=0.02)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, twin_weights[name], atol=0.01, rtol=0.1)


def report(layer):
    return models.build(models.config(QUIET), layers=[layer], prepare=make_leaves).fp8.report


@pytest.mark.parametrize(("layer", "reads"), [(ReadsByAMethod, True), (CallsOnly, False)])
def test_the_report_names_what_leaf_modules_read(ranks, layer, reads):
    seen = ranks(2, report, layer)[0]
    assert any("2 FP8 linears are all-gathered in BF16" in note for note in seen["notes"]) == reads
    assert seen["fp8_gathered_parameters"] == (0 if reads else 2 * 131 * 131)
