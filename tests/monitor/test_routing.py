"""Router statistics of one process: what is counted, and what it amounts to."""

import functools
import math

import pytest
import torch

from ds_fp8.layers.experts.routing import mixtures
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.monitor.routing import RoutingFigures, RoutingMonitor
from tests.layers.hugging_face import tokens
from tests.layers.moe import EXPERTS, mixture


def monitor_of(experts, every=1):
    """A RoutingMonitor, its CastMonitor, and a list that gets what is added up over the ranks."""
    casts, added = CastMonitor(every), []
    cpu = torch.device("cpu")
    return RoutingMonitor(casts, experts, cpu, lambda sums: added.append(sums.clone())), casts, added


def chosen(*experts):
    return None, (torch.zeros(1), torch.tensor(experts)[:, None], None), {}


def test_figures_are_those_of_the_shares():
    routing, *_ = monitor_of({"a": 4, "b": 2})
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
    routing, *_ = monitor_of({"a": 2, "b": 4})
    routing.observe(0, *chosen(0, 1, 2, 2, 2))
    routing.observe(1, *chosen(4, 4))
    assert routing.take().layers == {"a": RoutingFigures(pytest.approx(1), 0.5, 0)}


def test_only_measured_steps_in_training_count():
    routing, casts, _ = monitor_of({"a": 2}, every=2)
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


@pytest.mark.parametrize("recompute", [None, False, True])
def test_every_choice_of_a_model_counts_once(recompute):
    model = mixture("qwen3_moe", torch.float32, output_router_logits=True)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    layers = mixtures(model)
    routing, _, added = monitor_of(dict.fromkeys(layers, EXPERTS))
    for number, module in enumerate(layers.values()):
        module.register_forward_pre_hook(functools.partial(routing.observe, number), with_kwargs=True)
    model.register_forward_hook(routing.observe_output)
    ids = tokens()
    losses = []
    for _ in range(2):
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        losses.append(output.aux_loss.item())
    measured = routing.take()
    assert added[0][:-2].sum() == 2 * len(layers) * 2 * ids.numel()
    assert measured.auxiliary_loss == pytest.approx(sum(losses) / 2)
