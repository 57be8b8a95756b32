"""On one rank the shard is the weight: nothing is copied, and a cast changes no weight that is gathered."""

import contextlib
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.layers.linear.weights import UNSHARDED, fprop_weight
from ds_fp8.zero import collectives
from ds_fp8.zero.deepspeed.parameters import master_shard
from tests.zero import models
from tests.zero.test_parameter_gather import SECTIONS as OTHERS
from tests.zero.test_parameter_gather import fp8_linears, gather
from tests.zero.test_training import QUIET

SECTIONS = {**OTHERS, "precise": {"preset": "precise"}}
ALIGNED, RAGGED = (256, 512), (131, 301)
REUSED = {"stage3_prefetch_bucket_size": 10**8, "stage3_max_reuse_distance": 10**8}
COPIED = patch.object(collectives, "ALIGNMENT", 1 << 62)  # Let no weight lie where it can be used


def build(preset="infir2", sizes=ALIGNED, **zero):
    return models.build(models.config({**QUIET, **SECTIONS[preset]}, **zero), sizes=sizes)


def trained(preset, sizes, copied, accumulate):
    config = models.config({**QUIET, **SECTIONS[preset]}, **REUSED)
    config["gradient_accumulation_steps"] = accumulate
    engine = models.build(config, sizes=sizes)
    with COPIED if copied else contextlib.nullcontext():
        losses = models.train(engine, 4)
    engine.eval()
    with torch.no_grad():
        losses.append(engine(models.batch(99, 0).to(engine.device)).item())
    return losses, [models.full_master(p) for p in engine.module.parameters()]


@pytest.mark.parametrize("preset", SECTIONS)
@pytest.mark.parametrize(("sizes", "accumulate"), [(ALIGNED, 2), (RAGGED, 1)])
def test_training_has_the_bits_of_training_with_copies(ranks, preset, sizes, accumulate):
    losses, masters = ranks(1, trained, preset, sizes, False, accumulate)[0]
    expected, expected_masters = ranks(1, trained, preset, sizes, True, accumulate)[0]
    assert losses == expected
    assert all(map(torch.equal, masters, expected_masters))


def sent_and_allocated():
    engine = build()
    models.train(engine, 1)
    weights = [module.weight for module in fp8_linears(engine).values()]
    codes = engine.fp8.weights.data

    def refuse(*arguments, **options):
        raise AssertionError("one rank has nobody to gather from, or to send gradients to")

    with patch.object(collectives, "all_gather", refuse), patch.object(dist, "all_to_all_single", refuse):
        gather(engine, weights)
        models.train(engine, 2)
    gather(engine, weights)
    inside = codes.untyped_storage().data_ptr()
    return [getattr(weight, UNSHARDED).data.untyped_storage().data_ptr() == inside for weight in weights]


def test_nothing_is_sent_or_copied(ranks):
    assert ranks(1, sent_and_allocated)[0] == [True] * 6


def numbers(engine):
    return [fprop_weight([m.weight], m.recipe).dequantize() for m in fp8_linears(engine).values()]


def change_masters(engine):
    """Write the masters and let them be cast, as an optimizer step does."""
    gatherer = engine.fp8.weights
    for weight in gatherer:
        master_shard(weight.parameter).mul_(1.37)
    gatherer.step_wrote()
    gatherer.requantize()


def gathered_over_a_step(left_out, preset):
    """A weight that is gathered while a step writes new shards; DeepSpeed keeps one that nobody used in time."""
    engine = build(preset)
    models.train(engine, 1)
    weights = [m.weight for m in fp8_linears(engine).values()]
    gather(engine, weights)
    before = numbers(engine)
    if left_out:
        engine.fp8.weights.leave_fp8(weights)
    change_masters(engine)
    stays = all(map(torch.equal, before, numbers(engine)))
    for weight in weights:
        weight.partition()
    if left_out:
        return stays, None
    gather(engine, weights)
    return stays, any(map(torch.equal, before, numbers(engine)))


@pytest.mark.parametrize(("left_out", "preset"), [(False, "infir2"), (False, "precise"), (True, "infir2")])
def test_a_gathered_weight_keeps_its_numbers_over_a_step(ranks, left_out, preset):
    assert ranks(1, gathered_over_a_step, left_out, preset)[0] == (True, None if left_out else False)


def fetched_over_a_step():
    """A gather that is begun before a step and waited for after it."""
    engine = build()
    models.train(engine, 1)
    weights = [m.weight for m in fp8_linears(engine).values()]
    handle = weights[0].all_gather_coalesced(weights)
    change_masters(engine)
    handle.wait()
    found = numbers(engine)
    for weight in weights:
        weight.partition()
    gather(engine, weights)
    return all(map(torch.equal, found, numbers(engine)))


def test_a_weight_fetched_over_a_step_is_the_new_one(ranks):
    assert ranks(1, fetched_over_a_step) == [True]


def read_whole():
    engine = build()
    weight = fp8_linears(engine)["layers.0.up"].weight
    found = engine.fp8.weights.unsharded(weight)
    before = found.dequantize()
    change_masters(engine)
    return torch.equal(found.dequantize(), before)


def test_readers_keep_what_they_read(ranks):
    assert ranks(1, read_whole) == [True]
