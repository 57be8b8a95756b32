"""A step that ends midway, by the user's interrupt or for want of memory, in a program that goes on."""

from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from ds_fp8.config.errors import UserError
from ds_fp8.zero.masters import MasterSet
from tests.zero import models
from tests.zero.test_parameter_gather import look_at_gathered

SIZES = (256, 640)


def engine_of(master, scale="pow2", own=True):
    fp8 = {"optimizer": {"master": master}, "linear": {"weight": {"scale": scale}}}
    return models.build(models.config({"monitor": {"every": 0}, **fp8}), sizes=SIZES, own=own)


def interrupt(engine, start, known=False):
    """End a step midway, all of whose kernels are launched: before the host knows that it counts, or after."""
    step = engine.fp8.step
    end_midway(engine, start, *((step._zero, "finish") if known else (step, "prepare_bf16")))


def end_midway(engine, start, place, name):
    with mock.patch.object(place, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        models.train(engine, 1, start=start)


def masters(engine):
    return {name: models.full_master(p).cpu() for name, p in engine.module.named_parameters()}


def against_whole_masters():
    """Look at gathered weights behind a step that ended midway, and behind another and a user's write.

    Returns for both looks by name whether they are the casts of the masters. Behind the write they can only be others
    where the step has found an amax: on GPUs.
    """
    engine = engine_of("fp32")
    models.train(engine, 2)
    before = masters(engine)
    interrupt(engine, 2)
    behind_it = look_at_gathered(engine, "infir2")
    after, bf16 = masters(engine), models.bf16_weights(engine)
    behind_it["stepped"] = all(not torch.equal(before[name], after[name]) for name in after)
    behind_it["bf16"] = all(torch.equal(bf16[name], after[name].bfloat16()) for name in after)
    models.train(engine, 1, start=3)
    interrupt(engine, 4, known=True)
    for layer in engine.module.layers:
        safe_set_full_fp32_param(layer.up.weight, 3 * safe_get_full_fp32_param(layer.up.weight))
    return behind_it, look_at_gathered(engine, "infir2")


def assert_casts_of_masters(found):
    for looks in found:
        for look in looks:
            assert len(look) >= 6
            assert all(look.values()), look


def under_deepspeeds_step():
    """Look at gathered weights behind a step of DeepSpeed's that ended midway; return as against_whole_masters."""
    engine = engine_of("fp32", own=False)
    models.train(engine, 2)
    end_midway(engine, 2, engine.optimizer, "_post_step")
    return look_at_gathered(engine, "infir2")


def masters_behind(interrupted):
    """Return masters that are codes and corrections, behind three steps, the last maybe ended midway, and a cast."""
    engine = engine_of("fp8_plus16", "fp32")  # scales that change with every step
    models.train(engine, 2)
    interrupt(engine, 2) if interrupted else models.train(engine, 1, start=2)
    engine.fp8.weights.cast_and_wait()
    return masters(engine)


def assert_same_masters(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert [name for name in other if not torch.equal(one[name], other[name])] == []


def torn(folder):
    """Launch part of a step; return what readers of masters say then, the masters saved before, and those loaded."""
    engine = engine_of("fp8_plus16", "fp32")
    models.train(engine, 2)
    engine.save_checkpoint(folder)
    saved, said = masters(engine), []
    end_midway(engine, 2, MasterSet, "finish")
    readers = (
        lambda: models.train(engine, 1),
        lambda: masters(engine),
        lambda: engine.save_checkpoint(f"{folder}/torn"),
    )
    for reader in readers:
        with pytest.raises(UserError) as error:
            reader()
        said.append(str(error.value))
    engine.load_checkpoint(folder)
    loaded = masters(engine)
    models.train(engine, 1, start=2)
    return said, saved, loaded


def unlaunched():
    """Write 0.5 to a BF16 shard and end a step before any launch; return the numbers that are gathered then."""
    engine = engine_of("fp32")
    models.train(engine, 1)
    weight = engine.module.layers[0].up.weight
    with models.deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.fill_(0.5)
    end_midway(engine, 1, engine.fp8.step, "_norm")
    return engine.fp8.weights.whole(weight).dequantize()


@pytest.mark.parametrize("world", [1, 2])
def test_gathered_weights_are_those_of_the_masters(ranks, world):
    assert_casts_of_masters(ranks(world, against_whole_masters))


def test_deepspeeds_step_too(ranks):
    assert_casts_of_masters([look] for look in ranks(2, under_deepspeeds_step))


@pytest.mark.parametrize("world", [1, 2])
def test_codes_and_corrections_that_were_all_launched_are_the_steps(ranks, world):
    assert_same_masters(*(ranks(world, masters_behind, interrupted) for interrupted in (True, False)))


@pytest.mark.parametrize("world", [1, 2])
def test_codes_and_corrections_of_half_a_step_are_refused(ranks, world, tmp_path):
    for said, saved, loaded in ranks(world, torn, str(tmp_path)):
        assert all("neither old nor new" in one for one in said)
        assert len(said) == 3
        assert_same_masters([loaded], [saved])


def test_what_a_user_wrote_holds_where_nothing_was_launched(ranks):
    for numbers in ranks(2, unlaunched):
        assert torch.equal(numbers, torch.full_like(numbers, 0.5))
