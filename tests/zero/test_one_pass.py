"""Update and cast in one pass beside two passes. Off a GPU Triton interprets the kernel, whose casts round coarsely."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_fp8.casts import scale_from_amax
from ds_fp8.config.formats import CastSpec
from ds_fp8.optim.adamw import AdamStep, step_on
from tests.optim.numbers import gradients
from tests.zero.shard_casts import DEVICE, buffer_of, weights_of

kernels = pytest.importorskip("ds_fp8.zero.one_pass_triton", reason="Triton is not installed")
casts = pytest.importorskip("ds_fp8.zero.cast_triton")
SHAPES = [(256, 256), (130, 128), (384, 128)]  # Of two ranks each has whole blocks, and parts of blocks
GAPS = [260, 0, 130 * 128, 12]  # Elements of no weight before, between and behind them
STEP = AdamStep(3, 1e-3, 0.9, 0.95, 1e-8, 0.1)
EXACT = DEVICE == "cuda"


class Rank:
    """Weights of one rank in a sub-group with other parameters, and what a step reads and writes."""

    def __init__(self, rank, world, scale, dtype=torch.float32, channels=0):
        spec = CastSpec(granularity="128x128", scale=scale)
        self.weights = weights_of(rank, world, "128x128", DEVICE, SHAPES, spec, channels)
        self.members, end = [], 0
        for weight, gap in zip(self.weights, GAPS, strict=False):
            self.members.append((weight, end + gap))
            end += gap + weight.shard.numel
        self.numel = end + GAPS[-1]
        self.codes = self.weights[0].data._base
        numbers = (gradients(self.numel, 10 * rank + index).to(DEVICE) for index in range(4))
        self.masters, gradient, exp_avg, exp_avg_sq = numbers
        self.gradient, self.moments = gradient.to(dtype), (exp_avg * 0.1, exp_avg_sq**2)
        self.amax = buffer_of(self.weights)
        # That of torch would write all codes, and hide what the kernel has not written.
        self.shard_cast = casts.TritonShardCast(self.weights, self.codes, spec)

    def shard(self, weight):
        start = next(start for one, start in self.members if one is weight)
        return self.masters[start : start + weight.shard.numel]


def in_two_passes(ranks, scale, **options):
    for rank in ranks:
        step_on(rank.gradient.device, rank.moments)(
            rank.masters, rank.gradient, *rank.moments, replace(STEP, **options)
        )
        rank.shard_cast.write_amax(rank.amax, rank.shard)
    return agreed(ranks, scale)


def in_one_pass(ranks, scale, **options):
    for rank in ranks:
        assert kernels.can_take(rank.members, rank.numel)
        kernel = kernels.StepAndCast(rank.members, rank.numel, rank.weights[-1].data)
        kernel(rank.masters, rank.amax, rank.gradient, *rank.moments, replace(STEP, **options))
    return agreed(ranks, scale)


def agreed(ranks, scale):
    scales = scale_from_amax(torch.stack([rank.amax for rank in ranks]).amax(0), "e4m3", scale)
    for rank in ranks:
        rank.shard_cast.cast(scales, rank.shard)  # blocks that lie on two ranks
    return scales


@pytest.mark.parametrize(
    ("world", "scale", "dtype", "channels", "factor"),
    [
        (1, "pow2", torch.float32, 0, None),
        (2, "fp32", torch.float32, 0, 0.5),
        (1, "fp32", torch.bfloat16, 128, 0.25),
        (2, "pow2", torch.bfloat16, 0, None),
    ],
)
def test_one_pass_does_what_two_do(world, scale, dtype, channels, factor):
    options = {"factor": None if factor is None else torch.full((), factor, device=DEVICE)}
    expected, found = ([Rank(rank, world, scale, dtype, channels) for rank in range(world)] for _ in range(2))
    scales, new = in_two_passes(expected, scale, **options), in_one_pass(found, scale, **options)
    torch.testing.assert_close(new, scales, rtol=0 if EXACT else 1e-6, atol=0)
    for one, other in zip(found, expected, strict=True):
        assert not channels or one.weights[0].has_room
        for left, right in zip((one.masters, *one.moments), (other.masters, *other.moments), strict=True):
            torch.testing.assert_close(left, right, rtol=0 if EXACT else 2e-6, atol=0 if EXACT else 1e-8)
        assert other.codes.any()
        assert (one.codes != other.codes).float().mean() <= (0.0 if EXACT else 0.07)


def test_nothing_is_written_where_the_step_is_skipped():
    untouched, rank = Rank(0, 1, "pow2"), Rank(0, 1, "pow2")
    kernel = kernels.StepAndCast(rank.members, rank.numel, rank.codes)
    skip = torch.ones(1, dtype=torch.int32, device=DEVICE)
    kernel(rank.masters, rank.amax, rank.gradient, *rank.moments, replace(STEP, skip=skip))
    for name in ("masters", "codes", "amax"):
        assert torch.equal(getattr(rank, name), getattr(untouched, name))
    for left, right in zip(rank.moments, untouched.moments, strict=True):
        assert torch.equal(left, right)


def test_a_master_that_is_no_number_is_loud():
    for bad in (torch.nan, torch.inf):
        rank = Rank(0, 1, "fp32")
        rank.gradient.zero_()
        rank.masters[GAPS[0] + 5] = bad
        in_one_pass([rank], "fp32")
        first = rank.weights[0].scales_in(rank.amax)
        assert first[0, 0] == torch.inf
        assert first[0, 1] < torch.inf
        assert not EXACT or rank.codes.view(torch.float8_e4m3fn)[5].float().isnan()


@pytest.mark.parametrize(
    ("shapes", "world", "start", "numel", "taken"),
    [
        ([(256, 128)], 2, 12, 256 * 128, True),
        ([(256, 128)], 64, 0, 256 * 128, True),
        ([(256, 192)], 1, 0, 256 * 192, False),
        ([(256, 128)], 3, 0, 256 * 128, False),
        ([(256, 128)], 1, 6, 257 * 128, False),
        ([(256, 128)], 1, 0, 256 * 128 + 2, False),
        ([(2, 128)], 17, 0, 16, True),  # of which the last ranks have nothing
        ([(3, 128)], 16, 0, 24, False),
    ],
)
def test_only_what_lies_evenly_is_taken(shapes, world, start, numel, taken):
    for rank in {0, world - 1}:
        (weight,) = weights_of(rank, world, "128x128", DEVICE, shapes)
        assert kernels.can_take([(weight, start)], numel) is taken
        if taken:
            kernels.StepAndCast([(weight, start)], max(numel, start + weight.shard.numel), weight.data)


def test_codes_that_lie_unevenly_or_are_cast_in_two_ways_are_not_taken():
    first, second = weights_of(0, 1, "128x128", DEVICE, [(256, 128), (256, 128)])
    assert kernels.can_take([(first, 0), (second, 256 * 128)], 2 * 256 * 128)
    second.spec = CastSpec(format="e5m2", granularity="128x128")
    assert not kernels.can_take([(first, 0), (second, 256 * 128)], 2 * 256 * 128)
    first.data = torch.zeros(256 * 128 + 8, dtype=torch.uint8, device=DEVICE)[8:]
    assert not kernels.can_take([(first, 0)], 256 * 128)


@pytest.mark.parametrize("spec", [CastSpec(granularity="tensor"), CastSpec(format="log8", granularity="128x128")])
def test_other_casts_need_two_passes(spec):
    (weight,) = weights_of(0, 1, spec.granularity, DEVICE, [(256, 128)], spec)
    assert not kernels.can_take([(weight, 0)], 256 * 128)
