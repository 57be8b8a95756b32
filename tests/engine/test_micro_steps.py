"""CUDA graphs of micro-steps, as far as a machine without a GPU knows them; tests/gpu has the rest."""

from collections import Counter

import pytest
import torch

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.graph_conditions import one_sequence_a_row
from ds_fp8.engine.micro_step_graph import only_differentiable
from ds_fp8.zero.wire import GATHER, WireMeter
from tests.zero import models


def reported(graph):
    engine = models.build(models.config({"monitor": {"every": 0}, "graph": graph}))
    return engine.fp8.report["graphs"], engine.fp8.graphs


@pytest.mark.parametrize(("graph", "why"), [("off", 'off: "graph" is "off"'), ("auto", "off: there is no CUDA device")])
def test_the_report_says_why_there_are_none(ranks, graph, why):
    assert ranks(2, reported, graph) == [(why, None)] * 2


def test_they_are_off_unless_asked_for():
    assert FP8Config().graph == "off"


ROWS = torch.arange(6).expand(2, 6)


@pytest.mark.parametrize(
    ("batch", "plain"),
    [
        ({}, True),
        ({"attention_mask": torch.ones(2, 6)}, True),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, False),
        ({"position_ids": ROWS}, True),
        ({"position_ids": ROWS[:1]}, True),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, False),
        ({"position_ids": ROWS + 1}, False),
        ({"position_ids": ROWS, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, False),
    ],
)
def test_rows_of_one_sequence(batch, plain):
    assert one_sequence_a_row(batch) is plain


def test_one_output_has_the_gradient():
    loss, logits = torch.ones((), requires_grad=True), torch.ones(3)
    assert only_differentiable([None, logits, loss])[0] == 2
    for leaves in ([logits], [loss, loss * 2]):
        with pytest.raises(ValueError, match="a graph knows one loss"):
            only_differentiable(leaves)


def test_bytes_of_a_graph_are_counted_when_it_runs():
    wire = WireMeter()
    wire.add(Counter({GATHER: 5}))
    sent = wire.sent()
    wire.add(Counter({GATHER: 7}))
    more = wire.sent() - sent
    wire.subtract(more)
    assert wire.sent()[GATHER] == 5
    wire.add(more)
    assert wire.take()[GATHER] == 12
