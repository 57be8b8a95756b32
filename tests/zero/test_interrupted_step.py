"""A step that ends midway, by the user's interrupt or for want of memory, in a program that goes on."""

from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from tests.zero import models
from tests.zero.test_parameter_gather import look_at_gathered

SIZES = (256, 640)


def engine_of(master, scale="pow2"):
    fp8 = {"optimizer": {"master": master}, "linear": {"weight": {"scale": scale}}}
    return models.build(models.config({"monitor": {"every": 0}, **fp8}), sizes=SIZES)


def interrupt(engine, start, known=False):
    """End a step midway, all of whose kernels are launched: before the host knows that it counts, or after."""
    step = engine.fp8.step
    place = (step._zero, "finish") if known else (step, "prepare_bf16")
    with mock.patch.object(*place, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        models.train(engine, 1, start=start)


def masters(engine):
    return {name: models.full_master(p).cpu() for name, p in engine.module.named_parameters()}


def against_whole_masters():
    """Whether gathered weights are the casts of the masters, behind a step and behind a user's write."""
    engine = engine_of("fp32")
    models.train(engine, 2)
    interrupt(engine, 2)
    behind_it = look_at_gathered(engine, "infir2")
    models.train(engine, 1, start=3)
    interrupt(engine, 4, known=True)
    for layer in engine.module.layers:
        safe_set_full_fp32_param(layer.up.weight, 3 * safe_get_full_fp32_param(layer.up.weight))
    return behind_it, look_at_gathered(engine, "infir2")


def assert_casts_of_masters(found):
    for looks in found:
        for look in looks:
            assert len(look) == 6
            assert all(look.values()), look


def masters_behind(interrupted):
    """Masters as codes and corrections behind three steps, of which the last may have ended midway."""
    engine = engine_of("fp8_plus16", "fp32")  # scales that change with every step
    models.train(engine, 2)
    interrupt(engine, 2) if interrupted else models.train(engine, 1, start=2)
    return masters(engine)


def assert_same_masters(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert [name for name in other if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("world", [1, 2])
def test_gathered_weights_are_those_of_the_masters(ranks, world):
    assert_casts_of_masters(ranks(world, against_whole_masters))


@pytest.mark.parametrize("world", [1, 2])
def test_codes_and_corrections_keep_their_scales(ranks, world):
    assert_same_masters(*(ranks(world, masters_behind, interrupted) for interrupted in (True, False)))
