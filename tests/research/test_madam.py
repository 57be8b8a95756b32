"""Madam: its formula number by number, its grid, and that shards and resumed runs do the same as whole ones."""

import math

import pytest
import torch

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.preflight import check
from ds_fp8.research.madam import Madam
from tests.optim.numbers import gradients
from tests.ranks import on_ranks
from tests.zero import models


def stepped(weights, each, /, **options):
    """The weights after a step for each of these gradients, and the optimizer."""
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = Madam([parameter], **options)
    for gradient in each:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer


@pytest.mark.parametrize("options", [{}, {"lr": 0.02, "beta": 0.9, "weight_decay": 0.5}, {"bound": 0.5, "steps": 8}])
def test_every_number_follows_the_formula(options):
    weights = gradients(40, seed=1) * 1e3
    weights[::7] = 0
    steps = [gradients(40, seed=seed, spread=1) for seed in range(2, 7)]
    settings = {"lr": 1 / 128, "beta": 0.999, "bound": 10.0, "weight_decay": 0.0, "steps": 2048} | options
    found, _ = stepped(weights, steps, **options)
    for index, start in enumerate(weights.double().tolist()):
        w, v = start, 0.0
        for number, gradient in enumerate(steps, 1):
            g = gradient[index].double().item()
            v = settings["beta"] * v + (1 - settings["beta"]) * g * g
            normed = g / math.sqrt(v / (1 - settings["beta"] ** number))
            normed = max(-settings["bound"], min(settings["bound"], normed))
            sign = math.copysign(1, w if w else -g)
            exponent = math.log2(max(abs(w), 2.0**-20)) - settings["lr"] * (sign * normed + settings["weight_decay"])
            w = sign * 2 ** max(-20, round(exponent * settings["steps"]) / settings["steps"])
        # A rounding error of FP32 may put an exponent on the other side of half a step, once in a while.
        assert math.copysign(1, found[index]) == math.copysign(1, w)
        assert abs(math.log2(abs(found[index].item()) / abs(w))) <= 1.01 / settings["steps"]


def test_steps_without_any_gradient_before_the_first_one_leave_no_trace():
    weights, zero = gradients(64) * 1e3, torch.zeros(64)
    steps = [gradients(64, seed=seed) for seed in (1, 2)]
    assert torch.equal(stepped(weights, [zero])[0], weights)
    assert torch.equal(stepped(weights, [zero, zero, *steps])[0], stepped(weights, steps)[0])


def test_shards_move_as_the_whole_and_a_resumed_run_as_an_unbroken_one():
    weights, steps = gradients(320) * 1e3, [gradients(320, seed=seed) for seed in range(1, 7)]
    whole, _ = stepped(weights, steps)
    halves = [stepped(weights[part], [g[part] for g in steps])[0] for part in (slice(0, 101), slice(101, 320))]
    # Vectorised and scalar exponentials differ in the last bit.
    torch.testing.assert_close(torch.cat(halves), whole, rtol=1e-6, atol=0)
    middle, optimizer = stepped(weights, steps[:3])
    parameter = torch.nn.Parameter(middle.clone())
    resumed = Madam([parameter])
    resumed.load_state_dict(optimizer.state_dict())
    for gradient in steps[3:]:
        parameter.grad = gradient.clone()
        resumed.step()
    assert torch.equal(parameter, whole)


@pytest.mark.parametrize(
    "params", [{"betas": [0.9, 0.95]}, {"steps": 6}, {"beta": 1.0}, {"smallest": 0.0}, {"lr": -1.0}]
)
def test_a_section_that_madam_does_not_take(params):
    section = {"optimizer": {"type": "Madam", "params": params}, "zero_optimization": {"stage": 3}}
    with pytest.raises(UserError) as caught:
        check(Configuration(section))
    assert caught.value.key == f"optimizer.params.{next(iter(params))}"


LOGARITHMIC = {"linear": {"weight": {"format": "log8"}}, "param_gather": {"format": "log8"}, "monitor": {"every": 0}}


@on_ranks(2)
def test_zero_3_trains_with_madam_and_weights_in_log8_and_resumes(tmp_path):
    config = models.config(LOGARITHMIC) | {"optimizer": {"type": "Madam", "params": {"lr": 1 / 32}}}
    engine = models.build(config)
    losses = models.train(engine, 6)
    engine.save_checkpoint(tmp_path, tag="middle")
    losses += models.train(engine, 3, start=6)
    resumed = models.build(config)
    resumed.load_checkpoint(tmp_path, tag="middle")
    assert models.train(resumed, 3, start=6) == losses[6:]
    assert losses[-1] < 0.97 * losses[0]
    masters = models.full_master(engine.module.layers[1].up.weight)
    assert torch.equal(masters, models.full_master(resumed.module.layers[1].up.weight))
    steps = masters.abs().double().log2() * 2048
    assert (steps - steps.round()).abs().max() < 0.01
    report = engine.fp8.report
    assert (report["optimizer"], report["param_gather"]) == ("Madam", "log8")
