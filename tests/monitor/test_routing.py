"""Router statistics of one process: what is counted, and what it amounts to."""

import math

import pytest
import torch

from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.monitor.routing import RoutingFigures, RoutingMonitor


def monitor_of(experts, every=1):
    """A RoutingMonitor of one rank, and its CastMonitor."""
    casts = CastMonitor(every)
    return RoutingMonitor(casts, experts, torch.device("cpu"), lambda sums: None), casts


def chosen(*experts):
    return None, (torch.zeros(1), torch.tensor(experts)[:, None], None), {}


def test_figures_are_those_of_the_shares():
    routing, _ = monitor_of({"a": 4, "b": 2})
    routing.observe(0, *chosen(0, 0, 0, 1))
    routing.observe(0, *chosen(2, 2, 1, 2))
    routing.observe(1, *chosen(0, 1))
    measured = routing.take()
    shares = [3 / 8, 2 / 8, 3 / 8]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    assert measured.layers == {
        "a": RoutingFigures(pytest.approx(entropy), 3 / 8, 1),
        "b": RoutingFigures(pytest.approx(1), 0.5, 0),
    }
    assert measured.mean == RoutingFigures(pytest.approx((entropy + 1) / 2), 7 / 16, 0.5)
    assert measured.auxiliary_loss is None
    assert routing.last is measured
    assert routing.take() is None, "counts begin at zero again"
    assert routing.last is measured


def test_choices_that_no_expert_computes_do_not_count():
    """transformers gives tokens of other ranks, and masked ones, the number of experts."""
    routing, _ = monitor_of({"a": 2, "b": 4})
    routing.observe(0, *chosen(0, 1, 2, 2, 2))
    routing.observe(1, *chosen(4, 4))
    assert routing.take().layers == {"a": RoutingFigures(pytest.approx(1), 0.5, 0)}


def test_only_measured_steps_in_training_count():
    routing, casts = monitor_of({"a": 2}, every=2)
    model = torch.nn.Linear(1, 1)
    casts.attach(model, [], torch.device("cpu"), lambda sums, peaks: None)
    model.eval()
    routing.observe(0, *chosen(0))
    model.train()
    assert routing.take() is None
    casts.end_step()
    routing.observe(0, *chosen(0))
    assert routing.take() is None
    casts.end_step()
    routing.observe(0, *chosen(0))
    assert routing.take() is not None
