"""Update and cast in one pass on GPUs: the bits of two passes, in the kernel and through whole engines."""

import contextlib
from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from ds_fp8.zero import quantizer
from tests.zero import models, test_interrupted_step

pytestmark = pytest.mark.gpu
GPUS = range(1, min(torch.cuda.device_count(), 2) + 1)
SIZES = (256, 640)  # Of two ranks each has half of a block of one weight, and whole blocks of the other


def spy_on_casts(engine):
    """Return a list that grows where a cast of trained weights reads all masters."""
    reads = []
    for shard_cast, _ in engine.fp8.weights.trained._shard_casts:
        write_amax = shard_cast.write_amax
        shard_cast.write_amax = lambda *args, write_amax=write_amax: reads.append(write_amax(*args))
    return reads


def run(one_pass, section, sizes, zero):
    """Take steps, skip one and write as a user does between them.

    Returns (reads of all masters by casts, steps skipped, losses, masters with codes and scales).
    """
    apart = contextlib.nullcontext() if one_pass else mock.patch.object(quantizer.FP32Quantizer, "quantize_in_step")
    with apart:
        engine = models.build(models.config({"monitor": {"every": 0}, **section}, **zero), sizes=sizes)
    losses = models.train(engine, 3)
    reads = spy_on_casts(engine)
    engine.backward(engine(models.batch(5, 0).to(engine.device)) * torch.inf)
    engine.step()
    weight = engine.module.layers[0].up.weight
    safe_set_full_fp32_param(weight, 1.5 * safe_get_full_fp32_param(weight))
    losses += models.train(engine, 3)
    engine.fp8.weights.requantize_and_wait()
    kept = {name: models.full_master(p).cpu() for name, p in engine.module.named_parameters()}
    for number, one in enumerate(engine.fp8.weights):
        kept |= {f"codes {number}": one.data.cpu(), f"scale {number}": one.scale.cpu()}
    return len(reads), engine.skipped_steps, losses, kept


@pytest.mark.parametrize("world", GPUS)
@pytest.mark.parametrize("preset", ["hybrid_fast", "precise"])
@pytest.mark.parametrize("zero", [{}, {"sub_group_size": 100_000}], ids=["one sub-group", "several"])
def test_a_run_has_the_bits_of_two_passes(gpu_ranks, world, preset, zero):
    both = (gpu_ranks(world, run, one_pass, {"preset": preset}, SIZES, zero) for one_pass in (True, False))
    for (reads, *counts, kept), (in_two_passes, *expected, other) in zip(*both, strict=True):
        assert (reads, in_two_passes) == (1, 4)  # behind the user's write, and behind every step
        assert counts == expected
        assert counts[0] == 1
        assert [name for name in other if not torch.equal(kept[name], other[name])] == []


@pytest.mark.parametrize("world", GPUS)
def test_a_run_whose_step_ends_midway_goes_on(gpu_ranks, world):
    gpu_ranks(world, test_interrupted_step.assert_gathered_weights_are_those_of_the_masters)
    gpu_ranks(world, test_interrupted_step.assert_codes_and_corrections_that_were_all_launched_are_the_steps)


@pytest.mark.parametrize(
    ("section", "sizes"),
    [
        ({}, (131, 301)),
        ({"optimizer": {"exp_avg": "bf16"}}, SIZES),
        ({"preset": "tensorwise"}, SIZES),
    ],
)
def test_other_runs_take_two_passes(gpu_ranks, section, sizes):
    ((reads, *_),) = gpu_ranks(1, run, True, section, sizes, {})
    assert reads == 4
